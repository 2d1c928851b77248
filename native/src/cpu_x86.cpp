#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "cpu.h"

namespace bertopt_native {
namespace {

// Whether the CPU has AMX for INT8 and bf16, the operating system keeps the tiles, and this process may use them, which it
// has to ask for. Refused where seccomp or the hypervisor does not know the question. g++ 12 does not know AMX by name.
bool ask_for_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
    if ((d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
    constexpr unsigned OSXSAVE = 1u << 27, XTILE = 3u << 17;  // registers that the system keeps: XTILECFG and XTILEDATA
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a & XTILE) != XTILE) return false;
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

// g++ 12 does not know AVX-VNNI by name.
bool find_avx_vnni() {
    unsigned a, b, c, d;
    constexpr unsigned AVX_VNNI_BIT = 1u << 4;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI_BIT);
}

// Asked once a process, because a virtual machine takes microseconds to answer; a child keeps AMX's permission. No lock, which
// a fork could leave taken: to ask twice does no harm.
class Feature {
public:
    constexpr explicit Feature(bool (*ask)()) : ask_(ask) {}

    bool present() {
        int known = answer_.load(std::memory_order_relaxed);
        if (known == UNKNOWN) answer_.store(known = ask_() ? YES : NO, std::memory_order_relaxed);
        return known == YES;
    }

private:
    enum { UNKNOWN, NO, YES };
    bool (*ask_)();
    std::atomic<int> answer_{UNKNOWN};
};

constinit Feature amx{ask_for_amx}, avx_vnni{find_avx_vnni};

}  // namespace

const char* const NEEDED = "a CPU with AVX2 and FMA";

std::vector<const Kernel*> supported_kernels() {
    __builtin_cpu_init();  // also asks the operating system whether it keeps the registers
    std::vector<const Kernel*> found;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (bf16 && amx.present()) found.push_back(&AMX);
    // By vectors Intel's CPUs multiply bf16 more slowly than float32.
    const bool floats_first = __builtin_cpu_is("intel");
    if (vnni && floats_first) found.push_back(&AVX512_VNNI);
    if (bf16) found.push_back(&AVX512_BF16);
    if (vnni && !floats_first) found.push_back(&AVX512_VNNI);
    if (avx2 && avx_vnni.present()) found.push_back(&AVX_VNNI);
    if (avx2) found.push_back(&AVX2);
    return found;
}

}  // namespace bertopt_native
