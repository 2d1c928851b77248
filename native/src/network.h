// A network as the kernels see it: sizes and pointers into the packed file. Plain data, because the translation units of
// the instruction sets must not instantiate anything that the linker could merge into code for every CPU.
#pragma once
#include <cstddef>
#include <cstdint>

#include "format.h"

namespace bertopt_native {

struct Linear {
    const uint8_t* weight;  // [N/32][K/step][2][16][step] with 4 int8 or 2 bf16 a step
    const float* scale;     // [N], int8 only
    const float* sum;       // [N] sums of the int8 weights of a channel
    const float* bias;      // [N]
    size_t n, k;
    bool int8;
};

struct Layer {
    Linear qkv;  // head by head: query, key, value, each head_stride channels; queries carry log2(e) / sqrt(head_size)
    Linear attention_out;
    Linear ffn_in;  // gated: panels of 16 gates and the 16 channels that they gate
    Linear ffn_out;
    const float *attention_gain, *attention_shift, *ffn_gain, *ffn_shift;
    const float* rotary;  // [positions][head_stride]: for each panel of a head 16 cosines and 16 sines, or null; a panel's channels
                          // i and 16 + i are turned together
    const float *distance_keys, *distance_queries;  // [heads][distances][head_stride], or null
    size_t window;        // tokens on each side that a token attends to; longer than any text where it attends to all
};

// What turns last hidden states into logits, one for each id of the vocabulary.
struct VocabularyHead {
    const Linear* dense;  // an activation and a norm follow it; null where the decoder reads the hidden states
    Activation activation;
    const float *gain, *shift;
    const Linear* decoder;
};

struct Network {
    size_t hidden, embedding, heads, head_stride, intermediate, layers;
    size_t vocabulary, token_types, positions, position_offset;
    size_t dropped;      // 1 + the id of tokens that are 0 and by whose share a text's others are scaled; or 0
    size_t longest;      // tokens of the longest text: positions - position_offset
    size_t bias_stride;  // floats of a head's row of the relative bias
    Activation activation;
    float epsilon;
    const float *word, *position, *token_type, *embedding_gain, *embedding_shift;
    const float *first_gain, *first_shift;  // the norm before the first layer that does not touch the residual stream, or null
    bool gated, norm_first, raw_embeddings, uncentred;  // raw: the residual stream begins before the embeddings' norm
    const float* relative_bias;  // [heads][bias_stride], entry (key - query) + longest - 1, times log2(e); or null
    size_t distances;            // rows of the tables by distance, 0 where there are none
    const int32_t *place, *diagonal;  // at distance key - query a row of these tables, and 32 times it plus the distance: entries from
                                      // -(longest - 1) to longest + 30
    const Linear* projection;    // null where embedding == hidden and the network has none
    const VocabularyHead* head;  // or null
    const Layer* layer;          // [layers], shared weights repeated as pointers
};

}  // namespace bertopt_native
