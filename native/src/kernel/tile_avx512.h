// The register tile of AVX-512: up to 12 rows by 32 columns, 24 accumulators of its 32 registers.

constexpr size_t tile_rows(Kind) { return 12; }

// Inline assembly, because g++ 12 spills accumulators that it updates by intrinsics (tests/test_spills.py).
// Integer accumulators travel as Vec; the epilogue casts them.
template <Kind K>
BN_INLINE Vec dot(Vec sum, __m512i a, __m512i b) {
    if constexpr (K == Kind::int8) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    else if constexpr (K == Kind::bf16) asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    else asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

BN_INLINE __m512i broadcast(const Byte* p) {
    int word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

// Rows are reached as row r / 3's base plus (r % 3) strides: five registers for twelve rows.
template <Kind K, int M>
BN_INLINE void one_step(const Byte* const (&base)[4], size_t stride, size_t at, const Byte* panel, Vec (&sum)[M][2]) {
    __m512i b0 = _mm512_loadu_si512(panel), b1 = _mm512_loadu_si512(panel + 64);
    if constexpr (K == Kind::wide) {
        const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        const __m512i even0 = _mm512_slli_epi32(b0, 16), even1 = _mm512_slli_epi32(b1, 16);
        b0 = _mm512_and_si512(b0, high);
        b1 = _mm512_and_si512(b1, high);
#pragma GCC unroll 12
        for (int r = 0; r < M; r++) {
            const __m512i a = broadcast(base[r / 3] + static_cast<size_t>(r % 3) * stride + at);
            sum[r][0] = dot<K>(sum[r][0], a, even0);
            sum[r][1] = dot<K>(sum[r][1], a, even1);
        }
        at += 4;
    }
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        const __m512i a = broadcast(base[r / 3] + static_cast<size_t>(r % 3) * stride + at);
        sum[r][0] = dot<K>(sum[r][0], a, b0);
        sum[r][1] = dot<K>(sum[r][1], a, b1);
    }
}

// `steps` is even. A line of `ahead` is fetched every two steps: the next panel comes while this one is worked on.
template <Kind K, int M>
BN_INLINE void multiply(const Byte* a, size_t stride, const Byte* panel, size_t steps, const Byte* ahead, Vec (&sum)[M][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const Byte* base[4] = {a, a, a, a};
#pragma GCC unroll 4
    for (int i = 1; i < 4; i++)
        if (3 * i < M) base[i] = a + static_cast<size_t>(3 * i) * stride;
    for (; steps; steps -= 2) {
        // Opaque to the compiler, which would otherwise keep twelve pointers, on the stack.
        asm("" : "+r"(base[0]), "+r"(stride));
        if constexpr (M > 3) asm("" : "+r"(base[1]));
        if constexpr (M > 6) asm("" : "+r"(base[2]));
        if constexpr (M > 9) asm("" : "+r"(base[3]));
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
        one_step<K, M>(base, stride, 0, panel, sum);
        one_step<K, M>(base, stride, step_bytes(K), panel + 128, sum);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (3 * i < M) base[i] += 2 * step_bytes(K);
        panel += 256;
        ahead += 64;
    }
}

// M rows from row `m`, panel `p`; the epilogue gets each row's 32 results.
template <Kind K, int M, class Epilogue>
static __attribute__((noinline)) void rows(const Byte* a, size_t stride, const Byte* panel, size_t steps, size_t m, size_t p,
                                           const Epilogue& epilogue, const Byte* ahead) {
    Vec sum[M][2];
    multiply<K, M>(a, stride, panel, steps, ahead, sum);
    // Through memory and row by row: unrolled, the epilogues are so long that they displace each other from the cache of
    // instructions.
    Vec result[M][2];
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        result[r][0] = sum[r][0];
        result[r][1] = sum[r][1];
    }
    asm("" : "+m"(result));
    const auto columns = epilogue.columns(p);
#pragma GCC unroll 1
    for (size_t r = 0; r < M; r++) epilogue(columns, m + r, p, result[r][0], result[r][1]);
}
