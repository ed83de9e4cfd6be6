#include "mix.h"

#include <algorithm>
#include <cstring>

namespace towerd {

namespace {

constexpr int           kRounds = 16;  // ranks before a history, so that no context starts before it
constexpr int           kMatchOrders[kMixMatches] = {5};
constexpr int           kMatchLeast               = 2;
constexpr std::uint64_t kDynamicSalts[kMixOrders] = {3, 5, 7};

constexpr int kUnit       = 170;  // steps of the logistic domain for one nat
constexpr int kStretchMax = 2047;
constexpr int kRate = 22, kFinalRate = 2;
constexpr std::uint32_t kCountRows[16] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024, 4096, 16384};
constexpr std::size_t   kSetRows[kMixSets]        = {96, 0, 80, 0, 1024, 1024};  // 0: one per token
constexpr std::uint64_t kEntry[kMixStatic]        = {80, 120, 120, 120, 120};
constexpr std::uint64_t kLeast = 30, kDiscount = 32;
constexpr std::uint64_t kSession[kMixOrders] = {200, 100, 60};

struct Tables {
    std::int16_t  stretch[65536];
    std::uint16_t squash[4096];
    std::uint32_t rate[1024];

    // Only + - * / of doubles in a fixed order: every IEEE machine builds the same tables.
    Tables() {
        const double x     = 1.0 / kUnit;
        double       ratio = 1.0, term = 1.0;
        for (int i = 1; i < 20; ++i) {
            term *= x / i;
            ratio += term;
        }
        double power = 1.0;
        squash[0]    = 1;
        for (int i = 0; i <= kStretchMax; ++i) {
            const int p       = std::clamp(static_cast<int>(65536.0 * (power / (1.0 + power))), 1, 65535);
            squash[2048 + i]  = static_cast<std::uint16_t>(p);
            squash[2048 - i]  = static_cast<std::uint16_t>(65536 - p);
            power *= ratio;
        }
        int at = 0;
        for (int p = 32768; p < 65536; ++p) {
            while (at < kStretchMax && squash[2048 + at] < p) {
                ++at;
            }
            stretch[p] = static_cast<std::int16_t>(at);
        }
        for (int p = 1; p < 32768; ++p) {
            stretch[p] = static_cast<std::int16_t>(-stretch[65536 - p]);
        }
        stretch[0] = -kStretchMax;
        for (std::uint32_t n = 0; n < 1024; ++n) {
            rate[n] = 131072 / (2 * n + 3);
        }
    }
};

const Tables & tables() {
    static const Tables made;
    return made;
}

int level(std::uint64_t n) {
    if (n < 5) {
        return static_cast<int>(n);
    }
    const int bits = 63 - __builtin_clzll(n);
    return std::min(kMixLevels - 1, 5 + 2 * (bits - 2) + static_cast<int>((n >> (bits - 1)) & 1));
}

// Where each part of the state starts.
struct Layout {
    std::size_t nodes, statics, dynamics, matches, last, end;
    std::array<std::size_t, kMixSets> sets;

