// Attention of one head over one text. Operands are bf16, or float32 where the CPU has no bf16 product; softmax is float32.
// Scores come in base 2: log2(e) is in the queries' weights.

struct Head {
    const Byte *query, *key, *value;  // rows of `row_bytes`
    size_t row_bytes;
    size_t panels;  // of 32 channels
};

// Keys [length][head] to panels of 32 keys. Rows behind the last are read (the buffer has them), and masked later.
BN_INLINE void pack_keys(const Head& head, size_t padded, Byte* out) {
    const size_t lines = head.row_bytes / 64;  // of 64 bytes: 16 steps
    for (size_t key = 0; key < padded; key += 16)
        for (size_t line = 0; line < lines; line++)
            transpose16(head.key + key * head.row_bytes + line * 64, head.row_bytes,
                        out + (key / 32) * (lines * 16 * 128) + line * (16 * 128) + (key / 16 % 2) * 64);
}

// Values [length][head] to panels of 32 channels; rows from `length` to `padded` are zeros, whoever lies behind.
BN_INLINE void pack_values(const Head& head, size_t length, size_t padded, Byte* out) {
    for (size_t panel = 0; panel < head.panels; panel++) {
#if BN_BF16
        for (size_t key = 0; key < padded; key += 2, out += 128) {
            const Byte* in = head.value + key * head.row_bytes + panel * 64;
            interleave(key < length ? in : nullptr, key + 1 < length ? in + head.row_bytes : nullptr, out);
        }
#else
        for (size_t key = 0; key < padded; key++) {
            const auto* in = reinterpret_cast<const float*>(head.value + key * head.row_bytes + panel * 128);
            store(reinterpret_cast<float*>(out), key < length ? load(in) : zeros());
            store(reinterpret_cast<float*>(out + 64), key < length ? load(in + 16) : zeros());
            out += 128;
        }
#endif
    }
}

// Keys from the first to the one behind the last.
struct Keys {
    size_t first, end;
};

// What a token attends to that is `row` of its text.
BN_INLINE Keys keys_of(size_t row, size_t window, size_t length) {
    return {row > window ? row - window : 0, smaller(row + window + 1, length)};
}

// What the rows s to e attend to, in whole panels.
BN_INLINE Keys panels_of(size_t s, size_t e, size_t window, size_t length) {
    return {keys_of(s, window, length).first / PANEL * PANEL, round_up(keys_of(e - 1, window, length).end, PANEL)};
}

// -1e30 for the keys of `all_keys`, whole panels, that are not among `keys`.
BN_INLINE void mask_row(float* score, Keys all_keys, Keys keys) {
    const Vec never = all(-1e30f);
    const auto mask = [&](size_t from, size_t to) {
        for (size_t j = from; j < to; j += 16) {
            const size_t before = j < keys.first ? smaller(keys.first - j, 16) : 0, until = j < keys.end ? smaller(keys.end - j, 16) : 0;
            store(score + j, load_lanes(never, static_cast<Lanes>(first_lanes(until) & ~first_lanes(before)), score + j));
        }
    };
    mask(all_keys.first, keys.first);
    mask(keys.end / 16 * 16, all_keys.end);
}

// Softmax's numerators of one row to elements, of `panels` of keys, among them those that it attends to; returns 1 / their sum.
BN_INLINE float softmax_row(float* score, Keys panels, Keys keys, const float* bias, Byte* out) {
    if (bias)
        for (size_t j = panels.first; j < panels.end; j += 16) store(score + j, add(load(score + j), load(bias + j)));
    mask_row(score, panels, keys);
    Vec m0 = load(score + panels.first), m1 = load(score + panels.first + 16);
    for (size_t j = panels.first + 32; j < panels.end; j += 32) {
        m0 = maximum(m0, load(score + j));
        m1 = maximum(m1, load(score + j + 16));
    }
    const Vec top = all(lane_maximum(maximum(m0, m1)));
    Vec s0 = zeros(), s1 = s0;
    for (size_t j = panels.first; j < panels.end; j += 32) {
        const Vec x = exp2_negative(sub(load(score + j), top));
        const Vec y = exp2_negative(sub(load(score + j + 16), top));
        s0 = add(s0, x);
        s1 = add(s1, y);
        store_elements(out, j, x, y);
    }
    return 1.0f / lane_sum(add(s0, s1));
}

// What the scores of one head get for the distance of key and query; null where the network has none of it.
struct Relative {
    const float* bias;  // a number by distance, the entry for 0
    // DeBERTa's: tables, what a query is multiplied with in panels and what a key is multiplied with in rows.
    const Byte *keys, *queries;
    const int32_t *place, *diagonal;  // the entries for 0

    // Of a row, in front of its keys; `from` is the first row of a block whose `by_distance` there are.
    const float* of_row(size_t row, size_t from, const Scratch& scratch) const {
        return keys ? scratch.distance_scores + (row - from) * scratch.score_stride : bias ? bias - row : nullptr;
    }
};

