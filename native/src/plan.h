// How a batch is divided: into groups that each run on one thread, or shared by all threads.
#pragma once
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

Plan make_plan(const Network& network, const int64_t* starts, size_t texts, size_t threads);

}  // namespace bertopt_native
