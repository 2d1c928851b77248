// Vectors of sixteen floats and what is done to them. Included by the instruction sets' translation units, inside their
// namespaces; BN_BF16 says whether there are products of bf16.
#define BN_INLINE static inline __attribute__((always_inline))
#define BN_INLINE_MEMBER inline __attribute__((always_inline))

using Byte = uint8_t;
using Vec = __m512;

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
constexpr size_t larger(size_t a, size_t b) { return a > b ? a : b; }
constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

BN_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
BN_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
BN_INLINE Vec all(float x) { return _mm512_set1_ps(x); }

// Two vectors to 64 bytes of bf16, in order. Without the instruction: rounded to nearest even; NaN stays NaN.
BN_INLINE void store_bf16(Byte* p, Vec low, Vec high) {
#if BN_BF16
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
    (void)p, (void)low, (void)high;
    __builtin_trap();
#endif
}

// An element of attention's and of not quantised products' inputs.
#if BN_BF16
constexpr size_t ELEMENT = 2;
#else
constexpr size_t ELEMENT = 4;
#endif

// Two vectors of a row's elements i to i + 32.
BN_INLINE void store_elements(Byte* row, size_t i, Vec low, Vec high) {
    if (ELEMENT == 2) {
        store_bf16(row + 2 * i, low, high);
    } else {
        _mm512_storeu_ps(row + 4 * i, low);
        _mm512_storeu_ps(row + 4 * i + 64, high);
    }
}

// 2^x for x <= 0, degree 3: 1e-4, which is far below a bf16's half unit (2e-3); degree 5: 2e-7, for float32 weights.
BN_INLINE Vec exp2_negative(Vec x) {
    const Vec whole = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, whole);
    Vec p;
    if (ELEMENT == 2) {
        p = _mm512_fmadd_ps(f, all(EXP2_3[3]), all(EXP2_3[2]));
        p = _mm512_fmadd_ps(p, f, all(EXP2_3[1]));
        p = _mm512_fmadd_ps(p, f, all(EXP2_3[0]));
    } else {
        p = _mm512_fmadd_ps(f, all(EXP2_5[5]), all(EXP2_5[4]));
        p = _mm512_fmadd_ps(p, f, all(EXP2_5[3]));
        p = _mm512_fmadd_ps(p, f, all(EXP2_5[2]));
        p = _mm512_fmadd_ps(p, f, all(EXP2_5[1]));
        p = _mm512_fmadd_ps(p, f, all(EXP2_5[0]));
    }
    return _mm512_scalef_ps(p, whole);
}

// x * P(x), P(x) = 1/2 + x Q(x^2) on |x| <= limit and constant beyond: both kinds of GELU, by their coefficients.
template <int Degree>
BN_INLINE Vec gelu(Vec x, const float* table) {
    const Vec limit = all(table[Degree + 1]);
    const Vec c = _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    const Vec t = _mm512_mul_ps(c, c);
    Vec p = all(table[Degree]);
#pragma GCC unroll 8
    for (int i = Degree - 1; i >= 0; i--) p = _mm512_fmadd_ps(p, t, all(table[i]));
    return _mm512_mul_ps(x, _mm512_fmadd_ps(c, p, all(0.5f)));
}

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
