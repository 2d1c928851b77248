// One group of texts through all layers. Alone (team null) on one thread, or shared by a team in steps of tasks.

constexpr float TRAINED_SHARE = 1 - 0.15f * 0.8f;  // share of the tokens that ESM's training kept
constexpr size_t ROWS_A_THREAD = 32;  // from so many rows a thread, threads share rows, not columns
constexpr size_t PANELS_AT_ONCE = 64;  // of the vocabulary: a text's part of the answer stays in the cache until it is done

struct ForwardPass {
    const Network& net;
    const Batch& batch;
    const Work& work;
    const Scratch& scratch;
    Team* team;
    size_t text0, text1;  // the group's texts
    size_t base, tokens;  // its first token and their number

    size_t start(size_t text) const { return static_cast<size_t>(batch.starts[text]) - base; }
    size_t length(size_t text) const { return static_cast<size_t>(batch.starts[text + 1] - batch.starts[text]); }
    size_t parts(size_t most) const { return team ? smaller(most, 4 * team->threads) : 1; }

    template <class Body>
    void by_rows(size_t count, const Body& body) {
        const size_t n = larger(1, parts(count / 8));
        share(team, n, [&](size_t i) { body(count * i / n, count * (i + 1) / n); });
    }

    template <template <bool> class Epilogue, class... More>
    void linear(const Linear& l, const Byte* a, size_t stride, size_t m0, size_t m1, size_t p0, size_t p1,
                More... more) const {
        if (l.int8) {
            product<Kind::int8>(a, stride, m0, m1, l.weight, l.k, p0, p1, Epilogue<true>{{l, &work}, more...});
        } else {
            product<DENSE>(a, stride, m0, m1, l.weight, l.k, p0, p1, Epilogue<false>{{l, nullptr}, more...});
        }
    }

    // The share of a text's tokens that are not dropped; 1 where all are.
    float kept_share(size_t text) const {
        size_t dropped = 0;
        for (size_t r = start(text); r < start(text + 1); r++) dropped += static_cast<size_t>(batch.ids[base + r]) + 1 == net.dropped;
        const size_t length = start(text + 1) - start(text);
        return dropped == length ? 1 : 1 - static_cast<float>(dropped) / static_cast<float>(length);
    }

    void embed() {
        const size_t width = net.embedding;
        const bool int8 = !net.projection && net.layer[0].qkv.int8;
        by_rows(tokens, [&](size_t r0, size_t r1) {
            size_t text = text0;
            float kept = 1;
            for (size_t r = r0; r < r1; r++) {
                while (r >= start(text + 1)) text++;
                if (net.dropped && (r == r0 || r == start(text))) kept = kept_share(text);
                const size_t token = base + r, place = net.position_offset + r - start(text);
                const float* word = net.word + static_cast<size_t>(batch.ids[token]) * width;
                work.position[r] = batch.positions ? batch.positions[token] : static_cast<int32_t>(place);
                float* out = work.hidden + r * width;
                // Rows of the vocabulary come from memory: the next one while this one is worked on.
                const size_t next = smaller(r + 1, r1 - 1) + base;
                const auto* coming = reinterpret_cast<const char*>(net.word + static_cast<size_t>(batch.ids[next]) * width);
                for (size_t i = 0; i < width * sizeof(float); i += 64) __builtin_prefetch(coming + i);
                const float* type = nullptr;
                if (net.token_type) type = net.token_type + (batch.token_types ? static_cast<size_t>(batch.token_types[token]) : 0) * width;
                const float* position = net.position ? net.position + static_cast<size_t>(work.position[r]) * width : nullptr;
                const float scale = !net.dropped ? 1 : static_cast<size_t>(batch.ids[token]) + 1 == net.dropped ? 0 : TRAINED_SHARE / kept;
                for (size_t i = 0; i < width; i += 16) {
                    Vec sum = load(word + i);
                    if (net.dropped) sum = mul(sum, all(scale));
                    if (type) sum = add(sum, load(type + i));
                    if (position) sum = add(sum, load(position + i));
                    store(out + i, sum);
                }
                float* normalised = net.raw_embeddings ? scratch.row : out;
                normalise_row(out, width, net.embedding_gain, net.embedding_shift, net.epsilon, net.uncentred, normalised);
                if (net.first_gain) {
                    normalise_row(out, width, net.first_gain, net.first_shift, net.epsilon, net.uncentred, scratch.row);
                    normalised = scratch.row;
                }
                emit_row(normalised, width, int8, work, r);
            }
        });
        if (!net.projection) return;
        const Linear& l = *net.projection;
        const size_t panels = net.hidden / PANEL, n = parts(panels);
        share(team, n, [&](size_t i) {
            product<DENSE>(work.input, work.input_stride, 0, tokens, l.weight, l.k, panels * i / n, panels * (i + 1) / n,
                           WriteBiased<false>{{l, nullptr}, work.hidden, net.hidden});
        });
        by_rows(tokens, [&](size_t r0, size_t r1) {
            for (size_t r = r0; r < r1; r++) emit_row(work.hidden + r * net.hidden, net.hidden, net.layer[0].qkv.int8, work, r);
        });
    }

