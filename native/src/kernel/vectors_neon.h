// Vectors of sixteen floats by Neon: four of four. The same operations as in vectors_avx512.h, to the same bits.
// BN_BF16 says whether there are products of blocks of bytes and of bf16 (FEAT_I8MM and FEAT_BF16).
#define BN_INLINE static inline __attribute__((always_inline))
#define BN_INLINE_MEMBER inline __attribute__((always_inline))

using Byte = uint8_t;
struct Vec {
    float32x4_t v0, v1, v2, v3;
};
using Lanes = unsigned;  // a bit a lane

constexpr bool ROW_IN_REGISTERS = false;

// An element of an INT8 product's input, and where it lies in its row.
#if BN_BF16
using Quantised = uint8_t;
constexpr uint8_t LOWEST = 0;
#else
// Both sides of a product are signed: elements are less by 128, and `from_products` adds 128 times the sum of the weights.
using Quantised = int8_t;
constexpr uint8_t LOWEST = 128;
#endif
BN_INLINE size_t place_in_row(size_t k) { return k; }
BN_INLINE Quantised quantised(uint8_t x) { return static_cast<Quantised>(x ^ LOWEST); }

#define BN_EACH(F) return {F(x.v0), F(x.v1), F(x.v2), F(x.v3)}
#define BN_EACH_PAIR(F) return {F(x.v0, y.v0), F(x.v1, y.v1), F(x.v2, y.v2), F(x.v3, y.v3)}
#define BN_EACH_THREE(F) return {F(z.v0, x.v0, y.v0), F(z.v1, x.v1, y.v1), F(z.v2, x.v2, y.v2), F(z.v3, x.v3, y.v3)}

BN_INLINE Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
BN_INLINE void store(float* p, Vec v) {
    vst1q_f32(p, v.v0);
    vst1q_f32(p + 4, v.v1);
    vst1q_f32(p + 8, v.v2);
    vst1q_f32(p + 12, v.v3);
}
BN_INLINE Vec all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
BN_INLINE Vec zeros() { return all(0); }
BN_INLINE Vec add(Vec x, Vec y) { BN_EACH_PAIR(vaddq_f32); }
BN_INLINE Vec sub(Vec x, Vec y) { BN_EACH_PAIR(vsubq_f32); }
BN_INLINE Vec mul(Vec x, Vec y) { BN_EACH_PAIR(vmulq_f32); }
BN_INLINE Vec div(Vec x, Vec y) { BN_EACH_PAIR(vdivq_f32); }
BN_INLINE Vec fma(Vec x, Vec y, Vec z) { BN_EACH_THREE(vfmaq_f32); }   // x * y + z
BN_INLINE Vec fnma(Vec x, Vec y, Vec z) { BN_EACH_THREE(vfmsq_f32); }  // z - x * y
BN_INLINE Vec minimum(Vec x, Vec y) { BN_EACH_PAIR(vminq_f32); }
BN_INLINE Vec maximum(Vec x, Vec y) { BN_EACH_PAIR(vmaxq_f32); }

// Halves with halves, as AVX-512's reductions do it.
#define BN_REDUCE(F)                                              \
    const float32x4_t four = F(F(v.v3, v.v1), F(v.v2, v.v0));     \
    const float32x4_t two = F(four, vextq_f32(four, four, 2));    \
    return vgetq_lane_f32(F(two, vrev64q_f32(two)), 0)
BN_INLINE float lane_sum(Vec v) { BN_REDUCE(vaddq_f32); }
BN_INLINE float lane_minimum(Vec v) { BN_REDUCE(vminq_f32); }
BN_INLINE float lane_maximum(Vec v) { BN_REDUCE(vmaxq_f32); }
#undef BN_REDUCE

