// Rotation of K rows by a position delta.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "isa.h"
#include "rows.h"

namespace towerd {

struct RopeShift {
    Rows                 source;
    Rows                 target;  // same shape
    const Format *       format;  // a cache type
    std::size_t          n_elements;
    Heads                heads;
    const float *        cos;  // lines of n_rot / 2
    const float *        sin;
    const std::int32_t * row_table;       // line of each row, -1: copy; nullptr: all line 0
    std::size_t          hadamard_block;  // 0: rows are not rotated by Hadamard

    std::int32_t line(std::size_t row) const { return row_table == nullptr ? 0 : row_table[row]; }
};

// The first row that moves and has a scale that is not finite; element formats have none.
std::optional<std::size_t> find_bad_row(const RopeShift & shift, std::size_t n_threads);

void rope_shift(const RopeShift & shift, const Isa & isa, std::size_t n_threads);

}  // namespace towerd
