#include "dci.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <tuple>
#include <unordered_map>

namespace towerd {

namespace {

constexpr std::size_t kLanes    = 8;
constexpr double      kScaleMin = 1e-15;
constexpr double      kHeadroom = 1.25;  // of the scale, when a key longer than all before is added
constexpr int         kLevelMax = 32;
constexpr std::size_t kScoredAtOnce = 64;
constexpr std::size_t kNear = 4;  // leaves whose pages a new key may join
constexpr int         kPasses = 2;

// Eight running sums in a fixed order: every machine gets the same bits, with any vector width.
float dot(const float * a, const float * b, std::size_t n) {
    float sums[kLanes] = {};
    for (std::size_t i = 0; i < n; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            sums[lane] += a[i + lane] * b[i + lane];
        }
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

}  // namespace

DciTree::DciTree(const DciOptions & options, std::vector<float> directions, const DciLimits & building, const Isa & isa)
    : options_(options), building_(building), isa_(&isa), padded_((options.n_dims + kLanes - 1) / kLanes * kLanes),
      n_directions_(directions.size() / (options.n_dims + 1)), directions_(n_directions_ * padded_),
      direction_last_(n_directions_) {
    for (std::size_t i = 0; i < n_directions_; ++i) {
        const float * row = directions.data() + i * (options.n_dims + 1);
        std::copy_n(row, options.n_dims, directions_.data() + i * padded_);
        direction_last_[i] = row[options.n_dims];
    }
}

double DciTree::square(const float * values) const {
    double sum = 0;
    for (std::size_t i = 0; i < options_.n_dims; ++i) {
        sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    return sum;
}

float DciTree::last_of(double square) const {
    return static_cast<float>(std::sqrt(std::max(0.0, 1.0 - square / (scale_ * scale_))));
}

float DciTree::projected(const float * raw, std::size_t direction, float last) const {
    return static_cast<float>(static_cast<double>(*raw) / scale_ +
                              static_cast<double>(direction_last_[direction]) * static_cast<double>(last));
}

// Appends `ids` with their scores.
void DciTree::score(const Query & query, const std::int64_t * ids, std::size_t n, std::vector<Scored> & to) const {
    float products[kScoredAtOnce];
    for (std::size_t done = 0; done < n; done += kScoredAtOnce) {
        const std::size_t some = std::min(kScoredAtOnce, n - done);
        isa_->dots(query.vector.data(), keys_.data(), ids + done, some, padded_, products);
        for (std::size_t i = 0; i < some; ++i) {
            const std::int64_t id = ids[done + i];
            to.push_back({products[i] + query.last * last_[static_cast<std::size_t>(id)], id});
        }
    }
}

DciTree::Query DciTree::as_query(const float * values) const {
    Query        query{std::vector<float>(padded_), 0, std::vector<float>(n_directions_)};
    const double length = std::sqrt(square(values));
    if (length > 0) {
        std::vector<float> unit(padded_);
        for (std::size_t i = 0; i < options_.n_dims; ++i) {
            unit[i]         = static_cast<float>(values[i] / length);
            query.vector[i] = static_cast<float>(values[i] / length / scale_);
        }
        for (std::size_t i = 0; i < n_directions_; ++i) {
            query.projections[i] = dot(directions_.data() + i * padded_, unit.data(), padded_);
        }
    }
    return query;
}

DciTree::Query DciTree::as_point(std::int64_t id) const {
    const auto at = static_cast<std::size_t>(id);
    Query      query{std::vector<float>(padded_), last_[at], {}};
    for (std::size_t i = 0; i < options_.n_dims; ++i) {
        query.vector[i] = static_cast<float>(key(id)[i] / (scale_ * scale_));
    }
    const float * row = projection_.data() + at * n_directions_;
    query.projections.assign(row, row + n_directions_);
    return query;
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

void DciTree::widen(double longest) {
    if (scale_ >= longest && scale_ > 0) {
        return;
    }
    scale_ = std::max(kScaleMin, size() == 0 ? longest : longest * kHeadroom);
    for (std::size_t i = 0; i < size(); ++i) {
        last_[i] = last_of(square_[i]);
        for (std::size_t j = 0; j < n_directions_; ++j) {
            const std::size_t at = i * n_directions_ + j;
            projection_[at]      = projected(&raw_[at], j, last_[i]);
        }
    }
    for (Node & node : nodes_) {
        for (std::size_t j = 0; j < n_directions_; ++j) {
            for (auto & [projection, id] : node.lines[j]) {
                projection = projection_[static_cast<std::size_t>(id) * n_directions_ + j];
            }
            std::sort(node.lines[j].begin(), node.lines[j].end());
        }
    }
}

void DciTree::store(const float * values) {
    keys_.resize(keys_.size() + padded_);
    float * row = keys_.data() + keys_.size() - padded_;
    std::copy_n(values, options_.n_dims, row);
    square_.push_back(square(values));
    last_.push_back(last_of(square_.back()));
    for (std::size_t j = 0; j < n_directions_; ++j) {
        raw_.push_back(dot(directions_.data() + j * padded_, row, padded_));
        projection_.push_back(projected(&raw_.back(), j, last_.back()));
    }
    parent_.push_back(-1);
    page_.push_back(-1);
    own_node_.push_back(-1);
}

void DciTree::add(const float * keys, std::size_t n) {
    if (n == 0) {
        return;
    }
    double longest = 0;
    for (std::size_t i = 0; i < n; ++i) {
        longest = std::max(longest, square(keys + i * options_.n_dims));
    }
    widen(std::sqrt(longest));
    const std::size_t before = size();
    for (std::size_t i = 0; i < n; ++i) {
        store(keys + i * options_.n_dims);
        level_.push_back(drawn_level(before + i));
    }
    if (before == 0) {  // skip levels that no key drew
        std::vector<int> taken(kLevelMax + 1, 0);
        for (const int level : level_) {
            taken[static_cast<std::size_t>(level)] = 1;
        }
        for (std::size_t i = 1; i < taken.size(); ++i) {
            taken[i] += taken[i - 1];
        }
        for (int & level : level_) {
            level = taken[static_cast<std::size_t>(level)];
        }
        n_levels_ = static_cast<std::size_t>(taken.back());
        nodes_.emplace_back();
        nodes_.back().lines.resize(n_directions_);
    } else {
        for (std::size_t i = before; i < size(); ++i) {
            level_[i] = std::min(level_[i], static_cast<int>(n_levels_) + 1);
        }
    }
    std::vector<std::int64_t> order(n);
    for (std::size_t i = 0; i < n; ++i) {
        order[i] = static_cast<std::int64_t>(before + i);
    }
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
    for (int pass = 0; pass < kPasses; ++pass) {
        settle(near);
    }
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
    auto found = nearest(as_point(id), level + 1, false, k, building_);
    if (found.empty()) {  // within the limits there were only points without children
        found = nearest(as_point(id), level + 1, false, k, DciLimits{});
    }
    join(node_of(found.front().id), id);
    std::vector<std::int64_t> leaves;
    for (const Scored & point : found) {
        leaves.push_back(point.id);
    }
    return level == 1 ? leaves : std::vector<std::int64_t>{};
}

// Moves each key to the page with the nearest mean, among the pages of its leaves; the means are from before any
// key moved.
void DciTree::settle(const std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> & near) {
    std::unordered_map<std::int64_t, Mean> means;
    for (const auto & [id, leaves] : near) {
        for (const std::int64_t leaf : leaves) {
            for (const std::int64_t page : pages_of(leaf)) {
                if (means.find(page) == means.end()) {
                    means.emplace(page, mean_of(pages_[static_cast<std::size_t>(page)]));
                }
            }
        }
    }
    for (const auto & [id, leaves] : near) {
        const auto         i = static_cast<std::size_t>(id);
        const std::int64_t before = page_[i];
        auto &             left = pages_[static_cast<std::size_t>(before)].members;
        if (left.size() == 1) {
            continue;
        }
        const auto score = [&, at = i](std::int64_t page) {
            const Mean & mean = means.at(page);
            const float  product = dot(keys_.data() + at * padded_, mean.query.vector.data(), padded_);
            return product + mean.query.last * last_[at] - mean.half;
        };
        std::int64_t best = before;
        float        most = score(before);
        for (const std::int64_t leaf : leaves) {
            for (const std::int64_t page : pages_of(leaf)) {
                const bool has_room = pages_[static_cast<std::size_t>(page)].members.size() < options_.page_rows;
                if (page == before || !has_room) {
                    continue;
                }
                const float here = score(page);
                if (here > most) {
                    best = page;
                    most = here;
                }
            }
        }
        if (best != before) {
            left.erase(std::find(left.begin(), left.end(), id));
            pages_[static_cast<std::size_t>(best)].members.push_back(id);
            page_[i] = best;
        }
    }
}

// The pages of a point of the second level; if it has no children, its own page.
std::vector<std::int64_t> DciTree::pages_of(std::int64_t leaf) const {
    const std::int64_t node = own_node_[static_cast<std::size_t>(leaf)];
    if (node < 0) {
        return {page_[static_cast<std::size_t>(leaf)]};
    }
    return nodes_[static_cast<std::size_t>(node)].pages;
}

DciTree::Mean DciTree::mean_of(const Page & page) const {
    Mean                mean{{std::vector<float>(padded_), 0, {}}, 0};
    std::vector<double> total(options_.n_dims);
    double              last = 0, square = 0;
    for (const std::int64_t id : page.members) {
        for (std::size_t d = 0; d < options_.n_dims; ++d) {
            total[d] += static_cast<double>(key(id)[d]);
        }
        last += static_cast<double>(last_[static_cast<std::size_t>(id)]);
    }
    const auto n = static_cast<double>(page.members.size());
    for (std::size_t d = 0; d < options_.n_dims; ++d) {
        const double value   = total[d] / n / scale_;
        mean.query.vector[d] = static_cast<float>(value / scale_);
        square += value * value;
    }
    mean.query.last = static_cast<float>(last / n);
    mean.half       = static_cast<float>((square + last / n * (last / n)) / 2);
    return mean;
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
    nodes_.emplace_back();
    nodes_.back().lines.resize(n_directions_);
    ++n_levels_;
    join(root_, id);
}

std::size_t DciTree::node_of(std::int64_t id) {
    std::int64_t & node = own_node_[static_cast<std::size_t>(id)];
    if (node < 0) {
        node = static_cast<std::int64_t>(nodes_.size());
        nodes_.emplace_back();
        nodes_.back().owner = id;
        nodes_.back().lines.resize(n_directions_);
        if (level_[static_cast<std::size_t>(id)] == 2) {
            nodes_.back().pages.push_back(page_[static_cast<std::size_t>(id)]);
        }
    }
    return static_cast<std::size_t>(node);
}

void DciTree::join(std::size_t at, std::int64_t id) {
    Node & node = nodes_[at];
    const auto i = static_cast<std::size_t>(id);
    node.members.push_back(id);
    for (std::size_t j = 0; j < n_directions_; ++j) {
        const auto entry = std::make_pair(projection_[i * n_directions_ + j], id);
        Line &     line  = node.lines[j];
        line.insert(std::lower_bound(line.begin(), line.end(), entry), entry);
    }
    parent_[i] = node.owner;
    if (level_[i] != 2) {
        lay(at, id);
    } else if (own_node_[i] < 0) {
        page_[i] = open_page(id);
    } else {
        lay(static_cast<std::size_t>(own_node_[i]), id);
    }
}

std::int64_t DciTree::open_page(std::int64_t id) {
    pages_.push_back({id, {id}});
    return static_cast<std::int64_t>(pages_.size()) - 1;
}

// Puts a key on a page of this leaf, and splits the page if it is too large.
void DciTree::lay(std::size_t at, std::int64_t id) {
    Node &         node = nodes_[at];
    std::int64_t & page = page_[static_cast<std::size_t>(id)];
    if (node.pages.empty()) {
        page = open_page(id);
        node.pages.push_back(page);
        return;
    }
    std::size_t nearest_at = 0;
    if (node.pages.size() > 1) {
        std::vector<std::int64_t> pivots;
        for (const std::int64_t some : node.pages) {
            pivots.push_back(pages_[static_cast<std::size_t>(some)].pivot);
        }
        std::vector<Scored> scored;
        score(as_point(id), pivots.data(), pivots.size(), scored);
        nearest_at = static_cast<std::size_t>(std::min_element(scored.begin(), scored.end()) - scored.begin());
    }
    page           = node.pages[nearest_at];
    auto & members = pages_[static_cast<std::size_t>(page)].members;
    members.push_back(id);
    if (members.size() > options_.page_rows) {
        node.pages.push_back(split_page(page));
    }
}

// Splits a page between two keys far apart: each takes the keys nearer to it. Returns the new page. Keys
// that no distance tells apart are halved in order.
std::int64_t DciTree::split_page(std::int64_t page) {
    const auto at      = static_cast<std::size_t>(page);
    const auto members = pages_[at].members;
    std::vector<Scored> of_a, of_b;
    const auto          farthest = [&](std::int64_t from, std::vector<Scored> & scored) {
        scored.clear();
        score(as_point(from), members.data(), members.size(), scored);
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
        page_[static_cast<std::size_t>(id)] = static_cast<std::int64_t>(pages_.size());
    }
    pages_[at] = std::move(stays);
    pages_.push_back(std::move(moves));
    return static_cast<std::int64_t>(pages_.size()) - 1;
}

void DciTree::visit(const Node & node, const Query & query, std::size_t wanted, std::size_t visits,
                    std::vector<Scored> & to) const {
    if (visits != 0 && visits < node.members.size()) {
        const auto some = visit_nearest(node, query, wanted, visits);
        to.insert(to.end(), some.begin(), some.end());
    } else {
        score(query, node.members.data(), node.members.size(), to);
    }
}

// Prioritized DCI: every direction yields points in order of distance from the query, and a point that all
// directions have yielded is a candidate. A point is never nearer than its distance along a direction.
std::vector<DciTree::Scored> DciTree::visit_nearest(const Node & node, const Query & query, std::size_t wanted,
                                                    std::size_t visits) const {
    using Step = std::tuple<float, std::size_t, int>;  // distance, direction, side
    std::priority_queue<Step, std::vector<Step>, std::greater<Step>> steps;
    std::vector<std::size_t> above(n_directions_), below(n_directions_);
    const auto push = [&](std::size_t j, int side) {
        const Line & line = node.lines[j];
        if (side == 0 ? below[j] > 0 : above[j] < line.size()) {
            const float at = side == 0 ? line[below[j] - 1].first : line[above[j]].first;
            steps.emplace(std::abs(at - query.projections[j]), j, side);
        }
    };
    for (std::size_t j = 0; j < n_directions_; ++j) {
        const auto first = std::make_pair(query.projections[j], std::numeric_limits<std::int64_t>::min());
        const Line & line = node.lines[j];
        above[j] = static_cast<std::size_t>(std::lower_bound(line.begin(), line.end(), first) - line.begin());
        below[j] = above[j];
        push(j, 0);
        push(j, 1);
    }
    std::vector<std::pair<std::int64_t, std::size_t>> met;  // sorted by id
    std::vector<Scored>        found;
    std::priority_queue<Scored> best;  // the worst of the best `wanted` on top
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
        if (++at->second == n_directions_) {
            score(query, &id, 1, found);
            best.push(found.back());
            if (best.size() > wanted) {
                best.pop();
            }
        }
    }
    return found;
}

std::vector<DciTree::Scored> DciTree::nearest(const Query & query, std::size_t level, bool all_levels, std::size_t k,
                                              const DciLimits & limits) const {
    const std::size_t   wanted = limits.beam == 0 ? std::numeric_limits<std::size_t>::max() : std::max(k, limits.beam);
    std::vector<Scored> best;
    std::vector<std::size_t> nodes{root_};
    for (std::size_t at = n_levels_; at >= level && !nodes.empty(); --at) {
        std::vector<Scored> found;
        for (const std::size_t node : nodes) {
            visit(nodes_[node], query, wanted, limits.visits, found);
        }
        if (all_levels || at == level) {
            best.insert(best.end(), found.begin(), found.end());
        }
        nodes.clear();
        found.erase(std::remove_if(found.begin(), found.end(), [&](const Scored & point) {
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
        for (const Scored & found : nearest(as_query(query), 1, true, k, limits)) {
            ids.push_back(found.id);
        }
    }
    return ids;
}

std::string DciTree::broken() const {
    std::vector<std::size_t> times(size(), 0);
    for (std::size_t at = 0; at < nodes_.size(); ++at) {
        const Node & node = nodes_[at];
        const bool   is_root = node.owner < 0;
        if (is_root != (at == root_) || (!is_root && own_node_[static_cast<std::size_t>(node.owner)] != static_cast<std::int64_t>(at))) {
            return "a node belongs to the wrong point";
        }
        const std::size_t level = is_root ? n_levels_ + 1 : static_cast<std::size_t>(level_[static_cast<std::size_t>(node.owner)]);
        for (const std::int64_t id : node.members) {
            const auto i = static_cast<std::size_t>(id);
            ++times[i];
            if (parent_[i] != node.owner || static_cast<std::size_t>(level_[i]) + 1 != level) {
                return "point " + std::to_string(id) + " has the wrong parent";
            }
        }
        for (const Line & line : node.lines) {
            if (line.size() != node.members.size() || !std::is_sorted(line.begin(), line.end())) {
                return "a node is out of order";
            }
        }
    }
    if (std::any_of(times.begin(), times.end(), [](std::size_t n) { return n != 1; })) {
        return "a point is not in exactly one node";
    }
    return broken_pages();
}

std::string DciTree::broken_pages() const {
    std::size_t n = 0;
    for (std::size_t at = 0; at < pages_.size(); ++at) {
        const auto & members = pages_[at].members;
        if (members.empty() || members.size() > options_.page_rows) {
            return "a page holds too many rows or none";
        }
        n += members.size();
        for (const std::int64_t id : members) {
            if (page_[static_cast<std::size_t>(id)] != static_cast<std::int64_t>(at)) {
                return "point " + std::to_string(id) + " is on another page";
            }
        }
    }
    return n == size() ? "" : "a point is not on exactly one page";
}

}  // namespace towerd
