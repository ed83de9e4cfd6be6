// Which of the keys that a tree finds for queries they attend to.

#include <algorithm>
#include <cmath>

#include "aligned.h"
#include "dci.h"

namespace towerd {

namespace {

constexpr std::size_t kQueriesAtOnce = 64;  // queries scored at a time: 6 MiB for 24k keys

}  // namespace

// Ids that are `there`, in pages that one of the nearest keys lies in.
std::vector<std::int64_t> DciTree::hits(const float * queries, std::size_t n_queries, std::size_t k,
                                        const DciLimits & limits, const std::uint8_t * there) const {
    std::vector<std::uint8_t> is_hit(n_pages(), 0);
    for (std::size_t i = 0; i < n_queries; ++i) {
        for (const std::int64_t id : search(queries + i * options_.n_dims, k, limits)) {
            is_hit[static_cast<std::size_t>(pages_.of(id))] = 1;
        }
    }
    std::vector<std::int64_t> ids;
    for (std::size_t i = 0; i < size(); ++i) {
        if (there[i] != 0 && is_hit[static_cast<std::size_t>(pages_.of(static_cast<std::int64_t>(i)))] != 0) {
            ids.push_back(static_cast<std::int64_t>(i));
        }
    }
    return ids;
}

// The keys [first, first + kPanel) of `ids` and then `others`, element by element; 0 after the last.
void DciTree::pack(const std::int64_t * ids, std::size_t n_ids, const float * others, std::size_t n_others,
                   std::size_t first, float * panel) const {
    for (std::size_t j = 0; j < kPanel; ++j) {
        const std::size_t at = first + j;
        const float *     row = nullptr;
        if (at < n_ids) {
            row = key(ids[at]);
        } else if (at < n_ids + n_others) {
            row = others + (at - n_ids) * options_.n_dims;
        }
        for (std::size_t d = 0; d < options_.n_dims; ++d) {
            panel[d * kPanel + j] = row == nullptr ? 0.0f : row[d];
        }
    }
}

DciVotes DciTree::vote(const float * queries, std::size_t n_queries, std::size_t k, const DciLimits & limits,
                       const float * others, std::size_t n_others, const std::uint8_t * there) const {
    DciVotes votes{hits(queries, n_queries, k, limits, there), {}};
    const std::size_t n_ids = votes.ids.size();
    votes.shares.assign(n_ids, 0.0f);
    if (n_ids == 0) {
        return votes;
    }
    const std::size_t n_rows = n_ids + n_others;
    const std::size_t stride = (n_rows + kPanel - 1) / kPanel * kPanel;
    const float       scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(options_.n_dims)));
    Floats panel(kPanel * options_.n_dims), scores(std::min(kQueriesAtOnce, n_queries) * stride), shares(stride);
    for (std::size_t done = 0; done < n_queries; done += kQueriesAtOnce) {
        const std::size_t n = std::min(kQueriesAtOnce, n_queries - done);
        const float *     asking = queries + done * options_.n_dims;
        for (std::size_t first = 0; first < n_rows; first += kPanel) {
            pack(votes.ids.data(), n_ids, others, n_others, first, panel.data());
            points_.isa().scores(asking, n, panel.data(), options_.n_dims, scale, scores.data() + first, stride);
        }
        for (std::size_t i = 0; i < n; ++i) {
            std::fill_n(shares.data(), stride, 0.0f);
            points_.isa().add_softmax(scores.data() + i * stride, n_rows, shares.data());
            for (std::size_t j = 0; j < n_ids; ++j) {
                votes.shares[j] = std::max(votes.shares[j], shares.data()[j]);
            }
        }
    }
    return votes;
}

}  // namespace towerd
