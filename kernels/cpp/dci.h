// Multi-level prioritized DCI over attention keys. The contract, and why each part is there, is in
// lab/reference/dci.py; both must agree point by point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dci_points.h"
#include "isa.h"

namespace towerd {

// Pages: keys of one leaf that lie near each other, at most `page_rows` of them.
class DciPages {
  public:
    using Choices = std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>>;  // key, pages

    explicit DciPages(std::size_t rows_max) : rows_max_(rows_max) {}

    std::size_t  size() const { return pages_.size(); }
    std::int64_t of(std::int64_t id) const { return page_of_[static_cast<std::size_t>(id)]; }
    const std::vector<std::int64_t> & of_each() const { return page_of_; }

    void grow(std::size_t n_keys) { page_of_.resize(n_keys, -1); }  // keys without a page
    void open(std::int64_t id);                                     // a page of its own
    void lay(const DciPoints & points, std::vector<std::int64_t> & leaf, std::int64_t id);
    void settle(const DciPoints & points, const Choices & choices);

  private:
    struct Page {
        std::int64_t              pivot = -1;  // a key joins the page of its leaf with the nearest pivot
        std::vector<std::int64_t> members;
    };

    std::int64_t split(const DciPoints & points, std::int64_t page);
    void         move(std::int64_t id, std::int64_t page);

    std::size_t               rows_max_;
    std::vector<Page>         pages_;
    std::vector<std::int64_t> page_of_;
};

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
    DciTree(const DciOptions & options, const std::vector<float> & directions, const DciLimits & building,
            const Isa & isa);

    void add(const float * keys, std::size_t n);  // [n, n_dims], finite and at most kDciKeyMax long

    // The k nearest points by falling inner product with `query` [n_dims]; fewer if there are fewer.
    std::vector<std::int64_t> search(const float * query, std::size_t k, const DciLimits & limits) const;

    // Of all keys in the pages of the k nearest ones, those that are `there` [size]; each query [n_queries, n_dims]
    // spreads a softmax over them and `others` [n_others, n_dims].
    DciVotes vote(const float * queries, std::size_t n_queries, std::size_t k, const DciLimits & limits,
                  const float * others, std::size_t n_others, const std::uint8_t * there) const;

    const float * key(std::int64_t id) const { return points_.key(id); }
    std::size_t size() const { return level_.size(); }
    std::size_t n_dims() const { return options_.n_dims; }
    std::size_t n_pages() const { return pages_.size(); }
    std::size_t n_levels() const { return n_levels_; }
    const std::vector<std::int32_t> & levels() const { return level_; }
    const std::vector<std::int64_t> & parents() const { return parent_; }
    const std::vector<std::int64_t> & pages() const { return pages_.of_each(); }

  private:
    using Line = std::vector<std::pair<float, std::int64_t>>;  // points of a node along a direction
    struct Node {
        std::int64_t              owner = -1;  // -1: the root
        std::vector<std::int64_t> members;
        std::vector<Line>         lines;
        std::vector<std::int64_t> pages;  // of the keys of this leaf
    };

    int                       drawn_level(std::size_t id) const;
    void                      close_gaps();
    void                      sort_lines();
    DciPages::Choices         insert_from(std::size_t first);
    std::vector<std::int64_t> insert(std::int64_t id);
    std::vector<std::int64_t> pages_of(std::int64_t leaf) const;
    void                      raise(std::int64_t id);
    void                      open_node(std::int64_t owner);
    std::size_t               node_of(std::int64_t id);
    void                      join(std::size_t node, std::int64_t id);
    void visit(const Node & node, const DciQuery & query, std::size_t wanted, std::size_t visits,
               std::vector<DciScored> & to) const;
    std::vector<DciScored> visit_nearest(const Node & node, const DciQuery & query, std::size_t wanted,
                                         std::size_t visits) const;
    std::vector<DciScored> nearest(const DciQuery & query, std::size_t level, bool all_levels, std::size_t k,
                                   const DciLimits & limits) const;
    std::vector<std::int64_t> hits(const float * queries, std::size_t n_queries, std::size_t k,
                                   const DciLimits & limits, const std::uint8_t * there) const;
    void pack(const std::int64_t * ids, std::size_t n_ids, const float * others, std::size_t n_others,
              std::size_t first, float * panel) const;

    DciOptions                options_;
    DciLimits                 building_;
    DciPoints                 points_;
    DciPages                  pages_;
    std::vector<std::int32_t> level_;
    std::vector<std::int64_t> parent_, own_node_;
    std::vector<Node>         nodes_;
    std::size_t               root_ = 0, n_levels_ = 0;
};

constexpr double kDciKeyMax = 1e15;

}  // namespace towerd
