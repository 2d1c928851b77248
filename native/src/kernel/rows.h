// Work on whole rows: quantisation, layer normalisation, embeddings, pooling.

// A row's scale and zero point. The range includes 0, so that a row far from 0 keeps its precision in `zero * sum`, and a
// row of zeros has a scale.
struct Range {
    float scale, inverse, zero;

    BN_INLINE_MEMBER Range(float low, float high) {
        scale = high - low > 1e-30f ? (high - low) * (1.0f / 255) : 1.0f;
        inverse = 1 / scale;
        zero = -low * inverse;
    }
};

// In most networks a few elements of a text's first token are far beyond all others, whose 8 bits they would take. Where at
// most OUTLIERS elements are larger than a fifth of the largest, the others get all of the range: those elements are quantised
// as 0, and every product adds their part in float32. Repeated while there is room: of three elements of 20, 2 and 0.2, two go.
constexpr float OUTER = 0.2f;  // with 0.3, three times as many rows have some: more exact, and slower

// What is farther from 0 than the edge, on either side.
struct Outer {
    Vec edge, negative_edge;

    BN_INLINE_MEMBER Outer(float low, float high)
        : edge(all(OUTER * __builtin_fmaxf(-low, high))), negative_edge(all(-OUTER * __builtin_fmaxf(-low, high))) {}

    BN_INLINE_MEMBER Lanes has(Vec lows, Vec highs) const {
        return static_cast<Lanes>(greater(highs, edge) | less(lows, negative_edge));
    }
};

// Writes the elements to `found`, at most OUTLIERS and -1 behind them, and narrows the range to the others'.
static __attribute__((noinline)) void find_outliers(const float* v, size_t n, float floor, float* low, float* high, int32_t* found) {
    size_t count = 0;
    for (bool more = true; more && count < OUTLIERS;) {
        const Outer outer(*low, *high);
        // Beyond the edge are those of earlier rounds too.
        size_t at[2 * OUTLIERS], beyond = 0;
        Vec lows = all(floor), highs = zeros();
        for (size_t i = 0; i < n && beyond <= OUTLIERS; i += 16) {
            const Vec x = load(v + i);
            Lanes others = first_lanes(16);
            for (size_t j = 0; j < count; j++)
                if (static_cast<size_t>(found[j]) / 16 == i / 16) others = static_cast<Lanes>(others & ~(1u << (found[j] % 16)));
            unsigned mask = outer.has(x, x) & others;
            others = static_cast<Lanes>(others & ~mask);
            for (; mask && beyond <= OUTLIERS; mask &= mask - 1) at[beyond++] = i + static_cast<size_t>(__builtin_ctz(mask));
            lows = minimum_of(lows, others, x);
            highs = maximum_of(highs, others, x);
        }
        more = beyond > 0 && count + beyond <= OUTLIERS;
        if (!more) break;
        for (size_t j = 0; j < beyond; j++) found[count++] = static_cast<int32_t>(at[j]);
        *low = lane_minimum(lows);
        *high = lane_maximum(highs);
    }
    if (count < OUTLIERS) found[count] = -1;
}

// Row m's scale, zero point and outliers, from the least and the largest elements in each lane; `floor` is the range's lower
// end at most.
BN_INLINE Range find_range(const float* v, size_t n, Vec lows, Vec highs, float floor, const Work& work, size_t m) {
    float low = __builtin_fminf(lane_minimum(lows), floor), high = lane_maximum(highs);
    int32_t* found = work.row_outliers + m * OUTLIERS;
    found[0] = -1;
    const Outer outer(low, high);
    // Lanes with an element in the outer part: there are at least as many elements.
    const auto lanes = static_cast<size_t>(__builtin_popcount(outer.has(lows, highs)));
    if (lanes > 0 && lanes <= OUTLIERS) find_outliers(v, n, floor, &low, &high, found);
    const Range range(low, high);
    work.row_scale[m] = range.scale;
    work.row_zero[m] = range.zero;
    for (size_t j = 0; j < OUTLIERS && found[j] >= 0; j++) work.row_excess[m * OUTLIERS + j] = v[found[j]] * range.inverse + range.zero;
    return range;
}

BN_INLINE void clear_outliers(const Work& work, size_t m, Quantised* out) {
    const int32_t* found = work.row_outliers + m * OUTLIERS;
    for (size_t j = 0; j < OUTLIERS && found[j] >= 0; j++) out[place_in_row(static_cast<size_t>(found[j]))] = quantised(0);
}

BN_INLINE void quantise(const float* v, size_t n, const Range& range, const Work& work, size_t m, Byte* row) {
    auto* out = reinterpret_cast<Quantised*>(row);
    const Vec vi = all(range.inverse), vz = all(range.zero);
    for (size_t i = 0; i < n; i += 32) {
        store_quantised(out + i, load(v + i), vi, vz);
        store_quantised(out + i + 16, load(v + i + 16), vi, vz);
    }
    clear_outliers(work, m, out);
}

BN_INLINE void quantise_row(const float* v, size_t n, const Work& work, size_t m, Byte* out) {
    Vec low0 = zeros(), low1 = low0, high0 = low0, high1 = low0;
    for (size_t i = 0; i < n; i += 32) {
        const Vec x = load(v + i), y = load(v + i + 16);
        low0 = minimum(low0, x);
        low1 = minimum(low1, y);
        high0 = maximum(high0, x);
        high1 = maximum(high1, y);
    }
    quantise(v, n, find_range(v, n, minimum(low0, low1), maximum(high0, high1), 0, work, m), work, m, out);
}

