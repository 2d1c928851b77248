#include "random_model.h"

#include <cstring>
#include <fstream>
#include <stdexcept>

namespace bertopt_native {
namespace {

uint32_t word(Random& random, uint64_t least, uint64_t most) { return static_cast<uint32_t>(draw(random, least, most)); }

Header random_header(Random& random) {
    Header h{};
    std::memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.layout_version = LAYOUT_VERSION;
    h.header_bytes = sizeof(Header);
    h.table_offset = sizeof(Header);
    h.activation = word(random, 0, 3);
    // Widths of real networks: 384 has its own normalisation, groups of texts are longer from 768. Heads and the
    // intermediate size stay small, so that a batch is cheap.
    static constexpr uint32_t WIDE[] = {256, 384, 512, 768, 1024};
    h.hidden = draw(random, 0, 4) ? 32 * word(random, 1, draw(random, 0, 3) ? 2 : 4) : WIDE[draw(random, 0, 4)];
    h.embedding = draw(random, 0, 2) ? h.hidden : 32 * word(random, 1, 4);
    h.heads = word(random, 1, 3);
    h.head_stride = 32 * word(random, 1, 3);
    h.head_size = word(random, 1, h.head_stride);
    h.intermediate = 32 * word(random, 1, 4);
    h.layers = word(random, 1, 3);
    h.stored_layers = word(random, 1, h.layers);
    h.vocabulary = word(random, 1, 50);
    h.token_types = word(random, 0, 3);
    h.positions = word(random, 1, draw(random, 0, 15) ? 70 : 600);
    h.position_offset = word(random, 0, h.positions > 3 ? 3 : h.positions - 1);
    // As pack writes it: positions begin behind the padding id's.
    h.position_rule = h.position_offset ? word(random, 0, 1) : 0;
    h.pad_id = h.position_rule ? h.position_offset - 1 : 0;
    h.relative_bias = draw(random, 0, 3) == 0;
    h.rotary = draw(random, 0, 3) ? 0 : word(random, 1, 2);
    h.norm_first = draw(random, 0, 3) ? 0 : word(random, 1, h.embedding == h.hidden ? 3 : 2);
    h.uncentred = draw(random, 0, 3) == 0;
    h.window = draw(random, 0, 3) ? 0 : word(random, 1, 40);
    h.gated = draw(random, 0, 3) == 0;
    h.distances = h.relative_bias || draw(random, 0, 2) ? 0 : 32 * word(random, 1, draw(random, 0, 3) ? 3 : 32);
    h.vocabulary_head = draw(random, 0, 2) ? 0 : word(random, 1, 2);
    h.head_activation = word(random, 0, 3);
    if (h.vocabulary_head && !draw(random, 0, 3)) h.vocabulary = word(random, 1, 5000);  // more panels than are worked on at once
    h.epsilon = 1e-6f;
    std::memcpy(h.family, "random", 6);
    return h;
}

class Builder {
public:
    explicit Builder(Random& random) : random_(random) {}

    void add(uint32_t tensor, uint32_t layer, Type type, uint64_t rows, uint64_t cols, float middle, float spread) {
        const uint64_t width = type == Type::int8 ? 1 : type == Type::bf16 ? 2 : 4;
        std::vector<uint8_t> data(rows * cols * width);
        std::normal_distribution<float> normal(middle, spread);
        for (uint64_t i = 0; i < rows * cols; i++) {
            const float value = normal(random_);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            if (type == Type::int8) data[i] = static_cast<uint8_t>(random_());
            else if (type == Type::bf16) std::memcpy(&data[2 * i], reinterpret_cast<uint8_t*>(&bits) + 2, 2);
            else std::memcpy(&data[4 * i], &bits, 4);
        }
        put(tensor, layer, type, rows, cols, std::move(data));
    }

    void put(uint32_t tensor, uint32_t layer, Type type, uint64_t rows, uint64_t cols, std::vector<uint8_t> data) {
        entries.push_back({tensor, layer, static_cast<uint32_t>(type), static_cast<uint32_t>(rows), static_cast<uint32_t>(cols), 0, 0, data.size()});
        contents.push_back(std::move(data));
    }

