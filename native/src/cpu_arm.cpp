#include <sys/auxv.h>

#include "cpu.h"

namespace bertopt_native {

const char* const NEEDED = "a CPU with Armv8.2's dot products (asimddp)";

std::vector<const Kernel*> supported_kernels() {
    // Bits of the kernel's interface, which older headers do not name.
    constexpr unsigned long ASIMDDP = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
    std::vector<const Kernel*> found;
    if (!(getauxval(AT_HWCAP) & ASIMDDP)) return found;
    if ((getauxval(AT_HWCAP2) & (I8MM | BF16)) == (I8MM | BF16)) found.push_back(&NEON_I8MM);
    found.push_back(&NEON_DOTPROD);
    return found;
}

}  // namespace bertopt_native
