#include "attention.h"

#include <algorithm>
#include <vector>

#include "rows.h"
#include "parallel.h"

namespace towerd {

namespace {

constexpr std::size_t kTile = 16;      // query rows scored at a time: 1 MiB at 16k keys stays in L2
constexpr std::size_t kTasksMax = 16;  // of one KV head; each has its own masses

const float * query_row(const AttentionMass & job, std::size_t i) {
    return reinterpret_cast<const float *>(job.queries.data + i * job.queries.stride);
}

// The first row whose numbers are not all finite.
std::optional<std::size_t> first_bad(const Rows & rows, const Format & format, const Isa & isa) {
    alignas(64) float numbers[kHeadDimMax];
    const std::size_t n_elements = rows.bytes / format.block_bytes * format.block_elements;
    for (std::size_t i = 0; i < rows.n; ++i) {
        for (std::size_t done = 0; done < n_elements; done += kHeadDimMax) {
            const std::size_t n = std::min(kHeadDimMax, n_elements - done);
            isa.codecs[format.codec].decode(rows.data + i * rows.stride + format.bytes(done), numbers, n);
            if (!(isa.peak(numbers, n) < __builtin_inff())) {
                return i;
            }
        }
    }
    return std::nullopt;
}

// One KV head's part of the work.
class Head {
public:
    Head(const AttentionMass & job, const Isa & isa, std::size_t n_threads)
        : job_(job),
          isa_(isa),
          n_panels_(job.keys.n / kPanel + 1),  // with room for a sink behind the keys
          n_rows_(job.queries.n * group()),
          n_tasks_(std::min(kTasksMax, (n_rows_ + kTile - 1) / kTile)),
          n_threads_(useful_threads(n_threads, n_rows_ * job.keys.n * sizeof(float))),
          panels_(n_padded() * job.head_dim),
          masses_(n_tasks_ * n_padded()),
          scratch_(n_threads_, Floats(kTile * (n_padded() + job.head_dim))) {}

    // Writes the masses that the queries of KV head `kv` give.
    std::optional<BadAttention::What> measure(std::size_t kv, float * to) {
        std::vector<char> failed(std::max(n_panels_, n_tasks_), 0);
        parallel_for(n_panels_, n_threads_, [&](std::size_t p, std::size_t) { failed[p] = !pack(kv, p); });
        if (std::count(failed.begin(), failed.end(), 1) != 0) {
            return BadAttention::What::kKey;
        }
        parallel_for(n_tasks_, n_threads_, [&](std::size_t t, std::size_t worker) { failed[t] = !run(kv, t, worker); });
        if (std::count(failed.begin(), failed.end(), 1) != 0) {
            return BadAttention::What::kScore;
        }
        for (std::size_t j = 0; j < job_.keys.n; ++j) {
            double total = 0.0;
            for (std::size_t t = 0; t < n_tasks_; ++t) {
                total += static_cast<double>(masses_.data()[t * n_padded() + j]);
            }
            to[j] = static_cast<float>(total);
        }
        return std::nullopt;
    }

private:
    std::size_t group() const { return job_.n_heads / job_.n_kv_heads; }
    std::size_t n_padded() const { return n_panels_ * kPanel; }
    float *     panel(std::size_t p) { return panels_.data() + p * kPanel * job_.head_dim; }

    // Keys [p * kPanel, ...) as f32, element by element: [head_dim][kPanel]. False if one is not finite.
    bool pack(std::size_t kv, std::size_t p) {
        alignas(64) float numbers[kHeadDimMax];
        const std::size_t first = p * kPanel;
        const std::size_t n = std::min(kPanel, job_.keys.n - first);  // 0 in a panel for a sink alone
        float *           to = panel(p);
        float             peak = 0.0f;
        for (std::size_t j = 0; j < n; ++j) {
            const std::uint8_t * row = job_.keys.data + (first + j) * job_.keys.stride;
            isa_.codecs[job_.format->codec].decode(row + job_.format->bytes(kv * job_.head_dim), numbers, job_.head_dim);
            peak = std::max(peak, isa_.peak(numbers, job_.head_dim));
            for (std::size_t d = 0; d < job_.head_dim; ++d) {
                to[d * kPanel + j] = numbers[d];
            }
        }
        for (std::size_t d = 0; n < kPanel && d < job_.head_dim; ++d) {
            std::fill(to + d * kPanel + n, to + (d + 1) * kPanel, 0.0f);
        }
        return peak < __builtin_inff();
    }

