#include "token_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace towerd {

namespace {

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

constexpr std::uint64_t kBase = 0x9e3779b97f4a7c15ull;

constexpr std::uint64_t power(std::size_t n) {
    std::uint64_t product = 1;
    for (std::size_t i = 0; i < n; ++i) {
        product *= kBase;
    }
    return product;
}

// Takes tokens one by one, and tells the sampled window of the last kSpan ones.
class Sampler {
public:
    explicit Sampler(std::uint64_t seed) : seed_(seed) {}

    // Whether another window is sampled than before this token.
    bool take(std::int32_t id) {
        ++at_;
        if (id < 0) {  // no token: windows begin anew behind it
            n_ = 0;
            return false;
        }
        const std::size_t   place = n_ % kWindow;
        const std::uint64_t word  = mixed(static_cast<std::uint64_t>(id) + seed_);
        sum_ = (n_ == 0 ? 0 : sum_) * kBase + word - (n_ >= kWindow ? words_[place] * kLast : 0);
        words_[place] = word;
        const bool periodic = note_periods(id);
        if (++n_ < kWindow) {
            return false;
        }
        return rank(n_ - kWindow, periodic);
    }

    std::size_t   end() const { return at_ - (n_ - kWindow - best_); }  // behind the sampled window
    std::uint64_t window() const { return windows_[best_ % kRing]; }

private:
    static constexpr std::uint64_t kLast = power(kWindow);
    static constexpr std::size_t   kRing = 64;  // at least kSpan
    static constexpr std::int32_t  kEnough = kWindow - kPeriodMax;
    using Four = std::int32_t __attribute__((vector_size(16)));  // of GCC and Clang

    // Whether the last kWindow tokens repeat with a period of at most kPeriodMax. Lane i is for kPeriodMax - i.
    bool note_periods(std::int32_t id) {
        if (n_ == 0) {
            std::fill_n(recent_, 2 * kPeriodMax, -1);
            std::fill_n(same_, kPeriodMax / 4, Four{});
            newest_ = 0;
        }
        const Four now = {id, id, id, id};
        Four       enough = {kEnough, kEnough + 1, kEnough + 2, kEnough + 3}, sign = {};
        for (std::size_t i = 0; i < kPeriodMax / 4; ++i) {
            Four recent;
            std::memcpy(&recent, recent_ + newest_ + 4 * i, sizeof recent);
            same_[i] = (same_[i] + 1) & (recent == now);
            sign |= enough - 1 - same_[i];
            enough += 4;
        }
        recent_[newest_] = recent_[newest_ + kPeriodMax] = id;
        newest_          = (newest_ + 1) % kPeriodMax;
        return (sign[0] | sign[1] | sign[2] | sign[3]) < 0;
    }

    // Enter the window of this number. The one with the lowest rank is sampled, the last of equal ones; but of equal
    // ones with a short period the one that was sampled stays, else every window of a long repetition would be sampled.
    bool rank(std::size_t number, bool periodic) {
        const std::uint64_t window = mixed(sum_);
        const std::uint64_t rank   = (window >> 1) | (static_cast<std::uint64_t>(periodic) << 63);
        const std::size_t   before = best_;
        windows_[number % kRing]   = window;
        ranks_[number % kRing]     = rank;
        if (number == 0) {
            best_ = 0;
        } else if (best_ + kSpan == number) {
            best_ = number;
            for (std::size_t i = number; i-- > number + 1 - kSpan;) {
                best_ = ranks_[i % kRing] < ranks_[best_ % kRing] ? i : best_;
            }
        } else if (rank < ranks_[best_ % kRing] || (rank == ranks_[best_ % kRing] && (!periodic || number < kSpan))) {
            best_ = number;
        }
        return number + 1 == kSpan || (number >= kSpan && best_ != before);
    }

    std::uint64_t seed_, sum_ = 0;
    std::size_t   at_ = 0, n_ = 0, best_ = 0, newest_ = 0;  // n_: tokens since the last one that was none
    std::uint64_t words_[kWindow], windows_[kRing], ranks_[kRing];
    std::int32_t  recent_[2 * kPeriodMax];  // the last ones, twice: a period's are one behind the other
    Four          same_[kPeriodMax / 4];    // tokens in a row that equal the one a period before them
};

constexpr std::size_t kBlock = 16;  // tokens compared at once

}  // namespace

std::size_t common_before(const std::int32_t * a, const std::int32_t * b, std::size_t n) {
    std::size_t same = 0;
    while (n - same >= kBlock && std::memcmp(a - same - kBlock, b - same - kBlock, kBlock * sizeof *a) == 0) {
        same += kBlock;
    }
    while (same < n && *(a - same - 1) == *(b - same - 1)) {
        ++same;
    }
    return same;
}

std::size_t common_after(const std::int32_t * a, const std::int32_t * b, std::size_t n) {
    std::size_t same = 0;
    while (n - same >= kBlock && std::memcmp(a + same, b + same, kBlock * sizeof *a) == 0) {
        same += kBlock;
    }
    while (same < n && a[same] == b[same]) {
        ++same;
    }
    return same;
}

