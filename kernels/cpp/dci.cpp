#include "dci.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <queue>
#include <tuple>

#include "rows.h"

namespace towerd {

namespace {

constexpr std::uint8_t kLevelMax = 32;
constexpr std::size_t kNear     = 4;  // leaves whose pages a new key may join
constexpr int         kPasses   = 2;

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

constexpr std::size_t kQueriesAtOnce = 64;  // queries scored at a time: 6 MiB for 24k keys

}  // namespace

DciTree::DciTree(const DciOptions & options, const std::vector<float> & directions, const DciLimits & building,
                 const Isa & isa)
    : options_(options), building_(building), points_(options.n_dims, directions, isa), pages_(options.page_rows) {}

std::size_t DciTree::nbytes() const {
    std::size_t n = points_.nbytes() + pages_.nbytes() + level_.capacity() + own_node_.capacity() * sizeof(DciId) +
                    nodes_.capacity() * sizeof(Node);
    for (const Node & node : nodes_) {
        n += (node.members.capacity() + node.pages.capacity()) * sizeof(DciId) + node.lines.capacity() * sizeof(Line);
        for (const Line & line : node.lines) {
            n += line.capacity() * sizeof(Line::value_type);
        }
    }
    return n;
}

void DciTree::add(const DciKeys & keys) {
    const std::size_t before = size();
    if (keys.size() == before) {
        return;
    }
    const bool moved = points_.make_room(keys);
    points_.add(keys);
    reserve_for(level_, keys.size());
    for (std::size_t i = before; i < keys.size(); ++i) {
        level_.push_back(drawn_level(i));
    }
    pages_.grow(size());
    if (before == 0) {
        close_gaps();
        open_node(-1);
    }
    for (std::size_t i = before; i < size(); ++i) {
        level_[i] = std::min(level_[i], static_cast<std::uint8_t>(n_levels_ + 1));
        if (level_[i] > 1) {
            points_.promote(keys, static_cast<DciId>(i));
            own_node_.push_back(-1);
        }
    }
    for (Node & node : nodes_) {
        if (moved && !node.lines.empty()) {
            draw_lines(keys, node);
        }
    }
    const auto choices = insert_from(keys, before);
    for (int pass = 0; pass < kPasses; ++pass) {
        pages_.settle(points_, keys, choices);
    }
}

// Keys at the bottom leave their node, too. Those above stay where they are, because others hang below them.
void DciTree::remove(const std::uint8_t * is_gone) {
    const auto leaves = [&](DciId id) { return is_gone[id] != 0 && points_.upper(id) < 0; };
    pages_.remove(is_gone);
    for (Node & node : nodes_) {
        const auto empty = [&](DciId page) { return pages_.is_empty(page); };
        node.members.erase(std::remove_if(node.members.begin(), node.members.end(), leaves), node.members.end());
        node.pages.erase(std::remove_if(node.pages.begin(), node.pages.end(), empty), node.pages.end());
        for (Line & line : node.lines) {
            line.erase(std::remove_if(line.begin(), line.end(), [&](const auto & at) { return leaves(at.second); }),
                       line.end());
        }
    }
}

std::vector<DciId> DciTree::parents() const {
    std::vector<DciId> found(size(), -1);
    for (const Node & node : nodes_) {
        for (const DciId id : node.members) {
            found[static_cast<std::size_t>(id)] = node.owner;
        }
    }
    return found;
}

std::uint8_t DciTree::drawn_level(std::size_t id) const {
    std::uint8_t  level = 1;
    std::uint64_t x = mixed(options_.seed + id * 0xD1342543DE82EF95ull);
    while (level < kLevelMax && static_cast<double>(x >> 11) * 0x1p-53 < options_.ratio) {
        ++level;
        x = mixed(x);
    }
    return level;
}

// Skips the levels that no key of the first `add` drew.
void DciTree::close_gaps() {
    std::vector<std::uint8_t> taken(kLevelMax + 1, 0);
    for (const std::uint8_t level : level_) {
        taken[level] = 1;
    }
    std::partial_sum(taken.begin(), taken.end(), taken.begin());
    for (std::uint8_t & level : level_) {
        level = taken[level];
    }
    n_levels_ = taken.back();
}

// The members of a node along each direction, in order.
std::vector<DciTree::Line> DciTree::lines_of(const DciKeys & keys, const Node & node) const {
    std::vector<Line>  lines(points_.n_directions());
    std::vector<float> places(lines.size());
    for (const DciId id : node.members) {
        points_.project(keys, id, places.data());
        for (std::size_t j = 0; j < lines.size(); ++j) {
            lines[j].emplace_back(places[j], id);
        }
    }
    for (Line & line : lines) {
        std::sort(line.begin(), line.end());
    }
    return lines;
}

void DciTree::draw_lines(const DciKeys & keys, Node & node) { node.lines = lines_of(keys, node); }

// Inserts the keys from `first` on, the highest level first. Returns the pages that each key at the bottom may be on.
DciPages::Choices DciTree::insert_from(const DciKeys & keys, std::size_t first) {
    std::vector<DciId> order(size() - first);
    std::iota(order.begin(), order.end(), static_cast<DciId>(first));
    std::stable_sort(order.begin(), order.end(), [&](DciId a, DciId b) {
        return level_[static_cast<std::size_t>(a)] > level_[static_cast<std::size_t>(b)];
    });
    std::vector<std::pair<DciId, std::vector<DciId>>> near;
    for (const DciId id : order) {
        auto leaves = insert(keys, id);
        if (!leaves.empty()) {
            near.emplace_back(id, std::move(leaves));
        }
    }
    DciPages::Choices choices;  // only now: the leaves got more pages meanwhile
    for (const auto & [id, leaves] : near) {
        choices.emplace_back(id, std::vector<DciId>{});
        for (const DciId leaf : leaves) {
            const auto pages = pages_of(leaf);
            choices.back().second.insert(choices.back().second.end(), pages.begin(), pages.end());
        }
    }
    return choices;
}

// For a key at the bottom, returns the nearest points above, whose leaves it may move to.
std::vector<DciId> DciTree::insert(const DciKeys & keys, DciId id) {
    const auto level = static_cast<std::size_t>(level_[static_cast<std::size_t>(id)]);
    if (level > n_levels_) {
        raise(keys, id);
        return {};
    }
    if (level == n_levels_) {
        join(keys, root_, id);
        return {};
    }
    const std::size_t k = building_.beam == 0 ? kNear : std::min(kNear, building_.beam);
    DciQuery          query = points_.as_point(keys, id);
    query.projections.resize(points_.n_directions());
    points_.project(keys, id, query.projections.data());
    auto found = nearest(keys, query, level + 1, false, k, building_);
    if (found.empty()) {  // within the limits there were only points without children
        found = nearest(keys, query, level + 1, false, k, DciLimits{});
    }
    join(keys, node_of(found.front().id), id);
    std::vector<DciId> leaves;
    for (const DciScored & point : found) {
        leaves.push_back(point.id);
    }
    return level == 1 ? leaves : std::vector<DciId>{};
}

// The pages of a point of the second level; if it has no children, its own page.
std::vector<DciId> DciTree::pages_of(DciId leaf) const {
    if (const DciId node = own_node(leaf); node >= 0) {
        return nodes_[static_cast<std::size_t>(node)].pages;
    }
    return pages_.of(leaf) < 0 ? std::vector<DciId>{} : std::vector<DciId>{pages_.of(leaf)};
}

// Makes a point the new top: everything that was at the top becomes its children.
void DciTree::raise(const DciKeys & keys, DciId id) {
    const std::size_t below = root_;
    nodes_[below].owner     = id;
    own_node_[static_cast<std::size_t>(points_.upper(id))] = static_cast<DciId>(below);
    root_ = nodes_.size();
    open_node(-1);
    ++n_levels_;
    join(keys, root_, id);
}

void DciTree::open_node(DciId owner) {
    reserve_for(nodes_, nodes_.size() + 1);
    nodes_.emplace_back();
    nodes_.back().owner = owner;
}

DciId DciTree::own_node(DciId id) const {
    const DciId upper = points_.upper(id);
    return upper < 0 ? -1 : own_node_[static_cast<std::size_t>(upper)];
}

std::size_t DciTree::node_of(DciId id) {
    DciId & node = own_node_[static_cast<std::size_t>(points_.upper(id))];
    if (node < 0) {
        node = static_cast<DciId>(nodes_.size());
        open_node(id);
        if (level_[static_cast<std::size_t>(id)] == 2) {
            nodes_.back().pages = pages_.of(id) < 0 ? std::vector<DciId>{} : std::vector<DciId>{pages_.of(id)};
        }
    }
    return static_cast<std::size_t>(node);
}

void DciTree::join(const DciKeys & keys, std::size_t at, DciId id) {
    Node & node = nodes_[at];
    node.members.push_back(id);
    if (!node.lines.empty()) {
        std::vector<float> places(node.lines.size());
        points_.project(keys, id, places.data());
        for (std::size_t j = 0; j < node.lines.size(); ++j) {
            const auto entry = std::make_pair(places[j], id);
            Line &     line  = node.lines[j];
            line.insert(std::lower_bound(line.begin(), line.end(), entry), entry);
        }
    } else if (building_.visits != 0 && node.members.size() > building_.visits) {
        draw_lines(keys, node);
    }
    if (level_[static_cast<std::size_t>(id)] != 2) {
        pages_.lay(points_, keys, node.pages, id);
    } else if (own_node(id) < 0) {
        pages_.open(id);
    } else {
        pages_.lay(points_, keys, nodes_[static_cast<std::size_t>(own_node(id))].pages, id);
    }
}

void DciTree::visit(const DciKeys & keys, const Node & node, const DciQuery & query, std::size_t wanted,
                    std::size_t visits, std::vector<DciScored> & to) const {
    if (visits != 0 && visits < node.members.size()) {
        const auto some = visit_nearest(keys, node, query, wanted, visits);
        to.insert(to.end(), some.begin(), some.end());
    } else {
        points_.score(keys, query, node.members.data(), node.members.size(), to);
    }
}

// Prioritized DCI: every direction yields points in order of distance from the query, and a point that all
// directions have yielded is a candidate. A point is never nearer than its distance along a direction.
std::vector<DciScored> DciTree::visit_nearest(const DciKeys & keys, const Node & node, const DciQuery & query,
                                              std::size_t wanted, std::size_t visits) const {
    const std::size_t n_directions = points_.n_directions();
    const auto        drawn = node.lines.empty() ? lines_of(keys, node) : std::vector<Line>{};
    const auto &      lines = node.lines.empty() ? drawn : node.lines;
    using Step = std::tuple<float, std::size_t, int>;  // distance, direction, side
    std::priority_queue<Step, std::vector<Step>, std::greater<Step>> steps;
    std::vector<std::size_t> above(n_directions), below(n_directions);
    const auto push = [&](std::size_t j, int side) {
        const Line & line = lines[j];
        if (side == 0 ? below[j] > 0 : above[j] < line.size()) {
            const float at = side == 0 ? line[below[j] - 1].first : line[above[j]].first;
            steps.emplace(std::abs(at - query.projections[j]), j, side);
        }
    };
    for (std::size_t j = 0; j < n_directions; ++j) {
        const auto first = std::make_pair(query.projections[j], std::numeric_limits<DciId>::min());
        const Line & line = lines[j];
        above[j] = static_cast<std::size_t>(std::lower_bound(line.begin(), line.end(), first) - line.begin());
        below[j] = above[j];
        push(j, 0);
        push(j, 1);
    }
    std::vector<std::pair<DciId, std::size_t>>        met;  // sorted by id
    std::vector<DciScored>                            found;
    std::priority_queue<DciScored>                    best;  // the worst of the best `wanted` on top
    while (!steps.empty() && found.size() < visits) {
        const auto [distance, j, side] = steps.top();
        steps.pop();
        if (best.size() == wanted && distance * distance >= 2 - 2 * best.top().score) {
            break;
        }
        const DciId id = side == 0 ? lines[j][--below[j]].second : lines[j][above[j]++].second;
        push(j, side);
        auto at = std::lower_bound(met.begin(), met.end(), std::make_pair(id, std::size_t{0}));
        if (at == met.end() || at->first != id) {
            at = met.insert(at, {id, 0});
        }
        if (++at->second == n_directions) {
            points_.score(keys, query, &id, 1, found);
            best.push(found.back());
            if (best.size() > wanted) {
                best.pop();
            }
        }
    }
    return found;
}

std::vector<DciScored> DciTree::nearest(const DciKeys & keys, const DciQuery & query, std::size_t level,
                                        bool all_levels, std::size_t k, const DciLimits & limits) const {
    const std::size_t        wanted = limits.beam == 0 ? std::numeric_limits<std::size_t>::max() : std::max(k, limits.beam);
    std::vector<DciScored>   best, found;
    std::vector<std::size_t> nodes{root_};
    for (std::size_t at = n_levels_; at >= level && !nodes.empty(); --at) {
        found.clear();
        for (const std::size_t node : nodes) {
            visit(keys, nodes_[node], query, wanted, limits.visits, found);
        }
        if (all_levels) {
            std::copy_if(found.begin(), found.end(), std::back_inserter(best),
                         [&](const DciScored & point) { return pages_.of(point.id) >= 0; });
        } else if (at == level) {
            best = found;
        }
        nodes.clear();
        found.erase(std::remove_if(found.begin(), found.end(), [&](const DciScored & point) {
            return at > level && own_node(point.id) < 0;
        }), found.end());
        const std::size_t n_kept = limits.beam == 0 ? found.size() : std::min(limits.beam, found.size());
        std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(n_kept), found.end());
        for (std::size_t i = 0; i < n_kept && at > level; ++i) {
            nodes.push_back(static_cast<std::size_t>(own_node(found[i].id)));
        }
    }
    const std::size_t n = std::min(k, best.size());
    std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(n), best.end());
    best.resize(n);
    return best;
}

