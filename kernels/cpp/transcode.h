// Rows from one format into another, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace towerd {

// Writes `source`'s rows (all, or those that `index` names, in its order) to `target`, one after the other.
struct TranscodeJob {
    std::uint8_t *       target;
    Rows                 source;
    const std::int64_t * index;   // nullptr: rows 0 to n_rows-1
    std::size_t          n_rows;  // rows to write
    const Format *       from;
    const Format *       to;
    std::size_t          n_elements;  // of one row

    std::size_t target_bytes() const { return to->bytes(n_elements); }  // of one row
    std::size_t target_span() const { return n_rows * target_bytes(); }
    std::size_t row_at(std::size_t i) const { return index == nullptr ? i : static_cast<std::size_t>(index[i]); }
};

// A row that a quantized format cannot hold: it has a NaN, an infinity, or more than +-65504 as the codec sees it
// (after a Hadamard rotation that is sqrt(block) less at worst).
struct BadRow {
    std::size_t row;  // of the job's source
    float       peak;
    float       limit;
};

// Whether rows must be checked before they are encoded: a quantized format holds no number beyond a limit.
bool can_fail(const Format & from, const Format & to);

// Writes the rows of all jobs, none of which can fail. `is_new`: the target's memory has never been touched.
void transcode(const std::vector<TranscodeJob> & jobs, const Isa & isa, std::size_t n_threads, bool is_new = false);

// Writes the rows of a job to new memory and checks them on the way. Returns the first bad row; the contents of the
// memory are undefined then.
std::optional<BadRow> transcode_checked(const TranscodeJob & job, const Isa & isa, std::size_t n_threads);

}  // namespace towerd
