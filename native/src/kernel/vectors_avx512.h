// Vectors of sixteen floats by AVX-512. The same operations as in vectors_avx2.h; BN_BF16 says whether there are products of bf16.
#define BN_INLINE static inline __attribute__((always_inline))
#define BN_INLINE_MEMBER inline __attribute__((always_inline))

using Byte = uint8_t;
using Vec = __m512;
using Lanes = __mmask16;  // a bit a lane

constexpr bool ROW_IN_REGISTERS = true;  // a row of 384 floats fits

// An element of an INT8 product's input, and where it lies in its row.
using Quantised = uint8_t;
BN_INLINE size_t place_in_row(size_t k) { return k; }
BN_INLINE Quantised quantised(uint8_t x) { return x; }

BN_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
BN_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
BN_INLINE Vec all(float x) { return _mm512_set1_ps(x); }
BN_INLINE Vec zeros() { return _mm512_setzero_ps(); }
BN_INLINE Vec add(Vec x, Vec y) { return _mm512_add_ps(x, y); }
BN_INLINE Vec sub(Vec x, Vec y) { return _mm512_sub_ps(x, y); }
BN_INLINE Vec mul(Vec x, Vec y) { return _mm512_mul_ps(x, y); }
BN_INLINE Vec div(Vec x, Vec y) { return _mm512_div_ps(x, y); }
BN_INLINE Vec fma(Vec x, Vec y, Vec z) { return _mm512_fmadd_ps(x, y, z); }    // x * y + z
BN_INLINE Vec fnma(Vec x, Vec y, Vec z) { return _mm512_fnmadd_ps(x, y, z); }  // z - x * y
BN_INLINE Vec minimum(Vec x, Vec y) { return _mm512_min_ps(x, y); }
BN_INLINE Vec maximum(Vec x, Vec y) { return _mm512_max_ps(x, y); }
BN_INLINE float lane_sum(Vec v) { return _mm512_reduce_add_ps(v); }
BN_INLINE float lane_minimum(Vec v) { return _mm512_reduce_min_ps(v); }
BN_INLINE float lane_maximum(Vec v) { return _mm512_reduce_max_ps(v); }

BN_INLINE Lanes first_lanes(size_t n) { return static_cast<Lanes>((1u << n) - 1); }
BN_INLINE Lanes greater(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
BN_INLINE Lanes less(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }
// Of the lanes that are set; the others stay what they were.
BN_INLINE Vec minimum_of(Vec x, Lanes lanes, Vec y) { return _mm512_mask_min_ps(x, lanes, x, y); }
BN_INLINE Vec maximum_of(Vec x, Lanes lanes, Vec y) { return _mm512_mask_max_ps(x, lanes, x, y); }
BN_INLINE Vec load_lanes(Vec otherwise, Lanes lanes, const float* p) { return _mm512_mask_loadu_ps(otherwise, lanes, p); }
BN_INLINE Vec load_lanes(Lanes lanes, const float* p) { return _mm512_maskz_loadu_ps(lanes, p); }  // 0 elsewhere

// p[index[i]] in lane i.
BN_INLINE Vec gather(const float* p, const int32_t* index) { return _mm512_i32gather_ps(_mm512_loadu_si512(index), p, 4); }

// Lanes that hold integers, sums of products of a row's elements and the weights of a column.
BN_INLINE Vec from_products(Vec v, Vec) { return _mm512_cvtepi32_ps((__m512i)v); }

// The int8 weights of input k, of sixteen columns of a panel.
BN_INLINE Vec weights_of(const Byte* panel, size_t k) {
    const __m512i fours = _mm512_loadu_si512(panel + k / 4 * 128);
    const __m128i up = _mm_cvtsi32_si128(static_cast<int>(24 - 8 * (k % 4)));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sll_epi32(fours, up), 24));
}

// v * inverse + zero, rounded, from 0 to 255.
BN_INLINE void store_quantised(Quantised* out, Vec v, Vec inverse, Vec zero) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_fmadd_ps(v, inverse, zero));
    // Signed, then unsigned saturation: a value below 0 becomes 0, not 255.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(_mm512_max_epi32(q, _mm512_setzero_si512())));
}

#if BN_BF16
// Two vectors to 64 bytes of bf16, in order.
BN_INLINE void store_bf16(Byte* p, Vec low, Vec high) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }
BN_INLINE void store_bf16(Byte* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v)); }

// Elements of two rows of 32 bf16 in turns; a row that is not there is zeros.
BN_INLINE void interleave(const Byte* a, const Byte* b, Byte* out) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = a ? _mm512_loadu_si512(a) : _mm512_setzero_si512(), y = b ? _mm512_loadu_si512(b) : _mm512_setzero_si512();
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi16(x, high, y));
}
#endif

BN_INLINE Vec rounded(Vec x) { return _mm512_roundscale_ps(x, 8); }
BN_INLINE Vec scaled(Vec x, Vec whole) { return _mm512_scalef_ps(x, whole); }  // x * 2^whole

// Sixteen rows of 64 bytes, `in_stride` apart, to sixteen columns of double words, 128 bytes apart.
BN_INLINE void transpose16(const Byte* in, size_t in_stride, Byte* out) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + in_stride * i);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4g + c] has, in its four lanes, columns c, 4 + c, 8 + c, 12 + c of rows 4g to 4g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm512_storeu_si512(out + 128 * c, _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88));
        _mm512_storeu_si512(out + 128 * (4 + c), _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88));
        _mm512_storeu_si512(out + 128 * (8 + c), _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd));
        _mm512_storeu_si512(out + 128 * (12 + c), _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd));
    }
}