    void linear(Tensor tensor, uint32_t layer, uint64_t n, uint64_t k, bool int8) {
        const auto id = static_cast<uint32_t>(tensor);
        const float spread = 1.0f / static_cast<float>(k);
        add(id, layer, int8 ? Type::int8 : Type::bf16, n, k, 0, spread * 8);
        if (int8) {
            add(id + 1, layer, Type::f32, 1, n, spread * 0.05f, spread * 0.01f);
            add(id + 2, layer, Type::f32, 1, n, 0, 100);
        }
        add(id + 3, layer, Type::f32, 1, n, 0, 0.1f);
    }

    // A row for every distance: that of the distance before or the next.
    void places(uint64_t longest, uint32_t rows) {
        std::vector<uint8_t> data(4 * (2 * longest - 1));
        const uint64_t slow = draw(random_, 0, 2);
        uint32_t at = word(random_, 0, slow ? rows - 1 : rows / 2);
        for (uint64_t i = 0; i < 2 * longest - 1; i++) {
            if (i && at + 1 < rows && !draw(random_, 0, slow)) at++;
            std::memcpy(&data[4 * i], &at, 4);
        }
        put(static_cast<uint32_t>(Tensor::places), 0, Type::u32, 1, 2 * longest - 1, std::move(data));
    }

