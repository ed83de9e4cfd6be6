// Copies of many row sets into one buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rows.h"

namespace towerd {

// Copy `source`'s rows (all of them, or those that `index` names, in its order) to `target`, one after the other.
struct CopyJob {
    std::uint8_t *       target;
    Rows                 source;
    const std::int64_t * index;    // nullptr: rows 0 to n_rows-1
    std::size_t          n_rows;   // rows to write

    std::size_t bytes() const { return n_rows * source.bytes; }
};

void run_copies(const std::vector<CopyJob> & jobs, std::size_t n_threads);

}  // namespace towerd
