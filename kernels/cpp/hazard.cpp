// towerd.kernels._native.hazard_chances: probabilities of return. The contract is in lab/reference/hazard.py. Most
// features and half of the hidden units are 0, so they are skipped. It takes microseconds, and keeps the GIL.

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

constexpr double kScoreMax = 30.0;

void add_scaled(double * to, const double * row, double by, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        to[i] += by * row[i];
    }
}

// As in lab/reference/hazard.py, all float64 and contiguous.
struct Hazard {
    const double * w1;          // [features, hidden]
    const double * b1;          // [hidden]
    const double * correction;  // [hidden, bins]
    const double * logits;      // [curves, bins]
    std::size_t    features, hidden, bins;
};

void hazard_chances(const Hazard & hazard, const double * x, const std::int64_t * of, std::size_t n, double * out) {
    std::vector<double> units(hazard.hidden);
    for (std::size_t row = 0; row < n; ++row, x += hazard.features, out += hazard.bins) {
        std::copy_n(hazard.b1, hazard.hidden, units.data());
        for (std::size_t i = 0; i < hazard.features; ++i) {
            if (x[i] != 0.0) {
                add_scaled(units.data(), hazard.w1 + i * hazard.hidden, x[i], hazard.hidden);
            }
        }
        std::copy_n(hazard.logits + of[row] * hazard.bins, hazard.bins, out);
        for (std::size_t i = 0; i < hazard.hidden; ++i) {
            if (units[i] > 0.0) {
                add_scaled(out, hazard.correction + i * hazard.bins, units[i], hazard.bins);
            }
        }
        for (std::size_t b = 0; b < hazard.bins; ++b) {
            out[b] = 1.0 / (1.0 + std::exp(-std::clamp(out[b], -kScoreMax, kScoreMax)));
        }
    }
}

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
