// The Python module: arrays in, an array out, the interpreter's lock free in between.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "cpu.h"
#include "encoder.h"
#include "errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bertopt_native {
namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

[[noreturn]] void sleep_until_exit() {
    for (;;) pause();
}

// `take` takes the interpreter's lock. While the interpreter ends, Python before 3.14 ends every other thread that waits for it, by
// unwinding its stack, and no destructor may let that pass; when it has ended, there is no lock. A thread that comes so late sleeps
// until the process is gone, as later versions of Python let it.
template <class Take>
auto take_lock(const Take& take) {
    if (!Py_IsInitialized()) sleep_until_exit();
    try {
        return take();
    } catch (const abi::__forced_unwind&) {
        sleep_until_exit();
    }
}

// The interpreter's lock is free while one of these lives.
class Unlocked {
public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        take_lock([&] { PyEval_RestoreThread(state_); });
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

private:
    PyThreadState* state_;
};

bool python_interrupted() {
    const PyGILState_STATE state = take_lock(PyGILState_Ensure);
    const bool interrupted = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return interrupted;
}

// As the encoder reads them. Whether the model has such ids, types or positions is checked after.
std::vector<int32_t> narrow(const char* name, const Integers& values) {
    const int64_t *begin = values.data(), *end = begin + values.size();
    std::vector<int32_t> out(begin, end);
    if (std::equal(begin, end, out.begin(), out.end())) return out;
    const auto [least, most] = std::minmax_element(begin, end);
    throw BadInput(std::string(name) + " must fit int32; got " + std::to_string(*least) + " to " + std::to_string(*most));
}

