// Errors by who can mend them. Messages say what was expected, what came, and what to do.
#pragma once
#include <stdexcept>
#include <string>

namespace bertopt_native {

struct BadFile : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct BadInput : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};
struct Unsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct Interrupted {};  // the caller's interrupt check said stop; it holds the reason

}  // namespace bertopt_native
