// The register tile of Neon, in its 32 registers. A panel's 32 columns are two halves.
// Inline assembly, because g++ 12 spills accumulators that it updates by intrinsics (tests/test_spills.py).

#if BN_BF16
// Products of blocks: two rows by eight bytes with two columns by eight bytes, which are two steps, add to two by two sums. The
// sums of a row do not depend on the other row. Six rows by sixteen columns are 24 accumulators. Volatile, because the compiler
// would load columns early, and there is no register left for what is needed later.
constexpr size_t tile_rows(Kind) { return 6; }

template <Kind K>
BN_INLINE void add_block(float32x4_t& sum, uint8x16_t rows, uint32x4_t columns) {
    if constexpr (K == Kind::int8) asm volatile("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(rows), "w"(columns));
    else asm volatile("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(rows), "w"(columns));
}

// Sixteen columns, to `result`, which has 32 a row; `steps` is even.
template <Kind K, int M>
BN_INLINE void multiply(const Byte* a, size_t stride, const Byte* panel, size_t steps, float* result) {
    static_assert(K == Kind::int8 || K == Kind::bf16);
    constexpr int PAIRS = (M + 1) / 2;
    float32x4_t sum[PAIRS][8];  // [row of two][column of two]; integers in the lanes for int8
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) sum[p][c] = vdupq_n_f32(0);
    for (; steps; steps -= 2, a += 8, panel += 256) {
        uint8x16_t rows[PAIRS];
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; p++) {
            // The last of an odd number of rows is there twice.
            const size_t first = 2 * static_cast<size_t>(p), second = first + 1 < M ? first + 1 : first;
            rows[p] = vcombine_u8(vld1_u8(a + first * stride), vld1_u8(a + second * stride));
        }
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            uint32x4_t low, high;
            asm volatile("ldr %q1, [%2]\n\tldr q31, [%2, 128]\n\tzip1 %0.4s, %1.4s, v31.4s\n\tzip2 %1.4s, %1.4s, v31.4s"
                : "=&w"(low), "=&w"(high)
                : "r"(panel + 16 * q), "m"(*reinterpret_cast<const Byte(*)[144]>(panel + 16 * q))
                : "v31");
#pragma GCC unroll 3
            for (int p = 0; p < PAIRS; p++) add_block<K>(sum[p][2 * q], rows[p], low);
#pragma GCC unroll 3
            for (int p = 0; p < PAIRS; p++) add_block<K>(sum[p][2 * q + 1], rows[p], high);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const float64x2_t low = vreinterpretq_f64_f32(sum[r / 2][2 * q]), high = vreinterpretq_f64_f32(sum[r / 2][2 * q + 1]);
            vst1q_f32(result + 32 * r + 4 * q, vreinterpretq_f32_f64(r % 2 ? vzip2q_f64(low, high) : vzip1q_f64(low, high)));
        }
}
#else
// Four steps at a time: a register has what a row has for them, and a product reads one of its four words, so that nothing has
// to be copied to all lanes. Five rows by sixteen columns are 20 accumulators; of wide products, which need registers for halves of
// the weights, four rows.
constexpr size_t tile_rows(Kind kind) { return kind == Kind::wide ? 4 : 5; }

template <Kind K, int Word>
BN_INLINE void add_product(float32x4_t& sum, uint32x4_t columns, uint32x4_t row) {
    if constexpr (K == Kind::int8) asm("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(columns), "w"(row), "i"(Word));
    else asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(columns), "w"(row), "i"(Word));
}

template <int M>
BN_INLINE void load_rows(const Byte* a, size_t stride, uint32x4_t (&rows)[M]) {
#pragma GCC unroll 5
    for (int r = 0; r < M; r++) rows[r] = vreinterpretq_u32_u8(vld1q_u8(a + static_cast<size_t>(r) * stride));
}

// Four of sixteen columns with one word of each row.
template <Kind K, int Word, int M>
BN_INLINE void add_products(const uint32x4_t (&rows)[M], uint32x4_t columns, int q, float32x4_t (&sum)[M][4]) {
#pragma GCC unroll 5
    for (int r = 0; r < M; r++) add_product<K, Word>(sum[r][q], columns, rows[r]);
}

// The step that reads the rows' word `Word`; of a wide one's two words that and the next.
template <Kind K, int Word, int M>
BN_INLINE void one_step(const uint32x4_t (&rows)[M], const Byte* panel, float32x4_t (&sum)[M][4]) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        const uint32x4_t columns = vreinterpretq_u32_u8(vld1q_u8(panel + 16 * q));
        if constexpr (K == Kind::wide) {
            add_products<K, Word>(rows, vshlq_n_u32(columns, 16), q, sum);
            add_products<K, Word + 1>(rows, vandq_u32(columns, vdupq_n_u32(0xffff0000u)), q, sum);
        } else {
            add_products<K, Word>(rows, columns, q, sum);
        }
    }
}

// Sixteen columns, to `result`, which has 32 a row; `steps` is a multiple of four, or of two that are wide.
template <Kind K, int M>
BN_INLINE void multiply(const Byte* a, size_t stride, const Byte* panel, size_t steps, float* result) {
    constexpr size_t STEPS = 16 / step_bytes(K);
    float32x4_t sum[M][4];  // integers in the lanes for int8
#pragma GCC unroll 5
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) sum[r][q] = vdupq_n_f32(0);
    for (; steps; steps -= STEPS, a += 16, panel += 128 * STEPS) {
        uint32x4_t rows[M];
        load_rows<M>(a, stride, rows);
        if constexpr (K == Kind::wide) {
            one_step<K, 0, M>(rows, panel, sum);
            one_step<K, 2, M>(rows, panel + 128, sum);
        } else {
            one_step<K, 0, M>(rows, panel, sum);
            one_step<K, 1, M>(rows, panel + 128, sum);
            one_step<K, 2, M>(rows, panel + 256, sum);
            one_step<K, 3, M>(rows, panel + 384, sum);
        }
    }
#pragma GCC unroll 5
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) vst1q_f32(result + 32 * r + 4 * q, sum[r][q]);
}
#endif

// M rows from row `m`, panel `p`; the epilogue gets each row's 32 results. Panels follow each other, so that the CPU itself
// fetches the next one.
template <Kind K, int M, class Epilogue>
static __attribute__((noinline)) void rows(const Byte* a, size_t stride, const Byte* panel, size_t steps, size_t m, size_t p,
                                           const Epilogue& epilogue, const Byte*) {
    alignas(64) float result[M * 32];
#pragma GCC unroll 1
    for (size_t half = 0; half < 2; half++) multiply<K, M>(a, stride, panel + 64 * half, steps, result + 16 * half);
    asm("" : "+m"(result));
    const auto columns = epilogue.columns(p);
#pragma GCC unroll 1
    for (size_t r = 0; r < M; r++) epilogue(columns, m + r, p, load(result + 32 * r), load(result + 32 * r + 16));
}
