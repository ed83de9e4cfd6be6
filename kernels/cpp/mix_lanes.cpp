#include "mix_lanes.h"

#include <algorithm>

namespace towerd {

namespace {

constexpr int           kRounds = 16;  // ranks before a history, so that no context starts before it
constexpr int           kMatchOrders[kMixMatches] = {5};
constexpr int           kMatchLeast               = 2;
constexpr std::uint64_t kDynamicSalts[kMixOrders] = {3, 5, 7};

}  // namespace

MixLane::MixLane() : history(kRounds, 0) {}

// Follows the form of the chat: whose message this is, and where in it we are.
void MixLane::append(std::uint32_t rank, const MixKind * kinds) {
    const MixKind kind        = kinds[rank];
    const bool    after_break = kinds[history.back()] == MixKind::line_break;
    history.push_back(rank);
    if (kind == MixKind::opening) {
        in_name_  = true;
        letters_  = 0;
        previous_ = name_;
        place_    = 0;
    } else if (!in_name_) {
        if (++place_ == 1 || after_break) {
            line_ = rank + 1u;
        }
    } else if (kind == MixKind::line_break) {
        in_name_ = false;
        name_    = letters_;
        place_ = line_ = 0;
    } else {
        letters_ = mixed_hash(letters_, rank + 1u);
    }
}

void MixLane::contexts(std::array<std::uint64_t, kMixDynamic> & hashes) const {
    const auto *        end  = history.data() + history.size();
    const std::uint64_t last = end[-1];
    for (int i = 0; i < kMixOrders; ++i) {
        hashes[i] = context_hash(end, i + 1) * kDynamicSalts[i];
    }
    hashes[3] = 9999;
    hashes[4] = mixed_hash(name_ ^ 5, last);
    hashes[5] = mixed_hash(line_ + 9, last + (std::min<std::uint64_t>(place_, 3) << 20));
    hashes[6] = mixed_hash(previous_ ^ 13, 2 * std::min<std::uint64_t>(place_, 6) + (in_name_ ? 1 : 0));
}

void MixLanes::reset(std::size_t n) {
    lanes_.assign(n, MixLane());
    for (auto & seen : last_seen_) {
        seen.assign(1u << 16, 0);
    }
}

// The rank that followed the matched text, or -1: another lane may not have got there yet.
int MixLanes::follows(const MixMatch & match) const {
    const auto & past = lanes_[match.lane].history;
    return match.length != 0 && match.at < past.size() ? static_cast<int>(past[match.at]) : -1;
}

void MixLanes::append(std::size_t lane, std::uint32_t rank) {
    for (MixMatch & match : lanes_[lane].matches) {
        const bool held = follows(match) == static_cast<int>(rank);
        match.length    = held ? match.length + 1 : 0;
        match.at += held ? 1 : 0;
    }
    lanes_[lane].append(rank, kinds_);
    for (int i = 0; i < kMixMatches; ++i) {
        find_match(lane, i);
    }
}

// Finds where the last tokens were seen before, if at least kMatchLeast of them really are equal.
void MixLanes::find_match(std::size_t lane, int which) {
    const auto &        history = lanes_[lane].history;
    const std::size_t   end     = history.size();
    const std::uint64_t hash    = context_hash(history.data() + end, kMatchOrders[which]) >> 48;
    MixMatch &          match   = lanes_[lane].matches[which];
    if (match.length == 0) {
        const std::uint64_t seen = last_seen_[which][hash];
        const auto &        past = lanes_[seen >> 32].history;
        const std::size_t   at   = seen & 0xFFFFFFFFu;
        std::size_t         n    = 0;
        while (n < kMixMatchMax && at > n + kRounds && end > n + kRounds && past[at - 1 - n] == history[end - 1 - n]) {
            ++n;
        }
        if (at != 0 && n >= kMatchLeast) {
            match = {static_cast<std::uint32_t>(seen >> 32), static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(n)};
        }
    }
    last_seen_[which][hash] = static_cast<std::uint64_t>(lane) << 32 | end;
}

}  // namespace towerd
