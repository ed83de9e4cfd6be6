#include "arguments.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "dispatch.h"
#include "formats.h"

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

std::size_t count_of(nb::handle value, const std::string & name, long long low, long long high) {
    int             overflow = 0;
    const long long count = PyLong_Check(value.ptr()) ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflow) : -1;
    if (!PyLong_Check(value.ptr()) || overflow != 0 || count < low || count > high) {
        refuse(name, "expected an integer from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return static_cast<std::size_t>(count);
}

std::size_t threads_of(nb::handle value) { return count_of(value, "n_threads", 1, 1024); }

bool flag_of(nb::handle value, const std::string & name) {
    if (!PyBool_Check(value.ptr())) {
        refuse(name, "expected True or False");
    }
    return value.is(nb::handle(Py_True));
}

const Isa & checked_isa(const std::string & name) {
    const Isa * isa = isa_named(name.c_str());
    if (isa == nullptr) {
        refuse("name", "no kernels called " + name + " on this machine");
    }
    return *isa;
}

const Format & format_of(nb::handle value, const std::string & name) {
    if (!PyUnicode_Check(value.ptr())) {
        refuse(name, "expected the name of a format");
    }
    Py_ssize_t   length = 0;
    const char * text = PyUnicode_AsUTF8AndSize(value.ptr(), &length);
    if (text == nullptr) {
        PyErr_Clear();
        refuse(name, "not UTF-8");
    }
    const Format * format = std::strlen(text) == static_cast<std::size_t>(length) ? format_named(text) : nullptr;
    if (format == nullptr) {
        refuse(name, "unknown format " + std::string(text, static_cast<std::size_t>(length)));
    }
    return *format;
}

std::size_t elements_of(const Format & format, std::size_t row_bytes, const std::string & name) {
    if (row_bytes == 0 || row_bytes % format.block_bytes != 0) {
        refuse(name, "rows of " + std::to_string(row_bytes) + " bytes are not whole blocks of " + format.name);
    }
    return row_bytes / format.block_bytes * format.block_elements;
}

std::size_t hadamard_block_of(nb::handle value, const std::string & name) {
    const std::size_t block = count_of(value, name, 32, 512);
    if ((block & (block - 1)) != 0) {
        refuse(name, "not a power of two");
    }
    return block;
}

void check_index(const Buffer & index, std::size_t n_rows, const std::string & name) {
    index.require_contiguous(name);
    const auto * at = reinterpret_cast<const std::int64_t *>(index.data());
    for (std::size_t i = 0; i < index.shape(0); ++i) {
        if (at[i] < 0 || static_cast<std::size_t>(at[i]) >= n_rows) {
            refuse(name, "row " + std::to_string(at[i]) + " is not in [0, " + std::to_string(n_rows) + ")");
        }
    }
}

void check_apart(const Rows & source, const Rows & target) {
    if (overlap(source.data, source.span(), target.data, target.span())) {
        refuse("out", "overlaps src");
    }
}

void check_spans(std::vector<Span> spans) {
    const auto empty = [](const Span & span) { return span.second == 0; };
    spans.erase(std::remove_if(spans.begin(), spans.end(), empty), spans.end());
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 1; i < spans.size(); ++i) {
        if (spans[i - 1].first + spans[i - 1].second > spans[i].first) {
            refuse("jobs", "two jobs write the same bytes");
        }
    }
}

nb::sequence sequence_of(nb::handle value, const std::string & name) {
    if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) {
        refuse(name, "expected a list or tuple");
    }
    return nb::borrow<nb::sequence>(value);
}

JobRows job_rows(nb::handle item, std::size_t length, const std::string & name, const Buffer & dst,
                 std::deque<Buffer> & held) {
    if (!PyTuple_Check(item.ptr()) || static_cast<std::size_t>(PyTuple_Size(item.ptr())) != length) {
        refuse(name, length == 3 ? "expected a tuple (offset, rows, index)"
                                 : "expected a tuple (offset, rows, index, src_format, dst_format)");
    }
    const nb::tuple job = nb::borrow<nb::tuple>(item);
    JobRows         rows{};
    rows.offset = count_of(job[0], name + ".offset", 0, static_cast<long long>(dst.shape(0)));
    held.emplace_back(job[1], name + ".rows", false, 2, 1, kBytes);
    rows.source = rows_of(held.back(), name + ".rows");
    rows.n_rows = rows.source.n;
    const nb::object picked = job[2];
    if (!picked.is_none()) {
        held.emplace_back(picked, name + ".index", false, 1, sizeof(std::int64_t), kInt64);
        check_index(held.back(), rows.source.n, name + ".index");
        rows.index = reinterpret_cast<const std::int64_t *>(held.back().data());
        rows.n_rows = held.back().shape(0);
    }
    return rows;
}

void check_job(const JobRows & job, std::size_t row_bytes, const std::string & name, const Buffer & dst) {
    const std::size_t room = dst.shape(0) - job.offset;
    if (row_bytes != 0 && job.n_rows > room / row_bytes) {
        refuse(name, std::to_string(job.n_rows) + " rows of " + std::to_string(row_bytes) +
                         " bytes do not fit into the " + std::to_string(room) + " bytes of dst from offset " +
                         std::to_string(job.offset));
    }
    if (overlap(dst.data(), dst.shape(0), job.source.data, job.source.span())) {
        refuse("jobs", "a source lies in dst");
    }
}

}  // namespace towerd
