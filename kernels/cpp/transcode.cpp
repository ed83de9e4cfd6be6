#include "transcode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "parallel.h"

namespace towerd {

namespace {

constexpr std::size_t kRun = 1024;  // elements in hand: 4 KiB of f32 stay in L1; whole Hadamard blocks
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

const std::uint8_t * source_row(const TranscodeJob & job, std::size_t i) {
    return job.source.data + job.row_at(i) * job.source.stride;
}

void copy_rows(const Task & task) {
    const TranscodeJob & job = *task.job;
    for (std::size_t i = task.row0; i < task.row1; ++i) {
        std::memcpy(job.target + i * job.source.bytes, source_row(job, i), job.source.bytes);
    }
}

// Both sides rotated: the rotations cancel, so neither is done.
bool rotates(const Format & format, const Format & other) { return format.hadamard && !other.hadamard; }

void convert_rows(const Task & task, const Isa & isa) {
    const TranscodeJob & job = *task.job;
    const Codec &        from = isa.codecs[job.from->codec];
    const Codec &        to = isa.codecs[job.to->codec];
    const std::size_t    before = rotates(*job.from, *job.to) ? hadamard_block(*job.from, job.n_elements) : 0;
    const std::size_t    after = rotates(*job.to, *job.from) ? hadamard_block(*job.to, job.n_elements) : 0;
    const std::size_t    block = before + after;  // at most one of them
    alignas(64) float    numbers[kRun];
    for (std::size_t i = task.row0; i < task.row1; ++i) {
        const std::uint8_t * read = source_row(job, i);
        std::uint8_t *       write = job.target + i * job.target_bytes();
        for (std::size_t done = 0; done < job.n_elements; done += kRun) {
            const std::size_t n = std::min(kRun, job.n_elements - done);
            from.decode(read + job.from->bytes(done), numbers, n);
            if (block != 0) {
                isa.hadamard(numbers, n, block);
            }
            to.encode(numbers, write + job.to->bytes(done), n);
        }
    }
}

// The largest magnitude that is about to be quantized, before a Hadamard rotation of the target.
float peak_of_row(const TranscodeJob & job, const std::uint8_t * row, const Isa & isa) {
    if (!job.from->quantized()) {
        return isa.peak[job.from->codec](row, job.n_elements);
    }
    alignas(64) float numbers[kRun];
    float             peak = 0.0f;
    for (std::size_t done = 0; done < job.n_elements; done += kRun) {
        const std::size_t n = std::min(kRun, job.n_elements - done);
        isa.codecs[job.from->codec].decode(row + job.from->bytes(done), numbers, n);
        if (rotates(*job.from, *job.to)) {
            isa.hadamard(numbers, n, hadamard_block(*job.from, job.n_elements));
        }
        peak = std::max(peak, isa.peak[kF32](reinterpret_cast<const std::uint8_t *>(numbers), n));
    }
    return peak;
}

float limit_of(const TranscodeJob & job) {
    const std::size_t block = rotates(*job.to, *job.from) ? hadamard_block(*job.to, job.n_elements) : 1;
    return kF16Max / std::sqrt(static_cast<float>(block));
}

}  // namespace

std::optional<BadRow> find_bad_row(const std::vector<TranscodeJob> & jobs, const Isa & isa, std::size_t n_threads) {
    const std::vector<Task>            tasks = tasks_of(jobs);
    std::vector<std::optional<BadRow>> found(tasks.size());
    parallel_for(tasks.size(), useful_threads(n_threads, total_bytes(jobs)), [&](std::size_t t, std::size_t) {
        const TranscodeJob & job = *tasks[t].job;
        if (!job.to->quantized() || job.from == job.to) {
            return;
        }
        const float limit = limit_of(job);
        for (std::size_t i = tasks[t].row0; i < tasks[t].row1; ++i) {
            const float peak = peak_of_row(job, source_row(job, i), isa);
            if (!(peak <= limit)) {
                found[t] = {static_cast<std::size_t>(&job - jobs.data()), job.row_at(i), peak, limit};
                return;
            }
        }
    });
    const auto first = std::find_if(found.begin(), found.end(), [](const auto & bad) { return bad.has_value(); });
    return first == found.end() ? std::nullopt : *first;
}

void transcode(const std::vector<TranscodeJob> & jobs, const Isa & isa, std::size_t n_threads) {
    const std::vector<Task> tasks = tasks_of(jobs);
    parallel_for(tasks.size(), useful_threads(n_threads, total_bytes(jobs)), [&](std::size_t t, std::size_t) {
        if (tasks[t].job->from == tasks[t].job->to) {
            copy_rows(tasks[t]);
        } else {
            convert_rows(tasks[t], isa);
        }
    });
}

}  // namespace towerd
