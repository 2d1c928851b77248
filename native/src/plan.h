// How a batch is divided: into groups that each run on one thread, or shared by all threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "network.h"

namespace bertopt_native {

struct Plan {
    std::vector<size_t> bounds;  // group g has texts bounds[g] to bounds[g + 1]
    std::vector<size_t> order;   // of the groups: those of most tokens first, so that threads end at nearly one time
    size_t most_tokens = 0;      // of a group
    size_t longest = 0;          // tokens of a text
    bool shared = false;
};

// Tokens of a group, about: wide layers do not fit the second-level cache, and more tokens a group read their weights less often.
inline size_t group_tokens(const Network& network) { return network.hidden < 768 ? 128 : 256; }

Plan make_plan(const Network& network, const int64_t* starts, size_t texts, size_t threads);

}  // namespace bertopt_native
