// Random models, random ragged batches, wrong ids, damaged files, for a bounded time: fuzz [seconds] [seed] [batches]
// Checks that a text's numbers do not depend on the other texts, their order or the threads, that wrong input is refused, and,
// built with sanitisers, that nothing reads or writes where it must not. Ends with 0, or aborts.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>

#include "cpu.h"
#include "encoder.h"
#include "errors.h"
#include "random_model.h"

namespace bertopt_native {
namespace {

struct Count {
    uint64_t models = 0, damaged = 0, opened = 0, batches = 0, texts = 0, tokens = 0, refused = 0;
};

[[noreturn]] void fail(const char* what, uint64_t seed) {
    std::fprintf(stderr, "fuzz: %s (model's seed %llu)\n", what, static_cast<unsigned long long>(seed));
    std::abort();
}

// Ids, starts and the rest in vectors of exactly their size.
struct Texts {
    std::vector<int32_t> ids, types, positions;
    std::vector<int64_t> starts{0};

    Request request(Output output, bool normalize) const {
        return {ids.data(), types.empty() ? nullptr : types.data(), positions.empty() ? nullptr : positions.data(), starts.data(),
                ids.size(), starts.size() - 1, output, normalize};
    }
};

size_t random_length(Random& random, size_t longest) {
    switch (draw(random, 0, 9)) {
        case 0: return 0;
        case 1: return 1;
        case 2: return draw(random, 0, 3) ? draw(random, 0, longest) : longest;
        default: return draw(random, 0, std::min<size_t>(longest, 16));
    }
}

Texts random_texts(Random& random, const Network& net) {
    Texts t;
    const uint64_t kind = draw(random, 0, 499);
    const size_t count = kind == 0 ? 2000 : kind < 5 ? draw(random, 0, 60) : draw(random, 0, 5);
    const bool types = draw(random, 0, 1), positions = draw(random, 0, 3) == 0;
    for (size_t i = 0; i < count; i++) {
        const size_t n = kind == 0 ? draw(random, 0, 1) : random_length(random, net.longest);
        for (size_t j = 0; j < n; j++) {
            t.ids.push_back(static_cast<int32_t>(draw(random, 0, net.vocabulary - 1)));
            if (types) t.types.push_back(static_cast<int32_t>(draw(random, 0, std::max<size_t>(1, net.token_types) - 1)));
            if (positions) t.positions.push_back(static_cast<int32_t>(draw(random, 0, net.positions - 1)));
        }
        t.starts.push_back(static_cast<int64_t>(t.ids.size()));
    }
    return t;
}

Texts one_of(const Texts& all, size_t i) {
    Texts t;
    const auto a = all.starts[i], b = all.starts[i + 1];
    t.ids.assign(all.ids.begin() + a, all.ids.begin() + b);
    if (!all.types.empty()) t.types.assign(all.types.begin() + a, all.types.begin() + b);
    if (!all.positions.empty()) t.positions.assign(all.positions.begin() + a, all.positions.begin() + b);
    t.starts.push_back(b - a);
    return t;
}

std::vector<float> run(Encoder& encoder, const Request& r) {
    std::vector<float> out((by_token(r.output) ? r.tokens : r.texts) * encoder.width(r.output));
    encoder.run(r, out.data(), nullptr);
    return out;
}

// One wrong number somewhere; it must be refused.
void wrong_input(Encoder& encoder, Texts t, Random& random, uint64_t seed) {
    const Network& net = encoder.model().network();
    static constexpr int64_t EXTREMES[] = {-1, INT32_MIN, INT32_MAX};
    if (t.ids.empty()) return;
    auto bad = [&](size_t limit) { return static_cast<int32_t>(draw(random, 0, 1) ? EXTREMES[draw(random, 0, 2)] : static_cast<int64_t>(limit)); };
    const size_t at = draw(random, 0, t.ids.size() - 1);
    switch (draw(random, 0, 4)) {
        case 0: t.ids[at] = bad(net.vocabulary); break;
        case 1:
            t.types.assign(t.ids.size(), 0);
            t.types[at] = bad(std::max<size_t>(1, net.token_types));
            break;
        case 2:
            t.positions.assign(t.ids.size(), 0);
            t.positions[at] = bad(net.positions);
            break;
        case 3: {
            const size_t i = draw(random, 0, t.starts.size() - 1);
            static constexpr int64_t STARTS[] = {INT64_MIN, INT64_MAX, -1, int64_t{1} << 40};
            t.starts[i] = STARTS[draw(random, 0, 3)];
            break;
        }
        case 4: t.starts.back() += draw(random, 0, 1) ? 1 : -1; break;
    }
    try {
        run(encoder, t.request(Output::mean, false));
    } catch (const BadInput&) {
        return;
    }
    fail("wrong input was not refused", seed);
}

void batches(const RandomModel& model, const std::string& path, Random& random, uint64_t seed, uint64_t count, Count& total) {
    std::vector<std::unique_ptr<Encoder>> encoders;
    const auto kernels = supported_kernels();
    const Kernel* kernel = kernels[draw(random, 0, kernels.size() - 1)];
    for (const size_t threads : {1, 2, 5}) encoders.push_back(std::make_unique<Encoder>(path, threads, kernel->name, true));
    const Network& net = encoders[0]->model().network();
    for (uint64_t n = 0; n < count; n++) {
        const Texts t = random_texts(random, net);
        const auto output = static_cast<Output>(draw(random, 0, net.head ? 6 : 3));
        const size_t width = encoders[0]->width(output);
        const bool normalize = !by_token(output) && draw(random, 0, 1);
        const std::vector<float> got = run(*encoders[draw(random, 0, 2)], t.request(output, normalize));
        total.batches++;
        total.texts += t.starts.size() - 1;
        total.tokens += t.ids.size();
        if (t.starts.size() > 1) {
            const size_t i = draw(random, 0, t.starts.size() - 2);
            const Texts one = one_of(t, i);
            const std::vector<float> alone = run(*encoders[draw(random, 0, 2)], one.request(output, normalize));
            const size_t row = by_token(output) ? static_cast<size_t>(t.starts[i]) : i;
            if (!alone.empty() && std::memcmp(alone.data(), got.data() + row * width, alone.size() * sizeof(float)) != 0)
                fail("a text differs alone and among others", seed);
        }
        if (draw(random, 0, 9) == 0) {
            wrong_input(*encoders[draw(random, 0, 2)], t, random, seed);
            total.refused++;
        }
    }
}

void damaged_files(const RandomModel& model, const std::string& path, Random& random, Count& total) {
    for (int i = 0; i < 8; i++) {
        write_file(path, damage(model, random));
        total.damaged++;
        try {
            Encoder encoder(path, 2, "", true);
            const Network& net = encoder.model().network();
            if (net.longest > 5000) continue;
            total.opened++;
            for (int n = 0; n < 3; n++) run(encoder, random_texts(random, net).request(net.head ? Output::splade : Output::tokens, false));
        } catch (const BadFile&) {
        } catch (const BadInput&) {  // a position table shorter than the rule for padding expects
        }
    }
}

int main_loop(double seconds, uint64_t seed, uint64_t most) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    char folder[] = "/tmp/bertopt-native-fuzz-XXXXXX";
    if (!mkdtemp(folder)) fail("cannot make a folder", 0);
    const std::string path = std::string(folder) + "/model";
    Count total;
    while (passed() < seconds && total.batches < most) {
        Random random(seed);
        const RandomModel model = random_model(random);
        write_file(path, model.bytes);
        batches(model, path, random, seed, 400, total);
        damaged_files(model, path, random, total);
        total.models++;
        seed++;
    }
    std::filesystem::remove_all(folder);
    auto u = [](uint64_t n) { return static_cast<unsigned long long>(n); };
    std::printf("fuzz: %llu models, %llu batches, %llu texts, %llu tokens, %llu wrong inputs refused, %llu damaged files of which %llu ran, "
                "%.0f s, next seed %llu, 0 findings\n",
                u(total.models), u(total.batches), u(total.texts), u(total.tokens), u(total.refused), u(total.damaged), u(total.opened),
                passed(), u(seed));
    return 0;
}

}  // namespace
}  // namespace bertopt_native

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const uint64_t most = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : UINT64_MAX;
    return bertopt_native::main_loop(seconds, seed, most);
}
