// Products and sums a second that a CPU's registers allow: no memory is read. benchmarks/peaks.py compiles and runs this.
//
//     registers float32|bfloat16|int8 THREADS SECONDS       prints operations a second, of all threads together
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Independent sums: more than latency x instructions a cycle of any CPU so far. They are named, in one block of assembly: g++ 12 kept an
// array of them in memory, and half the peak was measured.
constexpr int sums = 24;
constexpr long repeats = 20000;
#define SUMS "8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31"
#define REGISTERS                                                                                                                       \
    "xmm0", "xmm1", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", \
        "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31"
#define STEP(instruction) asm volatile(".irp r," SUMS "\n\t" instruction " %%zmm0, %%zmm1, %%zmm\\r\n\t.endr" ::: REGISTERS)
#define CLEAR() asm volatile(".irp r,0,1," SUMS "\n\tvpxord %%zmm\\r, %%zmm\\r, %%zmm\\r\n\t.endr" ::: REGISTERS)

using Clock = std::chrono::steady_clock;

struct Float32 {
    static constexpr double operations = 16 * 2;
    static void step() { STEP("vfmadd231ps"); }
};

struct Bfloat16 {
    static constexpr double operations = 32 * 2;
    static void step() { STEP("vdpbf16ps"); }
};

struct Int8 {
    static constexpr double operations = 64 * 2;
    static void step() { STEP("vpdpbusd"); }
};

// The fastest of several short stretches: a peak is what nothing disturbed.
template <class Kind>
double rate(double seconds) {
    double best = 0;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
        CLEAR();
        const auto start = Clock::now();
        for (long i = 0; i < repeats; ++i) Kind::step();
        best = std::max(best, Kind::operations * sums * repeats / std::chrono::duration<double>(Clock::now() - start).count());
    }
    return best;
}

template <class Kind>
double rates(int threads, double seconds) {
    std::vector<double> found(threads);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) running.emplace_back([&found, i, seconds] { found[i] = rate<Kind>(seconds); });
    for (auto& thread : running) thread.join();
    double all = 0;
    for (const double one : found) all += one;
    return all;
}

}  // namespace

int main(int count, char** words) {
    if (count != 4) return 2;
    const int threads = std::atoi(words[2]);
    const double seconds = std::atof(words[3]);
    double found = 0;
    if (!std::strcmp(words[1], "float32")) found = rates<Float32>(threads, seconds);
    else if (!std::strcmp(words[1], "bfloat16")) found = rates<Bfloat16>(threads, seconds);
    else if (!std::strcmp(words[1], "int8")) found = rates<Int8>(threads, seconds);
    else return 2;
    std::printf("%.6g\n", found);
}
