#include "dci_pages.h"

#include <algorithm>
#include <unordered_map>

namespace towerd {

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

std::string DciPages::broken() const {
    std::size_t n = 0;
    for (std::size_t at = 0; at < pages_.size(); ++at) {
        const auto & members = pages_[at].members;
        if (members.empty() || members.size() > rows_max_) {
            return "a page holds too many rows or none";
        }
        n += members.size();
        for (const std::int64_t id : members) {
            if (of(id) != static_cast<std::int64_t>(at)) {
                return "point " + std::to_string(id) + " is on another page";
            }
        }
    }
    return n == page_of_.size() ? "" : "a point is not on exactly one page";
}

}  // namespace towerd
