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
                         "-byte integers, found format " + found);
    }
}

void Buffer::require_contiguous(const std::string & name) const {
    if (shape(0) > 1 && stride(0) != view_.itemsize) {
        refuse(name, "not contiguous");
    }
    if (reinterpret_cast<std::uintptr_t>(view_.buf) % static_cast<std::size_t>(view_.itemsize) != 0) {
        refuse(name, "not aligned");
    }
}

Rows rows_of(const Buffer & buffer, const std::string & name) {
    Rows rows{buffer.data(), buffer.shape(0), buffer.shape(1), 0};
    if (rows.bytes > 1 && buffer.stride(1) != 1) {
        refuse(name, "the bytes of a row are not contiguous");
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
