// Products: rows times panels of 32 columns, a register tile of up to tile_rows() rows at a time.

// How a step of a product reads its operands. Every step takes 128 bytes of a panel of 32 columns.
enum class Kind {
    int8,  // 4 uint8 of a row, 4 int8 a column
    bf16,  // 2 bf16 each
    f32,   // 1 float each
    wide,  // 2 floats of a row, 2 bf16 a column: bf16 weights where the CPU has no bf16 product
};

constexpr size_t step_bytes(Kind kind) { return kind == Kind::int8 ? 4 * sizeof(Quantised) : kind == Kind::wide ? 8 : 4; }
constexpr size_t step_elements(Kind kind) { return kind == Kind::int8 ? 4 : kind == Kind::f32 ? 1 : 2; }

#if BN_BF16
constexpr Kind DENSE = Kind::bf16, ATTENTION = Kind::bf16;
#else
constexpr Kind DENSE = Kind::wide, ATTENTION = Kind::f32;
#endif

#if defined(__aarch64__)
#include "tile_neon.h"
#elif BN_AVX512
#include "tile_avx512.h"
#else
#include "tile_avx2.h"
#endif

template <Kind K, class Epilogue>
BN_INLINE void pick_rows(size_t count, const Byte* a, size_t stride, const Byte* panel, size_t steps, size_t m, size_t p,
                         const Epilogue& epilogue, const Byte* ahead) {
    switch (count) {
#define BN_ROWS(M) \
    case M: \
        if constexpr (M <= tile_rows(K)) return rows<K, M>(a, stride, panel, steps, m, p, epilogue, ahead); \
        break;
        BN_ROWS(1) BN_ROWS(2) BN_ROWS(3) BN_ROWS(4) BN_ROWS(5) BN_ROWS(6)
        BN_ROWS(7) BN_ROWS(8) BN_ROWS(9) BN_ROWS(10) BN_ROWS(11) BN_ROWS(12)
#undef BN_ROWS
    }
}

#if BN_AMX
#include "amx.h"

// Fewer tokens are quicker by vectors. A row's INT8 sums are the same integers either way; sums of bf16 are not, so that those
// of products with weights are in tiles whatever the rows, and those of attention by the length of the text.
constexpr size_t TILES_FROM = 9;
#endif

// Rows m0 to m1 times panels p0 to p1 of a weight; `a` is row m0.
template <Kind K, class Epilogue>
static void product(const Byte* a, size_t stride, size_t m0, size_t m1, const Byte* weight, size_t depth, size_t p0, size_t p1,
                    const Epilogue& epilogue) {
#if BN_AMX
    if (K == Kind::bf16 || (depth % 64 == 0 && m1 - m0 >= TILES_FROM))
        return product_in_tiles<K>(a, stride, m0, m1, weight, depth, p0, p1, epilogue);
#endif
    const size_t steps = depth / step_elements(K), panel_bytes = steps * 128, count = m1 - m0;
    const size_t blocks = (count + tile_rows(K) - 1) / tile_rows(K);
    for (size_t p = p0; p < p1; p++) {
        const Byte* panel = weight + p * panel_bytes;
        for (size_t b = 0; b < blocks; b++) {
            // The first four tiles fetch the next panel, a quarter each. There is none behind the last.
            const Byte* ahead = b < 4 && p + 1 < p1 ? panel + panel_bytes + b * (panel_bytes / 4) : panel;
            const size_t s = count * b / blocks, e = count * (b + 1) / blocks;
            pick_rows<K>(e - s, a + s * stride, stride, panel, steps, m0 + s, p, epilogue, ahead);
        }
    }
}
