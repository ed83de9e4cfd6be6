// Attention keys as points of length 1, so that the nearest point to a query is the key with the largest inner
// product. When a key longer than all before comes, the scale grows and all points move.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

namespace towerd {

struct DciQuery {
    std::vector<float> vector;       // [padded], scaled so that its product with a key is a cosine
    float              last = 0;     // the coordinate that makes a key as long as all others
    std::vector<float> projections;  // [n_directions]
};

struct DciMean {  // of some points
    DciQuery query;
    float    half = 0;  // the square of its length
};

struct DciScored {
    float        score;
    std::int64_t id;
    bool operator<(const DciScored & other) const {  // better first
        return score != other.score ? score > other.score : id < other.id;
    }
};

class DciPoints {
  public:
    // directions: [n_directions, n_dims + 1], each of length 1; isa must outlive the points.
    DciPoints(std::size_t n_dims, const std::vector<float> & directions, const Isa & isa);

    bool make_room(const float * keys, std::size_t n);  // before `add` of these; true: all points moved
    void add(const float * values);                     // one key [n_dims]

    DciQuery as_query(const float * values) const;
    DciQuery as_point(std::int64_t id) const;
    DciMean  mean_of(const std::vector<std::int64_t> & ids) const;
    float    nearness(std::int64_t id, const DciMean & mean) const;  // larger is nearer

    std::size_t   size() const { return square_.size(); }
    std::size_t   n_dims() const { return n_dims_; }
    std::size_t   n_directions() const { return n_directions_; }
    const Isa &   isa() const { return *isa_; }
    const float * key(std::int64_t id) const { return keys_.data() + static_cast<std::size_t>(id) * padded_; }
    float         projection(std::int64_t id, std::size_t direction) const {
        return projection_[static_cast<std::size_t>(id) * n_directions_ + direction];
    }

    // Appends `ids` with their scores. Inline, because a search calls it for each candidate.
    void score(const DciQuery & query, const std::int64_t * ids, std::size_t n, std::vector<DciScored> & to) const {
        constexpr std::size_t kAtOnce = 64;
        float                 products[kAtOnce];
        for (std::size_t done = 0; done < n; done += kAtOnce) {
            const std::size_t some = std::min(kAtOnce, n - done);
            isa_->dots(query.vector.data(), keys_.data(), ids + done, some, padded_, products);
            for (std::size_t i = 0; i < some; ++i) {
                const std::int64_t id = ids[done + i];
                to.push_back({products[i] + query.last * last_[static_cast<std::size_t>(id)], id});
            }
        }
    }

  private:
    double square(const float * values) const;
    float  last_of(double square) const;
    float  projected(const float * raw, std::size_t direction, float last) const;

    std::size_t        n_dims_;
    const Isa *        isa_;
    std::size_t        padded_, n_directions_;
    std::vector<float> directions_;  // [n_directions, padded] and the last coordinates
    std::vector<float> direction_last_;
    double             scale_ = 0;  // at least the length of the longest key

    std::vector<float>  keys_;  // [n, padded]
    std::vector<double> square_;
    std::vector<float>  last_;
    std::vector<float>  raw_, projection_;  // [n, n_directions]
};

}  // namespace towerd
