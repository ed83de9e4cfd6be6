// Multi-level prioritized DCI over attention keys. The contract, and why each part is there, is in
// lab/reference/dci.py; both must agree point by point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dci_pages.h"
#include "dci_points.h"
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
    std::vector<DciId> ids;     // ascending
    std::vector<float> shares;  // for each id, the largest share that any query gives it
};

// Keys are numbered in the order in which they are added. Every call gets all of them (DciKeys), apart from those that
// were removed, whose rows may be gone.
class DciTree {
  public:
    // directions: [n_directions, n_dims + 1], each of length 1; isa must outlive the tree.
    DciTree(const DciOptions & options, const std::vector<float> & directions, const DciLimits & building,
            const Isa & isa);

    void add(const DciKeys & keys);                 // those from size() on, finite and at most kDciKeyMax long
    void remove(const std::uint8_t * is_gone);      // [size]

    // The k nearest points by falling inner product with `query` [n_dims]; fewer if there are fewer.
    std::vector<DciId> search(const DciKeys & keys, const float * query, std::size_t k, const DciLimits & limits) const;

    // Of all keys in the pages of the k nearest ones, those that are `there` [size]; each query [n_queries, n_dims]
    // spreads a softmax over them and `others` [n_others, n_dims].
    DciVotes vote(const DciKeys & keys, const float * queries, std::size_t n_queries, std::size_t k,
                  const DciLimits & limits, const float * others, std::size_t n_others,
                  const std::uint8_t * there) const;

    bool        is_gone(std::size_t id) const { return pages_.of_each()[id] < 0; }
    std::size_t size() const { return level_.size(); }
    std::size_t n_dims() const { return options_.n_dims; }
    std::size_t n_pages() const { return pages_.size(); }
    std::size_t n_levels() const { return n_levels_; }
    std::size_t nbytes() const;
    const Isa & isa() const { return points_.isa(); }
    const std::vector<std::uint8_t> & levels() const { return level_; }
    const std::vector<DciId> & pages() const { return pages_.of_each(); }
    std::vector<DciId> parents() const;  // -1: the root, or gone

  private:
    using Line = std::vector<std::pair<float, DciId>>;  // points of a node along a direction
    struct Node {
        DciId              owner = -1;  // -1: the root
        std::vector<DciId> members;
        std::vector<DciId> pages;  // of the keys of this leaf
        std::vector<Line>  lines;  // none while every search for a parent looks at all members
    };

    std::uint8_t       drawn_level(std::size_t id) const;
    void               close_gaps();
    std::vector<Line>  lines_of(const DciKeys & keys, const Node & node) const;
    void               draw_lines(const DciKeys & keys, Node & node);
    DciPages::Choices  insert_from(const DciKeys & keys, std::size_t first);
    std::vector<DciId> insert(const DciKeys & keys, DciId id);
    std::vector<DciId> pages_of(DciId leaf) const;
    void               raise(const DciKeys & keys, DciId id);
    void               open_node(DciId owner);
    DciId              own_node(DciId id) const;  // -1: it has no children
    std::size_t        node_of(DciId id);
    void               join(const DciKeys & keys, std::size_t node, DciId id);
    void visit(const DciKeys & keys, const Node & node, const DciQuery & query, std::size_t wanted, std::size_t visits,
               std::vector<DciScored> & to) const;
    std::vector<DciScored> visit_nearest(const DciKeys & keys, const Node & node, const DciQuery & query,
                                         std::size_t wanted, std::size_t visits) const;
    std::vector<DciScored> nearest(const DciKeys & keys, const DciQuery & query, std::size_t level, bool all_levels,
                                   std::size_t k, const DciLimits & limits) const;
    std::vector<DciId> hits(const DciKeys & keys, const float * queries, std::size_t n_queries, std::size_t k,
                            const DciLimits & limits, const std::uint8_t * there) const;
    void pack(const DciKeys & keys, const std::vector<DciId> & ids, const float * others, std::size_t n_others,
              std::size_t first, float * panel) const;

    DciOptions                options_;
    DciLimits                 building_;
    DciPoints                 points_;
    DciPages                  pages_;
    std::vector<std::uint8_t> level_;
    std::vector<DciId>        own_node_;  // of the promoted keys, see DciPoints::upper
    std::vector<Node>         nodes_;
    std::size_t               root_ = 0, n_levels_ = 0;
};

constexpr double kDciKeyMax = 1e15;

}  // namespace towerd
