// Which instruction sets this CPU runs, best first, and which one to use.
#pragma once
#include <string>
#include <vector>

#include "kernel.h"

namespace bertopt_native {

// What the least of the instruction sets of this architecture needs.
extern const char* const NEEDED;

std::vector<const Kernel*> supported_kernels();

// `name` empty: the best one that the environment variable BERTOPT_NATIVE_ISA allows. Throws Unsupported.
const Kernel& choose_kernel(const std::string& name);

}  // namespace bertopt_native
