// Products and sums a second that a CPU's registers allow: no memory is read. benchmarks/peaks.py compiles and runs this.
//
//     registers float32|bfloat16|int8 THREADS SECONDS       prints operations a second, of all threads together
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Independent sums: more than latency × instructions a cycle of any CPU so far, and fewer than the 32 registers.
constexpr int sums = 24;
constexpr long repeats = 20000;

using Clock = std::chrono::steady_clock;

struct Float32 {
    using Vector = __m512;
    static constexpr double operations = 16 * 2;
    static void step(Vector& sum, const Vector& a, const Vector& b) { asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
};

struct Bfloat16 {
    using Vector = __m512;
    static constexpr double operations = 32 * 2;
    static void step(Vector& sum, const Vector& a, const Vector& b) { asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
};

struct Int8 {
    using Vector = __m512i;
    static constexpr double operations = 64 * 2;
    static void step(Vector& sum, const Vector& a, const Vector& b) { asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
};

// The fastest of several short stretches: a peak is what nothing disturbed.
template <class Kind>
double rate(double seconds) {
    typename Kind::Vector sum[sums] = {}, a{}, b{};
    double best = 0;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
        const auto start = Clock::now();
        for (long i = 0; i < repeats; ++i)
#pragma GCC unroll 24
            for (int j = 0; j < sums; ++j) Kind::step(sum[j], a, b);
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
