#include "dci.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "rows.h"

namespace towerd {

namespace {

constexpr int         kLevelMax = 32;
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

void DciPages::open(std::int64_t id) {
    page_of_[static_cast<std::size_t>(id)] = static_cast<std::int64_t>(pages_.size());
    pages_.push_back({id, {id}});
}

// Puts a key on a page of this leaf, and splits the page if it is too large.
void DciPages::lay(const DciPoints & points, std::vector<std::int64_t> & leaf, std::int64_t id) {
    if (leaf.empty()) {
        open(id);
        leaf.push_back(of(id));
        return;
    }
    std::size_t nearest_at = 0;
    if (leaf.size() > 1) {
        std::vector<std::int64_t> pivots;
        for (const std::int64_t some : leaf) {
            pivots.push_back(pages_[static_cast<std::size_t>(some)].pivot);
        }
        std::vector<DciScored> scored;
        points.score(points.as_point(id), pivots.data(), pivots.size(), scored);
        nearest_at = static_cast<std::size_t>(std::min_element(scored.begin(), scored.end()) - scored.begin());
    }
    const std::int64_t page                = leaf[nearest_at];
    page_of_[static_cast<std::size_t>(id)] = page;
    auto & members                         = pages_[static_cast<std::size_t>(page)].members;
    members.push_back(id);
    if (members.size() > rows_max_) {
        leaf.push_back(split(points, page));
    }
}

// Splits a page between two keys far apart: each takes the keys nearer to it. Returns the new page. Keys
// that no distance tells apart are halved in order.
std::int64_t DciPages::split(const DciPoints & points, std::int64_t page) {
    const auto at      = static_cast<std::size_t>(page);
    const auto members = pages_[at].members;
    std::vector<DciScored> of_a, of_b;
    const auto             farthest = [&](std::int64_t from, std::vector<DciScored> & scored) {
        scored.clear();
        points.score(points.as_point(from), members.data(), members.size(), scored);
        return std::max_element(scored.begin(), scored.end())->id;
    };
    const std::int64_t b = farthest(pages_[at].pivot, of_a), a = farthest(b, of_b);
    farthest(a, of_a);
    Page stays{a, {}}, moves{b, {}};
    for (std::size_t i = 0; i < members.size(); ++i) {
        (of_b[i].score > of_a[i].score ? moves : stays).members.push_back(members[i]);
    }
    if (stays.members.empty() || moves.members.empty()) {
        const auto middle = members.begin() + static_cast<std::ptrdiff_t>(members.size() / 2);
        stays             = {members.front(), {members.begin(), middle}};
        moves             = {*middle, {middle, members.end()}};
    }
    for (const std::int64_t id : moves.members) {
        page_of_[static_cast<std::size_t>(id)] = static_cast<std::int64_t>(pages_.size());
    }
    pages_[at] = std::move(stays);
    pages_.push_back(std::move(moves));
    return static_cast<std::int64_t>(pages_.size()) - 1;
}

// Moves each key to the page with the nearest mean among its pages; the means are from before any key moved.
void DciPages::settle(const DciPoints & points, const Choices & choices) {
    std::unordered_map<std::int64_t, DciMean> means;
    for (const auto & [id, pages] : choices) {
        for (const std::int64_t page : pages) {
            if (means.find(page) == means.end()) {
                means.emplace(page, points.mean_of(pages_[static_cast<std::size_t>(page)].members));
            }
        }
    }
    for (const auto & [id, pages] : choices) {
        const std::int64_t before = of(id);
        if (pages_[static_cast<std::size_t>(before)].members.size() == 1) {
            continue;
        }
        std::int64_t best = before;
        float        most = points.nearness(id, means.at(before));
        for (const std::int64_t page : pages) {
            const bool has_room = pages_[static_cast<std::size_t>(page)].members.size() < rows_max_;
            if (page == before || !has_room) {
                continue;
            }
            const float here = points.nearness(id, means.at(page));
            if (here > most) {
                best = page;
                most = here;
            }
        }
        if (best != before) {
            move(id, best);
        }
    }
}

void DciPages::move(std::int64_t id, std::int64_t page) {
    auto & left = pages_[static_cast<std::size_t>(of(id))].members;
    left.erase(std::find(left.begin(), left.end(), id));
    pages_[static_cast<std::size_t>(page)].members.push_back(id);
    page_of_[static_cast<std::size_t>(id)] = page;
}

DciTree::DciTree(const DciOptions & options, const std::vector<float> & directions, const DciLimits & building,
                 const Isa & isa)
    : options_(options), building_(building), points_(options.n_dims, directions, isa), pages_(options.page_rows) {}

void DciTree::add(const float * keys, std::size_t n) {
    if (n == 0) {
        return;
    }
    if (points_.make_room(keys, n)) {
        sort_lines();
    }
    const std::size_t before = size();
    for (std::size_t i = 0; i < n; ++i) {
        points_.add(keys + i * options_.n_dims);
        level_.push_back(drawn_level(before + i));
    }
    parent_.resize(size(), -1);
    own_node_.resize(size(), -1);
    pages_.grow(size());
    if (before == 0) {
        close_gaps();
        open_node(-1);
    }
    for (std::size_t i = before; i < size(); ++i) {
        level_[i] = std::min(level_[i], static_cast<int>(n_levels_) + 1);
    }
    const auto choices = insert_from(before);
    for (int pass = 0; pass < kPasses; ++pass) {
        pages_.settle(points_, choices);
    }
}

int DciTree::drawn_level(std::size_t id) const {
    int level = 1;
    std::uint64_t x = mixed(options_.seed + id * 0xD1342543DE82EF95ull);
    while (level < kLevelMax && static_cast<double>(x >> 11) * 0x1p-53 < options_.ratio) {
        ++level;
        x = mixed(x);
    }
    return level;
}

// Skips the levels that no key of the first `add` drew.
void DciTree::close_gaps() {
    std::vector<int> taken(kLevelMax + 1, 0);
    for (const int level : level_) {
        taken[static_cast<std::size_t>(level)] = 1;
    }
    std::partial_sum(taken.begin(), taken.end(), taken.begin());
    for (int & level : level_) {
        level = taken[static_cast<std::size_t>(level)];
    }
    n_levels_ = static_cast<std::size_t>(taken.back());
}

// All points moved: brings the lines of the nodes in order again.
void DciTree::sort_lines() {
    for (Node & node : nodes_) {
        for (std::size_t j = 0; j < node.lines.size(); ++j) {
            for (auto & [projection, id] : node.lines[j]) {
                projection = points_.projection(id, j);
            }
            std::sort(node.lines[j].begin(), node.lines[j].end());
        }
    }
}

// Inserts the keys from `first` on, the highest level first. Returns the pages that each key at the bottom may be on.
DciPages::Choices DciTree::insert_from(std::size_t first) {
    std::vector<std::int64_t> order(size() - first);
    std::iota(order.begin(), order.end(), static_cast<std::int64_t>(first));
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return level_[static_cast<std::size_t>(a)] > level_[static_cast<std::size_t>(b)];
    });
    std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> near;
    for (const std::int64_t id : order) {
        auto leaves = insert(id);
        if (!leaves.empty()) {
            near.emplace_back(id, std::move(leaves));
        }
    }
    DciPages::Choices choices;  // only now: the leaves got more pages meanwhile
    for (const auto & [id, leaves] : near) {
        choices.emplace_back(id, std::vector<std::int64_t>{});
        for (const std::int64_t leaf : leaves) {
            const auto pages = pages_of(leaf);
            choices.back().second.insert(choices.back().second.end(), pages.begin(), pages.end());
        }
    }
    return choices;
}