BN_INLINE Lanes first_lanes(size_t n) { return (1u << n) - 1; }
// Of sixteen lanes whose bits are all set or none.
BN_INLINE Lanes lanes_of(uint32x4_t v0, uint32x4_t v1, uint32x4_t v2, uint32x4_t v3) {
    const uint8x8_t bits = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x8_t low = vmovn_u16(vcombine_u16(vmovn_u32(v0), vmovn_u32(v1))), high = vmovn_u16(vcombine_u16(vmovn_u32(v2), vmovn_u32(v3)));
    return vaddv_u8(vand_u8(low, bits)) | static_cast<Lanes>(vaddv_u8(vand_u8(high, bits))) << 8;
}
BN_INLINE Lanes greater(Vec x, Vec y) { return lanes_of(vcgtq_f32(x.v0, y.v0), vcgtq_f32(x.v1, y.v1), vcgtq_f32(x.v2, y.v2), vcgtq_f32(x.v3, y.v3)); }
BN_INLINE Lanes less(Vec x, Vec y) { return greater(y, x); }

BN_INLINE Vec choose(Vec otherwise, Lanes lanes, Vec v) {
    const uint32x4_t set = vdupq_n_u32(lanes), bits = {1, 2, 4, 8};
    return {vbslq_f32(vtstq_u32(set, bits), v.v0, otherwise.v0), vbslq_f32(vtstq_u32(set, vshlq_n_u32(bits, 4)), v.v1, otherwise.v1),
            vbslq_f32(vtstq_u32(set, vshlq_n_u32(bits, 8)), v.v2, otherwise.v2), vbslq_f32(vtstq_u32(set, vshlq_n_u32(bits, 12)), v.v3, otherwise.v3)};
}
// Of the lanes that are set; the others stay what they were.
BN_INLINE Vec minimum_of(Vec x, Lanes lanes, Vec y) { return choose(x, lanes, minimum(x, y)); }
BN_INLINE Vec maximum_of(Vec x, Lanes lanes, Vec y) { return choose(x, lanes, maximum(x, y)); }
// Nothing else is read.
BN_INLINE Vec load_lanes(Vec otherwise, Lanes lanes, const float* p) {
    float lane[16];
    store(lane, otherwise);
    for (; lanes; lanes &= lanes - 1) lane[__builtin_ctz(lanes)] = p[__builtin_ctz(lanes)];
    return load(lane);
}
BN_INLINE Vec load_lanes(Lanes lanes, const float* p) { return load_lanes(zeros(), lanes, p); }  // 0 elsewhere

// p[index[i]] in lane i.
BN_INLINE Vec gather(const float* p, const int32_t* index) {
    float lane[16];
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; i++) lane[i] = p[index[i]];
    return load(lane);
}

// Lanes that hold integers, sums of products of a row's elements and the weights of a column; `sum` is that of the weights.
BN_INLINE Vec from_products(Vec x, [[maybe_unused]] Vec sum) {
#define BN_INTEGERS(V) vreinterpretq_s32_f32(x.V)
#if !BN_BF16
#define BN_PRODUCTS(V) vcvtq_f32_s32(vaddq_s32(BN_INTEGERS(V), vshlq_n_s32(vcvtq_s32_f32(sum.V), 7)))
#else
#define BN_PRODUCTS(V) vcvtq_f32_s32(BN_INTEGERS(V))
#endif
    return {BN_PRODUCTS(v0), BN_PRODUCTS(v1), BN_PRODUCTS(v2), BN_PRODUCTS(v3)};
#undef BN_PRODUCTS
#undef BN_INTEGERS
}

// The int8 weights of input k, of sixteen columns of a panel.
BN_INLINE Vec weights_of(const Byte* panel, size_t k) {
    const auto* fours = reinterpret_cast<const int32_t*>(panel + k / 4 * 128);
    const int32x4_t up = vdupq_n_s32(static_cast<int>(24 - 8 * (k % 4)));
    const auto four = [&](size_t i) { return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vld1q_s32(fours + 4 * i), up), 24)); };
    return {four(0), four(1), four(2), four(3)};
}