    // Fills `context`. With `firsts` only the first token of every text has a query; its rows are packed together.
    void attention(const Layer& layer, bool firsts) {
        const size_t panels = net.head_stride / PANEL, row_bytes = net.head_stride * ELEMENT;
        const size_t matrix_bytes = scratch.head_rows * row_bytes;
        const bool floats = layer.attention_out.int8;
        size_t longest = 1;
        for (size_t text = text0; text < text1; text++) longest = larger(longest, length(text));
        share(team, net.heads, [&](size_t h) {
            linear<ToHead>(layer.qkv, work.input, work.input_stride, 0, tokens, 3 * panels * h, 3 * panels * (h + 1), layer.rotary, work.position,
                           scratch.heads, matrix_bytes, row_bytes, panels, 3 * panels * h);
            Relative relative{};
            if (net.relative_bias) relative.bias = net.relative_bias + h * net.bias_stride + (net.longest - 1);
            if (net.distances) {
                const size_t table = h * net.distances * net.head_stride;
                pack_tables(net, layer.distance_keys + table, layer.distance_queries + table, longest, scratch);
                relative = {nullptr, scratch.distance_keys, scratch.distance_queries, net.place, net.diagonal};
            }
            Byte* column = work.context + h * net.head_stride * (floats ? 4 : ELEMENT);
            size_t row = 0;
            for (size_t text = text0; text < text1; text++) {
                if (!length(text)) continue;
                const Byte* q = scratch.heads + start(text) * row_bytes;
                const Head head{q, q + matrix_bytes, q + 2 * matrix_bytes, row_bytes, panels};
                const size_t queries = firsts ? 1 : length(text);
                attend(head, length(text), queries, layer.window, relative, scratch, column + row * work.context_stride, work.context_stride, floats);
                row += queries;
            }
        });
    }

    // Moves the first token of every text to the front of the residual stream; returns how many there are.
    size_t gather_firsts() {
        size_t count = 0;
        for (size_t text = text0; text < text1; text++) count += length(text) > 0;
        share(team, 1, [&](size_t) {
            size_t row = 0;
            for (size_t text = text0; text < text1; text++) {
                if (!length(text)) continue;
                if (row != start(text))
                    __builtin_memcpy(work.hidden + row * net.hidden, work.hidden + start(text) * net.hidden, net.hidden * sizeof(float));
                row++;
            }
        });
        return count;
    }

    // Everything of a layer that is row by row: attention's output product, the feed-forward, both normalisations.
    struct Rest {
        const Layer& layer;
        bool last, next_int8;
    };

    const Byte* context_input(const Linear& l, size_t r0, size_t r1) const {
        if (!l.int8) return work.context + r0 * work.context_stride;
        for (size_t r = r0; r < r1; r++) emit_row(reinterpret_cast<const float*>(work.context + r * work.context_stride), l.k, true, work, r);
        return work.input + r0 * work.input_stride;
    }

    void normalise(size_t r0, size_t r1, const float* gain, const float* shift, bool int8, bool emit) const {
        for (size_t r = r0; r < r1; r++) {
            float* row = work.hidden + r * net.hidden;
            if (ROW_IN_REGISTERS && emit && !net.norm_first && !net.uncentred && net.hidden == 384) {
                normalise_and_emit<24>(row, gain, shift, net.epsilon, int8, work, r);
            } else {
                float* out = emit && net.norm_first ? scratch.row : row;
                normalise_row(row, net.hidden, gain, shift, net.epsilon, net.uncentred, out);
                if (emit) emit_row(out, net.hidden, int8, work, r);
            }
        }
    }