// For a key at the bottom, returns the nearest points above, whose leaves it may move to.
std::vector<std::int64_t> DciTree::insert(std::int64_t id) {
    const auto level = static_cast<std::size_t>(level_[static_cast<std::size_t>(id)]);
    if (level > n_levels_) {
        raise(id);
        return {};
    }
    if (level == n_levels_) {
        join(root_, id);
        return {};
    }
    const std::size_t k = building_.beam == 0 ? kNear : std::min(kNear, building_.beam);
    auto found = nearest(points_.as_point(id), level + 1, false, k, building_);
    if (found.empty()) {  // within the limits there were only points without children
        found = nearest(points_.as_point(id), level + 1, false, k, DciLimits{});
    }
    join(node_of(found.front().id), id);
    std::vector<std::int64_t> leaves;
    for (const DciScored & point : found) {
        leaves.push_back(point.id);
    }
    return level == 1 ? leaves : std::vector<std::int64_t>{};
}

// The pages of a point of the second level; if it has no children, its own page.
std::vector<std::int64_t> DciTree::pages_of(std::int64_t leaf) const {
    const std::int64_t node = own_node_[static_cast<std::size_t>(leaf)];
    if (node < 0) {
        return {pages_.of(leaf)};
    }
    return nodes_[static_cast<std::size_t>(node)].pages;
}

