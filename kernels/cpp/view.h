// A checked view of a Python buffer: what every kernel takes instead of raw pointers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

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

    // One dimension, elements one after the other, each aligned to its size.
    void require_contiguous(const std::string & name) const;

private:
    Py_buffer view_{};
};

// A two-dimensional uint8 array whose rows are contiguous and lie in ascending order.
struct Rows {
    std::uint8_t * data;
    std::size_t    n;
    std::size_t    bytes;   // of one row
    std::size_t    stride;  // from one row to the next, >= bytes unless n <= 1

    std::size_t span() const { return n == 0 || bytes == 0 ? 0 : (n - 1) * stride + bytes; }
};

Rows rows_of(const Buffer & buffer, const std::string & name);

bool overlap(const std::uint8_t * a, std::size_t a_bytes, const std::uint8_t * b, std::size_t b_bytes);

}  // namespace towerd
