#include "transcode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "parallel.h"
#include "stream.h"

namespace towerd {

namespace {

constexpr std::size_t kRun = 1024;  // elements at a time: 4 KiB of f32 stay in L1; whole Hadamard blocks
constexpr float       kF16Max = 65504.0f;

struct Task {
    const TranscodeJob * job;
    std::size_t          row0;
    std::size_t          row1;
};

std::vector<Task> tasks_of(const std::vector<TranscodeJob> & jobs) {
    std::vector<Task> tasks;
    for (const TranscodeJob & job : jobs) {
        const std::size_t row_bytes = std::max<std::size_t>(1, std::max(job.source.bytes, job.target_bytes()));
        const std::size_t step = std::max<std::size_t>(1, kTaskBytes / row_bytes);
        for (std::size_t row = 0; row < job.n_rows; row += step) {
            tasks.push_back({&job, row, std::min(job.n_rows, row + step)});
        }
    }
    return tasks;
}

std::size_t total_bytes(const std::vector<TranscodeJob> & jobs) {
    std::size_t total = 0;
    for (const TranscodeJob & job : jobs) {
        total += std::max(job.target_span(), job.n_rows * job.source.bytes);
    }
    return total;
}

std::size_t bytes_to_write(const std::vector<TranscodeJob> & jobs) {
    std::size_t total = 0;
    for (const TranscodeJob & job : jobs) {
        total += job.target_span();
    }
    return total;
}

const std::uint8_t * source_row(const TranscodeJob & job, std::size_t i) {
    return job.source.data + job.row_at(i) * job.source.stride;
}

void copy_rows(const Task & task, Stage & stage) {
    const TranscodeJob & job = *task.job;
    const std::size_t    n = job.source.bytes;
    for (std::size_t i = task.row0; i < task.row1; ++i) {
        std::memcpy(stage.place(job.target + i * n, n), source_row(job, i), n);
    }
}

// Both sides rotated: the rotations cancel, so neither is done.
bool rotates(const Format & format, const Format & other) { return format.hadamard && !other.hadamard; }

// The steps of one job between decode and encode.
struct Steps {
    std::size_t before;  // Hadamard block to rotate back by, 0: none
    std::size_t after;   // and to rotate by
    float       limit;   // of the numbers before that
};

Steps steps_of(const TranscodeJob & job) {
    Steps steps{};
    steps.before = rotates(*job.from, *job.to) ? hadamard_block(*job.from, job.n_elements) : 0;
    steps.after = rotates(*job.to, *job.from) ? hadamard_block(*job.to, job.n_elements) : 0;
    steps.limit = kF16Max / std::sqrt(static_cast<float>(std::max<std::size_t>(1, steps.after)));
    return steps;
}

// f32 that can be encoded in place.
const float * floats_at(const TranscodeJob & job, const std::uint8_t * read) {
    const bool ready = job.from->codec == kF32 && !job.to->hadamard;
    return ready && reinterpret_cast<std::uintptr_t>(read) % alignof(float) == 0
               ? reinterpret_cast<const float *>(read)
               : nullptr;
}

// Returns the largest magnitude of what was quantized, before a rotation.
float convert_row(const TranscodeJob & job, const Steps & steps, const Isa & isa, const std::uint8_t * read,
                  std::uint8_t * write, Stage & stage) {
    const Codec &     to = isa.codecs[job.to->codec];
    alignas(64) float numbers[kRun];
    if (const float * in_place = floats_at(job, read)) {
        return to.encode(in_place, stage.place(write, job.target_bytes()), job.n_elements);
    }
    float peak = 0.0f;
    for (std::size_t done = 0; done < job.n_elements; done += kRun) {
        const std::size_t n = std::min(kRun, job.n_elements - done);
        isa.codecs[job.from->codec].decode(read + job.from->bytes(done), numbers, n);
        if (steps.before != 0) {
            isa.hadamard(numbers, n, steps.before);
        }
        if (steps.after != 0) {
            peak = std::max(peak, isa.peak(numbers, n));
            isa.hadamard(numbers, n, steps.after);
        }
        std::uint8_t * at = stage.place(write + job.to->bytes(done), job.to->bytes(n));
        const float    encoded = to.encode(numbers, at, n);
        peak = steps.after != 0 ? peak : std::max(peak, encoded);
    }
    return peak;
}

// Stops at the first row beyond the limit; rows of element formats have no limit.
std::optional<BadRow> convert_rows(const Task & task, const Isa & isa, Stage & stage) {
    const TranscodeJob & job = *task.job;
    const Steps          steps = steps_of(job);
    for (std::size_t i = task.row0; i < task.row1; ++i) {
        const float peak = convert_row(job, steps, isa, source_row(job, i), job.target + i * job.target_bytes(), stage);
        if (!(peak <= steps.limit)) {
            return BadRow{job.row_at(i), peak, steps.limit};
        }
    }
    return std::nullopt;
}

}  // namespace

bool can_fail(const Format & from, const Format & to) { return to.quantized() && &from != &to; }

void transcode(const std::vector<TranscodeJob> & jobs, const Isa & isa, std::size_t n_threads, bool is_new) {
    const std::vector<Task> tasks = tasks_of(jobs);
    const bool              streams = !is_new && should_stream(isa, bytes_to_write(jobs));
    parallel_for(tasks.size(), useful_threads(n_threads, total_bytes(jobs)), [&](std::size_t t, std::size_t) {
        Stage stage(isa, streams);
        if (tasks[t].job->from == tasks[t].job->to) {
            copy_rows(tasks[t], stage);
        } else {
            convert_rows(tasks[t], isa, stage);
        }
    });
}

std::optional<BadRow> transcode_checked(const TranscodeJob & job, const Isa & isa, std::size_t n_threads) {
    const std::vector<TranscodeJob> jobs{job};
    if (!can_fail(*job.from, *job.to)) {
        transcode(jobs, isa, n_threads, true);
        return std::nullopt;
    }
    const std::vector<Task>            tasks = tasks_of(jobs);
    std::vector<std::optional<BadRow>> found(tasks.size());
    parallel_for(tasks.size(), useful_threads(n_threads, total_bytes(jobs)), [&](std::size_t t, std::size_t) {
        Stage stage(isa, false);
        found[t] = convert_rows(tasks[t], isa, stage);
    });
    const auto first = std::find_if(found.begin(), found.end(), [](const auto & bad) { return bad.has_value(); });
    return first == found.end() ? std::nullopt : *first;
}

}  // namespace towerd
