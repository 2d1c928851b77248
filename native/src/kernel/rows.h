// Work on whole rows: quantisation, layer normalisation, embeddings, pooling.

BN_INLINE void quantise16(Byte* out, Vec v, Vec inverse, Vec zero) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_fmadd_ps(v, inverse, zero));
    // Signed, then unsigned saturation: a value below 0 becomes 0, not 255.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(_mm512_max_epi32(q, _mm512_setzero_si512())));
}

// A row to uint8 with its own scale and zero point. The range includes 0, so that a row far from 0 keeps its precision in
// `zero * sum`, and a row of zeros has a scale.
BN_INLINE void quantise_range(const float* v, size_t n, float low, float high, Byte* out, float* scale, float* zero) {
    const float range = high - low;
    const float step = range > 1e-30f ? range * (1.0f / 255) : 1.0f, inverse = 1 / step, z = -low * inverse;
    *scale = step;
    *zero = z;
    const Vec vi = all(inverse), vz = all(z);
    for (size_t i = 0; i < n; i += 32) {
        quantise16(out + i, load(v + i), vi, vz);
        quantise16(out + i + 16, load(v + i + 16), vi, vz);
    }
}

BN_INLINE void quantise_row(const float* v, size_t n, Byte* out, float* scale, float* zero) {
    Vec low0 = _mm512_setzero_ps(), low1 = low0, high0 = low0, high1 = low0;
    for (size_t i = 0; i < n; i += 32) {
        const Vec x = load(v + i), y = load(v + i + 16);
        low0 = _mm512_min_ps(low0, x);
        low1 = _mm512_min_ps(low1, y);
        high0 = _mm512_max_ps(high0, x);
        high1 = _mm512_max_ps(high1, y);
    }
    const float low = _mm512_reduce_min_ps(_mm512_min_ps(low0, low1));
    const float high = _mm512_reduce_max_ps(_mm512_max_ps(high0, high1));
    quantise_range(v, n, low, high, out, scale, zero);
}

// After an activation function the lower end is known: -0.17 for both kinds of GELU, 0 for ReLU.
BN_INLINE void quantise_activated(const float* v, size_t n, float low, Byte* out, float* scale, float* zero) {
    Vec high0 = _mm512_setzero_ps(), high1 = high0;
    for (size_t i = 0; i < n; i += 32) {
        high0 = _mm512_max_ps(high0, load(v + i));
        high1 = _mm512_max_ps(high1, load(v + i + 16));
    }
    quantise_range(v, n, low, _mm512_reduce_max_ps(_mm512_max_ps(high0, high1)), out, scale, zero);
}

// A row as the next product reads it.
BN_INLINE void emit_row(const float* v, size_t n, bool int8, const Work& work, size_t m) {
    Byte* out = work.input + m * work.input_stride;
    if (int8) return quantise_row(v, n, out, work.row_scale + m, work.row_zero + m);
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
