#include "model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "errors.h"

namespace bertopt_native {
namespace {

constexpr uint64_t MOST = uint64_t{1} << 24;  // of any dimension but the vocabulary: products of two stay far below 2^63
constexpr char REMEDY[] = ": pack the checkpoint again with bertopt_native.pack";

[[noreturn]] void bad(const std::string& text) { throw BadFile(text + REMEDY); }

std::string number(uint64_t n) { return std::to_string(n); }

void within(const char* name, uint64_t value, uint64_t least, uint64_t most) {
    if (value < least || value > most)
        bad("the file's " + std::string(name) + " must be from " + number(least) + " to " + number(most) + "; got " + number(value));
}

void multiple_of_32(const char* name, uint64_t value) {
    within(name, value, 32, MOST);
    if (value % 32) bad("the file's " + std::string(name) + " must be a multiple of 32; got " + number(value));
}

}  // namespace

Model::Mapping::~Mapping() {
    if (bytes) munmap(bytes, size);
}

Model::Model(const std::string& path, bool huge_pages) {
    read(path);
    check_header();
    read_table();
    connect(huge_pages);
}

void Model::read(const std::string& path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw BadFile("cannot open " + path + ": " + std::strerror(errno));
    struct stat status {};
    const bool known = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    size_ = known ? static_cast<uint64_t>(status.st_size) : 0;
    void* mapped = MAP_FAILED;
    if (size_ >= sizeof(Header)) mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    const int reason = errno;
    close(file);
    if (!known) throw BadFile("expected a regular file: " + path);
    if (size_ < sizeof(Header)) bad("expected at least " + number(sizeof(Header)) + " bytes; " + path + " has " + number(size_));
    if (mapped == MAP_FAILED && reason == ENOMEM) throw std::bad_alloc();  // the file is none the worse
    if (mapped == MAP_FAILED) throw BadFile("cannot map " + path + ": " + std::strerror(reason));
    file_.bytes = mapped;
    file_.size = size_;
    data_ = static_cast<const uint8_t*>(mapped);
    std::memcpy(&header_, data_, sizeof header_);
}

void Model::check_header() {
    const Header& h = header_;
    if (std::memcmp(h.magic, MAGIC, sizeof MAGIC) != 0) bad("not a file of packed weights: its first bytes are others");
    if (h.layout_version < 1 || h.layout_version > LAYOUT_VERSION)
        bad("layout version must be from 1 to " + number(LAYOUT_VERSION) + "; the file has " + number(h.layout_version));
    if (h.header_bytes != sizeof(Header)) bad("header must have " + number(sizeof(Header)) + " bytes; got " + number(h.header_bytes));
    if (h.file_bytes != size_) bad("the file must have " + number(h.file_bytes) + " bytes; it has " + number(size_) + " (cut short?)");
    within("activation", h.activation, 0, 3);
    multiple_of_32("hidden size", h.hidden);
    multiple_of_32("embedding size", h.embedding);
    multiple_of_32("head stride", h.head_stride);
    multiple_of_32("intermediate size", h.intermediate);
    // The int32 sums of an int8 product hold 255 * 127 * 65536 at most.
    within("hidden size", h.hidden, 32, 65536);
    within("intermediate size", h.intermediate, 32, 65536);
    within("embedding size", h.embedding, 32, 65536);
    within("head stride", h.head_stride, 32, 1024);
    within("head size", h.head_size, 1, h.head_stride);
    within("number of heads", h.heads, 1, 65536 / h.head_stride);
    within("number of layers", h.layers, 1, 4096);
    within("number of stored layers", h.stored_layers, 1, h.layers);
    within("vocabulary", h.vocabulary, 1, uint64_t{1} << 31);
    within("number of token types", h.token_types, 0, MOST);
    within("number of positions", h.positions, 1, MOST);
    within("first position", h.position_offset, 0, h.positions - 1);
    within("position rule", h.position_rule, 0, 1);
    // A padding id's position is its own number, which must lie in the table.
    if (h.position_rule && h.position_offset != uint64_t{h.pad_id} + 1)
        bad("the file's first position must be " + number(uint64_t{h.pad_id} + 1) + ", behind the padding id; got " + number(h.position_offset));
    within("relative bias", h.relative_bias, 0, 1);
    within("number of rotary tables", h.rotary, 0, 2);
    within("gates", h.gated, 0, 1);
    within("norms first", h.norm_first, 0, 3);
    within("norms without mean", h.uncentred, 0, 1);
    within("window", h.window, 0, MOST);
    within("number of the head's products", h.vocabulary_head, 0, 2);
    within("activation of the head", h.head_activation, 0, 3);
    within("dropped token", h.dropped, 0, h.vocabulary);
    if (h.distances) multiple_of_32("number of rows by distance", h.distances);
    within("number of rows by distance", h.distances, 0, h.relative_bias ? 0 : 1 << 20);
    for (const char c : h.family)
        if (c && (c < 32 || c > 126)) bad("the file's family must be a word of ASCII letters");
    if (!(h.epsilon > 0 && h.epsilon < 1)) bad("the file's layer normalisation epsilon must be between 0 and 1");
}

void Model::read_table() {
    const uint64_t entries = header_.table_entries, from = header_.table_offset;
    within("number of tensors", entries, 1, 1 << 20);
    if (from % ALIGNMENT || from < sizeof(Header) || from > size_ || entries * sizeof(Entry) > size_ - from)
        bad("the file's table of " + number(entries) + " tensors at " + number(from) + " does not lie in its " + number(size_) + " bytes");
    table_.resize(entries);
    std::memcpy(table_.data(), data_ + from, entries * sizeof(Entry));
}

const Entry& Model::find(Tensor tensor, uint32_t part, uint32_t layer) const {
    const uint32_t id = static_cast<uint32_t>(tensor) + part;
    for (const Entry& e : table_)
        if (e.tensor == id && e.layer == layer) return e;
    bad("the file lacks tensor " + number(id) + " of layer " + number(layer));
}

bool Model::has(Tensor tensor) const {
    return std::any_of(table_.begin(), table_.end(), [&](const Entry& e) { return e.tensor == static_cast<uint32_t>(tensor); });
}

const uint8_t* Model::bytes(const Entry& e, Type type, uint64_t rows, uint64_t cols) const {
    const std::string name = "tensor " + number(e.tensor) + " of layer " + number(e.layer);
    const uint64_t width = type == Type::int8 ? 1 : type == Type::bf16 ? 2 : 4, expected = rows * cols * width;
    if (e.type != static_cast<uint32_t>(type) || e.rows != rows || e.cols != cols || e.bytes != expected)
        bad(name + " must be [" + number(rows) + ", " + number(cols) + "] in " + number(expected) + " bytes of type " +
            number(static_cast<uint32_t>(type)) + "; got [" + number(e.rows) + ", " + number(e.cols) + "] in " + number(e.bytes) +
            " bytes of type " + number(e.type));
    if (e.offset % ALIGNMENT || e.offset > size_ || e.bytes > size_ - e.offset)
        bad(name + " at " + number(e.offset) + " does not lie in the file's " + number(size_) + " bytes");
#ifdef BN_EXACT  // so that a sanitiser sees a read behind a tensor's end
    void* copy = std::malloc(e.bytes);
    copies_.emplace_back(static_cast<uint8_t*>(copy), std::free);
    std::memcpy(copy, data_ + e.offset, e.bytes);
    return static_cast<const uint8_t*>(copy);
#else
    return data_ + e.offset;
#endif
}

const float* Model::floats(Tensor tensor, uint32_t layer, uint64_t rows, uint64_t cols) const {
    return reinterpret_cast<const float*>(bytes(find(tensor, 0, layer), Type::f32, rows, cols));
}

Linear Model::linear(Tensor tensor, uint32_t layer, uint64_t n, uint64_t k) const {
    const Entry& weight = find(tensor, static_cast<uint32_t>(Part::weight), layer);
    Linear l{};
    l.n = n;
    l.k = k;
    l.int8 = weight.type == static_cast<uint32_t>(Type::int8);
    l.weight = bytes(weight, l.int8 ? Type::int8 : Type::bf16, n, k);
    auto row = [&](Part part) {
        return reinterpret_cast<const float*>(bytes(find(tensor, static_cast<uint32_t>(part), layer), Type::f32, 1, n));
    };
    l.bias = row(Part::bias);
    if (l.int8) {
        l.scale = row(Part::scale);
        l.sum = row(Part::sum);
    }
    return l;
}

void Model::connect(bool huge_pages) {
    const Header& h = header_;
    Network& n = network_;
    n.hidden = h.hidden;
    n.embedding = h.embedding;
    n.heads = h.heads;
    n.head_stride = h.head_stride;
    n.intermediate = h.intermediate;
    n.layers = h.layers;
    n.vocabulary = h.vocabulary;
    n.token_types = h.token_types;
    n.dropped = h.dropped;
    n.positions = h.positions;
    n.position_offset = h.position_offset;
    n.longest = n.positions - n.position_offset;
    n.activation = static_cast<Activation>(h.activation);
    n.epsilon = h.epsilon;
    n.word = floats(Tensor::word, 0, h.vocabulary, h.embedding);
    const bool positions = h.distances ? has(Tensor::position) : !h.rotary;
    n.position = positions ? floats(Tensor::position, 0, h.positions, h.embedding) : nullptr;
    const float* rotary[2] = {};
    for (uint32_t i = 0; i < h.rotary; i++) rotary[i] = floats(Tensor::rotary, i, h.positions, h.head_stride);
    n.gated = h.gated;
    n.norm_first = h.norm_first;
    n.raw_embeddings = h.norm_first == 2;
    if (h.norm_first == 3) {
        n.first_gain = floats(Tensor::first_gain, 0, 1, h.embedding);
        n.first_shift = floats(Tensor::first_shift, 0, 1, h.embedding);
    }
    n.uncentred = h.uncentred;
    n.token_type = h.token_types ? floats(Tensor::token_type, 0, h.token_types, h.embedding) : nullptr;
    n.embedding_gain = floats(Tensor::embedding_gain, 0, 1, h.embedding);
    n.embedding_shift = floats(Tensor::embedding_shift, 0, 1, h.embedding);
    // Rows of 2 * longest - 1 distances, and what the last keys' vectors read behind them.
    n.bias_stride = (2 * n.longest + 31) / 16 * 16 + 16;
    n.relative_bias = h.relative_bias ? floats(Tensor::relative_bias, 0, h.heads, n.bias_stride) : nullptr;

    if (h.distances) read_places();

    const bool has_projection = has(Tensor::projection);
    if (has_projection) {
        projection_ = linear(Tensor::projection, 0, h.hidden, h.embedding);
        if (projection_.int8) bad("the projection of the embeddings must be bf16");
        if (n.first_gain) bad("a network with a norm between embeddings and first layer must have no projection of its embeddings");
        n.projection = &projection_;
    } else if (h.embedding != h.hidden) {
        bad("the file lacks the projection from embedding size " + number(h.embedding) + " to hidden size " + number(h.hidden));
    }

    if (h.vocabulary_head) read_head();

    std::vector<Layer> stored;
    const uint64_t context = uint64_t{h.heads} * h.head_stride;
    for (uint32_t i = 0; i < h.stored_layers; i++) {
        Layer y{};
        y.qkv = linear(Tensor::qkv, i, 3 * context, h.hidden);
        y.attention_out = linear(Tensor::attention_out, i, h.hidden, context);
        y.ffn_in = linear(Tensor::ffn_in, i, uint64_t{h.intermediate} * (h.gated ? 2 : 1), h.hidden);
        y.ffn_out = linear(Tensor::ffn_out, i, h.hidden, h.intermediate);
        y.attention_gain = floats(Tensor::attention_gain, i, 1, h.hidden);
        y.attention_shift = floats(Tensor::attention_shift, i, 1, h.hidden);
        y.ffn_gain = floats(Tensor::ffn_gain, i, 1, h.hidden);
        y.ffn_shift = floats(Tensor::ffn_shift, i, 1, h.hidden);
        if (h.distances) {
            y.distance_keys = floats(Tensor::distance_keys, i, uint64_t{h.heads} * h.distances, h.head_stride);
            y.distance_queries = floats(Tensor::distance_queries, i, uint64_t{h.heads} * h.distances, h.head_stride);
        }
        stored.push_back(y);
    }
    if (huge_pages) copy_weights(stored);
    const auto* map = reinterpret_cast<const uint32_t*>(bytes(find(Tensor::layer_map, 0, 0), Type::u32, 1, h.layers));
    const uint32_t* windows = h.window ? reinterpret_cast<const uint32_t*>(bytes(find(Tensor::layer_window, 0, 0), Type::u32, 1, h.layers)) : nullptr;
    for (uint32_t i = 0; i < h.layers; i++) {
        if (map[i] >= h.stored_layers) bad("layer " + number(i) + " refers to stored layer " + number(map[i]) + " of " + number(h.stored_layers));
        Layer y = stored[map[i]];
        const bool windowed = windows && windows[i];
        y.window = windowed ? h.window : n.longest;
        y.rotary = rotary[windowed && h.rotary == 2];
        layers_.push_back(y);
        for (const Linear* l : {&y.qkv, &y.attention_out, &y.ffn_in, &y.ffn_out}) int8_products_ += l->int8;
    }
    n.layer = layers_.data();
    products_ = 4 * layers_.size() + has_projection + h.vocabulary_head;
    int8_products_ += head_dense_.int8 + decoder_.int8;
}

void Model::read_head() {
    const Header& h = header_;
    uint64_t width = h.hidden;
    if (h.vocabulary_head == 2) {
        width = h.embedding;
        head_dense_ = linear(Tensor::head_dense, 0, width, h.hidden);
        head_.dense = &head_dense_;
        head_.gain = floats(Tensor::head_gain, 0, 1, width);
        head_.shift = floats(Tensor::head_shift, 0, 1, width);
    }
    head_.activation = static_cast<Activation>(h.head_activation);
    decoder_ = linear(Tensor::decoder, 0, (uint64_t{h.vocabulary} + PANEL - 1) / PANEL * PANEL, width);
    head_.decoder = &decoder_;
    network_.head = &head_;
}

void Model::read_places() {
    const auto longest = static_cast<int64_t>(network_.longest), count = 2 * longest - 1;
    const auto* row = reinterpret_cast<const uint32_t*>(bytes(find(Tensor::places, 0, 0), Type::u32, 1, static_cast<uint64_t>(count)));
    // Vectors of keys read behind the last distance.
    for (int64_t i = 0; i < count + PANEL; i++) {
        const uint32_t at = row[std::min(i, count - 1)], before = i ? static_cast<uint32_t>(places_.back()) : at;
        if (at >= header_.distances || at < before || at > before + 1)
            bad("row " + number(at) + " by distance must be the one before, " + number(before) + ", or the next, of " + number(header_.distances));
        places_.push_back(static_cast<int32_t>(at));
        diagonals_.push_back(static_cast<int32_t>(int64_t{at} * PANEL + i - (longest - 1)));
    }
    network_.distances = header_.distances;
    network_.place = places_.data() + (longest - 1);
    network_.diagonal = diagonals_.data() + (longest - 1);
}

void Model::copy_weights(std::vector<Layer>& layers) {
#ifdef BN_EXACT
    (void)layers;
#else
    constexpr size_t HUGE_PAGE = size_t{2} << 20;
    std::vector<Linear*> products;
    for (Linear* l : {&projection_, &head_dense_, &decoder_})
        if (l->weight) products.push_back(l);
    for (Layer& y : layers) products.insert(products.end(), {&y.qkv, &y.attention_out, &y.ffn_in, &y.ffn_out});
    auto bytes_of = [](const Linear& l) { return l.n * l.k * (l.int8 ? 1 : 2); };
    size_t total = HUGE_PAGE;
    for (const Linear* l : products) total += bytes_of(*l);
    if (total < 2 * HUGE_PAGE) return;
    void* p = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;  // the file's pages do as well, slower
    weights_.bytes = p;
    weights_.size = total;
    madvise(p, total, MADV_HUGEPAGE);
    auto* to = reinterpret_cast<uint8_t*>((reinterpret_cast<size_t>(p) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    for (Linear* l : products) {
        const size_t n = bytes_of(*l);  // a multiple of 64: n and k are of 32
        std::memcpy(to, l->weight, n);
        l->weight = to;
        to += n;
    }
#endif
}

}  // namespace bertopt_native
