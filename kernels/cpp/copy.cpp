#include "copy.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace towerd {

namespace {

// Rows [row0, row1) of a job; for a job without index and with tight rows also a byte range.
struct Task {
    const CopyJob * job;
    std::size_t     row0;
    std::size_t     row1;
};

void copy_rows(const Task & task) {
    const CopyJob & job = *task.job;
    const Rows &    from = job.source;
    std::uint8_t *  to = job.target + task.row0 * from.bytes;
    if (job.index == nullptr && from.stride == from.bytes) {
        std::memcpy(to, from.data + task.row0 * from.stride, (task.row1 - task.row0) * from.bytes);
        return;
    }
    for (std::size_t row = task.row0; row < task.row1; ++row, to += from.bytes) {
        const std::size_t at = job.index == nullptr ? row : static_cast<std::size_t>(job.index[row]);
        std::memcpy(to, from.data + at * from.stride, from.bytes);
    }
}

}  // namespace

void run_copies(const std::vector<CopyJob> & jobs, std::size_t n_threads) {
    std::size_t       total = 0;
    std::vector<Task> tasks;
    for (const CopyJob & job : jobs) {
        if (job.bytes() == 0) {
            continue;
        }
        total += job.bytes();
        const std::size_t step = std::max<std::size_t>(1, kTaskBytes / job.source.bytes);
        for (std::size_t row = 0; row < job.n_rows; row += step) {
            tasks.push_back({&job, row, std::min(job.n_rows, row + step)});
        }
    }
    const auto run = [&](std::size_t i, std::size_t) { copy_rows(tasks[i]); };
    parallel_for(tasks.size(), useful_threads(n_threads, total), run);
}

}  // namespace towerd
