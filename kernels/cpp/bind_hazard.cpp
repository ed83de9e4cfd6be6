// towerd.kernels._native.hazard_chances. It takes microseconds, and keeps the GIL.

#include "bind_hazard.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hazard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

template <int N> using Table = nb::ndarray<const double, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

nb::object bound(const Table<2> & w1, const Table<1> & b1, const Table<2> & correction, const Table<2> & logits,
                 const Table<2> & x, const std::vector<std::int64_t> & of) {
    const Hazard      hazard{w1.data(),   b1.data(),   correction.data(), logits.data(),
                             w1.shape(0), w1.shape(1), logits.shape(1)};
    const std::size_t n = of.size();
    if (b1.shape(0) != hazard.hidden || correction.shape(0) != hazard.hidden || correction.shape(1) != hazard.bins) {
        throw std::invalid_argument("weights: their shapes do not fit each other");
    }
    if (x.shape(0) != n || x.shape(1) != hazard.features) {
        throw std::invalid_argument("x: expected (" + std::to_string(n) + ", " + std::to_string(hazard.features) + ")");
    }
    for (const std::int64_t each : of) {
        if (each < 0 || static_cast<std::size_t>(each) >= logits.shape(0)) {
            throw std::invalid_argument("of: expected numbers below " + std::to_string(logits.shape(0)));
        }
    }
    auto out = std::make_unique<double[]>(n * hazard.bins);
    hazard_chances(hazard, x.data(), of.data(), n, out.get());
    double *    data = out.release();
    nb::capsule owner(data, [](void * p) noexcept { delete[] static_cast<double *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, double, nb::ndim<2>>(data, {n, hazard.bins}, owner));
}

}  // namespace

void bind_hazard(nb::module_ & m) {
    m.def("hazard_chances", &bound, "w1"_a, "b1"_a, "correction"_a, "logits"_a, "x"_a, "of"_a,
          "Chances of return by bin; the contract is in lab.reference.hazard.");
}

}  // namespace towerd
