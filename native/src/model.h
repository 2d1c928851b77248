// A packed file, mapped into memory and checked: no size or offset in it is believed before it is compared with the file.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "network.h"

namespace bertopt_native {

class Model {
public:
    // With `huge_pages` the products' weights are copied to such: 4 KiB pages cost a few per cent in large batches and more in
    // single texts. Throws BadFile.
    Model(const std::string& path, bool huge_pages);
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    const Network& network() const { return network_; }
    const Header& header() const { return header_; }
    size_t int8_products() const { return int8_products_; }  // of a text's products with weights
    size_t products() const { return products_; }

private:
    struct Mapping {
        void* bytes = nullptr;
        size_t size = 0;
        ~Mapping();
    };

    void read(const std::string& path);
    void check_header();
    void read_table();
    const Entry& find(Tensor tensor, uint32_t part, uint32_t layer) const;
    bool has(Tensor tensor) const;
    const uint8_t* bytes(const Entry& entry, Type type, uint64_t rows, uint64_t cols) const;
    const float* floats(Tensor tensor, uint32_t layer, uint64_t rows, uint64_t cols) const;
    Linear linear(Tensor tensor, uint32_t layer, uint64_t n, uint64_t k) const;
    void connect(bool huge_pages);
    void read_places();
    void read_head();
    void copy_weights(std::vector<Layer>& layers);

    Mapping file_, weights_;
    const uint8_t* data_ = nullptr;
    uint64_t size_ = 0;
    Header header_{};
    Network network_{};
    std::vector<Entry> table_;
    Linear projection_{}, head_dense_{}, decoder_{};
    VocabularyHead head_{};
    std::vector<Layer> layers_;
    std::vector<int32_t> places_, diagonals_;
    size_t int8_products_ = 0, products_ = 0;
    mutable std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> copies_;  // BN_EXACT only
};

}  // namespace bertopt_native
