// towerd.kernels._native.NodeTap: copies tensors out of llama.cpp's compute graph while it is evaluated. The contract is
// in lab/reference/taps.py. Its callback needs no GIL; the other functions must not be called while llama.cpp evaluates.

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

// ggml's functions; this module is not linked with ggml.
struct TensorFunctions {
    const char * (*name)(const void * tensor);
    std::size_t (*n_bytes)(const void * tensor);
    std::int64_t (*n_elements)(const void * tensor);
    void (*get)(const void * tensor, void * to, std::size_t offset, std::size_t n_bytes);
};

// Called by one thread at a time.
class NodeTap {
public:
    using Place = std::pair<std::string, int>;  // name, layer

    struct Values {
        std::array<std::size_t, 4> shape;    // in numpy's order, the reverse of ggml's
        std::array<std::size_t, 4> strides;  // bytes
        std::vector<std::uint8_t>  data;
    };

    explicit NodeTap(const TensorFunctions & functions) : functions_(functions) { error_.reserve(kErrorMax); }
    NodeTap(const NodeTap &) = delete;  // llama.cpp keeps its address
    NodeTap & operator=(const NodeTap &) = delete;

    void watch(std::vector<std::string> names);

    const std::map<Place, Values> & values() const { return values_; }
    const std::string &             error() const { return error_; }  // why a tensor was not read; empty if none failed

    // ggml_backend_sched_eval_callback; `tap` is a NodeTap.
    static bool on_node(void * tensor, bool ask, void * tap) noexcept;

private:
    static constexpr std::size_t kErrorMax = 100;

    // Allocates nothing, because memory may have run out; `why` is at most kErrorMax long.
    void fail(const char * why) { error_.assign(why); }
    bool         see(const void * tensor, bool ask);
    bool         is_watched(const std::string & name) const;
    const void * queries_of(const void * tensor, const std::string & name);
    void         read(const void * tensor, const Place & place);

    TensorFunctions          functions_;
    std::vector<std::string> names_;
    std::map<Place, Values>  values_;
    std::string              error_;
};

// The leading fields of struct ggml_tensor (ggml.h).
struct TensorHead {
    std::int32_t type;
    void *       buffer;
    std::int64_t ne[4];
    std::size_t  nb[4];
};

// All of them up to its name.
struct TensorBody {
    TensorHead   head;
    std::int32_t op;
    std::int32_t op_params[16];
    std::int32_t flags;
    const void * src[10];
    const void * view_src;
    std::size_t  view_offset;
    void *       data;
    char         name[64];
};

constexpr char kQueries[] = "queries";  // what an attention multiplies with keys, whatever llama.cpp calls it

constexpr std::int32_t kTypeF32 = 0;
constexpr std::size_t  kDigitsMax = 6;

// "Qcur-12" is (Qcur, 12); a layer of -1 where a name has none.
NodeTap::Place place_of(const char * name) {
    const char * dash = std::strrchr(name, '-');
    if (dash == nullptr || dash[1] == '\0') {
        return {name, -1};
    }
    const std::size_t n_digits = std::strspn(dash + 1, "0123456789");
    if (dash[1 + n_digits] != '\0' || n_digits > kDigitsMax) {
        return {name, -1};
    }
    return {std::string(name, dash), std::atoi(dash + 1)};
}

void NodeTap::watch(std::vector<std::string> names) {
    names_ = std::move(names);
    values_.clear();
    error_.clear();
}

bool NodeTap::on_node(void * tensor, bool ask, void * tap) noexcept {
    return static_cast<NodeTap *>(tap)->see(tensor, ask);
}

bool NodeTap::is_watched(const std::string & name) const {
    return std::find(names_.begin(), names_.end(), name) != names_.end();
}

// The queries that went into a layer's attention, if `tensor` is the product with its keys (kq) or the output of a fused
// attention (kqv_out), before whose computation nothing else takes their memory; null if it is neither.
const void * NodeTap::queries_of(const void * tensor, const std::string & name) {
    const bool is_product = name == "kq";
    if ((!is_product && name != "kqv_out") || !is_watched(kQueries)) {
        return nullptr;
    }
    const auto * body = static_cast<const TensorBody *>(tensor);
    if (functions_.name(tensor) != body->name) {
        fail("This llama.cpp lays its tensors out in another way.");
        return nullptr;
    }
    if (is_product) {
        return body->src[1];
    }
    const auto * fused = static_cast<const TensorBody *>(body->src[0]);
    return fused == nullptr || fused->src[2] == nullptr ? nullptr : fused->src[0];
}

