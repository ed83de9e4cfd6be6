// Context mixing over a vocabulary: the probability of each binary decision on the way to a token.
// All arithmetic is on integers, so every machine gets the same bits. The contract, and why each
// part is there, is in lab/reference/mix.py; both must agree decision by decision.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace towerd {

constexpr int kMixDynamic  = 7;  // contexts whose counts start at the reset
constexpr int kMixOrders   = 3;  // the first of these are the last 1, 2, 3 tokens
constexpr int kMixMatches  = 1;
constexpr int kMixMatchMax = 32;
constexpr int kMixStatic   = 5;  // orders of the corpus table
constexpr int kMixBlends   = 2;
constexpr int kMixInputs   = 1 + kMixStatic + kMixDynamic + kMixMatches + kMixBlends + 2;
constexpr int kMixLevels   = 48;
constexpr int kMixSets     = 6;
constexpr int kMixFinal    = 128;

enum class MixKind : std::uint8_t { plain, line_break, opening };

inline std::uint64_t mixed_hash(std::uint64_t hash, std::uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
    return hash * 0xBF58476D1CE4E5B9ull;
}

// Of the last `order` ranks before `end`, latest first.
inline std::uint64_t context_hash(const std::uint32_t * end, int order) {
    std::uint64_t hash = 0;
    for (int i = 1; i <= order; ++i) {
        hash = mixed_hash(hash, end[-i] + 1u);
    }
    return hash;
}

struct MixMatch {  // tokens of a lane that were equal to the last ones, up to `at`
    std::uint32_t lane = 0, at = 0, length = 0;
};

// The texts that a mixer codes are lanes: their tokens, the form of the chat that they are, and where their last tokens
// were seen before, in any lane.
class MixLane {
  public:
    MixLane();
    void append(std::uint32_t rank, const MixKind * kinds);
    void contexts(std::array<std::uint64_t, kMixDynamic> & hashes) const;

    std::vector<std::uint32_t>        history;
    std::array<MixMatch, kMixMatches> matches;

  private:
    std::uint64_t name_ = 0, previous_ = 0, letters_ = 0, line_ = 0, place_ = 0;
    bool          in_name_ = false;
};

class MixLanes {
  public:
    explicit MixLanes(const MixKind * kinds) : kinds_(kinds) {}  // [n_tokens]; must outlive the lanes

    void reset(std::size_t n);
    void append(std::size_t lane, std::uint32_t rank);
    int  follows(const MixMatch & match) const;

    std::size_t     size() const { return lanes_.size(); }
    const MixLane & operator[](std::size_t lane) const { return lanes_[lane]; }

  private:
    void find_match(std::size_t lane, int which);

    const MixKind *      kinds_;
    std::vector<MixLane> lanes_;
    std::array<std::vector<std::uint64_t>, kMixMatches> last_seen_;  // lane and place, by hash
};

struct MixOrder {
    const std::uint32_t * index   = nullptr;  // [n_buckets + 1] offsets into data
    const std::uint16_t * data    = nullptr;
    std::size_t           buckets = 0;  // a power of two; order 1: the vocabulary
};

struct MixNode {
    std::uint32_t low, middle, high, left, right;  // a child of 0 is a leaf
};

class Mixer {
  public:
    static std::size_t state_size(std::size_t n_tokens);

    // All pointers must outlive the mixer. weights, kinds: [n_tokens]; state: [state_size].
    Mixer(std::size_t n_tokens, const std::uint32_t * weights, const std::array<MixOrder, kMixStatic> & orders,
          const std::uint32_t * state, const MixKind * kinds);

    void reset(std::size_t lanes, int table_bits);
    int  begin(std::size_t lane, const std::uint32_t * counts);  // of the next token: P(1) * 65536
    int  step(int bit);                                           // the same of the next decision, or -1 - rank
    int  towards(std::size_t rank) const { return rank >= tree_[node_].middle; }
    bool busy() const { return busy_; }
    std::size_t lanes() const { return lanes_.size(); }
    std::size_t n_tokens() const { return n_tokens_; }
    const std::vector<std::uint32_t> & state() const { return state_; }

  private:
    struct List {
        std::vector<std::uint32_t> ranks;
        std::vector<std::uint64_t> sums;  // [ranks + 1]
        std::size_t                first = 0, last = 0, split = 0;
        std::uint64_t              unlisted = 0;
    };

    struct Cell {  // of the hash table
        std::uint8_t counts = 0, check = 0;
    };

    std::uint32_t build(std::size_t low, std::size_t high, const std::vector<std::uint64_t> & sums);
    void          fetch_lists(const MixLane & lane) const;
    void          fetch_node(std::uint32_t node) const;
    void          look_up(int order, const MixLane & lane);
    int           evaluate();
    void          static_inputs();
    void          dynamic_inputs();
    void          blend_inputs();
    void          match_inputs();
    int           mix();
    void          learn(int bit);
    std::uint32_t slot(std::uint64_t hash);
    void          update(std::size_t map, int bit);
    int           stretched(std::size_t map) const;

    std::size_t                     n_tokens_;
    std::array<MixOrder, kMixStatic> orders_;
    const std::uint32_t *           initial_;
    std::vector<MixNode>            tree_;
    std::vector<std::uint32_t>      state_;
    MixLanes                        lanes_;
    std::vector<Cell>               cells_;

    bool                                   busy_ = false;
    std::size_t                            lane_ = 0, node_ = 0;
    std::array<List, kMixStatic>           lists_;
    std::array<std::uint64_t, kMixDynamic> hashes_{};
    std::array<int, kMixMatches>           predicted_{};
    std::vector<std::uint64_t>             network_;  // [n_tokens + 1] sums by rank, or empty
    std::array<int, kMixInputs>            inputs_{};
    std::array<long, kMixStatic>           static_at_{};
    std::array<std::uint32_t, kMixDynamic> slots_{};
    std::array<std::uint8_t, kMixDynamic>  seen_{};
    std::array<long, kMixMatches>          match_at_{};
    std::array<std::uint64_t, kMixStatic + 1> reached_{};  // probability of this node, times 2^28
    std::array<std::uint64_t, kMixStatic + 1> chances_{};  // of a 1, times 65536
    int                                    best_static_ = 0, best_static_level_ = 0, best_dynamic_ = 0;
    int                                    match_class_ = 0, match_bit_ = 0, surprise_ = 0;
    std::array<std::size_t, kMixSets>      sets_{};
    std::array<int, kMixSets>              mixed_{}, mixed_probability_{};
    std::size_t                            final_set_ = 0;
    int                                    probability_ = 0;
};

}  // namespace towerd