    std::vector<Entry> entries;
    std::vector<std::vector<uint8_t>> contents;

private:
    Random& random_;
};

uint64_t aligned(uint64_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

}  // namespace

RandomModel random_model(Random& random) {
    RandomModel model;
    Header& h = model.header = random_header(random);
    Builder b(random);
    auto id = [](Tensor t) { return static_cast<uint32_t>(t); };
    b.add(id(Tensor::word), 0, Type::f32, h.vocabulary, h.embedding, 0, 1);
    for (uint32_t i = 0; i < h.rotary; i++) b.add(id(Tensor::rotary), i, Type::f32, h.positions, h.head_stride, 0, 1);
    if (h.distances ? draw(random, 0, 1) : !h.rotary) b.add(id(Tensor::position), 0, Type::f32, h.positions, h.embedding, 0, 1);
    if (h.token_types) b.add(id(Tensor::token_type), 0, Type::f32, h.token_types, h.embedding, 0, 1);
    b.add(id(Tensor::embedding_gain), 0, Type::f32, 1, h.embedding, 1, 0.1f);
    b.add(id(Tensor::embedding_shift), 0, Type::f32, 1, h.embedding, 0, 0.1f);
    if (h.norm_first == 3) {
        b.add(id(Tensor::first_gain), 0, Type::f32, 1, h.embedding, 1, 0.1f);
        b.add(id(Tensor::first_shift), 0, Type::f32, 1, h.embedding, 0, 0.1f);
    }
    const uint64_t longest = h.positions - h.position_offset;
    if (h.relative_bias) b.add(id(Tensor::relative_bias), 0, Type::f32, h.heads, (2 * longest + 31) / 16 * 16 + 16, 0, 1);
    if (h.distances) b.places(longest, h.distances);
    std::vector<uint8_t> map(4 * h.layers);
    for (uint32_t i = 0; i < h.layers; i++) {
        const uint32_t stored = word(random, 0, h.stored_layers - 1);
        std::memcpy(&map[4 * i], &stored, 4);
    }
    b.put(id(Tensor::layer_map), 0, Type::u32, 1, h.layers, map);
    if (h.window) {
        for (uint32_t i = 0; i < h.layers; i++) {
            const uint32_t windowed = word(random, 0, 1);
            std::memcpy(&map[4 * i], &windowed, 4);
        }
        b.put(id(Tensor::layer_window), 0, Type::u32, 1, h.layers, map);
    }
    if (h.embedding != h.hidden || (h.norm_first < 3 && draw(random, 0, 5) == 0)) b.linear(Tensor::projection, 0, h.hidden, h.embedding, false);
    const uint64_t context = uint64_t{h.heads} * h.head_stride;
    const uint64_t kind = draw(random, 0, 2);  // all int8, all bf16, mixed
    auto int8 = [&] { return kind == 0 || (kind == 2 && draw(random, 0, 1)); };
    for (uint32_t i = 0; i < h.stored_layers; i++) {
        b.linear(Tensor::qkv, i, 3 * context, h.hidden, int8());
        b.linear(Tensor::attention_out, i, h.hidden, context, int8());
        b.linear(Tensor::ffn_in, i, h.intermediate * (h.gated ? 2 : 1), h.hidden, int8());
        b.linear(Tensor::ffn_out, i, h.hidden, h.intermediate, int8());
        for (const Tensor t : {Tensor::distance_keys, Tensor::distance_queries})
            if (h.distances) b.add(id(t), i, Type::f32, uint64_t{h.heads} * h.distances, h.head_stride, 0, 0.3f);
        for (const Tensor t : {Tensor::attention_gain, Tensor::ffn_gain}) b.add(id(t), i, Type::f32, 1, h.hidden, 1, 0.1f);
        // A few channels far beyond the others, more of them than a quantised row excepts too.
        for (const Tensor t : {Tensor::attention_shift, Tensor::ffn_shift}) {
            b.add(id(t), i, Type::f32, 1, h.hidden, 0, 0.1f);
            for (uint64_t n = draw(random, 0, 2) ? 0 : draw(random, 1, 6); n--;) {
                const float far = draw(random, 0, 1) ? 100.0f : -70.0f;
                std::memcpy(&b.contents.back()[4 * draw(random, 0, h.hidden - 1)], &far, 4);
            }
        }
    }
    if (h.vocabulary_head == 2) {
        b.linear(Tensor::head_dense, 0, h.embedding, h.hidden, int8());
        b.add(id(Tensor::head_gain), 0, Type::f32, 1, h.embedding, 1, 0.1f);
        b.add(id(Tensor::head_shift), 0, Type::f32, 1, h.embedding, 0, 0.1f);
    }
    const uint64_t columns = (uint64_t{h.vocabulary} + PANEL - 1) / PANEL * PANEL;
    if (h.vocabulary_head) b.linear(Tensor::decoder, 0, columns, h.vocabulary_head == 2 ? h.embedding : h.hidden, int8());
    uint64_t at = aligned(sizeof(Header) + b.entries.size() * sizeof(Entry));
    for (Entry& e : b.entries) {
        e.offset = at;
        at = aligned(at + e.bytes);
    }
    h.table_entries = static_cast<uint32_t>(b.entries.size());
    h.file_bytes = at;
    model.table = b.entries;
    model.bytes.resize(at);
    std::memcpy(model.bytes.data(), &h, sizeof h);
    std::memcpy(model.bytes.data() + sizeof h, b.entries.data(), b.entries.size() * sizeof(Entry));
    for (size_t i = 0; i < b.entries.size(); i++)
        std::memcpy(model.bytes.data() + b.entries[i].offset, b.contents[i].data(), b.contents[i].size());
    return model;
}

std::vector<uint8_t> damage(const RandomModel& model, Random& random) {
    std::vector<uint8_t> bytes = model.bytes;
    const uint64_t described = sizeof(Header) + model.table.size() * sizeof(Entry);
    if (draw(random, 0, 5) == 0) bytes.resize(draw(random, 0, bytes.size()));
    for (uint64_t n = draw(random, 1, 3); n--;) {
        const uint64_t at = draw(random, 0, (draw(random, 0, 1) ? uint64_t{152} : described) - 1);
        if (at >= bytes.size()) continue;
        if (draw(random, 0, 1)) bytes[at] = static_cast<uint8_t>(random());
        else bytes[at] = static_cast<uint8_t>(bytes[at] + (draw(random, 0, 1) ? 1 : -1));
    }
    return bytes;
}

void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace bertopt_native
