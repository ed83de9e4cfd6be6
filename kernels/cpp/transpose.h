// Transposition of a matrix of 1, 2 or 4 byte elements.
#pragma once

#include <cstddef>

#include "rows.h"

namespace towerd {

// target[c][r] = source[r][c]; `source` has rows of n_columns * element_bytes bytes.
// The shapes must already have been checked and the memory must not overlap.
void transpose(const Rows & source, const Rows & target, std::size_t element_bytes, std::size_t n_threads);

}  // namespace towerd
