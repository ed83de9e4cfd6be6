#include "rope.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "stream.h"

namespace towerd {

namespace {

struct Run {  // of elements of a row
    std::size_t begin;
    std::size_t end;
};

// The runs of whole blocks (of the format and of the Hadamard rotation) that hold rotated elements;
// all others are copied as bytes.
std::vector<Run> touched_runs(const RopeShift & shift) {
    const std::size_t unit = std::max(shift.format->block_elements, shift.hadamard_block);
    std::vector<Run>  runs;
    for (std::size_t head = 0; head < shift.heads.n; ++head) {
        const std::size_t first = head * shift.heads.head_dim + shift.heads.first;
        const std::size_t begin = first / unit * unit;
        const std::size_t end = (first + shift.heads.n_rot + unit - 1) / unit * unit;
        if (!runs.empty() && begin <= runs.back().end) {
            runs.back().end = end;
        } else {
            runs.push_back({begin, end});
        }
    }
    return runs;
}

// A thread's memory: one line of the table as Isa::rotate wants it, and one row of f32 on 64 bytes.
class RowScratch {
public:
    explicit RowScratch(const RopeShift & shift)
        : cos_(shift.heads.n_rot), sin_(shift.heads.n_rot), row_(shift.n_elements) {}

    float * row() { return row_.data(); }

    void rotate(const RopeShift & shift, std::int32_t line, const Isa & isa, CodecId codec, const std::uint8_t * from,
                std::uint8_t * to) {
        const std::size_t half = shift.heads.n_rot / 2;
        const float *     cos = shift.cos + static_cast<std::size_t>(line) * half;
        const float *     sin = shift.sin + static_cast<std::size_t>(line) * half;
        if (shift.heads.neox) {
            isa.rotate[codec](from, to, shift.heads, cos, sin);
            return;
        }
        if (line != line_) {
            for (std::size_t j = 0; j < half; ++j) {
                cos_[2 * j] = cos_[2 * j + 1] = cos[j];
                sin_[2 * j] = -sin[j];
                sin_[2 * j + 1] = sin[j];
            }
            line_ = line;
        }
        isa.rotate[codec](from, to, shift.heads, cos_.data(), sin_.data());
    }

private:
    std::vector<float> cos_;
    std::vector<float> sin_;
    Floats             row_;
    std::int32_t       line_ = -1;
};

// Decode, undo the Hadamard rotation, rotate the pairs, redo the Hadamard rotation, encode.
void shift_blocks(const RopeShift & shift, const std::vector<Run> & runs, std::int32_t line, const Isa & isa,
                  RowScratch & scratch, const std::uint8_t * from, std::uint8_t * to) {
    const Codec & codec = isa.codecs[shift.format->codec];
    float *       row = scratch.row();
    for (const Run & run : runs) {
        const std::size_t n = run.end - run.begin;
        codec.decode(from + shift.format->bytes(run.begin), row + run.begin, n);
        if (shift.hadamard_block != 0) {
            isa.hadamard(row + run.begin, n, shift.hadamard_block);
        }
    }
    auto * bytes = reinterpret_cast<std::uint8_t *>(row);
    scratch.rotate(shift, line, isa, kF32, bytes, bytes);
    std::size_t copied = 0;
    for (const Run & run : runs) {
        const std::size_t n = run.end - run.begin;
        if (shift.hadamard_block != 0) {
            isa.hadamard(row + run.begin, n, shift.hadamard_block);
        }
        const std::size_t begin = shift.format->bytes(run.begin);
        std::memcpy(to + copied, from + copied, begin - copied);
        codec.encode(row + run.begin, to + begin, n);
        copied = shift.format->bytes(run.end);
    }
    std::memcpy(to + copied, from + copied, shift.source.bytes - copied);
}

bool finite_scales(const RopeShift & shift, const std::vector<Run> & runs, const std::uint8_t * row) {
    const Format & format = *shift.format;
    for (const Run & run : runs) {
        for (std::size_t at = format.bytes(run.begin); at < format.bytes(run.end); at += format.block_bytes) {
            for (std::size_t i = 0; i < format.scales; ++i) {
                std::uint16_t raw = 0;
                std::memcpy(&raw, row + at + 2 * i, sizeof raw);
                if ((raw & 0x7c00u) == 0x7c00u) {
                    return false;
                }
            }
        }
    }
    return true;
}

std::size_t rows_per_task(std::size_t row_bytes) {
    return std::max<std::size_t>(1, kTaskBytes / std::max<std::size_t>(1, row_bytes));
}

std::size_t n_tasks(std::size_t n_rows, std::size_t step) { return (n_rows + step - 1) / step; }

}  // namespace

std::optional<std::size_t> find_bad_row(const RopeShift & shift, std::size_t n_threads) {
    if (!shift.format->quantized()) {
        return std::nullopt;
    }
    const std::vector<Run>   runs = touched_runs(shift);
    const std::size_t        step = rows_per_task(shift.source.bytes);
    const std::size_t        none = shift.source.n;
    std::vector<std::size_t> found(n_tasks(shift.source.n, step), none);
    parallel_for(found.size(), useful_threads(n_threads, shift.source.span()), [&](std::size_t t, std::size_t) {
        for (std::size_t row = t * step; row < std::min(none, (t + 1) * step); ++row) {
            if (shift.line(row) >= 0 && !finite_scales(shift, runs, shift.source.data + row * shift.source.stride)) {
                found[t] = row;
                return;
            }
        }
    });
    const auto first = std::find_if(found.begin(), found.end(), [&](std::size_t row) { return row != none; });
    return first == found.end() ? std::nullopt : std::optional(*first);
}

void rope_shift(const RopeShift & shift, const Isa & isa, std::size_t n_threads) {
    const std::size_t    n = shift.source.n;
    const std::size_t    step = rows_per_task(shift.source.bytes);
    const std::size_t    threads = std::min(useful_threads(n_threads, shift.source.span()), n_tasks(n, step));
    const bool           direct = !shift.format->quantized() && shift.hadamard_block == 0;
    const auto           runs = direct ? std::vector<Run>{} : touched_runs(shift);
    const bool           streams = should_stream(isa, n * shift.target.bytes);
    std::vector<RowScratch> scratch(std::max<std::size_t>(1, threads), RowScratch(shift));
    parallel_for(n_tasks(n, step), threads, [&](std::size_t t, std::size_t worker) {
        Stage stage(isa, streams);
        for (std::size_t row = t * step; row < std::min(n, (t + 1) * step); ++row) {
            const std::uint8_t * from = shift.source.data + row * shift.source.stride;
            std::uint8_t *       to = stage.place(shift.target.data + row * shift.target.stride, shift.target.bytes);
            const std::int32_t   line = shift.line(row);
            if (line < 0) {
                std::memcpy(to, from, shift.source.bytes);
            } else if (direct) {
                scratch[worker].rotate(shift, line, isa, shift.format->codec, from, to);
            } else {
                shift_blocks(shift, runs, line, isa, scratch[worker], from, to);
            }
        }
    });
}

}  // namespace towerd