// Makes a point the new top: everything that was at the top becomes its children.
void DciTree::raise(std::int64_t id) {
    const std::size_t below = root_;
    nodes_[below].owner     = id;
    for (const std::int64_t member : nodes_[below].members) {
        parent_[static_cast<std::size_t>(member)] = id;
    }
    own_node_[static_cast<std::size_t>(id)] = static_cast<std::int64_t>(below);
    root_                                   = nodes_.size();
    open_node(-1);
    ++n_levels_;
    join(root_, id);
}

void DciTree::open_node(std::int64_t owner) {
    nodes_.emplace_back();
    nodes_.back().owner = owner;
    nodes_.back().lines.resize(points_.n_directions());
}

std::size_t DciTree::node_of(std::int64_t id) {
    std::int64_t & node = own_node_[static_cast<std::size_t>(id)];
    if (node < 0) {
        node = static_cast<std::int64_t>(nodes_.size());
        open_node(id);
        if (level_[static_cast<std::size_t>(id)] == 2) {
            nodes_.back().pages.push_back(pages_.of(id));
        }
    }
    return static_cast<std::size_t>(node);
}

void DciTree::join(std::size_t at, std::int64_t id) {
    Node & node = nodes_[at];
    const auto i = static_cast<std::size_t>(id);
    node.members.push_back(id);
    for (std::size_t j = 0; j < node.lines.size(); ++j) {
        const auto entry = std::make_pair(points_.projection(id, j), id);
        Line &     line  = node.lines[j];
        line.insert(std::lower_bound(line.begin(), line.end(), entry), entry);
    }
    parent_[i] = node.owner;
    if (level_[i] != 2) {
        pages_.lay(points_, node.pages, id);
    } else if (own_node_[i] < 0) {
        pages_.open(id);
    } else {
        pages_.lay(points_, nodes_[static_cast<std::size_t>(own_node_[i])].pages, id);
    }
}

void DciTree::visit(const Node & node, const DciQuery & query, std::size_t wanted, std::size_t visits,
                    std::vector<DciScored> & to) const {
    if (visits != 0 && visits < node.members.size()) {
        const auto some = visit_nearest(node, query, wanted, visits);
        to.insert(to.end(), some.begin(), some.end());
    } else {
        points_.score(query, node.members.data(), node.members.size(), to);
    }
}

// Prioritized DCI: every direction yields points in order of distance from the query, and a point that all
// directions have yielded is a candidate. A point is never nearer than its distance along a direction.
std::vector<DciScored> DciTree::visit_nearest(const Node & node, const DciQuery & query, std::size_t wanted,
                                              std::size_t visits) const {
    const std::size_t n_directions = points_.n_directions();
    using Step = std::tuple<float, std::size_t, int>;  // distance, direction, side
    std::priority_queue<Step, std::vector<Step>, std::greater<Step>> steps;
    std::vector<std::size_t> above(n_directions), below(n_directions);
    const auto push = [&](std::size_t j, int side) {
        const Line & line = node.lines[j];
        if (side == 0 ? below[j] > 0 : above[j] < line.size()) {
            const float at = side == 0 ? line[below[j] - 1].first : line[above[j]].first;
            steps.emplace(std::abs(at - query.projections[j]), j, side);
        }
    };
    for (std::size_t j = 0; j < n_directions; ++j) {
        const auto first = std::make_pair(query.projections[j], std::numeric_limits<std::int64_t>::min());
        const Line & line = node.lines[j];
        above[j] = static_cast<std::size_t>(std::lower_bound(line.begin(), line.end(), first) - line.begin());
        below[j] = above[j];
        push(j, 0);
        push(j, 1);
    }
    std::vector<std::pair<std::int64_t, std::size_t>> met;  // sorted by id
    std::vector<DciScored>                            found;
    std::priority_queue<DciScored>                    best;  // the worst of the best `wanted` on top
    while (!steps.empty() && found.size() < visits) {
        const auto [distance, j, side] = steps.top();
        steps.pop();
        if (best.size() == wanted && distance * distance >= 2 - 2 * best.top().score) {
            break;
        }
        const std::int64_t id = side == 0 ? node.lines[j][--below[j]].second : node.lines[j][above[j]++].second;
        push(j, side);
        auto at = std::lower_bound(met.begin(), met.end(), std::make_pair(id, std::size_t{0}));
        if (at == met.end() || at->first != id) {
            at = met.insert(at, {id, 0});
        }
        if (++at->second == n_directions) {
            points_.score(query, &id, 1, found);
            best.push(found.back());
            if (best.size() > wanted) {
                best.pop();
            }
        }
    }
    return found;
}

