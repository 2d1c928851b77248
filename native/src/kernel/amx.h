// Products by AMX: tiles of 16 rows of 64 bytes. Half a panel of weights is a tile as it lies: 16 steps of 16 columns.

// Tiles 0 to 3 are sums, 4 and 5 rows of the input, 6 and 7 weights. With fewer than 16 rows only so many are read.
// Loaded for one product and released behind it: no other code meets them, and no switch of threads has to save them.
class Tiles {
public:
    explicit Tiles(size_t rows) {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } shape{};
        shape.palette = 1;
        for (int i = 0; i < 8; i++) {
            shape.row_bytes[i] = 64;
            shape.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
        }
        asm volatile("ldtilecfg %0" ::"m"(shape) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Inline assembly, because g++ 12's intrinsics do not say that they read memory. What is read is written before a product
// begins (Tiles), so that loads need not say so either and leave the compiler free.
template <int T>
BN_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
BN_INLINE void tile_load(const Byte* p, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride));
}
template <int T>
BN_INLINE void tile_store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <Kind K, int Sum, int A, int B>
BN_INLINE void tile_dot() {
    if constexpr (K == Kind::int8) asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
    else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

// Sums of 16 rows and 32 columns that wait for their epilogue: rows `row` to `end` of them.
struct Half {
    size_t m, p, row, end;  // m is the tile's first row
};

// While one block's sums are made, the epilogue of the block before is applied, some rows a step: tiles and vectors have
// units of their own.
template <class Epilogue>
class Finishing {
public:
    explicit Finishing(const Epilogue& epilogue) : epilogue_(epilogue) {}

    // Where the next block's sums go.
    float* results() { return results_[current_]; }

    void begin(const Half& first, const Half& second) {
        half_[0] = first;
        half_[1] = second;
        done_ = results_[current_];
        current_ ^= 1;
    }

    __attribute__((noinline)) void some(size_t rows) {
        for (size_t h = 0; h < 2; h++) {
            Half& half = half_[h];
            const size_t end = smaller(half.end, half.row + rows);
            if (half.row >= end) continue;
            rows -= end - half.row;
            const auto columns = epilogue_.columns(half.p);
            const float* in = done_ + h * 512;
#pragma GCC unroll 1
            for (; half.row < end; half.row++)
                epilogue_(columns, half.m + half.row, half.p, load(in + half.row * 32), load(in + half.row * 32 + 16));
        }
    }

private:
    alignas(64) float results_[2][2 * 16 * 32];
    const Epilogue& epilogue_;
    Half half_[2] = {};
    const float* done_ = results_[0];
    size_t current_ = 0;
};

// How the two halves of a block lie: one below the other, side by side in two panels, or there is one.
enum class Block { below, beside, single };

// Sums of a block. `a1` and `b1` are the second half's rows and panel; `ahead` is fetched, `lines` of 64 bytes a step.
template <Kind K, Block B, class Epilogue>
BN_INLINE void tile_block(const Byte* a0, const Byte* a1, size_t stride, const Byte* b0, const Byte* b1, size_t steps, const Byte* ahead,
                          size_t lines, Finishing<Epilogue>& finishing) {
    const size_t rows_a_step = (32 + steps - 1) / steps;
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (B != Block::single) {
        tile_zero<2>();
        tile_zero<3>();
    }
    for (size_t i = 0; i < steps; i++) {
        tile_load<4>(a0 + 64 * i, stride);
        tile_load<6>(b0 + 2048 * i, 128);
        tile_dot<K, 0, 4, 6>();
        tile_load<7>(b0 + 2048 * i + 64, 128);
        tile_dot<K, 1, 4, 7>();
        if constexpr (B == Block::below) {
            tile_load<5>(a1 + 64 * i, stride);
            tile_dot<K, 2, 5, 6>();
            tile_dot<K, 3, 5, 7>();
        }
        if constexpr (B == Block::beside) {
            tile_load<6>(b1 + 2048 * i, 128);
            tile_dot<K, 2, 4, 6>();
            tile_load<7>(b1 + 2048 * i + 64, 128);
            tile_dot<K, 3, 4, 7>();
        }
        for (size_t j = 0; j < lines; j++) _mm_prefetch(reinterpret_cast<const char*>(ahead + 64 * (i * lines + j)), _MM_HINT_T0);
        finishing.some(rows_a_step);
    }
    finishing.some(32);
    float* out = finishing.results();
    tile_store<0>(out, 128);
    tile_store<1>(out + 16, 128);
    if constexpr (B != Block::single) {
        tile_store<2>(out + 512, 128);
        tile_store<3>(out + 528, 128);
    }
}

// Rows m0 to m1 times panels p0 to p1, where a row has whole tiles: `depth` bytes are a multiple of 64. Sixteen rows or more
// are read as full tiles, of which the last overlaps the one before; a row's sums do not depend on the others of its tile.
template <Kind K, class Epilogue>
static __attribute__((noinline)) void product_in_tiles(const Byte* a, size_t stride, size_t m0, size_t m1, const Byte* weight, size_t depth,
                                                       size_t p0, size_t p1, const Epilogue& epilogue) {
    const size_t count = m1 - m0, steps = depth / (16 * step_elements(K)), panel_bytes = steps * 2048;
    if (!count) return;
    const Tiles tiles(smaller(count, 16));
    Finishing<Epilogue> finishing(epilogue);
    const size_t pairs = (count + 15) / 32;              // blocks of more than 16 rows
    const bool odd = count > 32 * pairs;                 // and one of at most 16,
    const size_t last = count < 16 ? 0 : count - 16;     // which begins here
    for (size_t p = p0; p < p1; p++) {
        const Byte* panel = weight + p * panel_bytes;
        const size_t left = p + 1 < p1 ? larger(1, pairs) : 0;
        for (size_t i = 0; i < pairs; i++) {
            const size_t s = 32 * i, t = smaller(s + 16, last);
            // Each block fetches its part of the next panel.
            const size_t lines = left ? (32 + pairs - 1) / pairs : 0;
            tile_block<K, Block::below>(a + s * stride, a + t * stride, stride, panel, panel, steps, panel + panel_bytes + i * lines * steps * 64,
                                        lines && (i + 1) * lines <= 32 ? lines : 0, finishing);
            finishing.begin({m0 + s, p, 0, 16}, {m0 + t, p, s + 16 - t, smaller(16, count - t)});
        }
        if (!odd) continue;
        const Half half{m0 + last, p, 32 * pairs - last, count - last};
        if ((p - p0) % 2) {
            tile_block<K, Block::beside>(a + last * stride, nullptr, stride, panel - panel_bytes, panel, steps, panel, 0, finishing);
            Half before = half;
            before.p--;
            finishing.begin(before, half);
        } else if (p + 1 == p1) {
            tile_block<K, Block::single>(a + last * stride, nullptr, stride, panel, nullptr, steps, panel, 0, finishing);
            finishing.begin(half, {});
        }
    }
    finishing.some(32);
}
