// Checks of Python arguments; all throw ValueError with the argument's name first.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace towerd {

namespace nb = nanobind;

[[noreturn]] inline void refuse(const std::string & name, const std::string & what) {
    throw nb::value_error((name + ": " + what).c_str());
}

// A checked view of a Python buffer: what every kernel takes instead of raw pointers.
// Holds an export of the buffer for as long as it lives, so the memory can neither move nor be
// freed while the GIL is released. Must be created and destroyed with the GIL held.
class Buffer {
public:
    Buffer(nb::handle object, const std::string & name, bool writable, int ndim, std::size_t itemsize,
           const char * formats);
    Buffer(const Buffer &) = delete;  // not movable either: shape may point into view_
    Buffer & operator=(const Buffer &) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    std::uint8_t * data() const { return static_cast<std::uint8_t *>(view_.buf); }
    std::size_t    shape(int axis) const { return static_cast<std::size_t>(view_.shape[axis]); }
    std::ptrdiff_t stride(int axis) const { return view_.strides[axis]; }
    std::size_t    itemsize() const { return static_cast<std::size_t>(view_.itemsize); }

    // Elements one after the other, row by row, each aligned to its size.
    void require_contiguous(const std::string & name) const;
    void require_aligned(const std::string & name) const;

private:
    Py_buffer view_{};
};

Rows rows_of(const Buffer & buffer, const std::string & name);

bool overlap(const std::uint8_t * a, std::size_t a_bytes, const std::uint8_t * b, std::size_t b_bytes);

constexpr const char * kBytes = "B";
constexpr const char * kInt32 = "il";
constexpr const char * kInt64 = "lq";
constexpr const char * kFloat = "f";

std::size_t count_of(nb::handle value, const std::string & name, long long low, long long high);
std::size_t threads_of(nb::handle value);
bool        flag_of(nb::handle value, const std::string & name);
const Isa &    checked_isa(const std::string & name);  // the kernels of that name on this machine
const Format & format_of(nb::handle value, const std::string & name);

// Elements of a row of `row_bytes`, a whole number of blocks and at least one.
std::size_t elements_of(const Format & format, std::size_t row_bytes, const std::string & name);

// 32, 64 ... 512.
std::size_t hadamard_block_of(nb::handle value, const std::string & name);

// int64[m], each in [0, n_rows).
void check_index(const Buffer & index, std::size_t n_rows, const std::string & name);

void check_apart(const Rows & source, const Rows & target);  // src and out

using Span = std::pair<const std::uint8_t *, std::size_t>;
void check_spans(std::vector<Span> spans);  // no two share a byte

// What the jobs of copy_planes and transcode have in common: rows to take, and where they go in dst.
struct JobRows {
    std::size_t          offset;
    Rows                 source;
    const std::int64_t * index;   // nullptr: all
    std::size_t          n_rows;  // to write
};

nb::sequence sequence_of(nb::handle value, const std::string & name);

// Reads (offset, rows, index) from the front of a tuple of `length`; its buffers go into `held`,
// which must outlive the work.
JobRows job_rows(nb::handle item, std::size_t length, const std::string & name, const Buffer & dst,
                 std::deque<Buffer> & held);

// Refuses rows that do not fit behind the offset, and a source that lies in dst.
void check_job(const JobRows & job, std::size_t row_bytes, const std::string & name, const Buffer & dst);

}  // namespace towerd
