// Rows of bytes in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace towerd {

// The rows of a two-dimensional array: each contiguous, in ascending order.
struct Rows {
    std::uint8_t * data;
    std::size_t    n;
    std::size_t    bytes;   // of one row
    std::size_t    stride;  // from one row to the next, >= bytes unless n <= 1

    std::size_t span() const { return n == 0 || bytes == 0 ? 0 : (n - 1) * stride + bytes; }
};

}  // namespace towerd