Result run(Encoder& encoder, const Integers& ids, const Integers& starts, const std::optional<Integers>& token_types,
           const std::optional<Integers>& positions, uint32_t output, bool normalize) {
    if (starts.size() == 0) throw BadInput("starts must have one entry more than there are texts; got none");
    if (output > static_cast<uint32_t>(Output::splade_log1p)) throw BadInput("unknown output");
    auto fits = [&](const char* name, const std::optional<Integers>& values) {
        if (values && values->size() != ids.size())
            throw BadInput(std::string(name) + " must be as many as ids, " + std::to_string(ids.size()) + "; got " + std::to_string(values->size()));
    };
    fits("token_types", token_types);
    fits("positions", positions);
    const std::vector<int32_t> narrow_ids = narrow("ids", ids);
    const auto narrow_types = token_types ? narrow("token_types", *token_types) : std::vector<int32_t>();
    const auto narrow_positions = positions ? narrow("positions", *positions) : std::vector<int32_t>();
    // Copies all, so that a thread that writes to the caller's arrays cannot change what was checked.
    const std::vector<int64_t> own_starts(starts.data(), starts.data() + starts.size());
    Request request;
    request.ids = narrow_ids.data();
    request.token_types = token_types ? narrow_types.data() : nullptr;
    request.positions = positions ? narrow_positions.data() : nullptr;
    request.starts = own_starts.data();
    request.tokens = ids.size();
    request.texts = own_starts.size() - 1;
    request.output = static_cast<Output>(output);
    request.normalize = normalize;
    // Before memory of a size that the input determines is taken.
    {
        const Unlocked unlocked;
        encoder.check(request);
    }
    const size_t width = encoder.width(request.output), rows = by_token(request.output) ? request.tokens : request.texts;
    if (rows > std::numeric_limits<ptrdiff_t>::max() / sizeof(float) / width) throw std::bad_alloc();
    std::unique_ptr<float[]> data(new float[rows * width + 16]);
    try {
        const Unlocked unlocked;
        encoder.run(request, data.get(), python_interrupted);
    } catch (const Interrupted&) {
        throw nb::python_error();
    }
    float* pointer = data.get();
    nb::capsule owner(pointer, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    data.release();
    // Without what fills the vocabulary's last panel.
    const size_t columns = over_vocabulary(request.output) ? encoder.model().network().vocabulary : width;
    return Result(pointer, {rows, columns}, owner, {static_cast<int64_t>(width), 1});
}

nb::dict info(const Encoder& e) {
    const Header& h = e.model().header();
    nb::dict d;
    d["family"] = std::string(h.family, strnlen(h.family, sizeof h.family));
    d["isa"] = e.kernel().name;
    d["threads"] = e.threads();
    d["products"] = e.model().products();
    d["int8_products"] = e.model().int8_products();
    d["layers"] = h.layers;
    d["stored_layers"] = h.stored_layers;
    d["hidden_size"] = h.hidden;
    d["embedding_size"] = h.embedding;
    d["heads"] = h.heads;
    d["head_size"] = h.head_size;
    d["intermediate_size"] = h.intermediate;
    d["vocabulary_size"] = h.vocabulary;
    d["token_types"] = h.token_types;
    d["longest_text"] = e.model().network().longest;
    d["head_products"] = h.vocabulary_head;
    d["layout_version"] = h.layout_version;
    d["file_bytes"] = h.file_bytes;
    return d;
}

// For the tests: the product that the encoder's int8 layers use, before scales.
nb::ndarray<nb::numpy, int32_t, nb::ndim<2>> int8_product(
    const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& a,
    const nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& packed, const std::string& isa) {
    const size_t rows = a.shape(0), k = a.shape(1);
    if (!k || k % 32 || packed.size() % (32 * k)) throw BadInput("expected [rows, k] and packed weights of [32 * panels, k] with k a multiple of 32");
    const size_t n = packed.size() / k;
    auto* out = new int32_t[rows * n + 16];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    choose_kernel(isa).int8_product(a.data(), rows, reinterpret_cast<const uint8_t*>(packed.data()), n, k, out);
    return nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(out, {rows, n}, owner);
}

// Task heads: a BLAS gives a row other bits beside other rows.
Result float_linear(const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& x,
                    const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& weight,
                    const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& bias) {
    const size_t rows = x.shape(0), k = x.shape(1), n = weight.shape(0);
    if (weight.shape(1) != k || bias.shape(0) != n)
        throw BadInput("expected x [rows, k], weight [n, k] and bias [n]; got " + std::to_string(k) + " and " +
                       std::to_string(weight.shape(1)) + " for k, " + std::to_string(n) + " and " + std::to_string(bias.shape(0)) + " for n");
    if (n && rows > std::numeric_limits<ptrdiff_t>::max() / sizeof(float) / n) throw std::bad_alloc();
    auto* out = new float[rows * n + 1];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    const Kernel& kernel = choose_kernel("");
    {
        const Unlocked unlocked;
        kernel.float_linear(x.data(), rows, weight.data(), bias.data(), n, k, out);
    }
    return Result(out, {rows, n}, owner);
}

std::vector<std::string> supported() {
    std::vector<std::string> names;
    for (const Kernel* k : supported_kernels()) names.emplace_back(k->name);
    return names;
}

}  // namespace
}  // namespace bertopt_native

NB_MODULE(_core, m) {
    using namespace bertopt_native;
    nb::set_leak_warnings(false);  // daemon threads keep encoders until the process is gone
    nb::exception<BadFile>(m, "BadFile", PyExc_ValueError);
    nb::exception<Unsupported>(m, "Unsupported", PyExc_RuntimeError);
    nb::class_<Encoder>(m, "Encoder")
        .def(nb::init<const std::string&, size_t, const std::string&, bool>(), "path"_a, "threads"_a, "isa"_a, "huge_pages"_a,
             nb::call_guard<Unlocked>())
        .def("run", &run, "ids"_a, "starts"_a, "token_types"_a.none(), "positions"_a.none(), "output"_a, "normalize"_a)
        .def("info", &info);
    m.def("isa", [](const std::string& name) { return std::string(choose_kernel(name).name); }, "name"_a = "");
    m.def("supported", &supported);
    m.def("float_linear", &float_linear, "x"_a, "weight"_a, "bias"_a);
    m.def("int8_product", &int8_product, "a"_a, "packed"_a, "isa"_a = "");
    m.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
}