std::vector<DciId> DciTree::search(const DciKeys & keys, const float * query, std::size_t k,
                                   const DciLimits & limits) const {
    std::vector<DciId> ids;
    if (size() != 0) {
        for (const DciScored & found : nearest(keys, points_.as_query(query), 1, true, k, limits)) {
            ids.push_back(found.id);
        }
    }
    return ids;
}

// Ids that are `there`, in pages that one of the nearest keys lies in.
std::vector<DciId> DciTree::hits(const DciKeys & keys, const float * queries, std::size_t n_queries, std::size_t k,
                                 const DciLimits & limits, const std::uint8_t * there) const {
    std::vector<std::uint8_t> is_hit(n_pages(), 0);
    for (std::size_t i = 0; i < n_queries; ++i) {
        for (const DciId id : search(keys, queries + i * options_.n_dims, k, limits)) {
            is_hit[static_cast<std::size_t>(pages_.of(id))] = 1;
        }
    }
    std::vector<DciId> ids;
    for (std::size_t i = 0; i < size(); ++i) {
        if (there[i] != 0 && !is_gone(i) && is_hit[static_cast<std::size_t>(pages_.of_each()[i])] != 0) {
            ids.push_back(static_cast<DciId>(i));
        }
    }
    return ids;
}

// The keys [first, first + kPanel) of `ids` and then `others`, element by element; 0 after the last.
void DciTree::pack(const DciKeys & keys, const std::vector<DciId> & ids, const float * others, std::size_t n_others,
                   std::size_t first, float * panel) const {
    std::vector<float> key(points_.padded());
    for (std::size_t j = 0; j < kPanel; ++j) {
        const std::size_t at = first + j;
        const float *     row = nullptr;
        if (at < ids.size()) {
            points_.read(keys, ids[at], key.data());
            row = key.data();
        } else if (at < ids.size() + n_others) {
            row = others + (at - ids.size()) * options_.n_dims;
        }
        for (std::size_t d = 0; d < options_.n_dims; ++d) {
            panel[d * kPanel + j] = row == nullptr ? 0.0f : row[d];
        }
    }
}

