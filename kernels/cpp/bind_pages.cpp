// towerd.kernels._native.populate.

#include "bind_pages.h"

#include "pages.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

void bind_pages(nb::module_ & m) {
    m.def("populate", &populate, "start"_a, "stride"_a, "n"_a, "run_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Has the pages of n runs of bytes in RAM; the contract is in towerd.kernels.pages.");
}

}  // namespace towerd
