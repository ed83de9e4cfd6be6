#include "view.h"

#include <cstring>
#include <functional>

namespace towerd {

Buffer::Buffer(nb::handle object, const std::string & name, bool writable, int ndim,
               std::size_t itemsize, const char * formats) {
    const int flags = PyBUF_STRIDED_RO | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
        PyErr_Clear();
        refuse(name, writable ? "not a writable buffer" : "not a buffer");
    }
    // From here on a throw would skip the destructor, so release by hand first.
    const char * format = view_.format == nullptr ? "B" : view_.format;
    const std::size_t skip = format[0] == '@' || format[0] == '=' || format[0] == '<' ? 1 : 0;
    const bool known = std::strlen(format) == skip + 1 && std::strchr(formats, format[skip]) != nullptr;
    const bool typed = known && static_cast<std::size_t>(view_.itemsize) == itemsize;
    const bool shaped = view_.ndim == ndim && view_.shape != nullptr && view_.strides != nullptr;
    if (!typed || !shaped) {
        const std::string found = std::string(format) + " of " + std::to_string(view_.ndim) + " dimension(s)";
        PyBuffer_Release(&view_);
        refuse(name, "expected " + std::to_string(ndim) + " dimension(s) of " + std::to_string(itemsize) +
                         (formats[0] == 'f' ? "-byte floats" : "-byte integers") + ", found format " + found);
    }
}

void Buffer::require_contiguous(const std::string & name) const {
    std::ptrdiff_t expected = view_.itemsize;
    for (int axis = view_.ndim - 1; axis >= 0; --axis) {
        if (shape(axis) > 1 && stride(axis) != expected) {
            refuse(name, "not contiguous");
        }
        expected *= view_.shape[axis];
    }
    require_aligned(name);
}

void Buffer::require_aligned(const std::string & name) const {
    const auto size = static_cast<std::size_t>(view_.itemsize);
    const auto start = reinterpret_cast<std::uintptr_t>(view_.buf);
    bool       aligned = start % size == 0;
    for (int axis = 0; axis < view_.ndim; ++axis) {
        aligned = aligned && (shape(axis) <= 1 || stride(axis) % view_.itemsize == 0);
    }
    if (!aligned) {
        refuse(name, "not aligned");
    }
}

Rows rows_of(const Buffer & buffer, const std::string & name) {
    Rows rows{buffer.data(), buffer.shape(0), buffer.shape(1) * buffer.itemsize(), 0};
    if (buffer.shape(1) > 1 && buffer.stride(1) != static_cast<std::ptrdiff_t>(buffer.itemsize())) {
        refuse(name, "the elements of a row are not contiguous");
    }
    if (rows.n > 1) {
        const std::ptrdiff_t stride = buffer.stride(0);
        if (stride < 0 || static_cast<std::size_t>(stride) < rows.bytes) {
            refuse(name, "rows overlap or run backwards");
        }
        rows.stride = static_cast<std::size_t>(stride);
    } else {
        rows.stride = rows.bytes;
    }
    return rows;
}

bool overlap(const std::uint8_t * a, std::size_t a_bytes, const std::uint8_t * b, std::size_t b_bytes) {
    const std::less<const std::uint8_t *> before;
    return a_bytes != 0 && b_bytes != 0 && before(a, b + b_bytes) && before(b, a + a_bytes);
}

}  // namespace towerd
