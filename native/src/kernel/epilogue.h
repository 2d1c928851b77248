// What follows a product while its results are in registers.

template <bool Int8>
struct Dequantise {
    const Linear& linear;
    const float *row_scale, *row_zero;

    BN_INLINE_MEMBER void apply(size_t m, size_t p, Vec& x, Vec& y) const {
        const size_t n = PANEL * p;
        const Vec bias0 = load(linear.bias + n), bias1 = load(linear.bias + n + 16);
        if constexpr (Int8) {
            const Vec scale = all(row_scale[m]), zero = all(row_zero[m]);
            x = _mm512_fnmadd_ps(zero, load(linear.sum + n), _mm512_cvtepi32_ps((__m512i)x));
            y = _mm512_fnmadd_ps(zero, load(linear.sum + n + 16), _mm512_cvtepi32_ps((__m512i)y));
            x = _mm512_fmadd_ps(_mm512_mul_ps(x, scale), load(linear.scale + n), bias0);
            y = _mm512_fmadd_ps(_mm512_mul_ps(y, scale), load(linear.scale + n + 16), bias1);
        } else {
            x = _mm512_add_ps(x, bias0);
            y = _mm512_add_ps(y, bias1);
        }
    }
};

// One head's query, key and value: panels `first` onwards.
template <bool Int8>
struct ToHead {
    Dequantise<Int8> dequantise;
    Byte* out;
    size_t matrix_bytes, row_bytes, panels, first;  // panels of one of the three

    BN_INLINE_MEMBER void operator()(size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(m, p, x, y);
        const size_t which = (p - first) / panels, part = (p - first) % panels;
        store_elements(out + which * matrix_bytes + m * row_bytes, PANEL * part, x, y);
    }
};

// Adds to the residual stream.
template <bool Int8>
struct AddTo {
    Dequantise<Int8> dequantise;
    float* out;
    size_t stride;

    BN_INLINE_MEMBER void operator()(size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(m, p, x, y);
        float* o = out + m * stride + PANEL * p;
        store(o, _mm512_add_ps(x, load(o)));
        store(o + 16, _mm512_add_ps(y, load(o + 16)));
    }
};

// The activation function. To floats where int8 follows (they are quantised when the row's range is known, and a shorter
// polynomial is well within its step), to elements otherwise. Row m0 is the first of `out`.
template <bool Int8, bool ToFloats>
struct Activate {
    Dequantise<Int8> dequantise;
    Activation activation;
    Byte* out;
    size_t row_bytes, m0;

    BN_INLINE_MEMBER void operator()(size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(m, p, x, y);
        if (activation == Activation::relu) {
            x = _mm512_max_ps(x, _mm512_setzero_ps());
            y = _mm512_max_ps(y, _mm512_setzero_ps());
        } else {
            const size_t kind = activation == Activation::gelu_erf ? 0 : 1;
            constexpr int degree = ToFloats ? 5 : 7;
            const float* table = ToFloats ? GELU_5[kind] : GELU_7[kind];
            x = gelu<degree>(x, table);
            y = gelu<degree>(y, table);
        }
        Byte* row = out + (m - m0) * row_bytes;
        if constexpr (ToFloats) {
            store(reinterpret_cast<float*>(row) + PANEL * p, x);
            store(reinterpret_cast<float*>(row) + PANEL * p + 16, y);
        } else {
            store_elements(row, PANEL * p, x, y);
        }
    }
};

struct Write {
    float* out;
    size_t stride;

    BN_INLINE_MEMBER void operator()(size_t m, size_t p, Vec x, Vec y) const {
        store(out + m * stride + PANEL * p, x);
        store(out + m * stride + PANEL * p + 16, y);
    }
};

// The projection of narrow embeddings: bias, no residual.
struct WriteBiased {
    Dequantise<false> dequantise;
    float* out;
    size_t stride;

    BN_INLINE_MEMBER void operator()(size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(m, p, x, y);
        Write{out, stride}(m, p, x, y);
    }
};

// Attention's output: divided by the sum of the softmax's numerators. Floats where int8 follows.
struct ToContext {
    Byte* out;
    size_t row_bytes;
    const float* inverse;
    bool floats;

    BN_INLINE_MEMBER void operator()(size_t m, size_t p, Vec x, Vec y) const {
        const Vec factor = all(inverse[m]);
        x = _mm512_mul_ps(x, factor);
        y = _mm512_mul_ps(y, factor);
        Byte* row = out + m * row_bytes;
        if (floats) {
            store(reinterpret_cast<float*>(row) + PANEL * p, x);
            store(reinterpret_cast<float*>(row) + PANEL * p + 16, y);
        } else {
            store_elements(row, PANEL * p, x, y);
        }
    }
};