    template <template <bool, bool> class Epilogue, bool Int8>
    void activate(const Layer& layer, const Inner& inner, size_t c0, size_t c1, size_t p0, size_t p1) const {
        const Linear& l = layer.ffn_in;
        constexpr Kind K = Int8 ? Kind::int8 : DENSE;
        const Dequantise<Int8> dequantise{l, &work};
        const Byte* a = work.input + c0 * work.input_stride;
        if (layer.ffn_out.int8) {
            product<K>(a, work.input_stride, c0, c1, l.weight, l.k, p0, p1,
                       Epilogue<Int8, true>{dequantise, net.activation, reinterpret_cast<Byte*>(inner.floats), inner.float_stride * 4, c0});
        } else {
            product<K>(a, work.input_stride, c0, c1, l.weight, l.k, p0, p1,
                       Epilogue<Int8, false>{dequantise, net.activation, inner.input, inner.stride, c0});
        }
    }

    void ffn_in(const Layer& layer, const Inner& inner, size_t c0, size_t c1, size_t p0, size_t p1) const {
        if (net.gated) {
            if (layer.ffn_in.int8) activate<Gate, true>(layer, inner, c0, c1, p0, p1);
            else activate<Gate, false>(layer, inner, c0, c1, p0, p1);
        } else {
            if (layer.ffn_in.int8) activate<Activate, true>(layer, inner, c0, c1, p0, p1);
            else activate<Activate, false>(layer, inner, c0, c1, p0, p1);
        }
    }

    // Rows r0 to r1 of a chunk that begins at row c0.
    void quantise_inner(const Inner& inner, size_t c0, size_t r0, size_t r1) const {
        const float low = net.activation == Activation::relu ? 0.0f : net.activation == Activation::silu ? -0.27847f : -0.17005f;
        for (size_t r = r0; r < r1; r++) {
            const float* row = inner.floats + r * inner.float_stride;
            Byte* out = inner.input + r * inner.stride;
            if (net.gated) quantise_row(row, net.intermediate, work, c0 + r, out);
            else quantise_activated(row, net.intermediate, low, work, c0 + r, out);
        }
    }

    void output_product(const Rest& rest, size_t r0, size_t r1) const {
        const Layer& y = rest.layer;
        const Byte* a = context_input(y.attention_out, r0, r1);
        linear<AddTo>(y.attention_out, a, y.attention_out.int8 ? work.input_stride : work.context_stride, r0, r1, 0, net.hidden / PANEL, work.hidden, net.hidden);
        normalise(r0, r1, y.attention_gain, y.attention_shift, y.ffn_in.int8, true);
    }

    void feed_forward(const Rest& rest, size_t c0, size_t c1) const {
        const Layer& y = rest.layer;
        const Inner& inner = scratch.inner;
        ffn_in(y, inner, c0, c1, 0, y.ffn_in.n / PANEL);
        if (y.ffn_out.int8) quantise_inner(inner, c0, 0, c1 - c0);
        linear<AddTo>(y.ffn_out, inner.input, inner.stride, c0, c1, 0, net.hidden / PANEL, work.hidden, net.hidden);
        normalise(c0, c1, y.ffn_gain, y.ffn_shift, rest.next_int8, !rest.last);
    }

