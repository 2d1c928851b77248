// The packed file: a header, a table of tensors, and the tensors, each aligned to 64 bytes. Little-endian throughout.
// bertopt_native/layout.py writes it; model.cpp reads it and believes nothing.
#pragma once
#include <cstdint>

namespace bertopt_native {

inline constexpr char MAGIC[8] = {'B', 'E', 'R', 'T', 'N', 'A', 'T', '\n'};
inline constexpr uint32_t LAYOUT_VERSION = 5;  // the newest; fields that a file's version does not know are 0
inline constexpr uint64_t ALIGNMENT = 64;
inline constexpr uint32_t PANEL = 32;  // columns of a weight panel

enum class Activation : uint32_t { gelu_erf, gelu_tanh, relu, silu };
enum class PositionRule : uint32_t { index, non_pad };  // non_pad: RoBERTa's, padding ids do not advance the position
enum class Type : uint32_t { f32, u32, int8, bf16 };

struct Header {
    char magic[8];
    uint32_t layout_version;
    uint32_t header_bytes;
    uint64_t file_bytes;
    uint64_t table_offset;
    uint32_t table_entries;
    uint32_t activation;
    uint32_t hidden;        // H, a multiple of 32
    uint32_t embedding;     // width of the embedding tables; another than H needs a projection
    uint32_t heads;
    uint32_t head_size;     // the network's
    uint32_t head_stride;   // head_size rounded up to a multiple of 32; the rest is zeros
    uint32_t intermediate;  // rounded up to a multiple of 32; the rest is zeros
    uint32_t layers;
    uint32_t stored_layers;  // fewer than `layers` where layers share weights
    uint32_t vocabulary;
    uint32_t token_types;  // 0: the network has none
    uint32_t positions;    // rows of the position table, or of the rotary table
    uint32_t position_offset;
    uint32_t position_rule;
    uint32_t pad_id;
    uint32_t relative_bias;  // 1: attention scores get a bias by distance
    float epsilon;
    char family[16];
    uint32_t rotary;      // rotary tables, 0 to 2: queries and keys are turned by their position, and there is no position table
    uint32_t gated;       // 1: the activation of one product gates another
    uint32_t norm_first;  // 1: norms are of what products read; a layer's `ffn` norm is the next layer's first, or the network's last.
                          // 2: that of the embeddings too, which is the first layer's; 3: the embeddings have one, and the first layer another
    uint32_t window;      // tokens on each side that layers with a window attend to; 0: there are none
    uint32_t distances;   // rows of the tables by distance, a multiple of 32: scores are the sum of three products; 0: there are none
    uint32_t uncentred;   // 1: norms do not subtract the mean (root mean square)
    uint32_t vocabulary_head;  // products of the head over the vocabulary: 1 (the decoder), 2 (a dense layer, an activation and a norm before), or 0
    uint32_t head_activation;
    uint32_t dropped;  // 1 + the id whose tokens are 0 and by whose share a text's other tokens are scaled (ESM's mask tokens); 0: there is none
    uint8_t reserved[100];
};
static_assert(sizeof(Header) == 256, "layout.py writes 256 bytes");

// A linear product has four tensors: weight, scale, sum, bias. `scale` and `sum` exist for int8 only.
enum class Part : uint32_t { weight, scale, sum, bias };

enum class Tensor : uint32_t {
    word = 0,
    position = 1,  // not where there are rotary tables; a network with tables by distance may do without
    token_type = 2,
    embedding_gain = 3,
    embedding_shift = 4,
    layer_map = 5,
    relative_bias = 6,
    rotary = 7,         // its `layer` is the table's number: layers with a window use the last
    attention_gain = 8,
    attention_shift = 9,
    ffn_gain = 10,
    ffn_shift = 11,
    layer_window = 12,  // for each layer 1 where it has a window
    places = 13,        // [1, 2 * longest - 1] a row of the tables for each distance key - query
    distance_keys = 14,  // [heads * distances, head_stride] what a query is multiplied with
    distance_queries = 15,  // and a key; it carries what queries do
    projection = 16,  // a linear product: + Part
    qkv = 20,
    attention_out = 24,
    ffn_in = 28,
    ffn_out = 32,
    head_dense = 36,  // [embedding, hidden]
    decoder = 40,     // [vocabulary rounded up to whole panels, embedding]; the rest is zeros
    head_gain = 44,
    head_shift = 45,
    first_gain = 46,  // the first layer's first norm, where the embeddings have one before it (norm_first 3)
    first_shift = 47,
};

struct Entry {
    uint32_t tensor;
    uint32_t layer;
    uint32_t type;
    uint32_t rows;
    uint32_t cols;
    uint32_t reserved;
    uint64_t offset;
    uint64_t bytes;
};
static_assert(sizeof(Entry) == 40, "layout.py writes 40 bytes");

}  // namespace bertopt_native
