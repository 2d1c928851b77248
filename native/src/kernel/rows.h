// Work on whole rows: quantisation, layer normalisation, embeddings, pooling.

BN_INLINE void quantise16(Byte* out, Vec v, Vec inverse, Vec zero) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_fmadd_ps(v, inverse, zero));
    // Signed, then unsigned saturation: a value below 0 becomes 0, not 255.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(_mm512_max_epi32(q, _mm512_setzero_si512())));
}

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

// In most networks one element of a text's first token is far beyond all others, whose 8 bits it would take. Where the others
// have less than half of the row's range, they get all of it: that element is quantised as 0, and every product adds its part
// in float32. Returns its index and narrows the range to the others', or returns -1.
static __attribute__((noinline)) int32_t find_outlier(const float* v, size_t n, float extreme, float floor, float* low, float* high) {
    size_t at = n;
    for (size_t i = 0; i < n && at == n; i += 16)
        if (const __mmask16 equal = _mm512_cmp_ps_mask(load(v + i), all(extreme), _CMP_EQ_OQ)) at = i + static_cast<size_t>(__builtin_ctz(equal));
    if (at == n) return -1;
    Vec lows = _mm512_setzero_ps(), highs = lows;
    for (size_t i = 0; i < n; i += 16) {
        const auto others = static_cast<__mmask16>(i == at / 16 * 16 ? ~(1u << (at % 16)) : ~0u);
        const Vec x = _mm512_maskz_loadu_ps(others, v + i);
        lows = _mm512_min_ps(lows, x);
        highs = _mm512_max_ps(highs, x);
    }
    const float rest_low = __builtin_fminf(_mm512_reduce_min_ps(lows), floor), rest_high = _mm512_reduce_max_ps(highs);
    if (!(rest_high - rest_low < 0.5f * (*high - *low))) return -1;
    *low = rest_low;
    *high = rest_high;
    return static_cast<int32_t>(at);
}

// Row m's scale, zero point and outlier, from the least and the largest elements in each lane; `floor` is the range's lower
// end at most.
BN_INLINE Range find_range(const float* v, size_t n, Vec lows, Vec highs, float floor, const Work& work, size_t m) {
    float low = __builtin_fminf(_mm512_reduce_min_ps(lows), floor), high = _mm512_reduce_max_ps(highs);
    const bool above = high >= -low;
    const Vec extreme = all(above ? high : low), none = _mm512_setzero_ps();
    // Without the lane that has the extreme: the others' range is at least this.
    const float rest_low = above ? low : _mm512_reduce_min_ps(_mm512_mask_mov_ps(lows, _mm512_cmp_ps_mask(lows, extreme, _CMP_EQ_OQ), none));
    const float rest_high = above ? _mm512_reduce_max_ps(_mm512_mask_mov_ps(highs, _mm512_cmp_ps_mask(highs, extreme, _CMP_EQ_OQ), none)) : high;
    int32_t outlier = -1;
    if (rest_high - rest_low < 0.5f * (high - low)) outlier = find_outlier(v, n, above ? high : low, floor, &low, &high);
    const Range range(low, high);
    work.row_scale[m] = range.scale;
    work.row_zero[m] = range.zero;
    work.row_outlier[m] = outlier;
    if (outlier >= 0) work.row_excess[m] = v[outlier] * range.inverse + range.zero;
    return range;
}

BN_INLINE void quantise(const float* v, size_t n, const Range& range, const Work& work, size_t m, Byte* out) {
    const Vec vi = all(range.inverse), vz = all(range.zero);
    for (size_t i = 0; i < n; i += 32) {
        quantise16(out + i, load(v + i), vi, vz);
        quantise16(out + i + 16, load(v + i + 16), vi, vz);
    }
    if (work.row_outlier[m] >= 0) out[work.row_outlier[m]] = 0;
}

BN_INLINE void quantise_row(const float* v, size_t n, const Work& work, size_t m, Byte* out) {
    Vec low0 = _mm512_setzero_ps(), low1 = low0, high0 = low0, high1 = low0;
    for (size_t i = 0; i < n; i += 32) {
        const Vec x = load(v + i), y = load(v + i + 16);
        low0 = _mm512_min_ps(low0, x);
        low1 = _mm512_min_ps(low1, y);
        high0 = _mm512_max_ps(high0, x);
        high1 = _mm512_max_ps(high1, y);
    }
    quantise(v, n, find_range(v, n, _mm512_min_ps(low0, low1), _mm512_max_ps(high0, high1), 0, work, m), work, m, out);
}

// After an activation function the lower end is known: -0.17 for both kinds of GELU, 0 for ReLU.
BN_INLINE void quantise_activated(const float* v, size_t n, float low, const Work& work, size_t m, Byte* out) {
    Vec high0 = _mm512_setzero_ps(), high1 = high0;
    for (size_t i = 0; i < n; i += 32) {
        high0 = _mm512_max_ps(high0, load(v + i));
        high1 = _mm512_max_ps(high1, load(v + i + 16));
    }
    quantise(v, n, find_range(v, n, all(low), _mm512_max_ps(high0, high1), low, work, m), work, m, out);
}