std::vector<DciScored> DciTree::nearest(const DciQuery & query, std::size_t level, bool all_levels, std::size_t k,
                                        const DciLimits & limits) const {
    const std::size_t        wanted = limits.beam == 0 ? std::numeric_limits<std::size_t>::max() : std::max(k, limits.beam);
    std::vector<DciScored>   best;
    std::vector<std::size_t> nodes{root_};
    for (std::size_t at = n_levels_; at >= level && !nodes.empty(); --at) {
        std::vector<DciScored> found;
        for (const std::size_t node : nodes) {
            visit(nodes_[node], query, wanted, limits.visits, found);
        }
        if (all_levels || at == level) {
            best.insert(best.end(), found.begin(), found.end());
        }
        nodes.clear();
        found.erase(std::remove_if(found.begin(), found.end(), [&](const DciScored & point) {
            return at > level && own_node_[static_cast<std::size_t>(point.id)] < 0;
        }), found.end());
        const std::size_t n_kept = limits.beam == 0 ? found.size() : std::min(limits.beam, found.size());
        std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(n_kept), found.end());
        for (std::size_t i = 0; i < n_kept && at > level; ++i) {
            nodes.push_back(static_cast<std::size_t>(own_node_[static_cast<std::size_t>(found[i].id)]));
        }
    }
    const std::size_t n = std::min(k, best.size());
    std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(n), best.end());
    best.resize(n);
    return best;
}

std::vector<std::int64_t> DciTree::search(const float * query, std::size_t k, const DciLimits & limits) const {
    std::vector<std::int64_t> ids;
    if (size() != 0) {
        for (const DciScored & found : nearest(points_.as_query(query), 1, true, k, limits)) {
            ids.push_back(found.id);
        }
    }
    return ids;
}

// Ids that are `there`, in pages that one of the nearest keys lies in.
std::vector<std::int64_t> DciTree::hits(const float * queries, std::size_t n_queries, std::size_t k,
                                        const DciLimits & limits, const std::uint8_t * there) const {
    std::vector<std::uint8_t> is_hit(n_pages(), 0);
    for (std::size_t i = 0; i < n_queries; ++i) {
        for (const std::int64_t id : search(queries + i * options_.n_dims, k, limits)) {
            is_hit[static_cast<std::size_t>(pages_.of(id))] = 1;
        }
    }
    std::vector<std::int64_t> ids;
    for (std::size_t i = 0; i < size(); ++i) {
        if (there[i] != 0 && is_hit[static_cast<std::size_t>(pages_.of(static_cast<std::int64_t>(i)))] != 0) {
            ids.push_back(static_cast<std::int64_t>(i));
        }
    }
    return ids;
}

// The keys [first, first + kPanel) of `ids` and then `others`, element by element; 0 after the last.
void DciTree::pack(const std::int64_t * ids, std::size_t n_ids, const float * others, std::size_t n_others,
                   std::size_t first, float * panel) const {
    for (std::size_t j = 0; j < kPanel; ++j) {
        const std::size_t at = first + j;
        const float *     row = nullptr;
        if (at < n_ids) {
            row = key(ids[at]);
        } else if (at < n_ids + n_others) {
            row = others + (at - n_ids) * options_.n_dims;
        }
        for (std::size_t d = 0; d < options_.n_dims; ++d) {
            panel[d * kPanel + j] = row == nullptr ? 0.0f : row[d];
        }
    }
}

DciVotes DciTree::vote(const float * queries, std::size_t n_queries, std::size_t k, const DciLimits & limits,
                       const float * others, std::size_t n_others, const std::uint8_t * there) const {
    DciVotes votes{hits(queries, n_queries, k, limits, there), {}};
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
            pack(votes.ids.data(), n_ids, others, n_others, first, panel.data());
            points_.isa().scores(asking, n, panel.data(), options_.n_dims, scale, scores.data() + first, stride);
        }
        for (std::size_t i = 0; i < n; ++i) {
            std::fill_n(shares.data(), stride, 0.0f);
            points_.isa().add_softmax(scores.data() + i * stride, n_rows, shares.data());
            for (std::size_t j = 0; j < n_ids; ++j) {
                votes.shares[j] = std::max(votes.shares[j], shares.data()[j]);
            }
        }
    }
    return votes;
}

}  // namespace towerd
