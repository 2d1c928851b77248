// What is done to vectors of sixteen floats, whatever the instruction set has for them.

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
constexpr size_t larger(size_t a, size_t b) { return a > b ? a : b; }
constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
constexpr size_t round_down(size_t n, size_t to) { return n / to * to; }

// An element of attention's and of not quantised products' inputs; how two vectors of a row's elements are stored, i to i + 32, and one.
#if BN_BF16
constexpr size_t ELEMENT = 2;
BN_INLINE void store_elements(Byte* row, size_t i, Vec low, Vec high) { store_bf16(row + 2 * i, low, high); }
BN_INLINE void store_elements(Byte* row, size_t i, Vec v) { store_bf16(row + 2 * i, v); }
#else
constexpr size_t ELEMENT = 4;
BN_INLINE void store_elements(Byte* row, size_t i, Vec v) { store(reinterpret_cast<float*>(row + 4 * i), v); }
BN_INLINE void store_elements(Byte* row, size_t i, Vec low, Vec high) {
    store_elements(row, i, low);
    store_elements(row, i + 16, high);
}
#endif

// 2^x for x <= 0, degree 3: 1e-4, which is far below a bf16's half unit (2e-3); degree 5: 2e-7, for float32 weights.
BN_INLINE Vec exp2_negative(Vec x) {
    const Vec whole = rounded(x), f = sub(x, whole);
    Vec p;
    if (ELEMENT == 2) {
        p = fma(f, all(EXP2_3[3]), all(EXP2_3[2]));
        p = fma(p, f, all(EXP2_3[1]));
        p = fma(p, f, all(EXP2_3[0]));
    } else {
        p = fma(f, all(EXP2_5[5]), all(EXP2_5[4]));
        p = fma(p, f, all(EXP2_5[3]));
        p = fma(p, f, all(EXP2_5[2]));
        p = fma(p, f, all(EXP2_5[1]));
        p = fma(p, f, all(EXP2_5[0]));
    }
    return scaled(p, whole);
}

// x * P(x), P(x) = 1/2 + x Q(x^2) on |x| <= limit and constant beyond: both kinds of GELU, by their coefficients.
template <int Degree>
BN_INLINE Vec gelu(Vec x, const float* table) {
    const Vec limit = all(table[Degree + 1]);
    const Vec c = maximum(minimum(x, limit), sub(zeros(), limit));
    const Vec t = mul(c, c);
    Vec p = all(table[Degree]);
#pragma GCC unroll 8
    for (int i = Degree - 1; i >= 0; i--) p = fma(p, t, all(table[i]));
    return mul(x, fma(c, p, all(0.5f)));
}

// x / (1 + e^-x)
BN_INLINE Vec silu(Vec x) {
    const Vec above = maximum(x, zeros()), below = minimum(x, zeros());
    const Vec power = exp2_negative(mul(sub(below, above), all(1.44269504f)));  // e^-|x|
    return div(fma(below, power, above), add(all(1), power));
}

// `Degree`: of the polynomial where there is one.
template <int Degree>
BN_INLINE Vec activated(Activation activation, Vec x) {
    static_assert(Degree == 5 || Degree == 7);
    switch (activation) {
        case Activation::relu: return maximum(x, zeros());
        case Activation::silu: return silu(x);
        case Activation::gelu_erf: return gelu<Degree>(x, Degree == 5 ? GELU_5[0] : GELU_7[0]);
        case Activation::gelu_tanh: return gelu<Degree>(x, Degree == 5 ? GELU_5[1] : GELU_7[1]);
    }
    __builtin_unreachable();
}