    // Few rows and several threads: each product's columns are shared, so that every weight is read once.
    void rest_by_columns(const Rest& rest, size_t count) {
        const Layer& y = rest.layer;
        const size_t narrow = net.hidden / PANEL, wide = y.ffn_in.n / PANEL, nn = parts(narrow), nw = parts(wide);
        const Byte* a = work.context;
        size_t stride = work.context_stride;
        if (y.attention_out.int8) {
            by_rows(count, [&](size_t r0, size_t r1) { context_input(y.attention_out, r0, r1); });
            a = work.input;
            stride = work.input_stride;
        }
        share(team, nn, [&](size_t i) {
            linear<AddTo>(y.attention_out, a, stride, 0, count, narrow * i / nn, narrow * (i + 1) / nn, work.hidden, net.hidden);
        });
        by_rows(count, [&](size_t r0, size_t r1) { normalise(r0, r1, y.attention_gain, y.attention_shift, y.ffn_in.int8, true); });
        const size_t chunks = (count + work.inner.rows - 1) / work.inner.rows;
        for (size_t c = 0; c < chunks; c++) {
            const size_t c0 = count * c / chunks, c1 = count * (c + 1) / chunks;
            share(team, nw, [&](size_t i) { ffn_in(y, work.inner, c0, c1, wide * i / nw, wide * (i + 1) / nw); });
            if (y.ffn_out.int8) by_rows(c1 - c0, [&](size_t r0, size_t r1) { quantise_inner(work.inner, c0, r0, r1); });
            share(team, nn, [&](size_t i) {
                linear<AddTo>(y.ffn_out, work.inner.input, work.inner.stride, c0, c1, narrow * i / nn, narrow * (i + 1) / nn, work.hidden, net.hidden);
            });
        }
        by_rows(count, [&](size_t r0, size_t r1) { normalise(r0, r1, y.ffn_gain, y.ffn_shift, rest.next_int8, !rest.last); });
    }

    void rest_of_layer(const Rest& rest, size_t count) {
        if (team && count < ROWS_A_THREAD * team->threads) return rest_by_columns(rest, count);
        // Rows in parts, one a thread; the feed-forward of a part in chunks.
        const size_t n = team ? team->threads : 1;
        share(team, n, [&](size_t i) {
            const size_t r0 = count * i / n, r1 = count * (i + 1) / n;
            output_product(rest, r0, r1);
            for (size_t c = r0; c < r1; c += scratch.inner.rows) feed_forward(rest, c, smaller(r1, c + scratch.inner.rows));
        });
    }

    void write(bool firsts) {
        const size_t width = net.hidden, bytes = width * sizeof(float);
        share(team, 1, [&](size_t) {
            if (batch.output == Output::tokens) {
                if (tokens) __builtin_memcpy(batch.out + base * width, work.hidden, tokens * bytes);
                return;
            }
            size_t row = 0;
            for (size_t text = text0; text < text1; text++) {
                float* out = batch.out + text * width;
                if (!length(text)) {
                    __builtin_memset(out, 0, bytes);
                    continue;
                }
                if (firsts) __builtin_memcpy(out, work.hidden + row++ * width, bytes);
                else pool_rows(work.hidden + start(text) * width, length(text), width, batch.output == Output::mean, out);
                if (batch.normalize) normalise_length(out, width);
            }
        });
    }

    // Last hidden states to what the decoder reads.
    void before_decoder(const VocabularyHead& head) {
        const Linear& first = head.dense ? *head.dense : *head.decoder;
        by_rows(tokens, [&](size_t r0, size_t r1) {
            size_t text = text0;
            for (size_t r = r0; r < r1; r++) {
                while (r >= start(text + 1)) text++;
                work.text[r] = static_cast<int32_t>(text - text0);
                emit_row(work.hidden + r * net.hidden, net.hidden, first.int8, work, r);
            }
        });
        if (!head.dense) return;
        const size_t width = first.n, panels = width / PANEL, n = parts(panels);
        share(team, n, [&](size_t i) {
            linear<WriteBiased>(first, work.input, work.input_stride, 0, tokens, panels * i / n, panels * (i + 1) / n, work.hidden, width);
        });
        by_rows(tokens, [&](size_t r0, size_t r1) {
            for (size_t r = r0; r < r1; r++) {
                float* row = work.hidden + r * width;
                for (size_t i = 0; i < width; i += 16) store(row + i, activated<7>(head.activation, load(row + i)));
                normalise_row(row, width, head.gain, head.shift, net.epsilon, false, row);
                emit_row(row, width, head.decoder->int8, work, r);
            }
        });
    }

    // A text's weight for each id, in panels p0 to p1 of the vocabulary.
    void splade(const Linear& decoder, size_t p0, size_t p1) {
        const size_t width = decoder.n, first = p0 * PANEL, count = (p1 - p0) * PANEL;
        float* out = batch.out + text0 * width;
        for (size_t text = 0; text < text1 - text0; text++) __builtin_memset(out + text * width + first, 0, count * sizeof(float));
        linear<Largest>(decoder, work.input, work.input_stride, 0, tokens, p0, p1, out, width, work.text);
        const int logarithms = batch.output == Output::splade_log1p ? 2 : 1;
        for (size_t text = 0; text < text1 - text0; text++)
            for (int i = 0; i < logarithms; i++) log1p_row(out + text * width + first, count);
    }