void TokenIndex::add(const TokenRun & run) {
    const std::size_t n_context = std::min(run.n_context, kRun);
    const std::size_t begin     = run.first - n_context;  // position of the first token that is looked at
    Sampler           sampler(seed_);
    for (std::size_t i = run.n_context - n_context; i < run.n_context; ++i) {
        sampler.take(run.context[i]);
    }
    std::vector<Slot> sampled;
    for (std::size_t i = 0; i < run.n; ++i) {
        if (sampler.take(run.ids[i])) {
            const std::size_t   end    = begin + sampler.end();
            const std::uint64_t owner  = end > run.first ? run.owner : run.parent;
            const std::uint64_t window = mixed(sampler.window() ^ run.key);
            sampled.push_back({window, owner << kEndBits | end});
            shards_[window >> 56].fetch(window);
        }
    }
    for (const Slot & slot : sampled) {
        const std::uint64_t before = run.instead_of << kEndBits | (slot.place & kEndMax);
        shards_[slot.window >> 56].put(slot, run.instead_of == 0 ? 0 : before);
    }
}

std::vector<TokenHit> TokenIndex::find(const std::vector<std::uint64_t> & keys, const std::int32_t * ids,
                                       std::size_t start, std::size_t stop) const {
    std::vector<std::pair<std::uint64_t, std::size_t>> sampled;  // a window's hash, and where it ends
    Sampler                                            sampler(seed_);
    for (std::size_t i = start; i < stop; ++i) {
        if (sampler.take(ids[i])) {
            sampled.emplace_back(sampler.window(), start + sampler.end());
        }
    }
    constexpr std::size_t kAhead = 8;
    std::vector<TokenHit> hits;
    for (std::size_t i = 0; i < sampled.size(); ++i) {
        for (const std::uint64_t key : keys) {
            const std::uint64_t later = mixed(sampled[std::min(i + kAhead, sampled.size() - 1)].first ^ key);
            const std::uint64_t window = mixed(sampled[i].first ^ key);
            const auto          first = static_cast<std::ptrdiff_t>(hits.size());
            shards_[later >> 56].fetch(later);
            shards_[window >> 56].find(window, sampled[i].second, hits);
            std::reverse(hits.begin() + first, hits.end());
        }
    }
    return hits;
}

void TokenIndex::compact(std::size_t shard, const std::int64_t * live, std::size_t n_live) {
    const auto keep = [&](const Slot & slot) {
        return std::binary_search(live, live + n_live, static_cast<std::int64_t>(slot.place >> kEndBits));
    };
    Shard &           of = shards_[shard];
    const std::size_t n  = static_cast<std::size_t>(
        std::count_if(of.slots.begin(), of.slots.end(), [&](const Slot & s) { return s.place != 0 && keep(s); }));
    of.rebuild(n + n / 2, keep);
}

std::size_t TokenIndex::size() const {
    std::size_t n = 0;
    for (const Shard & shard : shards_) {
        n += shard.n;
    }
    return n;
}

std::size_t TokenIndex::nbytes() const {
    std::size_t n = sizeof *this;
    for (const Shard & shard : shards_) {
        n += shard.slots.size() * sizeof(Slot);
    }
    return n;
}

void TokenIndex::Shard::find(std::uint64_t window, std::size_t at, std::vector<TokenHit> & hits) const {
    if (slots.empty()) {
        return;
    }
    for (std::size_t i = home(window); slots[i].place != 0; i = next(i)) {
        if (slots[i].window == window) {
            hits.push_back({at, {slots[i].place >> kEndBits, slots[i].place & kEndMax}});
        }
    }
}

void TokenIndex::Shard::put(Slot slot, std::uint64_t instead_of) {
    if (n + 1 + slots.size() / 5 >= slots.size()) {  // a slot stays free: searches end there
        rebuild(slots.size() + slots.size() / 2 + 8, [](const Slot &) { return true; });
    }
    std::size_t same[kPlacesMax];
    std::size_t n_same = 0, i = home(slot.window);
    for (; slots[i].place != 0; i = next(i)) {
        if (slots[i].window != slot.window) {
            continue;
        }
        if (slots[i].place == slot.place) {
            return;
        }
        if (slots[i].place == instead_of) {
            slots[i].place = slot.place;
            return;
        }
        same[n_same++] = i;  // no more than kPlacesMax were put
    }
    if (n_same < kPlacesMax) {
        slots[i] = slot;
        ++n;
        return;
    }
    // The first place stays: what came since may be copies of it whose rows are not there, or moved.
    for (std::size_t j = 1; j + 1 < kPlacesMax; ++j) {
        slots[same[j]].place = slots[same[j + 1]].place;
    }
    slots[same[kPlacesMax - 1]].place = slot.place;
}

// Moves what is kept into `capacity` slots, of which at least one stays free.
template <typename Keep> void TokenIndex::Shard::rebuild(std::size_t capacity, const Keep & keep) {
    std::vector<Slot> before(capacity == 0 ? 0 : capacity + 1);
    before.swap(slots);
    n = 0;
    // from behind a free slot, so that slots of one window keep their order
    const auto        free  = std::find_if(before.begin(), before.end(), [](const Slot & slot) { return slot.place == 0; });
    const std::size_t first = static_cast<std::size_t>(free - before.begin());
    for (std::size_t i = 0; i < before.size(); ++i) {
        const Slot & slot = before[(first + i) % before.size()];
        if (slot.place != 0 && keep(slot)) {
            std::size_t j = home(slot.window);
            while (slots[j].place != 0) {
                j = next(j);
            }
            slots[j] = slot;
            ++n;
        }
    }
}

}  // namespace towerd