// A row as the next product reads it.
BN_INLINE void emit_row(const float* v, size_t n, bool int8, const Work& work, size_t m) {
    Byte* out = work.input + m * work.input_stride;
    if (int8) return quantise_row(v, n, work, m, out);
    for (size_t i = 0; i < n; i += 32) store_elements(out, i, load(v + i), load(v + i + 16));
}

BN_INLINE void normalise_row(float* v, size_t n, const float* gain, const float* shift, float epsilon) {
    Vec s0 = _mm512_setzero_ps(), s1 = s0;
    for (size_t i = 0; i < n; i += 32) {
        s0 = _mm512_add_ps(s0, load(v + i));
        s1 = _mm512_add_ps(s1, load(v + i + 16));
    }
    const float count = static_cast<float>(n);
    const Vec mean = all(_mm512_reduce_add_ps(_mm512_add_ps(s0, s1)) / count);
    s0 = s1 = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 32) {
        const Vec x = _mm512_sub_ps(load(v + i), mean), y = _mm512_sub_ps(load(v + i + 16), mean);
        s0 = _mm512_fmadd_ps(x, x, s0);
        s1 = _mm512_fmadd_ps(y, y, s1);
    }
    const Vec factor = all(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(s0, s1)) / count + epsilon));
    for (size_t i = 0; i < n; i += 16) {
        const Vec x = _mm512_mul_ps(_mm512_sub_ps(load(v + i), mean), factor);
        store(v + i, _mm512_fmadd_ps(x, load(gain + i), load(shift + i)));
    }
}

// The same for a row of V vectors that stays in registers, and what the next product reads of it.
template <size_t V>
BN_INLINE void normalise_and_emit(float* row, const float* gain, const float* shift, float epsilon, bool int8, const Work& work, size_t m) {
    Vec v[V], s0 = _mm512_setzero_ps(), s1 = s0;
#pragma GCC unroll 24
    for (size_t i = 0; i < V; i += 2) {
        v[i] = load(row + 16 * i);
        v[i + 1] = load(row + 16 * i + 16);
        s0 = _mm512_add_ps(s0, v[i]);
        s1 = _mm512_add_ps(s1, v[i + 1]);
    }
    const float count = 16 * V;
    const Vec mean = all(_mm512_reduce_add_ps(_mm512_add_ps(s0, s1)) / count);
    s0 = s1 = _mm512_setzero_ps();
#pragma GCC unroll 24
    for (size_t i = 0; i < V; i += 2) {
        v[i] = _mm512_sub_ps(v[i], mean);
        v[i + 1] = _mm512_sub_ps(v[i + 1], mean);
        s0 = _mm512_fmadd_ps(v[i], v[i], s0);
        s1 = _mm512_fmadd_ps(v[i + 1], v[i + 1], s1);
    }
    const Vec factor = all(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(s0, s1)) / count + epsilon));
    Vec low = _mm512_setzero_ps(), high = low;
#pragma GCC unroll 24
    for (size_t i = 0; i < V; i++) {
        v[i] = _mm512_fmadd_ps(_mm512_mul_ps(v[i], factor), load(gain + 16 * i), load(shift + 16 * i));
        store(row + 16 * i, v[i]);
        low = _mm512_min_ps(low, v[i]);
        high = _mm512_max_ps(high, v[i]);
    }
    Byte* out = work.input + m * work.input_stride;
    if (int8) {
        const Range range = find_range(row, 16 * V, low, high, 0, work, m);
        const Vec vi = all(range.inverse), vz = all(range.zero);
#pragma GCC unroll 24
        for (size_t i = 0; i < V; i++) quantise16(out + 16 * i, v[i], vi, vz);
        if (work.row_outlier[m] >= 0) out[work.row_outlier[m]] = 0;
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
            v = mean ? _mm512_add_ps(v, x) : _mm512_max_ps(v, x);
        }
        store(out + i, mean ? _mm512_div_ps(v, all(static_cast<float>(count))) : v);
    }
}

// To length 1, as torch.nn.functional.normalize does: divided by the norm, at least 1e-12.
BN_INLINE void normalise_length(float* v, size_t n) {
    Vec sum = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) sum = _mm512_fmadd_ps(load(v + i), load(v + i), sum);
    const float norm = __builtin_sqrtf(_mm512_reduce_add_ps(sum));
    const Vec factor = all(1.0f / (norm > 1e-12f ? norm : 1e-12f));
    for (size_t i = 0; i < n; i += 16) store(v + i, _mm512_mul_ps(load(v + i), factor));
}
