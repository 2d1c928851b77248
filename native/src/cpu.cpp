#include "cpu.h"

#include <cstdlib>

#include "errors.h"

namespace bertopt_native {
namespace {

std::string names(const std::vector<const Kernel*>& kernels) {
    std::string text;
    for (const Kernel* k : kernels) text += (text.empty() ? "" : ", ") + std::string(k->name);
    return text.empty() ? "none" : text;
}

}  // namespace

const Kernel& choose_kernel(const std::string& name) {
    const auto kernels = supported_kernels();
    if (kernels.empty())
        throw Unsupported(std::string("expected ") + NEEDED + "; this one has none of the instruction sets of bertopt-native: "
                          "use another runtime on this machine");
    std::string wanted = name;
    if (wanted.empty())
        if (const char* mask = std::getenv("BERTOPT_NATIVE_ISA")) wanted = mask;
    if (wanted.empty()) return *kernels.front();
    for (const Kernel* k : kernels)
        if (wanted == k->name) return *k;
    throw Unsupported("instruction set must be one of: " + names(kernels) + " (what this CPU has); got '" + wanted +
                      "': pass another isa, or unset BERTOPT_NATIVE_ISA");
}

}  // namespace bertopt_native
