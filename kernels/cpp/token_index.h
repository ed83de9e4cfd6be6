// An index of windows of tokens: where in stored paths the tokens of a prompt occur. The contract is in
// lab/reference/token_index.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace towerd {

constexpr std::size_t   kWindow     = 32;                     // tokens of a window
constexpr std::size_t   kSpan       = 33;                     // consecutive windows of which one is sampled
constexpr std::size_t   kRun        = kWindow + kSpan - 1;    // tokens whose sampled window they alone determine
constexpr std::size_t   kPeriodMax  = 16;                     // windows with a shorter period are sampled last
constexpr std::size_t   kPlacesMax  = 4;                      // of one window
constexpr std::uint64_t kOwnerMax   = (1ull << 36) - 1;
constexpr std::size_t   kEndBits    = 28;
constexpr std::uint64_t kEndMax     = (1ull << kEndBits) - 1;

// Where a window ends: `end` tokens from the root, on the path of the node `owner`.
struct TokenPlace {
    std::uint64_t owner;
    std::uint64_t end;
};

// The tokens of a node and the last ones before it; at most kRun of those are looked at.
struct TokenRun {
    std::uint64_t       key;         // of the scope
    std::uint64_t       parent;      // owner of windows that end before the node
    std::uint64_t       owner;       // the node
    std::uint64_t       instead_of;  // the node that had these tokens before a split, or 0
    std::size_t         first;       // the node's first position
    const std::int32_t *context;
    std::size_t         n_context;
    const std::int32_t *ids;
    std::size_t         n;
};

struct TokenHit {
    std::size_t at;  // where the window ends in the prompt
    TokenPlace  place;
};

// How many of the `n` tokens before, or from, two places on agree.
std::size_t common_before(const std::int32_t * a, const std::int32_t * b, std::size_t n);
std::size_t common_after(const std::int32_t * a, const std::int32_t * b, std::size_t n);

class TokenIndex {
public:
    static constexpr std::size_t kShards = 256;

    explicit TokenIndex(std::uint64_t seed) : seed_(seed) {}

    void add(const TokenRun & run);

    // What is known of the windows of ids[start, stop) under each of the keys: in order of `at`, newest first.
    std::vector<TokenHit> find(const std::vector<std::uint64_t> & keys, const std::int32_t * ids, std::size_t start,
                               std::size_t stop) const;

    // Forget the places of a shard whose owner is not in `live`, ascending.
    void compact(std::size_t shard, const std::int64_t * live, std::size_t n_live);

    std::size_t size() const;
    std::size_t nbytes() const;

private:
    struct Slot {
        std::uint64_t window;
        std::uint64_t place;  // 0: free
    };

    // Open addressing. Slots of one window stand in the order of their age on the way that a search takes.
    struct Shard {
        std::vector<Slot> slots;
        std::size_t       n = 0;

        std::size_t home(std::uint64_t window) const {
            return static_cast<std::size_t>(((window & 0xffffffff) * static_cast<std::uint64_t>(slots.size())) >> 32);
        }
        std::size_t next(std::size_t i) const { return i + 1 == slots.size() ? 0 : i + 1; }
        void        fetch(std::uint64_t window) const {  // into the caches, ahead
            if (!slots.empty()) {
                __builtin_prefetch(&slots[home(window)]);
            }
        }
        void        find(std::uint64_t window, std::size_t at, std::vector<TokenHit> & hits) const;  // oldest first
        void        put(Slot slot, std::uint64_t instead_of);
        template <typename Keep> void rebuild(std::size_t capacity, const Keep & keep);
    };

    std::uint64_t             seed_;
    std::array<Shard, kShards> shards_;
};

}  // namespace towerd