// v * inverse + zero, rounded, from 0 to 255.
BN_INLINE void store_quantised(Quantised* out, Vec v, Vec inverse, Vec zero) {
    const Vec x = fma(v, inverse, zero);
    const auto eight = [](float32x4_t low, float32x4_t high) {
        return vqmovn_u16(vcombine_u16(vqmovun_s32(vcvtnq_s32_f32(low)), vqmovun_s32(vcvtnq_s32_f32(high))));
    };
    const uint8x16_t bytes = vcombine_u8(eight(x.v0, x.v1), eight(x.v2, x.v3));
    vst1q_u8(reinterpret_cast<uint8_t*>(out), veorq_u8(bytes, vdupq_n_u8(LOWEST)));
}

#if BN_BF16
// Two vectors to 64 bytes of bf16, in order.
BN_INLINE void store_bf16(Byte* p, Vec v) {
    auto* out = reinterpret_cast<bfloat16_t*>(p);
    vst1q_bf16(out, vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.v0), v.v1));
    vst1q_bf16(out + 8, vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.v2), v.v3));
}
BN_INLINE void store_bf16(Byte* p, Vec low, Vec high) {
    store_bf16(p, low);
    store_bf16(p + 32, high);
}

// Elements of two rows of 32 bf16 in turns; a row that is not there is zeros.
BN_INLINE void interleave(const Byte* a, const Byte* b, Byte* out) {
    const auto eight = [](const Byte* row, size_t i) { return row ? vld1q_u16(reinterpret_cast<const uint16_t*>(row) + 8 * i) : vdupq_n_u16(0); };
    auto* pairs = reinterpret_cast<uint16_t*>(out);
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; i++) {
        vst1q_u16(pairs + 16 * i, vzip1q_u16(eight(a, i), eight(b, i)));
        vst1q_u16(pairs + 16 * i + 8, vzip2q_u16(eight(a, i), eight(b, i)));
    }
}
#endif

BN_INLINE Vec rounded(Vec x) { BN_EACH(vrndnq_f32); }

// x * 2^whole for whole <= 0. Below 2^-126 it is 0.
BN_INLINE Vec scaled(Vec x, Vec whole) {
    const Vec w = maximum(whole, all(-127));
    const auto power = [](float32x4_t v) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(v), vdupq_n_s32(127)), 23)); };
    return mul(x, {power(w.v0), power(w.v1), power(w.v2), power(w.v3)});
}

// Sixteen rows of 64 bytes, `in_stride` apart, to sixteen columns of double words, 128 bytes apart.
BN_INLINE void transpose16(const Byte* in, size_t in_stride, Byte* out) {
#pragma GCC unroll 16
    for (size_t block = 0; block < 16; block++) {
        const size_t row = block % 4 * 4, column = block / 4 * 4;
        uint32x4_t r[4];
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; i++) r[i] = vreinterpretq_u32_u8(vld1q_u8(in + (row + i) * in_stride + 4 * column));
        const uint64x2_t low0 = vreinterpretq_u64_u32(vzip1q_u32(r[0], r[1])), high0 = vreinterpretq_u64_u32(vzip2q_u32(r[0], r[1]));
        const uint64x2_t low1 = vreinterpretq_u64_u32(vzip1q_u32(r[2], r[3])), high1 = vreinterpretq_u64_u32(vzip2q_u32(r[2], r[3]));
        Byte* to = out + 128 * column + 4 * row;
        vst1q_u8(to, vreinterpretq_u8_u64(vzip1q_u64(low0, low1)));
        vst1q_u8(to + 128, vreinterpretq_u8_u64(vzip2q_u64(low0, low1)));
        vst1q_u8(to + 256, vreinterpretq_u8_u64(vzip1q_u64(high0, high1)));
        vst1q_u8(to + 384, vreinterpretq_u8_u64(vzip2q_u64(high0, high1)));
    }
}
#undef BN_EACH
#undef BN_EACH_PAIR
#undef BN_EACH_THREE
