// The register tile of AVX2: up to 6 rows by sixteen columns, 12 accumulators of its 16 registers. A panel's 32 columns are two
// halves.

constexpr size_t tile_rows(Kind) { return 6; }

// Steps after which the other half is worked on: what both read of the panel and of the rows stays in the first-level cache.
constexpr size_t BLOCK_STEPS = 128;

// Inline assembly, because g++ 12 spills accumulators that it updates by intrinsics (tests/test_spills.py).
BN_INLINE void add_product(__m256& sum, __m256 a, __m256 b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

#if BN_AVX_VNNI
// Four products of bytes in each sum; `a` is unsigned.
BN_INLINE void add_product(__m256i& sum, __m256i a, __m256i b) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
#else
// Two products of 16 bits in each sum.
BN_INLINE void add_product(__m256i& sum, __m256i a, __m256i b) {
    __m256i pairs;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(pairs) : "x"(a), "x"(b));
}
#endif

// What a row has at `p`, everywhere: one float, or 32 bits of elements.
BN_INLINE void broadcast(const Byte* p, __m256& everywhere) {
    float x;
    __builtin_memcpy(&x, p, 4);
    everywhere = _mm256_set1_ps(x);
}
BN_INLINE void broadcast(const Byte* p, __m256i& everywhere) {
    int x;
    __builtin_memcpy(&x, p, 4);
    everywhere = _mm256_set1_epi32(x);
}

// Rows are reached as row r / 3's base plus (r % 3) strides: three registers for six rows.
template <int M>
struct Rows {
    const Byte* base[2];
    size_t stride;

    BN_INLINE_MEMBER Rows(const Byte* a, size_t stride) : base{a, M > 3 ? a + 3 * stride : a}, stride(stride) {}

    BN_INLINE_MEMBER const Byte* at(int r) const { return base[r / 3] + static_cast<size_t>(r % 3) * stride; }

    BN_INLINE_MEMBER void advance(size_t bytes) {
        base[0] += bytes;
        // Opaque to the compiler, which would otherwise keep six pointers, on the stack.
        asm("" : "+r"(base[0]), "+r"(stride));
        if constexpr (M > 3) {
            base[1] += bytes;
            asm("" : "+r"(base[1]));
        }
    }
};

// Adds products of what the rows have at `at` and sixteen columns.
template <int M, class V>
BN_INLINE void add_products(const Rows<M>& rows, size_t at, V b0, V b1, V (&sum)[M][2]) {
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) {
        V a;
        broadcast(rows.at(r) + at, a);
        add_product(sum[r][0], a, b0);
        add_product(sum[r][1], a, b1);
    }
}

// One step. Elements of a row lie as `place_in_row` says.
template <Kind K, int M>
BN_INLINE void one_step(const Rows<M>& rows, const Byte* panel, __m256i (&sum)[M][2]) {
    const auto* columns = reinterpret_cast<const __m256i*>(panel);
    const __m256i b0 = _mm256_loadu_si256(columns), b1 = _mm256_loadu_si256(columns + 1);
#if BN_AVX_VNNI
    add_products<M>(rows, 0, b0, b1, sum);
#else
    add_products<M>(rows, 0, _mm256_srai_epi16(_mm256_slli_epi16(b0, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(b1, 8), 8), sum);
    add_products<M>(rows, 4, _mm256_srai_epi16(b0, 8), _mm256_srai_epi16(b1, 8), sum);
#endif
}

template <Kind K, int M>
BN_INLINE void one_step(const Rows<M>& rows, const Byte* panel, __m256 (&sum)[M][2]) {
    const auto* columns = reinterpret_cast<const __m256i*>(panel);
    const __m256i b0 = _mm256_loadu_si256(columns), b1 = _mm256_loadu_si256(columns + 1);
    if constexpr (K == Kind::wide) {
        add_products<M>(rows, 0, _mm256_castsi256_ps(_mm256_slli_epi32(b0, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b1, 16)), sum);
        const __m256i none = _mm256_setzero_si256();
        add_products<M>(rows, 4, _mm256_castsi256_ps(_mm256_blend_epi16(b0, none, 0x55)), _mm256_castsi256_ps(_mm256_blend_epi16(b1, none, 0x55)), sum);
    } else {
        add_products<M>(rows, 0, _mm256_castsi256_ps(b0), _mm256_castsi256_ps(b1), sum);
    }
}

BN_INLINE void read(const float* p, __m256& v) { v = _mm256_loadu_ps(p); }
BN_INLINE void read(const float* p, __m256i& v) { v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
BN_INLINE void write(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
BN_INLINE void write(float* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

template <Kind K>
struct Accumulator {
    using Type = __m256;
};
template <>
struct Accumulator<Kind::int8> {
    using Type = __m256i;
};

// Sixteen columns of a block of steps, added to `result`, which has 32 a row: the sums are as in one go.
template <Kind K, int M>
BN_INLINE void multiply(const Byte* a, size_t stride, const Byte* panel, size_t steps, const Byte* ahead, float* result) {
    typename Accumulator<K>::Type sum[M][2];
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) {
        read(result + 32 * r, sum[r][0]);
        read(result + 32 * r + 8, sum[r][1]);
    }
    Rows<M> rows(a, stride);
    for (; steps; steps--) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
        one_step<K, M>(rows, panel, sum);
        rows.advance(step_bytes(K));
        panel += 128;
        ahead += 16;
    }
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) {
        write(result + 32 * r, sum[r][0]);
        write(result + 32 * r + 8, sum[r][1]);
    }
}

// M rows from row `m`, panel `p`; the epilogue gets each row's 32 results. A quarter of a panel is fetched from `ahead`.
template <Kind K, int M, class Epilogue>
static __attribute__((noinline)) void rows(const Byte* a, size_t stride, const Byte* panel, size_t steps, size_t m, size_t p,
                                           const Epilogue& epilogue, const Byte* ahead) {
    alignas(32) float result[M * 32];
#pragma GCC unroll 12
    for (int i = 0; i < 2 * M; i++) store(result + 16 * i, zeros());
    for (size_t s = 0; s < steps; s += BLOCK_STEPS) {
        const size_t count = smaller(BLOCK_STEPS, steps - s);
        for (size_t half = 0; half < 2; half++, ahead += 16 * count)
            multiply<K, M>(a + s * step_bytes(K), stride, panel + 128 * s + 64 * half, count, ahead, result + 16 * half);
    }
    asm("" : "+m"(result));
    const auto columns = epilogue.columns(p);
#pragma GCC unroll 1
    for (size_t r = 0; r < M; r++) epilogue(columns, m + r, p, load(result + 32 * r), load(result + 32 * r + 16));
}
