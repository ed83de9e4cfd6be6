// towerd.kernels._native.gittins. It takes microseconds, and keeps the GIL.

#include "bind_gittins.h"

#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "gittins.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

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
