// The Python face: check every argument with the GIL held, then work without it.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "copy.h"
#include "transpose.h"
#include "view.h"

namespace nb = nanobind;
using namespace nb::literals;
using towerd::Buffer;
using towerd::CopyJob;
using towerd::Rows;
using towerd::refuse;

namespace {

constexpr const char * kBytes = "B";
constexpr const char * kInt64 = "lq";

std::size_t count_of(nb::handle value, const char * name, long long low, long long high) {
    int             overflow = 0;
    const long long count = PyLong_Check(value.ptr()) ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflow) : -1;
    if (!PyLong_Check(value.ptr()) || overflow != 0 || count < low || count > high) {
        refuse(name, "expected an integer from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return static_cast<std::size_t>(count);
}

std::size_t threads_of(nb::handle value) { return count_of(value, "n_threads", 1, 1024); }

void check_index(const Buffer & index, std::size_t n_rows, const std::string & name) {
    index.require_contiguous(name);
    const auto * at = reinterpret_cast<const std::int64_t *>(index.data());
    for (std::size_t i = 0; i < index.shape(0); ++i) {
        if (at[i] < 0 || static_cast<std::size_t>(at[i]) >= n_rows) {
            refuse(name, "row " + std::to_string(at[i]) + " is not in [0, " + std::to_string(n_rows) + ")");
        }
    }
}

void check_targets(const std::vector<CopyJob> & jobs, const Buffer & dst) {
    std::vector<std::pair<const std::uint8_t *, std::size_t>> spans;
    for (const CopyJob & job : jobs) {
        if (towerd::overlap(dst.data(), dst.shape(0), job.source.data, job.source.span())) {
            refuse("jobs", "a source lies in dst");
        }
        if (job.bytes() != 0) {
            spans.emplace_back(job.target, job.target_span());
        }
    }
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 1; i < spans.size(); ++i) {
        if (spans[i - 1].first + spans[i - 1].second > spans[i].first) {
            refuse("jobs", "two jobs write the same bytes");
        }
    }
}

// Adds the buffers of job `i` to `held` (they must outlive the copy) and returns the job.
CopyJob job_of(nb::handle item, std::size_t i, const Buffer & dst, std::deque<Buffer> & held) {
    const std::string name = "jobs[" + std::to_string(i) + "]";
    if (!PyTuple_Check(item.ptr()) || PyTuple_Size(item.ptr()) != 3) {
        refuse(name, "expected a tuple (offset, rows, index)");
    }
    const nb::tuple   job = nb::borrow<nb::tuple>(item);
    const std::size_t size = dst.shape(0);
    const std::size_t offset = count_of(job[0], (name + ".offset").c_str(), 0, static_cast<long long>(size));
    held.emplace_back(job[1], name + ".rows", false, 2, 1, kBytes);
    const Rows source = towerd::rows_of(held.back(), name + ".rows");

    const std::int64_t * index = nullptr;
    std::size_t          n_rows = source.n;
    const nb::object     picked = job[2];
    if (!picked.is_none()) {
        held.emplace_back(picked, name + ".index", false, 1, sizeof(std::int64_t), kInt64);
        check_index(held.back(), source.n, name + ".index");
        index = reinterpret_cast<const std::int64_t *>(held.back().data());
        n_rows = held.back().shape(0);
    }
    const std::size_t room = size - offset;
    if (source.bytes != 0 && n_rows > room / source.bytes) {
        refuse(name, std::to_string(n_rows) + " rows of " + std::to_string(source.bytes) + " bytes do not fit into the " +
                         std::to_string(room) + " bytes of dst from offset " + std::to_string(offset));
    }
    return {dst.data() + offset, source.bytes, source, index, n_rows};
}

void copy_planes(nb::handle dst, nb::handle jobs, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      target(dst, "dst", true, 1, 1, kBytes);
    target.require_contiguous("dst");
    if (!PyList_Check(jobs.ptr()) && !PyTuple_Check(jobs.ptr())) {
        refuse("jobs", "expected a list or tuple");
    }
    std::deque<Buffer>   held;
    std::vector<CopyJob> work;
    std::size_t          i = 0;
    for (nb::handle item : nb::borrow<nb::sequence>(jobs)) {
        work.push_back(job_of(item, i++, target, held));
    }
    check_targets(work, target);
    const nb::gil_scoped_release free;
    towerd::run_copies(work, threads);
}

void gather_rows(nb::handle src, nb::handle index, nb::handle out, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      from(src, "src", false, 2, 1, kBytes);
    const Buffer      at(index, "index", false, 1, sizeof(std::int64_t), kInt64);
    const Buffer      to(out, "out", true, 2, 1, kBytes);
    const Rows        source = towerd::rows_of(from, "src");
    const Rows        target = towerd::rows_of(to, "out");
    check_index(at, source.n, "index");
    if (target.n != at.shape(0) || target.bytes != source.bytes) {
        refuse("out", "expected shape (" + std::to_string(at.shape(0)) + ", " + std::to_string(source.bytes) + ")");
    }
    if (towerd::overlap(source.data, source.span(), target.data, target.span())) {
        refuse("out", "overlaps src");
    }
    const auto *               rows = reinterpret_cast<const std::int64_t *>(at.data());
    const std::vector<CopyJob> work{{target.data, target.stride, source, rows, target.n}};
    const nb::gil_scoped_release free;
    towerd::run_copies(work, threads);
}

void transpose(nb::handle src, nb::handle out, nb::handle element_bytes, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const std::size_t element = count_of(element_bytes, "element_bytes", 1, 4);
    if (element == 3) {
        refuse("element_bytes", "expected 1, 2 or 4");
    }
    const Buffer from(src, "src", false, 2, 1, kBytes);
    const Buffer to(out, "out", true, 2, 1, kBytes);
    const Rows   source = towerd::rows_of(from, "src");
    const Rows   target = towerd::rows_of(to, "out");
    if (source.bytes % element != 0) {
        refuse("src", "rows are not whole elements");
    }
    if (target.n != source.bytes / element || target.bytes != source.n * element) {
        refuse("out", "expected shape (" + std::to_string(source.bytes / element) + ", " +
                          std::to_string(source.n * element) + ")");
    }
    if (towerd::overlap(source.data, source.span(), target.data, target.span())) {
        refuse("out", "overlaps src");
    }
    const nb::gil_scoped_release free;
    towerd::transpose(source, target, element, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "C++ kernels of towerd; the contracts are in towerd.kernels.reference.";
    m.def("copy_planes", &copy_planes, "dst"_a.none(), "jobs"_a.none(), "n_threads"_a.none() = 1,
          "Copy the rows of every job (offset, rows, index) into dst.");
    m.def("gather_rows", &gather_rows, "src"_a.none(), "index"_a.none(), "out"_a.none(), "n_threads"_a.none() = 1,
          "out[i] = src[index[i]].");
    m.def("transpose", &transpose, "src"_a.none(), "out"_a.none(), "element_bytes"_a.none(), "n_threads"_a.none() = 1,
          "out[c, r] = src[r, c] for elements of 1, 2 or 4 bytes.");
}
