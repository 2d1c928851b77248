// An opened model: checks a batch, divides it among threads, runs it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "model.h"

namespace bertopt_native {

class Workspace;

struct Request {
    const int32_t* ids = nullptr;
    const int32_t* token_types = nullptr;  // or null
    const int32_t* positions = nullptr;    // or null
    const int64_t* starts = nullptr;
    size_t tokens = 0, texts = 0;
    Output output = Output::tokens;
    bool normalize = false;
};

// Rows for each token, otherwise for each text.
constexpr bool by_token(Output output) { return output == Output::tokens || output == Output::logits; }
constexpr bool over_vocabulary(Output output) { return output >= Output::logits; }

class Encoder {
public:
    Encoder(const std::string& path, size_t threads, const std::string& isa, bool huge_pages);
    ~Encoder();

    // Throws BadInput, and Interrupted when `interrupted` (may be null; called now and then on this thread) says so.
    // `out` has room for tokens or texts rows of `width` floats. Any number of threads may call at once.
    void run(const Request& request, float* out, bool (*interrupted)());
    void check(const Request& request) const;
    size_t width(Output output) const;

    const Model& model() const { return model_; }
    const Kernel& kernel() const { return kernel_; }
    size_t threads() const { return threads_; }

private:
    friend class Groups;
    friend class Shared;
    std::unique_ptr<Workspace> borrow(size_t tokens, size_t longest);
    void give_back(std::unique_ptr<Workspace> workspace);

    Model model_;
    const Kernel& kernel_;
    size_t threads_;
    std::vector<std::unique_ptr<Workspace>> idle_;  // guarded by process_lock
};

}  // namespace bertopt_native
