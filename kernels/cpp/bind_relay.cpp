// towerd.kernels._native.relay. It waits for sockets, without the GIL.

#include "bind_relay.h"

#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "relay.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

std::vector<std::string> copied(const std::vector<nb::bytes> & marks) {
    std::vector<std::string> out;
    for (const nb::bytes & mark : marks) {
        out.emplace_back(mark.c_str(), mark.size());
    }
    return out;
}

nb::bytes as_bytes(const std::string & text) {
    return nb::bytes(text.data(), text.size());
}

nb::tuple bound(int up, int down, int cancel, const std::vector<nb::bytes> & goes_on,
                const std::vector<nb::bytes> & ends, std::size_t bytes_max, bool is_chunked) {
    const Marks marks{copied(goes_on), copied(ends)};
    Relayed     found;
    {
        const nb::gil_scoped_release free;
        found = relay(up, down, cancel, marks, bytes_max, is_chunked);
    }
    return nb::make_tuple(as_bytes(found.passed), as_bytes(found.unsent), as_bytes(found.rest));
}

}  // namespace

void bind_relay(nb::module_ & m) {
    m.def("relay", &bound, "up"_a, "down"_a, "cancel"_a, "goes_on"_a, "ends"_a, "bytes_max"_a, "is_chunked"_a,
          "Passes a stream of events on; the contract is in towerd.kernels.reference_relay.");
}

}  // namespace towerd
