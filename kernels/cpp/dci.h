// Multi-level prioritized DCI over attention keys. The contract, and why each part is there, is in
// kernels/reference/dci.py; both must agree point by point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"

namespace towerd {

struct DciOptions {
    std::size_t   n_dims     = 0;  // of a key
    double        ratio      = 0;  // of points that are promoted to the next level
    std::uint64_t seed       = 0;
    std::size_t   page_rows  = 0;
};

struct DciLimits {
    std::size_t visits = 0;  // points of a node whose distance is computed; 0: all
    std::size_t beam   = 0;  // nodes of a level that are entered; 0: all
};

// The keys that some queries attend to.
struct DciVotes {
    std::vector<std::int64_t> ids;     // ascending
    std::vector<float>        shares;  // for each id, the largest share that any query gives it
};

class DciTree {
  public:
    // directions: [n_directions, n_dims + 1], each of length 1; isa must outlive the tree.
    DciTree(const DciOptions & options, std::vector<float> directions, const DciLimits & building, const Isa & isa);

    void add(const float * keys, std::size_t n);  // [n, n_dims], finite and at most kDciKeyMax long

    // The k nearest points by falling inner product with `query` [n_dims]; fewer if there are fewer.
    std::vector<std::int64_t> search(const float * query, std::size_t k, const DciLimits & limits) const;

    // Of all keys in the pages of the k nearest ones, those that are `there` [size]; each query [n_queries, n_dims]
    // spreads a softmax over them and `others` [n_others, n_dims].
    DciVotes vote(const float * queries, std::size_t n_queries, std::size_t k, const DciLimits & limits,
                  const float * others, std::size_t n_others, const std::uint8_t * there) const;

    const float * key(std::int64_t id) const { return keys_.data() + static_cast<std::size_t>(id) * padded_; }
    std::size_t size() const { return level_.size(); }
    std::size_t n_dims() const { return options_.n_dims; }
    std::size_t n_pages() const { return pages_.size(); }
    std::size_t n_levels() const { return n_levels_; }
    const std::vector<std::int32_t> & levels() const { return level_; }
    const std::vector<std::int64_t> & parents() const { return parent_; }
    const std::vector<std::int64_t> & pages() const { return page_; }
    std::string broken() const;  // what is wrong with the tree; empty if nothing is

  private:
    struct Query {
        std::vector<float> vector;       // [padded], scaled so that its product with a key is a cosine
        float              last = 0;     // the coordinate that makes a key as long as all others
        std::vector<float> projections;  // [n_directions]
    };
    struct Scored {
        float        score;
        std::int64_t id;
        bool operator<(const Scored & other) const {  // better first
            return score != other.score ? score > other.score : id < other.id;
        }
    };
    using Line = std::vector<std::pair<float, std::int64_t>>;  // points of a node along a direction
    struct Node {
        std::int64_t              owner = -1;  // -1: the root
        std::vector<std::int64_t> members;
        std::vector<Line>         lines;
        std::vector<std::int64_t> pages;  // of the keys of this leaf
    };
    struct Mean {  // of a page's points
        Query query;
        float half = 0;  // the square of its length
    };
    struct Page {
        std::int64_t              pivot = -1;  // a key joins the page of its leaf with the nearest pivot
        std::vector<std::int64_t> members;
    };

    void   score(const Query & query, const std::int64_t * ids, std::size_t n, std::vector<Scored> & to) const;
    std::vector<std::int64_t> hits(const float * queries, std::size_t n_queries, std::size_t k,
                                   const DciLimits & limits, const std::uint8_t * there) const;
    void   pack(const std::int64_t * ids, std::size_t n_ids, const float * others, std::size_t n_others,
                std::size_t first, float * panel) const;
    double square(const float * values) const;
    float  last_of(double square) const;
    float  projected(const float * raw, std::size_t direction, float last) const;
    Query  as_query(const float * values) const;
    Query  as_point(std::int64_t id) const;
    Mean   mean_of(const Page & page) const;
    int    drawn_level(std::size_t id) const;
    void   widen(double longest);
    void   store(const float * values);
    std::vector<std::int64_t> insert(std::int64_t id);
    void   settle(const std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> & near);
    std::vector<std::int64_t> pages_of(std::int64_t leaf) const;
    void   raise(std::int64_t id);
    void   join(std::size_t node, std::int64_t id);
    std::int64_t open_page(std::int64_t id);
    void   lay(std::size_t node, std::int64_t id);
    std::int64_t split_page(std::int64_t page);
    std::string broken_pages() const;
    std::size_t node_of(std::int64_t id);
    void   visit(const Node & node, const Query & query, std::size_t wanted, std::size_t visits,
                 std::vector<Scored> & to) const;
    std::vector<Scored> visit_nearest(const Node & node, const Query & query, std::size_t wanted,
                                      std::size_t visits) const;
    std::vector<Scored> nearest(const Query & query, std::size_t level, bool all_levels, std::size_t k,
                                const DciLimits & limits) const;

    DciOptions         options_;
    DciLimits          building_;
    const Isa *        isa_;
    std::size_t        padded_, n_directions_;
    std::vector<float> directions_;  // [n_directions, padded] and the last coordinates
    std::vector<float> direction_last_;
    double             scale_ = 0;  // at least the length of the longest key

    std::vector<float>        keys_;  // [n, padded]
    std::vector<double>       square_;
    std::vector<float>        last_;
    std::vector<float>        raw_, projection_;  // [n, n_directions]
    std::vector<std::int32_t> level_;
    std::vector<std::int64_t> parent_, page_, own_node_;
    std::vector<Page>         pages_;
    std::vector<Node>         nodes_;
    std::size_t               root_ = 0, n_levels_ = 0;
};

constexpr double kDciKeyMax = 1e15;

}  // namespace towerd
