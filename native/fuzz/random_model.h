// Random models: a file of packed weights with random sizes, written by the same table of tensors that the library reads.
#pragma once
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "format.h"

namespace bertopt_native {

using Random = std::mt19937_64;

// From `least` to `most`, both included.
inline uint64_t draw(Random& random, uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(random);
}

struct RandomModel {
    Header header{};
    std::vector<Entry> table;
    std::vector<uint8_t> bytes;  // the whole file
};

RandomModel random_model(Random& random);

// Changes some bytes of header and table, or the length.
std::vector<uint8_t> damage(const RandomModel& model, Random& random);

void write_file(const std::string& path, const std::vector<uint8_t>& bytes);

}  // namespace bertopt_native
