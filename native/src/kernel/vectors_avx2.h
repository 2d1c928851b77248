// Vectors of sixteen floats by AVX2: two of eight. The same operations as in vectors_avx512.h, to the same bits.
// BN_AVX_VNNI says whether there is a product of bytes.
#define BN_INLINE static inline __attribute__((always_inline))
#define BN_INLINE_MEMBER inline __attribute__((always_inline))

using Byte = uint8_t;
struct Vec {
    __m256 low, high;
};
using Lanes = unsigned;  // a bit a lane

constexpr bool ROW_IN_REGISTERS = false;

// An element of an INT8 product's input, and where it lies in its row.
#if BN_AVX_VNNI
using Quantised = uint8_t;
BN_INLINE size_t place_in_row(size_t k) { return k; }
#else
// There is no product of bytes that does not saturate, but one of pairs of 16 bits. The even elements of four lie in front of the
// odd ones, because shifts make such pairs of four weights.
using Quantised = uint16_t;
BN_INLINE size_t place_in_row(size_t k) { return (k & ~size_t{3}) | (k & 1) << 1 | (k >> 1 & 1); }
#endif
BN_INLINE Quantised quantised(uint8_t x) { return x; }

BN_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BN_INLINE void store(float* p, Vec v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
BN_INLINE Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BN_INLINE Vec zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
BN_INLINE Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)}; }
BN_INLINE Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)}; }
BN_INLINE Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)}; }
BN_INLINE Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)}; }
BN_INLINE Vec fma(Vec x, Vec y, Vec z) {  // x * y + z
    return {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}
BN_INLINE Vec fnma(Vec x, Vec y, Vec z) {  // z - x * y
    return {_mm256_fnmadd_ps(x.low, y.low, z.low), _mm256_fnmadd_ps(x.high, y.high, z.high)};
}
BN_INLINE Vec minimum(Vec x, Vec y) { return {_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)}; }
BN_INLINE Vec maximum(Vec x, Vec y) { return {_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)}; }

// Halves with halves, as AVX-512's reductions do it.
#define BN_REDUCE(OP)                                                              \
    const __m256 eight = _mm256_##OP##_ps(v.high, v.low);                          \
    const __m128 four = _mm_##OP##_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight)); \
    const __m128 two = _mm_##OP##_ps(four, _mm_shuffle_ps(four, four, 0x4e));      \
    return _mm_cvtss_f32(_mm_##OP##_ps(two, _mm_shuffle_ps(two, two, 0xb1)))
BN_INLINE float lane_sum(Vec v) { BN_REDUCE(add); }
BN_INLINE float lane_minimum(Vec v) { BN_REDUCE(min); }
BN_INLINE float lane_maximum(Vec v) { BN_REDUCE(max); }
#undef BN_REDUCE

BN_INLINE Lanes first_lanes(size_t n) { return (1u << n) - 1; }
BN_INLINE Lanes lanes_of(__m256 low, __m256 high) {
    return static_cast<Lanes>(_mm256_movemask_ps(low)) | static_cast<Lanes>(_mm256_movemask_ps(high)) << 8;
}
BN_INLINE Lanes greater(Vec x, Vec y) { return lanes_of(_mm256_cmp_ps(x.low, y.low, _CMP_GT_OQ), _mm256_cmp_ps(x.high, y.high, _CMP_GT_OQ)); }
BN_INLINE Lanes less(Vec x, Vec y) { return lanes_of(_mm256_cmp_ps(x.low, y.low, _CMP_LT_OQ), _mm256_cmp_ps(x.high, y.high, _CMP_LT_OQ)); }

// All bits of the lanes that are set, of lanes 0 to 7.
BN_INLINE __m256i mask_of(Lanes lanes) {
    const __m256i bits = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bits), bits);
}
BN_INLINE Vec choose(Vec otherwise, Lanes lanes, Vec v) {
    return {_mm256_blendv_ps(otherwise.low, v.low, _mm256_castsi256_ps(mask_of(lanes))),
            _mm256_blendv_ps(otherwise.high, v.high, _mm256_castsi256_ps(mask_of(lanes >> 8)))};
}
// Of the lanes that are set; the others stay what they were.
BN_INLINE Vec minimum_of(Vec x, Lanes lanes, Vec y) { return choose(x, lanes, minimum(x, y)); }
BN_INLINE Vec maximum_of(Vec x, Lanes lanes, Vec y) { return choose(x, lanes, maximum(x, y)); }
BN_INLINE Vec load_lanes(Lanes lanes, const float* p) {  // 0 elsewhere
    return {_mm256_maskload_ps(p, mask_of(lanes)), _mm256_maskload_ps(p + 8, mask_of(lanes >> 8))};
}
BN_INLINE Vec load_lanes(Vec otherwise, Lanes lanes, const float* p) { return choose(otherwise, lanes, load_lanes(lanes, p)); }