    void write_over_vocabulary() {
        const Linear& decoder = *net.head->decoder;
        const size_t width = decoder.n, panels = width / PANEL, n = parts(panels);
        before_decoder(*net.head);
        share(team, n, [&](size_t i) {
            const size_t end = panels * (i + 1) / n;
            for (size_t p0 = panels * i / n, p1; p0 < end; p0 = p1) {
                p1 = smaller(end, p0 + PANELS_AT_ONCE);
                if (batch.output == Output::logits) linear<WriteBiased>(decoder, work.input, work.input_stride, 0, tokens, p0, p1, batch.out + base * width, width);
                else splade(decoder, p0, p1);
            }
        });
        if (!batch.normalize) return;
        share(team, 1, [&](size_t) {
            for (size_t text = text0; text < text1; text++) normalise_length(batch.out + text * width, width);
        });
    }

    void run() {
        embed();
        const bool want_firsts = batch.output == Output::first;
        for (size_t l = 0; l < net.layers; l++) {
            const Layer& layer = net.layer[l];
            const bool last = l + 1 == net.layers, firsts = last && want_firsts;
            attention(layer, firsts);
            const size_t count = firsts ? gather_firsts() : tokens;
            rest_of_layer({layer, last, !last && net.layer[l + 1].qkv.int8}, count);
        }
        if (batch.output >= Output::logits) write_over_vocabulary();
        else write(want_firsts);
    }
};

static void run_group(const Network& net, const Batch& batch, size_t text0, size_t text1, const Work& work, const Scratch& scratch,
                      Team* team) {
    const size_t base = static_cast<size_t>(batch.starts[text0]), end = static_cast<size_t>(batch.starts[text1]);
    ForwardPass{net, batch, work, scratch, team, text0, text1, base, end - base}.run();
}

// For the tests: what the int8 layers add up, of rows as they are before `Quantised`.
static void int8_product(const uint8_t* a, size_t rows, const uint8_t* weight, size_t n, size_t k, int32_t* out) {
    auto* input = static_cast<Quantised*>(__builtin_malloc(rows * k * sizeof(Quantised) + 1));
    if (!input) __builtin_trap();  // the tests' matrices are small
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < k; i++) input[r * k + place_in_row(i)] = quantised(a[r * k + i]);
    product<Kind::int8>(reinterpret_cast<const Byte*>(input), k * sizeof(Quantised), 0, rows, weight, k, 0, n / PANEL, Write{reinterpret_cast<float*>(out), n});
    __builtin_free(input);
    for (size_t c = 0; c < n && quantised(0) != 0; c++) {
        int32_t sum = 0;
        for (size_t i = 0; i < k; i++) sum += static_cast<int8_t>(weight[c / 32 * 32 * k + i / 4 * 128 + c % 32 * 4 + i % 4]);
        for (size_t r = 0; r < rows; r++) out[r * n + c] -= quantised(0) * sum;
    }
}

static void float_linear(const float* x, size_t rows, const float* weight, const float* bias, size_t n, size_t k, float* out) {
    constexpr size_t AT_ONCE = 4;  // outputs that share what is loaded of x
    const Lanes tail = first_lanes(k % 16);
    for (size_t r = 0; r < rows; r++) {
        const float* row = x + r * k;
        for (size_t c = 0; c < n; c += AT_ONCE) {
            const size_t count = smaller(AT_ONCE, n - c);
            Vec sum[AT_ONCE] = {all(0), all(0), all(0), all(0)};
            size_t i = 0;
            for (; i + 16 <= k; i += 16)
                for (size_t j = 0; j < count; j++) sum[j] = fma(load(row + i), load(weight + (c + j) * k + i), sum[j]);
            if (tail)
                for (size_t j = 0; j < count; j++)
                    sum[j] = fma(load_lanes(tail, row + i), load_lanes(tail, weight + (c + j) * k + i), sum[j]);
            for (size_t j = 0; j < count; j++) out[r * n + c + j] = lane_sum(sum[j]) + bias[c + j];
        }
    }
}
