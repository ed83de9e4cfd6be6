// The texts that a mixer codes, each in a lane of its own: their tokens, the form of the chat that they are, and
// where their last tokens were seen before, in any lane.
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

// One text.
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

}  // namespace towerd