    // The tiles of task t, into its own masses. False if a score is not finite.
    bool run(std::size_t kv, std::size_t t, std::size_t worker) {
        float * masses = masses_.data() + t * n_padded();
        std::fill(masses, masses + n_padded(), 0.0f);
        const std::size_t n_tiles = (n_rows_ + kTile - 1) / kTile;
        for (std::size_t tile = n_tiles * t / n_tasks_; tile < n_tiles * (t + 1) / n_tasks_; ++tile) {
            if (!add_tile(kv, tile * kTile, scratch_[worker].data(), masses)) {
                return false;
            }
        }
        return true;
    }

    // Query rows [row0, ...) of this KV head: row r is head r % group of query r / group.
    bool add_tile(std::size_t kv, std::size_t row0, float * scores, float * masses) {
        const std::size_t n = std::min(kTile, n_rows_ - row0);
        const std::size_t dim = job_.head_dim;
        float *           queries = scores + kTile * n_padded();
        std::size_t       n_seen = 0;
        for (std::size_t r = 0; r < n; ++r) {
            const std::size_t query = (row0 + r) / group();
            const float *     from = query_row(job_, query) + (kv * group() + (row0 + r) % group()) * dim;
            std::copy(from, from + dim, queries + r * dim);
            n_seen = std::max(n_seen, seen(query));
        }
        for (std::size_t first = 0; first < n_seen; first += kPanel) {
            isa_.scores(queries, n, panel(first / kPanel), dim, job_.scale, scores + first, n_padded());
        }
        for (std::size_t r = 0; r < n; ++r) {
            float *           row = scores + r * n_padded();
            const std::size_t query = (row0 + r) / group();
            const std::size_t n_row = seen(query);
            const float       weight = job_.weights == nullptr ? 1.0f : job_.weights[query];
            if (!(isa_.peak(row, n_row) < __builtin_inff())) {
                return false;
            }
            if (job_.sinks == nullptr) {
                isa_.add_softmax(row, n_row, weight, masses);
                continue;
            }
            const float others = masses[n_row];
            row[n_row] = job_.sinks[kv * group() + (row0 + r) % group()];
            isa_.add_softmax(row, n_row + 1, weight, masses);
            masses[n_row] = others;
        }
        return true;
    }

    std::size_t seen(std::size_t query) const { return static_cast<std::size_t>(job_.n_seen[query]); }

    const AttentionMass & job_;
    const Isa &           isa_;
    std::size_t           n_panels_;
    std::size_t           n_rows_;
    std::size_t           n_tasks_;
    std::size_t           n_threads_;
    Floats                panels_;
    Floats                masses_;   // of the tasks
    std::vector<Floats>   scratch_;  // of the workers: scores of a tile, then its queries
};

}  // namespace

std::optional<BadAttention> attention_mass(const AttentionMass & job, const Isa & isa, std::size_t n_threads) {
    static constexpr Format kNumbers{"f32", 0, kF32, 1, sizeof(float), 0, false, true};
    if (const auto row = first_bad(job.queries, kNumbers, isa)) {
        return BadAttention{BadAttention::What::kQuery, *row};
    }
    Head head(job, isa, n_threads);
    for (std::size_t kv = 0; kv < job.n_kv_heads; ++kv) {
        if (const auto what = head.measure(kv, job.mass + kv * job.keys.n)) {
            const bool key = *what == BadAttention::What::kKey;
            return BadAttention{*what, key ? first_bad(job.keys, *job.format, isa).value_or(0) : 0};
        }
    }
    return std::nullopt;
}

}  // namespace towerd