// p[index[i]] in lane i.
BN_INLINE Vec gather(const float* p, const int32_t* index) {
    const auto* eights = reinterpret_cast<const __m256i*>(index);
    return {_mm256_i32gather_ps(p, _mm256_loadu_si256(eights), 4), _mm256_i32gather_ps(p, _mm256_loadu_si256(eights + 1), 4)};
}

// Lanes that hold integers, sums of products of a row's elements and the weights of a column.
BN_INLINE Vec from_products(Vec v, Vec) {
    return {_mm256_cvtepi32_ps(_mm256_castps_si256(v.low)), _mm256_cvtepi32_ps(_mm256_castps_si256(v.high))};
}

// The int8 weights of input k, of sixteen columns of a panel.
BN_INLINE Vec weights_of(const Byte* panel, size_t k) {
    const auto* fours = reinterpret_cast<const __m256i*>(panel + k / 4 * 128);
    const __m128i up = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * (k % 4)));
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sll_epi32(_mm256_loadu_si256(fours), up), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sll_epi32(_mm256_loadu_si256(fours + 1), up), 24))};
}

// v * inverse + zero, rounded, from 0 to 255.
BN_INLINE void store_quantised(Quantised* out, Vec v, Vec inverse, Vec zero) {
    const Vec x = fma(v, inverse, zero);
    const __m256i both = _mm256_packus_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));  // by halves of 128 bits
    const __m256i limited = _mm256_min_epu16(both, _mm256_set1_epi16(255));
    const __m256i in_order = _mm256_permute4x64_epi64(limited, 0xd8);
#if BN_AVX_VNNI
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
#else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(in_order, 0xd8), 0xd8));
#endif
}

BN_INLINE Vec rounded(Vec x) {
    return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// x * 2^whole for whole <= 0. Below 2^-126 it is 0.
BN_INLINE Vec scaled(Vec x, Vec whole) {
    const Vec w = maximum(whole, all(-127));
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(w.low), bias), 23);
    const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(w.high), bias), 23);
    return mul(x, {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)});
}

// Eight rows of 32 bytes, `in_stride` apart, to eight columns of double words, 128 bytes apart.
BN_INLINE void transpose8(const Byte* in, size_t in_stride, Byte* out) {
    __m256 r[8], t[8];
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(in + in_stride * i));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    // r[4g + c] has columns c and 4 + c of rows 4g to 4g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(reinterpret_cast<float*>(out + 128 * c), _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(out + 128 * (4 + c)), _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
    }
}

// Sixteen rows of 64 bytes, `in_stride` apart, to sixteen columns of double words, 128 bytes apart.
BN_INLINE void transpose16(const Byte* in, size_t in_stride, Byte* out) {
    transpose8(in, in_stride, out);
    transpose8(in + 32, in_stride, out + 8 * 128);
    transpose8(in + 8 * in_stride, in_stride, out + 32);
    transpose8(in + 8 * in_stride + 32, in_stride, out + 8 * 128 + 32);
}