// Elements of a table's rows [rows][head], read as floats.
BN_INLINE void to_elements(const float* table, size_t count, Byte* out) {
    for (size_t i = 0; i < count; i += 32) store_elements(out, i, load(table + i), load(table + i + 16));
}

// What a head's texts of up to `longest` tokens need of its tables [distances][head_stride], ready for products.
static void pack_tables(const Network& net, const float* keys, const float* queries, size_t longest, const Scratch& scratch) {
    const size_t row_bytes = net.head_stride * ELEMENT, far = longest - 1;
    const size_t first = round_down(static_cast<size_t>(net.place[-static_cast<ptrdiff_t>(far)]), PANEL);
    const size_t rows = round_up(static_cast<size_t>(net.place[far + PANEL - 1]) + 1, PANEL) - first, count = rows * net.head_stride;
    Byte* out = scratch.distance_queries + first * row_bytes;
    to_elements(keys + first * net.head_stride, count, out);
    pack_keys({nullptr, out, nullptr, row_bytes, 0}, rows, scratch.distance_keys + first * row_bytes);
    to_elements(queries + first * net.head_stride, count, out);
}

// To `distance_scores`: what the rows from `from` to `to`, up to QUERY_ROWS of a text, and its keys give with the tables.
// `product(a, rows, panel, out, stride)` multiplies rows of a head with a panel. Keys behind the last are computed and masked later.
template <class Product>
static void by_distance(const Head& head, const Relative& relative, size_t length, size_t from, size_t to, const Scratch& scratch, const Product& product) {
    const size_t panel_bytes = PANEL * head.row_bytes;
    for (size_t k = 0; k < length; k += PANEL) {
        const int32_t *place = relative.place + k, *diagonal = relative.diagonal + k;
        const auto first = static_cast<size_t>(place[1 - static_cast<ptrdiff_t>(to)]);
        const auto last = static_cast<size_t>(place[static_cast<ptrdiff_t>(PANEL - 1) - static_cast<ptrdiff_t>(from)]);
        const size_t p0 = first / PANEL;
        for (size_t p = p0; p <= last / PANEL; p++)
            product(head.query + from * head.row_bytes, to - from, relative.keys + p * panel_bytes, scratch.by_query + PANEL * (p - p0), BY_QUERY);
        product(relative.queries + first * head.row_bytes, last + 1 - first, scratch.keys + k * head.row_bytes, scratch.by_key, PANEL);
        for (size_t i = from; i < to; i++) {
            const float* by_query = scratch.by_query + (i - from) * BY_QUERY - p0 * PANEL;
            const float* by_key = scratch.by_key + i - k - first * PANEL;
            float* out = scratch.distance_scores + (i - from) * scratch.score_stride + k;
            for (size_t half = 0; half < PANEL; half += 16) {
                const int32_t* at = place + half - i;
                const Vec content = at[15] - at[0] == 15 ? load(by_query + at[0]) : gather(by_query, at);
                store(out + half, add(content, gather(by_key, diagonal + half - i)));
            }
        }
    }
}

// The first `queries` rows of a text of `length` tokens.
static void attend_by_vectors(const Head& head, size_t length, size_t queries, size_t window, const Relative& relative, const Scratch& scratch,
                              Byte* context, size_t context_stride, bool context_floats) {
    const size_t padded = round_up(length, 32), depth = head.panels * PANEL;
    const size_t value_rows = round_up(length, 4);  // two steps of two keys; float32 steps divide it too
    pack_keys(head, padded, scratch.keys);
    pack_values(head, length, value_rows, scratch.values);
    const size_t score_steps = depth / step_elements(ATTENTION), value_steps = value_rows / step_elements(ATTENTION);
    float inverse[tile_rows(ATTENTION)];
    const size_t most = relative.keys ? QUERY_ROWS : queries;
    for (size_t from = 0, to; from < queries; from = to) {
        to = smaller(from + most, queries);
        if (relative.keys) {
            by_distance(head, relative, length, from, to, scratch, [&](const Byte* a, size_t count, const Byte* panel, float* out, size_t stride) {
                for (size_t s = 0, n; s < count; s += n) {
                    n = smaller(tile_rows(ATTENTION), count - s);
                    pick_rows<ATTENTION>(n, a + s * head.row_bytes, head.row_bytes, panel, score_steps, s, 0, Write{out, stride}, panel);
                }
            });
        }
        const size_t blocks = (to - from + tile_rows(ATTENTION) - 1) / tile_rows(ATTENTION);
        for (size_t b = 0; b < blocks; b++) {
            const size_t s = from + (to - from) * b / blocks, e = from + (to - from) * (b + 1) / blocks;
            const Write to_scores{scratch.scores, scratch.score_stride};
            const Keys keys = panels_of(s, e, window, length);
            for (size_t p = keys.first / PANEL; p < keys.end / PANEL; p++) {
                const Byte* panel = scratch.keys + p * score_steps * 128;
                pick_rows<ATTENTION>(e - s, head.query + s * head.row_bytes, head.row_bytes, panel, score_steps, 0, p, to_scores, panel);
            }
            for (size_t r = 0; r < e - s; r++)
                inverse[r] = softmax_row(scratch.scores + r * scratch.score_stride, keys, keys_of(s + r, window, length),
                                         relative.of_row(s + r, from, scratch), scratch.weights + r * scratch.weight_stride);
            const ToContext to_context{context + s * context_stride, context_stride, inverse, context_floats};
            const size_t before = keys.first / step_elements(ATTENTION), steps = smaller(keys.end, value_rows) / step_elements(ATTENTION) - before;
            for (size_t p = 0; p < head.panels; p++) {
                const Byte* panel = scratch.values + (p * value_steps + before) * 128;
                pick_rows<ATTENTION>(e - s, scratch.weights + keys.first * ELEMENT, scratch.weight_stride, panel, steps, 0, p, to_context, panel);
            }
        }
    }
}

