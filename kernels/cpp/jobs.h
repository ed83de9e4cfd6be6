// What the jobs of copy_planes and transcode have in common: rows to take, and where they go in dst.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "arguments.h"

namespace towerd {

struct JobRows {
    std::size_t          offset;
    Rows                 source;
    const std::int64_t * index;   // nullptr: all
    std::size_t          n_rows;  // to write
};

nb::sequence checked_jobs(nb::handle jobs);

// Reads (offset, rows, index) from the front of a tuple of `length`; its buffers go into `held`,
// which must outlive the work.
JobRows job_rows(nb::handle item, std::size_t length, const std::string & name, const Buffer & dst,
                 std::deque<Buffer> & held);

// Refuses rows that do not fit behind the offset, and a source that lies in dst.
void check_job(const JobRows & job, std::size_t row_bytes, const std::string & name, const Buffer & dst);

}  // namespace towerd
