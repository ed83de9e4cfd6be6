#include "transpose.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace towerd {

namespace {

constexpr std::size_t kTile = 32;         // 32 x 32 elements of source and target stay in L1
constexpr std::size_t kTaskColumns = 64;  // target rows that one task writes

// memcpy of a constant size: rows have no alignment, and the compiler turns it into one move.
template <typename Element>
void transpose_tile(const Rows & source, const Rows & target, std::size_t row0, std::size_t row1,
                    std::size_t column0, std::size_t column1) {
    for (std::size_t column = column0; column < column1; ++column) {
        const std::uint8_t * from = source.data + row0 * source.stride + column * sizeof(Element);
        std::uint8_t *       to = target.data + column * target.stride + row0 * sizeof(Element);
        for (std::size_t row = row0; row < row1; ++row, from += source.stride, to += sizeof(Element)) {
            std::memcpy(to, from, sizeof(Element));
        }
    }
}

template <typename Element>
void transpose_all(const Rows & source, const Rows & target, std::size_t n_threads) {
    const std::size_t n_rows = source.n;
    const std::size_t n_columns = target.n;
    const std::size_t n_tasks = (n_columns + kTaskColumns - 1) / kTaskColumns;
    const auto        task = [&](std::size_t i) {
        const std::size_t end = std::min(n_columns, (i + 1) * kTaskColumns);
        for (std::size_t row = 0; row < n_rows; row += kTile) {
            for (std::size_t column = i * kTaskColumns; column < end; column += kTile) {
                transpose_tile<Element>(source, target, row, std::min(n_rows, row + kTile), column,
                                        std::min(end, column + kTile));
            }
        }
    };
    parallel_for(n_tasks, useful_threads(n_threads, n_rows * source.bytes), task);
}

}  // namespace

void transpose(const Rows & source, const Rows & target, std::size_t element_bytes, std::size_t n_threads) {
    switch (element_bytes) {
        case 1: transpose_all<std::uint8_t>(source, target, n_threads); break;
        case 2: transpose_all<std::uint16_t>(source, target, n_threads); break;
        default: transpose_all<std::uint32_t>(source, target, n_threads); break;
    }
}

}  // namespace towerd
