#include "arguments.h"

#include <algorithm>
#include <cstring>

#include "formats.h"

namespace towerd {

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

}  // namespace towerd
