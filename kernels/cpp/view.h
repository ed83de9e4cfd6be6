// A checked view of a Python buffer: what every kernel takes instead of raw pointers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "rows.h"

namespace towerd {

namespace nb = nanobind;

[[noreturn]] inline void refuse(const std::string & name, const std::string & what) {
    throw nb::value_error((name + ": " + what).c_str());
}

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

}  // namespace towerd