// After an activation function without a gate the lower end is known.
BN_INLINE void quantise_activated(const float* v, size_t n, float low, const Work& work, size_t m, Byte* out) {
    Vec high0 = zeros(), high1 = high0;
    for (size_t i = 0; i < n; i += 32) {
        high0 = maximum(high0, load(v + i));
        high1 = maximum(high1, load(v + i + 16));
    }
    quantise(v, n, find_range(v, n, all(low), maximum(high0, high1), low, work, m), work, m, out);
}

// A row as the next product reads it.
BN_INLINE void emit_row(const float* v, size_t n, bool int8, const Work& work, size_t m) {
    Byte* out = work.input + m * work.input_stride;
    if (int8) return quantise_row(v, n, work, m, out);
    for (size_t i = 0; i < n; i += 32) store_elements(out, i, load(v + i), load(v + i + 16));
}

// To `out`, which may be `v`. Uncentred: by the root mean square, as if the mean were 0.
BN_INLINE void normalise_row(const float* v, size_t n, const float* gain, const float* shift, float epsilon, bool uncentred, float* out) {
    Vec s0 = zeros(), s1 = s0;
    for (size_t i = 0; i < n && !uncentred; i += 32) {
        s0 = add(s0, load(v + i));
        s1 = add(s1, load(v + i + 16));
    }
    const float count = static_cast<float>(n);
    const Vec mean = all(lane_sum(add(s0, s1)) / count);
    s0 = s1 = zeros();
    for (size_t i = 0; i < n; i += 32) {
        const Vec x = sub(load(v + i), mean), y = sub(load(v + i + 16), mean);
        s0 = fma(x, x, s0);
        s1 = fma(y, y, s1);
    }
    const Vec factor = all(1.0f / __builtin_sqrtf(lane_sum(add(s0, s1)) / count + epsilon));
    for (size_t i = 0; i < n; i += 16) {
        const Vec x = mul(sub(load(v + i), mean), factor);
        store(out + i, fma(x, load(gain + i), load(shift + i)));
    }
}

// The same for a row of V vectors that stays in registers, and what the next product reads of it.
template <size_t V>
BN_INLINE void normalise_and_emit(float* row, const float* gain, const float* shift, float epsilon, bool int8, const Work& work, size_t m) {
    Vec v[V], s0 = zeros(), s1 = s0;
#pragma GCC unroll 24
    for (size_t i = 0; i < V; i += 2) {
        v[i] = load(row + 16 * i);
        v[i + 1] = load(row + 16 * i + 16);
        s0 = add(s0, v[i]);
        s1 = add(s1, v[i + 1]);
    }
    const float count = 16 * V;
    const Vec mean = all(lane_sum(add(s0, s1)) / count);
    s0 = s1 = zeros();
#pragma GCC unroll 24
    for (size_t i = 0; i < V; i += 2) {
        v[i] = sub(v[i], mean);
        v[i + 1] = sub(v[i + 1], mean);
        s0 = fma(v[i], v[i], s0);
        s1 = fma(v[i + 1], v[i + 1], s1);
    }
    const Vec factor = all(1.0f / __builtin_sqrtf(lane_sum(add(s0, s1)) / count + epsilon));
    Vec low = zeros(), high = low;
#pragma GCC unroll 24
    for (size_t i = 0; i < V; i++) {
        v[i] = fma(mul(v[i], factor), load(gain + 16 * i), load(shift + 16 * i));
        store(row + 16 * i, v[i]);
        low = minimum(low, v[i]);
        high = maximum(high, v[i]);
    }
    Byte* out = work.input + m * work.input_stride;
    if (int8) {
        const Range range = find_range(row, 16 * V, low, high, 0, work, m);
        const Vec vi = all(range.inverse), vz = all(range.zero);
        auto* quantised = reinterpret_cast<Quantised*>(out);
#pragma GCC unroll 24
        for (size_t i = 0; i < V; i++) store_quantised(quantised + 16 * i, v[i], vi, vz);
        clear_outliers(work, m, quantised);
    } else {
#pragma GCC unroll 24
        for (size_t i = 0; i < V; i += 2) store_elements(out, 16 * i, v[i], v[i + 1]);
    }
}

// The mean or maximum of `count` rows of n floats. Sums run over the tokens in order, whoever computes them.
BN_INLINE void pool_rows(const float* rows, size_t count, size_t n, bool mean, float* out) {
    for (size_t i = 0; i < n; i += 16) {
        Vec v = load(rows + i);
        for (size_t t = 1; t < count; t++) {
            const Vec x = load(rows + t * n + i);
            v = mean ? add(v, x) : maximum(v, x);
        }
        store(out + i, mean ? div(v, all(static_cast<float>(count))) : v);
    }
}

// log(1 + v) of what is above 0; most of SPLADE's weights are not.
BN_INLINE void log1p_row(float* v, size_t n) {
    for (size_t i = 0; i < n; i += 16)
        for (unsigned above = greater(load(v + i), zeros()); above; above &= above - 1) {
            float* x = v + i + __builtin_ctz(above);
            *x = __builtin_log1pf(*x);
        }
}

// To length 1, as torch.nn.functional.normalize does: divided by the norm, at least 1e-12.
BN_INLINE void normalise_length(float* v, size_t n) {
    Vec sum = zeros();
    for (size_t i = 0; i < n; i += 16) sum = fma(load(v + i), load(v + i), sum);
    const float norm = __builtin_sqrtf(lane_sum(sum));
    const Vec factor = all(1.0f / (norm > 1e-12f ? norm : 1e-12f));
    for (size_t i = 0; i < n; i += 16) store(v + i, mul(load(v + i), factor));
}
