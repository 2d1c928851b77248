// The buffers of one thread, big enough for a group of so many tokens and a text of so many.
#pragma once
#include <memory>
#include <vector>

#include "kernel.h"

namespace bertopt_native {

class Workspace {
public:
    Workspace(const Network& network, const Kernel& kernel, size_t tokens, size_t longest);
    bool fits(size_t tokens, size_t longest) const { return tokens <= tokens_ && longest <= longest_; }

    Work work{};
    Scratch scratch{};

private:
    struct Release {
        size_t mapped;
        void operator()(uint8_t* p) const;
    };
    uint8_t* allocate(size_t bytes);

    size_t tokens_, longest_;
    std::vector<std::unique_ptr<uint8_t, Release>> blocks_;
};

}  // namespace bertopt_native
