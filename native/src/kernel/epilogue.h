// What follows a product while its results are in registers.

// What a panel's columns have in common, loaded once a tile: epilogues store floats, so that the compiler would load it a row.
struct NoColumns {};
struct Columns {
    Vec bias0, bias1, scale0, scale1, sum0, sum1;
    const Byte* panel;
};

template <bool Int8>
struct Dequantise {
    const Linear& linear;
    const Work* work;  // null where nothing is quantised

    BN_INLINE_MEMBER Columns columns(size_t p) const {
        const size_t n = PANEL * p;
        Columns c;
        c.bias0 = load(linear.bias + n);
        c.bias1 = load(linear.bias + n + 16);
        if constexpr (Int8) {
            c.scale0 = load(linear.scale + n);
            c.scale1 = load(linear.scale + n + 16);
            c.sum0 = load(linear.sum + n);
            c.sum1 = load(linear.sum + n + 16);
            c.panel = linear.weight + n * linear.k;
        }
        return c;
    }

    BN_INLINE_MEMBER void apply(const Columns& c, size_t m, Vec& x, Vec& y) const {
        if constexpr (Int8) {
            const Vec scale = all(work->row_scale[m]), zero = all(work->row_zero[m]);
            x = fnma(zero, c.sum0, from_products(x, c.sum0));
            y = fnma(zero, c.sum1, from_products(y, c.sum1));
            const int32_t* outliers = work->row_outliers + m * OUTLIERS;
            for (size_t j = 0; j < OUTLIERS && __builtin_expect(outliers[j] >= 0, 0); j++) {
                const auto k = static_cast<size_t>(outliers[j]);
                const Vec excess = all(work->row_excess[m * OUTLIERS + j]);
                x = fma(excess, weights_of(c.panel, k), x);
                y = fma(excess, weights_of(c.panel + 64, k), y);
            }
            x = fma(mul(x, scale), c.scale0, c.bias0);
            y = fma(mul(y, scale), c.scale1, c.bias1);
        } else {
            x = add(x, c.bias0);
            y = add(y, c.bias1);
        }
    }
};

// One head's query, key and value: panels `first` onwards. With a rotary table queries and keys are turned by their position.
template <bool Int8>
struct ToHead {
    Dequantise<Int8> dequantise;
    const float* rotary;
    const int32_t* position;
    Byte* out;
    size_t matrix_bytes, row_bytes, panels, first;  // panels of one of the three

    BN_INLINE_MEMBER Columns columns(size_t p) const { return dequantise.columns(p); }

    BN_INLINE_MEMBER void operator()(const Columns& c, size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(c, m, x, y);
        const size_t which = (p - first) / panels, part = (p - first) % panels;
        if (rotary && which < 2) {
            const float* turn = rotary + (static_cast<size_t>(position[m]) * panels + part) * PANEL;
            const Vec cosine = load(turn), sine = load(turn + 16), low = x;
            x = fnma(y, sine, mul(x, cosine));
            y = fma(low, sine, mul(y, cosine));
        }
        store_elements(out + which * matrix_bytes + m * row_bytes, PANEL * part, x, y);
    }
};

// Adds to the residual stream.
template <bool Int8>
struct AddTo {
    Dequantise<Int8> dequantise;
    float* out;
    size_t stride;

    BN_INLINE_MEMBER Columns columns(size_t p) const { return dequantise.columns(p); }

    BN_INLINE_MEMBER void operator()(const Columns& c, size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(c, m, x, y);
        float* o = out + m * stride + PANEL * p;
        store(o, add(x, load(o)));
        store(o + 16, add(y, load(o + 16)));
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

    BN_INLINE_MEMBER Columns columns(size_t p) const { return dequantise.columns(p); }

    BN_INLINE_MEMBER void operator()(const Columns& c, size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(c, m, x, y);
        constexpr int degree = ToFloats ? 5 : 7;
        x = activated<degree>(activation, x);
        y = activated<degree>(activation, y);
        Byte* row = out + (m - m0) * row_bytes;
        if constexpr (ToFloats) {
            store(reinterpret_cast<float*>(row) + PANEL * p, x);
            store(reinterpret_cast<float*>(row) + PANEL * p + 16, y);
        } else {
            store_elements(row, PANEL * p, x, y);
        }
    }
};

// The same of a panel's gates, times what they gate: half as many columns.
template <bool Int8, bool ToFloats>
struct Gate {
    Dequantise<Int8> dequantise;
    Activation activation;
    Byte* out;
    size_t row_bytes, m0;

    BN_INLINE_MEMBER Columns columns(size_t p) const { return dequantise.columns(p); }

    BN_INLINE_MEMBER void operator()(const Columns& c, size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(c, m, x, y);
        const Vec gated = mul(activated<ToFloats ? 5 : 7>(activation, x), y);
        Byte* row = out + (m - m0) * row_bytes;
        if constexpr (ToFloats) store(reinterpret_cast<float*>(row) + PANEL / 2 * p, gated);
        else store_elements(row, PANEL / 2 * p, gated);
    }
};

struct Write {
    float* out;
    size_t stride;

    BN_INLINE_MEMBER NoColumns columns(size_t) const { return {}; }

    BN_INLINE_MEMBER void operator()(NoColumns, size_t m, size_t p, Vec x, Vec y) const {
        store(out + m * stride + PANEL * p, x);
        store(out + m * stride + PANEL * p + 16, y);
    }
};

// Bias, no residual.
template <bool Int8>
struct WriteBiased {
    Dequantise<Int8> dequantise;
    float* out;
    size_t stride;

    BN_INLINE_MEMBER Columns columns(size_t p) const { return dequantise.columns(p); }

    BN_INLINE_MEMBER void operator()(const Columns& c, size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(c, m, x, y);
        Write{out, stride}({}, m, p, x, y);
    }
};

// The largest of a column for each text, and of what `out` has there.
template <bool Int8>
struct Largest {
    Dequantise<Int8> dequantise;
    float* out;
    size_t stride;
    const int32_t* text;

    BN_INLINE_MEMBER Columns columns(size_t p) const { return dequantise.columns(p); }

    BN_INLINE_MEMBER void operator()(const Columns& c, size_t m, size_t p, Vec x, Vec y) const {
        dequantise.apply(c, m, x, y);
        float* o = out + static_cast<size_t>(text[m]) * stride + PANEL * p;
        // In this order x86 keeps an x that is NaN; a row of zeros would look like a text without weights.
        store(o, maximum(load(o), x));
        store(o + 16, maximum(load(o + 16), y));
    }
};

// Attention's output: divided by the sum of the softmax's numerators. Floats where int8 follows.
struct ToContext {
    Byte* out;
    size_t row_bytes;
    const float* inverse;
    bool floats;

    BN_INLINE_MEMBER NoColumns columns(size_t) const { return {}; }

    BN_INLINE_MEMBER void operator()(NoColumns, size_t m, size_t p, Vec x, Vec y) const {
        const Vec factor = all(inverse[m]);
        x = mul(x, factor);
        y = mul(y, factor);
        Byte* row = out + m * row_bytes;
        if (floats) {
            store(reinterpret_cast<float*>(row) + PANEL * p, x);
            store(reinterpret_cast<float*>(row) + PANEL * p + 16, y);
        } else {
            store_elements(row, PANEL * p, x, y);
        }
    }
};
