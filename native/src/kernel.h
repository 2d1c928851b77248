// What an instruction set's translation unit offers, and what it works in.
#pragma once
#include <cstddef>
#include <cstdint>

#include "network.h"
#include "team.h"

namespace bertopt_native {

// From logits on, of networks with a head over the vocabulary. splade: for each id log(1 + relu(x)) of a text's largest logit x;
// splade_log1p: the same logarithm once more.
enum class Output : uint32_t { tokens, first, mean, max, logits, splade, splade_log1p };

// One call: K texts of T tokens, checked. Text i has tokens starts[i] to starts[i + 1].
struct Batch {
    const int32_t* ids;
    const int32_t* token_types;  // null: all 0
    const int32_t* positions;    // null: position_offset + index in the text
    const int64_t* starts;
    float* out;  // [T, H] for tokens, [T, V] for logits, [K, V] for both kinds of splade, else [K, H]; V is the vocabulary in whole panels, rows of empty texts are 0
    Output output;
    bool normalize;
};

// What lies between the two products of the feed-forward, for a chunk of rows.
struct Inner {
    float* floats;   // [rows][float_stride] before quantisation
    uint8_t* input;  // [rows][stride]
    size_t rows, stride, float_stride;
};

inline constexpr size_t OUTLIERS = 8;  // of a quantised row

// Buffers of one group of texts. Strides of byte buffers are in bytes.
struct Work {
    float* hidden;         // [tokens][H], the residual stream
    int32_t* position;     // [tokens]
    int32_t* text;         // [tokens] which text a token belongs to; of networks with a head over the vocabulary
    uint8_t* input;        // [tokens][input_stride], what the next product reads
    uint8_t* context;      // [tokens][context_stride], attention's output
    float* row_scale;      // [tokens] scale and zero point of a quantised row
    float* row_zero;
    int32_t* row_outliers;  // [tokens][OUTLIERS] elements that are quantised as 0, -1 behind the last; and what they are, in
    float* row_excess;      // the row's steps
    Inner inner;
    size_t input_stride, context_stride;
};

// Buffers of one thread.
struct Scratch {
    uint8_t* heads;    // query, key and value of one head: [3][head_rows][head_stride]
    uint8_t* keys;     // packed as weights are
    uint8_t* values;
    uint8_t* weights;  // [QUERY_ROWS][weight_stride] softmax
    float* scores;     // [QUERY_ROWS][score_stride]
    // Of networks with tables by distance: a head's two, as products take them; their products with a block of queries
    // [QUERY_ROWS][BY_QUERY] and with a panel of keys [BY_KEY][32]; the sums [QUERY_ROWS][score_stride].
    uint8_t *distance_keys, *distance_queries;
    float *by_query, *by_key, *distance_scores;
    float* row;        // [H]
    Inner inner;
    size_t head_rows, weight_stride, score_stride;
};

inline constexpr size_t QUERY_ROWS = 32;  // that attention works on together, at most; two tiles of AMX
// Between as many queries and a panel of keys there are 63 distances: rows of a table, and of panels three at most.
inline constexpr size_t BY_KEY = 64, BY_QUERY = 96;

struct Kernel {
    const char* name;
    size_t int8_bytes;     // an element of an INT8 product's input
    size_t element_bytes;  // an element of attention's operands and of another product's input
    // Rows that go through the feed-forward together, at most. What lies between its products should stay in the cache, but
    // every chunk reads all weights: where products are quick, that costs more, and a chunk is a whole group.
    size_t chunk_rows;
    void (*group)(const Network&, const Batch&, size_t first_text, size_t last_text, const Work&, const Scratch&, Team*);
    void (*int8_product)(const uint8_t* a, size_t rows, const uint8_t* weight, size_t n, size_t k, int32_t* out);
    // x [rows][k] times weight [n][k] plus bias [n], in float32; a row's sums do not depend on the others.
    void (*float_linear)(const float* x, size_t rows, const float* weight, const float* bias, size_t n, size_t k, float* out);
};

#if defined(__aarch64__)
extern const Kernel NEON_I8MM;
extern const Kernel NEON_DOTPROD;
#else
extern const Kernel AMX;
extern const Kernel AVX512_BF16;
extern const Kernel AVX512_VNNI;
extern const Kernel AVX_VNNI;
extern const Kernel AVX2;
#endif

}  // namespace bertopt_native
