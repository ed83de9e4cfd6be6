// towerd.kernels._native.NodeTap. Its callback needs no GIL; the other functions must not be called while llama.cpp
// evaluates.

#include "bind_taps.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "arguments.h"
#include "taps.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

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