#if BN_AMX
// Up to 32 rows of `lines` times 64 bytes, times panels: [32][32] a panel at `out`, which is `out_stride` bytes a row.
BN_INLINE void attention_product(size_t rows, const Byte* a, size_t stride, const Byte* panel, size_t lines, float* out, size_t out_stride) {
    const bool second = rows > 16;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (size_t i = 0; i < lines; i++) {
        tile_load<4>(a + 64 * i, stride);
        tile_load<6>(panel + 2048 * i, 128);
        tile_dot<ATTENTION, 0, 4, 6>();
        tile_load<7>(panel + 2048 * i + 64, 128);
        tile_dot<ATTENTION, 1, 4, 7>();
        if (!second) continue;
        tile_load<5>(a + 16 * stride + 64 * i, stride);
        tile_dot<ATTENTION, 2, 5, 6>();
        tile_dot<ATTENTION, 3, 5, 7>();
    }
    tile_store<0>(out, out_stride);
    tile_store<1>(out + 16, out_stride);
    if (!second) return;
    auto* below = reinterpret_cast<float*>(reinterpret_cast<Byte*>(out) + 16 * out_stride);
    tile_store<2>(below, out_stride);
    tile_store<3>(below + 16, out_stride);
}

// The same in tiles. They are full, whatever the number of queries: rows behind the last are read (the buffer has them) and
// their results never used.
static void attend_in_tiles(const Head& head, size_t length, size_t queries, size_t window, const Relative& relative, const Scratch& scratch,
                            Byte* context, size_t context_stride, bool context_floats) {
    const size_t padded = round_up(length, 32);
    pack_keys(head, padded, scratch.keys);
    pack_values(head, length, padded, scratch.values);
    const Tiles tiles(16);
    float inverse[QUERY_ROWS];
    alignas(64) float sums[QUERY_ROWS * 32];
    for (size_t s = 0; s < queries; s += QUERY_ROWS) {
        const size_t count = smaller(QUERY_ROWS, queries - s);
        const Keys keys = panels_of(s, s + count, window, length);
        if (relative.keys) {
            by_distance(head, relative, length, s, s + count, scratch, [&](const Byte* a, size_t rows, const Byte* panel, float* out, size_t stride) {
                for (size_t r = 0; r < rows; r += QUERY_ROWS)
                    attention_product(smaller(QUERY_ROWS, rows - r), a + r * head.row_bytes, head.row_bytes, panel, head.panels, out + r * stride,
                                      stride * sizeof(float));
            });
        }
        for (size_t p = keys.first / PANEL; p < keys.end / PANEL; p++)
            attention_product(count, head.query + s * head.row_bytes, head.row_bytes, scratch.keys + p * head.panels * 2048, head.panels,
                              scratch.scores + PANEL * p, scratch.score_stride * sizeof(float));
        for (size_t r = 0; r < count; r++)
            inverse[r] = softmax_row(scratch.scores + r * scratch.score_stride, keys, keys_of(s + r, window, length),
                                     relative.of_row(s + r, s, scratch), scratch.weights + r * scratch.weight_stride);
        asm volatile("" ::: "memory");  // tile_load does not say that it reads the weights
        const ToContext to_context{context + s * context_stride, context_stride, inverse, context_floats};
        for (size_t p = 0; p < head.panels; p++) {
            attention_product(count, scratch.weights + keys.first * ELEMENT, scratch.weight_stride,
                              scratch.values + (p * padded + keys.first) * 64, (keys.end - keys.first) / PANEL, sums, 128);
            for (size_t r = 0; r < count; r++) to_context({}, r, p, load(sums + 32 * r), load(sums + 32 * r + 16));
        }
    }
}
#endif

// By which of the two is a matter of the text's length alone, because they do not sum alike.
static void attend(const Head& head, size_t length, size_t queries, size_t window, const Relative& relative, const Scratch& scratch, Byte* context,
                   size_t context_stride, bool context_floats) {
#if BN_AMX
    if (length >= TILES_FROM) return attend_in_tiles(head, length, queries, window, relative, scratch, context, context_stride, context_floats);
#endif
    attend_by_vectors(head, length, queries, window, relative, scratch, context, context_stride, context_floats);
}
