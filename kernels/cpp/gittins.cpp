// towerd.kernels._native.gittins: Gittins indices by pooling adjacent bins. Same operations in the same order as
// lab/reference/gittins.py, so that decisions do not depend on which one runs. It takes microseconds, and keeps the GIL.

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

constexpr double kSure = 1.0 - 1e-12;

struct Pool {
    double won, spent, stays;
};

void check(const double * chances, const double * widths, std::size_t n, std::size_t bins) {
    for (std::size_t i = 0; i < n * bins; ++i) {
        if (!(chances[i] >= 0.0 && chances[i] <= 1.0)) {
            throw std::invalid_argument("chances: expected numbers of 0 to 1");
        }
    }
    for (std::size_t b = 0; b < bins; ++b) {
        if (!(widths[b] > 0.0 && std::isfinite(widths[b]))) {
            throw std::invalid_argument("widths: expected numbers above 0");
        }
    }
}

void gittins(const double * chances, const double * widths, std::size_t n, std::size_t bins, double * out) {
    check(chances, widths, n, bins);
    // The first pool stands for the time after the last bin, without returns: no probability is
    // below 0, so nothing is ever pooled with it.
    std::vector<Pool> pools(bins + 1);
    pools[0] = {0.0, 1.0, 1.0};
    for (std::size_t row = 0; row < n; ++row, chances += bins, out += bins) {
        std::size_t last = 0;
        for (std::size_t b = bins; b-- > 0;) {
            const double won = std::min(chances[b], kSure);
            Pool         pool{won, widths[b] - 0.5 * widths[b] * won, 1.0 - won};
            while (pools[last].won * pool.spent > pool.won * pools[last].spent) {
                pool.won += pool.stays * pools[last].won;
                pool.spent += pool.stays * pools[last].spent;
                pool.stays *= pools[last].stays;
                --last;
            }
            pools[++last] = pool;
            out[b]        = pool.won / pool.spent;
        }
    }
}

template <int N> using Table = nb::ndarray<const double, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

nb::object bound(const Table<2> & chances, const Table<1> & widths) {
    const std::size_t n = chances.shape(0), bins = chances.shape(1);
    if (widths.shape(0) != bins) {
        throw std::invalid_argument("chances: expected one for each of " + std::to_string(widths.shape(0)) + " widths");
    }
    auto out = std::make_unique<double[]>(n * bins);
    gittins(chances.data(), widths.data(), n, bins, out.get());
    double *    data = out.release();
    nb::capsule owner(data, [](void * p) noexcept { delete[] static_cast<double *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, double, nb::ndim<2>>(data, {n, bins}, owner));
}

}  // namespace

void bind_gittins(nb::module_ & m) {
    m.def("gittins", &bound, "chances"_a, "widths"_a,
          "Returns per time at each bin; the contract is in lab.reference.gittins.");
}

}  // namespace towerd