// Before a node is computed, returns whether its data is wanted; after it, true: otherwise the computation stops.
bool NodeTap::see(const void * tensor, bool ask) {
    if (names_.empty()) {
        return !ask;
    }
    try {
        const Place place = place_of(functions_.name(tensor));
        if (place.second < 0) {
            return !ask;
        }
        const void * queries = queries_of(tensor, place.first);
        const bool   is_named = is_watched(place.first);
        if (!is_named && queries == nullptr) {
            return !ask;
        }
        if (!ask && error_.empty() && is_named) {
            read(tensor, place);
        }
        if (!ask && error_.empty() && queries != nullptr) {
            read(queries, {kQueries, place.second});
        }
    } catch (const std::bad_alloc &) {
        fail("There is no memory for a tapped tensor.");
    } catch (const std::exception &) {
        fail("A tapped tensor cannot be read.");
    }
    return true;
}

void NodeTap::read(const void * tensor, const Place & place) {
    TensorHead head;
    std::memcpy(&head, tensor, sizeof head);
    std::uint64_t n_elements = 1;  // with another layout it may be any number
    for (const std::int64_t n : head.ne) {
        n_elements *= static_cast<std::uint64_t>(n);
    }
    if (n_elements != static_cast<std::uint64_t>(functions_.n_elements(tensor))) {
        fail("This llama.cpp lays its tensors out in another way.");
        return;
    }
    if (head.type != kTypeF32) {
        fail("A tapped tensor does not hold 32-bit floats.");
        return;
    }
    Values & values = values_[place];
    for (std::size_t i = 0; i < 4; ++i) {
        values.shape[i] = static_cast<std::size_t>(head.ne[3 - i]);
        values.strides[i] = head.nb[3 - i];
    }
    values.data.resize(functions_.n_bytes(tensor));
    functions_.get(tensor, values.data.data(), 0, values.data.size());
}

template <typename Function> Function function_at(std::uintptr_t address, const char * name) {
    if (address == 0) {
        refuse(name, "expected the address of a function");
    }
    return reinterpret_cast<Function>(address);
}

TensorFunctions functions_at(std::uintptr_t name, std::uintptr_t n_bytes, std::uintptr_t n_elements,
                             std::uintptr_t get) {
    TensorFunctions found{};
    found.name = function_at<decltype(found.name)>(name, "name");
    found.n_bytes = function_at<decltype(found.n_bytes)>(n_bytes, "n_bytes");
    found.n_elements = function_at<decltype(found.n_elements)>(n_elements, "n_elements");
    found.get = function_at<decltype(found.get)>(get, "get");
    return found;
}

nb::list places(const NodeTap & tap) {
    nb::list found;
    for (const auto & [place, values] : tap.values()) {
        found.append(nb::make_tuple(place.first, place.second));
    }
    return found;
}

nb::tuple read(const NodeTap & tap, const std::string & name, int layer) {
    const auto found = tap.values().find({name, layer});
    if (found == tap.values().end()) {
        throw nb::key_error((name + "-" + std::to_string(layer)).c_str());
    }
    const NodeTap::Values & values = found->second;
    const std::size_t       n = values.data.size();
    const nb::object        data = nb::module_::import_("numpy").attr("empty")(n, "uint8");
    const Buffer            to(data, "data", true, 1, 1, kBytes);
    std::memcpy(to.data(), values.data.data(), n);
    const auto tuple_of = [](const std::array<std::size_t, 4> & x) { return nb::make_tuple(x[0], x[1], x[2], x[3]); };
    return nb::make_tuple(tuple_of(values.shape), tuple_of(values.strides), data);
}

}  // namespace

void bind_taps(nb::module_ & m) {
    nb::class_<NodeTap>(m, "NodeTap", "Copies tensors out of a compute graph; see lab.reference.taps.")
        .def("__init__", [](NodeTap * self, std::uintptr_t name, std::uintptr_t n_bytes, std::uintptr_t n_elements,
                            std::uintptr_t get) {
                new (self) NodeTap(functions_at(name, n_bytes, n_elements, get));
            }, "name"_a, "n_bytes"_a, "n_elements"_a, "get"_a)
        .def_prop_ro("callback", [](const NodeTap &) { return reinterpret_cast<std::uintptr_t>(&NodeTap::on_node); })
        .def_prop_ro("user_data", [](const NodeTap & self) { return reinterpret_cast<std::uintptr_t>(&self); })
        .def_prop_ro("error", &NodeTap::error)
        .def("watch", &NodeTap::watch, "names"_a, "Forget what was collected; collect tensors of these names.")
        .def("places", &places, "(name, layer) of what was collected.")
        .def("read", &read, "name"_a, "layer"_a, "(shape, strides in bytes, data) of a tensor. KeyError if it is not there.");
}

}  // namespace towerd