    explicit Layout(std::size_t n_tokens) {
        nodes    = 0;
        statics  = nodes + n_tokens;
        dynamics = statics + kMixStatic * kMixLevels * kMixLevels;
        matches  = dynamics + kMixDynamic * 256;
        last     = matches + kMixMatches * 2 * kMixMatchMax;
        for (int i = 0; i < kMixSets; ++i) {
            sets[i] = last;
            last += (kSetRows[i] != 0 ? kSetRows[i] : n_tokens) * kMixInputs;
        }
        end = last + kMixFinal * kMixSets;
    }
};

std::uint64_t within(std::uint64_t chance, std::uint64_t least) {
    return std::clamp<std::uint64_t>(chance, least, 65535 - least);
}

std::int64_t product(const std::uint32_t * weights, const int * inputs, int n) {
    std::int64_t sum = 0;
    for (int i = 0; i < n; ++i) {
        sum += static_cast<std::int64_t>(static_cast<std::int32_t>(weights[i])) * inputs[i];
    }
    return sum;
}

int clamped(std::int64_t sum) {
    return static_cast<int>(std::clamp<std::int64_t>(sum >> 16, -kStretchMax, kStretchMax));
}

void adjust(std::uint32_t * weights, const int * inputs, int n, int probability, int bit, int rate) {
    const std::int64_t error = static_cast<std::int64_t>((bit << 16) - probability) * rate;
    for (int i = 0; i < n; ++i) {
        weights[i] += static_cast<std::uint32_t>((inputs[i] * error + (1 << 17)) >> 18);
    }
}

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

std::size_t Mixer::state_size(std::size_t n_tokens) {
    return Layout(n_tokens).end;
}

Mixer::Mixer(std::size_t n_tokens, const std::uint32_t * weights, const std::array<MixOrder, kMixStatic> & orders,
             const std::uint32_t * state, const MixKind * kinds)
    : n_tokens_(n_tokens), orders_(orders), initial_(state), lanes_(kinds) {
    std::vector<std::uint64_t> sums(n_tokens + 1);
    for (std::size_t i = 0; i < n_tokens; ++i) {
        sums[i + 1] = sums[i] + weights[i] + 1u;
    }
    tree_.reserve(n_tokens);
    build(0, n_tokens, sums);
    reset(1, 12);
}

// Splits where the weights on both sides are most nearly equal; the first such place wins.
std::uint32_t Mixer::build(std::size_t low, std::size_t high, const std::vector<std::uint64_t> & sums) {
    if (high - low < 2) {
        return 0;
    }
    const auto          node  = static_cast<std::uint32_t>(tree_.size());
    const std::uint64_t ends  = sums[low] + sums[high];
    std::size_t         split = low + 1;
    std::uint64_t       best  = ~0ull;
    for (std::size_t i = low + 1; i < high; ++i) {
        const std::uint64_t twice = 2 * sums[i];
        const std::uint64_t far   = twice > ends ? twice - ends : ends - twice;
        if (far < best) {
            best  = far;
            split = i;
        }
    }
    tree_.push_back({static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(split), static_cast<std::uint32_t>(high), 0, 0});
    const std::uint32_t left  = build(low, split, sums);
    const std::uint32_t right = build(split, high, sums);
    tree_[node].left          = left;
    tree_[node].right         = right;
    return node;
}

void Mixer::reset(std::size_t lanes, int table_bits) {
    state_.assign(initial_, initial_ + state_size(n_tokens_));
    lanes_.reset(lanes);
    cells_.assign(std::size_t{1} << table_bits, Cell());
    busy_ = false;
}

// Begins to read what `look_up` will need: where the lists of each order start is independent of the other orders.
void Mixer::fetch_lists(const MixLane & lane) const {
    const auto * end = lane.history.data() + lane.history.size();
    for (int pass = 0; pass < 2; ++pass) {
        for (int order = 2; order <= kMixStatic; ++order) {
            const MixOrder & table = orders_[order - 1];
            if (table.buckets != 0) {
                const std::uint32_t * entry = table.index + (context_hash(end, order) >> 32 & (table.buckets - 1));
                __builtin_prefetch(pass == 0 ? static_cast<const void *>(entry) : table.data + *entry);
            }
        }
    }
}

// The same of what a decision at `node` will need.
void Mixer::fetch_node(std::uint32_t node) const {
    if (node == 0) {
        return;
    }
    const Layout at(n_tokens_);
    __builtin_prefetch(&tree_[node]);
    __builtin_prefetch(&state_[at.nodes + node]);
    const std::uint32_t * weights = &state_[at.sets[1] + std::size_t{node} * kMixInputs];
    __builtin_prefetch(weights);
    __builtin_prefetch(weights + kMixInputs - 1);
    for (const std::uint64_t hash : hashes_) {
        __builtin_prefetch(&cells_[mixed_hash(hash, node + 1) >> 20 & (cells_.size() - 1)]);
    }
}

// Fills lists_[order - 1] with what followed the last `order` tokens in the corpus.
void Mixer::look_up(int order, const MixLane & lane) {
    List &           list  = lists_[order - 1];
    const MixOrder & table = orders_[order - 1];
    const auto *     end   = lane.history.data() + lane.history.size();
    list.ranks.clear();
    list.sums.assign(1, 0);
    if (table.buckets != 0) {
        const std::uint64_t hash   = context_hash(end, order);
        const std::size_t   bucket = order == 1 ? end[-1] : static_cast<std::size_t>(hash >> 32) & (table.buckets - 1);
        std::uint32_t       at     = table.index[bucket];
        const std::uint32_t stop   = table.index[bucket + 1];
        std::uint32_t       n      = stop - at;
        if (order > 1) {
            n = 0;
            while (at < stop) {
                const std::uint16_t head = table.data[at++];
                const std::uint32_t size = (head & 63u) == 63u ? table.data[at++] : head & 63u;
                if (head >> 6 == static_cast<std::uint16_t>(hash >> 12 & 1023u)) {
                    n = size;
                    break;
                }
                at += size;
            }
        }
        for (std::uint32_t i = at; i < at + n; ++i) {
            list.ranks.push_back(table.data[i] >> 4u);
            list.sums.push_back(list.sums.back() + kCountRows[table.data[i] & 15u]);
        }
    }
    list.first    = 0;
    list.last     = list.ranks.size();
    list.unlisted = 64 * (list.last * kEntry[order - 1] + kLeast);
}

int Mixer::begin(std::size_t lane, const std::uint32_t * counts) {
    const MixLane & here = lanes_[lane];
    lane_ = lane;
    node_ = 0;
    busy_ = true;
    fetch_lists(here);
    for (int order = 1; order <= kMixStatic; ++order) {
        look_up(order, here);
    }
    reached_.fill(std::uint64_t{1} << 28);
    here.contexts(hashes_);
    for (int i = 0; i < kMixMatches; ++i) {
        predicted_[i] = lanes_.follows(here.matches[i]);
    }
    network_.clear();
    if (counts != nullptr) {
        network_.resize(n_tokens_ + 1);
        for (std::size_t i = 0; i < n_tokens_; ++i) {
            network_[i + 1] = network_[i] + counts[i];
        }
    }
    return evaluate();
}

int Mixer::evaluate() {
    inputs_.fill(0);
    static_inputs();
    dynamic_inputs();
    fetch_node(tree_[node_].left);
    fetch_node(tree_[node_].right);
    blend_inputs();
    match_inputs();
    inputs_[kMixInputs - 2] = 256;
    if (!network_.empty()) {
        const MixNode &     node = tree_[node_];
        const std::uint64_t all  = network_[node.high] - network_[node.low];
        if (all != 0) {
            const std::uint64_t p   = (network_[node.high] - network_[node.middle]) * 65536u / all;
            inputs_[kMixInputs - 1] = tables().stretch[std::clamp<std::uint64_t>(p, 1, 65535)];
        }
    }
    return mix();
}

void Mixer::static_inputs() {
    const Layout    at(n_tokens_);
    const MixNode & node = tree_[node_];
    inputs_[0]           = stretched(at.nodes + node_);
    best_static_ = best_static_level_ = 0;
    for (int i = 0; i < kMixStatic; ++i) {
        List & list = lists_[i];
        static_at_[i] = -1;
        list.split    = list.first;
        if (list.last == list.first) {
            continue;
        }
        const auto begin = list.ranks.begin();
        list.split       = static_cast<std::size_t>(
            std::lower_bound(begin + static_cast<long>(list.first), begin + static_cast<long>(list.last), node.middle) - begin);
        const std::uint64_t zeros = list.sums[list.split] - list.sums[list.first];
        const std::uint64_t ones  = list.sums[list.last] - list.sums[list.split];
        static_at_[i]  = static_cast<long>(at.statics) + (i * kMixLevels + level(zeros)) * kMixLevels + level(ones);
        inputs_[1 + i] = stretched(static_cast<std::size_t>(static_at_[i]));
        best_static_   = i + 1;
        best_static_level_ = std::min(3, level(zeros + ones) / 3);
    }
}

void Mixer::dynamic_inputs() {
    const Layout at(n_tokens_);
    best_dynamic_ = 0;
    for (int i = 0; i < kMixDynamic; ++i) {
        slots_[i] = slot(mixed_hash(hashes_[i], node_ + 1));
        seen_[i]  = cells_[slots_[i]].counts;
        if (seen_[i] != 0) {
            inputs_[1 + kMixStatic + i] = stretched(at.dynamics + static_cast<std::size_t>(i) * 256 + seen_[i]);
            best_dynamic_               = i < kMixOrders ? i + 1 : best_dynamic_;
        }
    }
}

// The interpolated probability of 1 by order, and the last of these with the counts of the session.
// All unlisted tokens under this node weigh `unlisted` times the probability of the node.
void Mixer::blend_inputs() {
    std::uint64_t chance = chances_[0] = within(state_[node_] >> 16, 16);
    for (int i = 0; i < kMixStatic; ++i) {
        const List &        list  = lists_[i];
        const std::uint64_t zeros = ((list.sums[list.split] - list.sums[list.first]) << 12) - (list.split - list.first) * kDiscount * 64;
        const std::uint64_t ones  = ((list.sums[list.last] - list.sums[list.split]) << 12) - (list.last - list.split) * kDiscount * 64;
        const std::uint64_t rest  = (list.unlisted * reached_[i] >> 28) + 1;
        chance = chances_[i + 1] = within(((ones << 16) + rest * chance) / (zeros + ones + rest), 8);
    }
    constexpr std::size_t at = 1 + kMixStatic + kMixDynamic + kMixMatches;
    inputs_[at]              = tables().stretch[chance];
    for (int i = 0; i < kMixOrders; ++i) {
        if (seen_[i] != 0) {
            const std::uint64_t zeros = seen_[i] >> 4, ones = seen_[i] & 15;
            const std::uint64_t rest = (kSession[i] * 256 * reached_[kMixStatic] >> 28) + 1;
            chance                   = ((ones << 28) + rest * chance) / (((zeros + ones) << 12) + rest);
        }
    }
    inputs_[at + 1] = tables().stretch[within(chance, 8)];
    surprise_       = std::min(15, __builtin_clzll(reached_[kMixStatic]) - 35);
}

// The slot of a hash: its own, or its neighbour; else the one of the two with the lower counts, cleared.
std::uint32_t Mixer::slot(std::uint64_t hash) {
    const auto size  = [this](std::uint32_t i) { return (cells_[i].counts >> 4) + (cells_[i].counts & 15); };
    const auto check = static_cast<std::uint8_t>(hash >> 56 | 1);
    auto       here  = static_cast<std::uint32_t>((hash >> 20) & (cells_.size() - 1));
    if (cells_[here].check == check) {
        return here;
    }
    const std::uint32_t other = here ^ 1;
    if (cells_[other].check == check) {
        return other;
    }
    here          = size(other) < size(here) ? other : here;
    cells_[here]  = {0, check};
    return here;
}

void Mixer::match_inputs() {
    const Layout    at(n_tokens_);
    const MixNode & node = tree_[node_];
    match_class_ = match_bit_ = 0;
    for (int i = 0; i < kMixMatches; ++i) {
        match_at_[i]   = -1;
        const int rank = predicted_[i];
        if (rank < static_cast<int>(node.low) || rank >= static_cast<int>(node.high)) {
            continue;
        }
        const std::uint32_t length = lanes_[lane_].matches[i].length;
        const std::uint32_t row    = std::min<std::uint32_t>(length, kMixMatchMax - 1) * 2 + (rank >= static_cast<int>(node.middle));
        match_at_[i]               = static_cast<long>(at.matches) + i * 2 * kMixMatchMax + row;
        inputs_[1 + kMixStatic + kMixDynamic + i] = stretched(static_cast<std::size_t>(match_at_[i]));
        if (i == 0) {
            match_class_ = length < 4 ? 1 : length < 16 ? 2 : 3;
            match_bit_   = rank >= static_cast<int>(node.middle) ? 2 : 1;
        }
    }
}

int Mixer::mix() {
    const Layout at(n_tokens_);
    const int    seen = best_dynamic_ != 0 ? seen_[best_dynamic_ - 1] : 0;
    const int    certain = best_dynamic_ != 0 ? std::min(3, (seen >> 4) + (seen & 15) - 1) : 0;
    const int    reach   = best_static_ > 4 ? 2 : best_static_ > 2 ? 1 : 0;
    const int    surprise = surprise_ * 64;
    const int    rows[kMixSets] = {
        best_static_ * 16 + best_static_level_ * 4 + match_class_,
        static_cast<int>(node_),
        best_dynamic_ * 16 + certain * 4 + reach,
        static_cast<int>(lanes_[lane_].history.back()),
        surprise + match_bit_ * 4 + best_dynamic_,
        surprise + best_static_ * 8 + best_dynamic_,
    };
    for (int i = 0; i < kMixSets; ++i) {
        sets_[i]  = at.sets[i] + static_cast<std::size_t>(rows[i]) * kMixInputs;
        mixed_[i] = clamped(product(&state_[sets_[i]], inputs_.data(), kMixInputs));
        mixed_probability_[i] = tables().squash[2048 + mixed_[i]];
    }
    final_set_   = at.last + static_cast<std::size_t>(surprise_ * 8 + best_static_) * kMixSets;
    probability_ = tables().squash[2048 + clamped(product(&state_[final_set_], mixed_.data(), kMixSets))];
    return probability_;
}

int Mixer::stretched(std::size_t map) const {
    return tables().stretch[state_[map] >> 16];
}

void Mixer::update(std::size_t map, int bit) {
    constexpr std::int64_t kOne = 1 << 22;
    const std::uint32_t    n    = state_[map] & 1023u;
    std::int64_t           p    = state_[map] >> 10;
    p += (((bit != 0 ? kOne - 1 : 0) - p) * tables().rate[n]) >> 16;
    p           = std::clamp<std::int64_t>(p, 64, kOne - 64);
    state_[map] = static_cast<std::uint32_t>(p) << 10 | (n < 1023 ? n + 1 : n);
}

void Mixer::learn(int bit) {
    const Layout at(n_tokens_);
    for (int i = 0; i < kMixSets; ++i) {
        adjust(&state_[sets_[i]], inputs_.data(), kMixInputs, mixed_probability_[i], bit, kRate);
    }
    adjust(&state_[final_set_], mixed_.data(), kMixSets, probability_, bit, kFinalRate);
    for (int i = 0; i <= kMixStatic; ++i) {
        reached_[i] = std::max<std::uint64_t>(1, reached_[i] * (bit != 0 ? chances_[i] : 65536 - chances_[i]) >> 16);
    }
    update(at.nodes + node_, bit);
    for (int i = 0; i < kMixStatic; ++i) {
        if (static_at_[i] >= 0) {
            update(static_cast<std::size_t>(static_at_[i]), bit);
        }
        (bit != 0 ? lists_[i].first : lists_[i].last) = lists_[i].split;
    }
    for (int i = 0; i < kMixDynamic; ++i) {
        if (seen_[i] != 0) {
            update(at.dynamics + static_cast<std::size_t>(i) * 256 + seen_[i], bit);
        }
        int same = bit != 0 ? seen_[i] & 15 : seen_[i] >> 4, other = bit != 0 ? seen_[i] >> 4 : seen_[i] & 15;
        same  = std::min(15, same + 1);
        other = other > 2 ? (other + 2) / 2 : other;
        cells_[slots_[i]].counts = static_cast<std::uint8_t>(bit != 0 ? other << 4 | same : same << 4 | other);
    }
    for (int i = 0; i < kMixMatches; ++i) {
        if (match_at_[i] >= 0) {
            update(static_cast<std::size_t>(match_at_[i]), bit);
            if (((match_at_[i] - static_cast<long>(at.matches)) & 1) != bit) {
                predicted_[i] = -1;
            }
        }
    }
}

int Mixer::step(int bit) {
    learn(bit);
    const MixNode &     node = tree_[node_];
    const std::uint32_t next = bit != 0 ? node.right : node.left;
    if (next == 0) {
        const std::size_t rank = bit != 0 ? node.middle : node.low;
        lanes_.append(lane_, static_cast<std::uint32_t>(rank));
        busy_ = false;
        return -1 - static_cast<int>(rank);
    }
    node_ = next;
    return evaluate();
}

}  // namespace towerd