DciVotes DciTree::vote(const DciKeys & keys, const float * queries, std::size_t n_queries, std::size_t k,
                       const DciLimits & limits, const float * others, std::size_t n_others,
                       const std::uint8_t * there) const {
    DciVotes votes{hits(keys, queries, n_queries, k, limits, there), {}};
    const std::size_t n_ids = votes.ids.size();
    votes.shares.assign(n_ids, 0.0f);
    if (n_ids == 0) {
        return votes;
    }
    const std::size_t n_rows = n_ids + n_others;
    const std::size_t stride = (n_rows + kPanel - 1) / kPanel * kPanel;
    const float       scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(options_.n_dims)));
    Floats panel(kPanel * options_.n_dims), scores(std::min(kQueriesAtOnce, n_queries) * stride), shares(stride);
    for (std::size_t done = 0; done < n_queries; done += kQueriesAtOnce) {
        const std::size_t n = std::min(kQueriesAtOnce, n_queries - done);
        const float *     asking = queries + done * options_.n_dims;
        for (std::size_t first = 0; first < n_rows; first += kPanel) {
            pack(keys, votes.ids, others, n_others, first, panel.data());
            points_.isa().scores(asking, n, panel.data(), options_.n_dims, scale, scores.data() + first, stride);
        }
        for (std::size_t i = 0; i < n; ++i) {
            std::fill_n(shares.data(), stride, 0.0f);
            points_.isa().add_softmax(scores.data() + i * stride, n_rows, 1.0f, shares.data());
            for (std::size_t j = 0; j < n_ids; ++j) {
                votes.shares[j] = std::max(votes.shares[j], shares.data()[j]);
            }
        }
    }
    return votes;
}

}  // namespace towerd
