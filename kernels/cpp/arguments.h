// Checks of single Python arguments; all throw ValueError with the argument's name first.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "view.h"

namespace towerd {

constexpr const char * kBytes = "B";
constexpr const char * kInt32 = "il";
constexpr const char * kInt64 = "lq";
constexpr const char * kFloat = "f";

std::size_t count_of(nb::handle value, const std::string & name, long long low, long long high);
std::size_t threads_of(nb::handle value);
bool        flag_of(nb::handle value, const std::string & name);
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

}  // namespace towerd
