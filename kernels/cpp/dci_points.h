// Attention keys as points of length 1, so that the nearest point to a query is the key with the largest inner
// product. When a key longer than all before comes, the scale grows and all points move. Keys are read where they
// lie; only those that others hang below, one in 1 / ratio, are copied, because they are met by every search and
// show the way even when their row is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dci_keys.h"
#include "isa.h"

namespace towerd {

using DciId = std::int32_t;

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
    float score;
    DciId id;
    bool operator<(const DciScored & other) const {  // better first
        return score != other.score ? score > other.score : id < other.id;
    }
};

class DciPoints {
  public:
    // directions: [n_directions, n_dims + 1], each of length 1; isa must outlive the points.
    DciPoints(std::size_t n_dims, const std::vector<float> & directions, const Isa & isa);

    bool make_room(const DciKeys & keys);  // for the keys behind those that are there; true: all points moved
    void add(const DciKeys & keys);        // those behind the ones that are there
    void promote(const DciKeys & keys, DciId id);

    DciQuery as_query(const float * values) const;
    DciQuery as_point(const DciKeys & keys, DciId id) const;  // without projections
    DciMean  mean_of(const DciKeys & keys, const std::vector<DciId> & ids) const;
    float    nearness(const float * key, DciId id, const DciMean & mean) const;  // larger is nearer; key: [padded]
    void     project(const DciKeys & keys, DciId id, float * to) const;     // [n_directions]
    void     read(const DciKeys & keys, DciId id, float * to) const;        // [padded], zeros behind the key

    // Appends `ids` with their scores.
    void score(const DciKeys & keys, const DciQuery & query, const DciId * ids, std::size_t n,
               std::vector<DciScored> & to) const;

    std::size_t size() const { return last_.size(); }
    std::size_t n_dims() const { return n_dims_; }
    std::size_t padded() const { return padded_; }
    std::size_t n_directions() const { return n_directions_; }
    std::size_t nbytes() const;
    const Isa & isa() const { return *isa_; }

    // Which promoted key it is, from 0 on; -1: it was not promoted.
    DciId upper(DciId id) const { return upper_[static_cast<std::size_t>(id)]; }

  private:
    bool is_present(const DciKeys & keys, std::size_t id) const { return upper_[id] >= 0 || keys.has(id); }
    void dots(const DciKeys & keys, const DciQuery & query, const DciId * ids, std::size_t n, float * to) const;
    void set_last(const float * values, std::size_t id);

    std::size_t        n_dims_;
    const Isa *        isa_;
    std::size_t        padded_, n_directions_;
    std::vector<float> directions_;  // [n_directions, padded] and the last coordinates
    std::vector<float> direction_last_;
    double             scale_ = 0;  // at least the length of the longest key

    std::vector<float> last_;        // [n]
    std::vector<DciId> upper_;       // [n]
    std::vector<float> upper_keys_;  // [promoted, padded]
};

// Makes room for `n` elements with a little to spare: an index is as large as a part of what it indexes.
template <typename T> void reserve_for(std::vector<T> & values, std::size_t n) {
    if (n > values.capacity()) {
        values.reserve(n + n / 16);
    }
}

}  // namespace towerd
