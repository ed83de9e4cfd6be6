// towerd.kernels._native.populate: pages of memory that the system has not given yet.

#include "bind.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nb = nanobind;

namespace towerd {

namespace {

#if defined(__linux__)

constexpr int         kPopulateWrite = 23;       // MADV_POPULATE_WRITE, which older headers lack
constexpr std::size_t kCallBytes     = 1 << 18;  // the address space is locked during a call, against mmap and munmap

bool populate_pages(std::uintptr_t start, std::uintptr_t end) {
    for (std::uintptr_t at = start; at < end; at += kCallBytes) {
        const std::size_t n_bytes = std::min<std::size_t>(kCallBytes, end - at);
        if (madvise(reinterpret_cast<void *>(at), n_bytes, kPopulateWrite) != 0) {
            return false;
        }
    }
    return true;
}

bool populate(std::uintptr_t start, std::size_t stride, std::size_t n, std::size_t run_bytes) {
    const auto     page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    std::uintptr_t first = 0, end = 0;  // of the pages to ask for: runs that lie close share a call
    for (std::size_t i = 0; i < n && run_bytes > 0; ++i) {
        const std::uintptr_t run      = start + i * stride;
        const std::uintptr_t run_page = run / page * page;
        if (run_page > end) {
            if (!populate_pages(first, end)) {
                return false;
            }
            first = run_page;
        }
        end = std::max(end, (run + run_bytes + page - 1) / page * page);
    }
    return populate_pages(first, end);
}

#else

bool populate(std::uintptr_t, std::size_t, std::size_t, std::size_t) {
    return false;
}

#endif

}  // namespace

void bind_pages(nb::module_ & m) {
    m.def("populate", &populate, nb::arg("start"), nb::arg("stride"), nb::arg("n"), nb::arg("run_bytes"),
          nb::call_guard<nb::gil_scoped_release>(), "Has the pages of n runs of bytes in RAM; see _native.pyi.");
}

}  // namespace towerd
