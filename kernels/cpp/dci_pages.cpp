#include "dci_pages.h"

#include <algorithm>
#include <unordered_map>

namespace towerd {

void DciPages::grow(std::size_t n_keys) {
    reserve_for(page_of_, n_keys);
    reserve_for(next_, n_keys);
    page_of_.resize(n_keys, -1);
    next_.resize(n_keys, -1);
}

void DciPages::open(DciId id) {
    reserve_for(pages_, pages_.size() + 1);
    pages_.push_back({id, -1, -1, 0});
    put(id, static_cast<DciId>(pages_.size()) - 1);
}

std::vector<DciId> DciPages::members(DciId page) const {
    std::vector<DciId> found;
    for (DciId id = at(page).first; id >= 0; id = next_[static_cast<std::size_t>(id)]) {
        found.push_back(id);
    }
    return found;
}

// Puts a key behind the others of a page.
void DciPages::put(DciId id, DciId page) {
    Page & to = at(page);
    (to.n == 0 ? to.first : next_[static_cast<std::size_t>(to.last)]) = id;
    to.last = id;
    ++to.n;
    next_[static_cast<std::size_t>(id)]    = -1;
    page_of_[static_cast<std::size_t>(id)] = page;
}

void DciPages::take(DciId id) {
    Page &      from = at(of(id));
    const DciId next = next_[static_cast<std::size_t>(id)];
    DciId       before = -1;
    for (DciId each = from.first; each != id; each = next_[static_cast<std::size_t>(each)]) {
        before = each;
    }
    (before < 0 ? from.first : next_[static_cast<std::size_t>(before)]) = next;
    from.last = next < 0 ? before : from.last;
    --from.n;
}

// Puts a key on a page of this leaf, and splits the page if it is too large.
void DciPages::lay(const DciPoints & points, const DciKeys & keys, std::vector<DciId> & leaf, DciId id) {
    if (leaf.empty()) {
        open(id);
        leaf.push_back(of(id));
        return;
    }
    std::size_t nearest_at = 0;
    if (leaf.size() > 1) {
        std::vector<DciId> pivots;
        for (const DciId page : leaf) {
            pivots.push_back(at(page).pivot);
        }
        std::vector<DciScored> scored;
        points.score(keys, points.as_point(keys, id), pivots.data(), pivots.size(), scored);
        nearest_at = static_cast<std::size_t>(std::min_element(scored.begin(), scored.end()) - scored.begin());
    }
    const DciId page = leaf[nearest_at];
    put(id, page);
    if (static_cast<std::size_t>(at(page).n) > rows_max_) {
        leaf.push_back(split(points, keys, page));
    }
}

// Splits a page between two keys far apart: each takes the keys nearer to it. Returns the new page. Keys
// that no distance tells apart are halved in order.
DciId DciPages::split(const DciPoints & points, const DciKeys & keys, DciId page) {
    const auto             all = members(page);
    std::vector<DciScored> of_a, of_b;
    const auto             farthest = [&](DciId from, std::vector<DciScored> & scored) {
        scored.clear();
        points.score(keys, points.as_point(keys, from), all.data(), all.size(), scored);
        return std::max_element(scored.begin(), scored.end())->id;
    };
    const DciId        b = farthest(at(page).pivot, of_a), a = farthest(b, of_b);
    std::vector<DciId> stay, move;
    farthest(a, of_a);
    for (std::size_t i = 0; i < all.size(); ++i) {
        (of_b[i].score > of_a[i].score ? move : stay).push_back(all[i]);
    }
    const bool is_told = !stay.empty() && !move.empty();
    if (!is_told) {
        const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
        stay.assign(all.begin(), middle);
        move.assign(middle, all.end());
    }
    const auto other = static_cast<DciId>(pages_.size());
    at(page) = {is_told ? a : stay.front(), -1, -1, 0};
    reserve_for(pages_, pages_.size() + 1);
    pages_.push_back({is_told ? b : move.front(), -1, -1, 0});
    for (const DciId id : stay) {
        put(id, page);
    }
    for (const DciId id : move) {
        put(id, other);
    }
    return other;
}

// Moves each key to the page with the nearest mean among its pages; the means are from before any key moved.
void DciPages::settle(const DciPoints & points, const DciKeys & keys, const Choices & choices) {
    std::unordered_map<DciId, DciMean> means;
    for (const auto & [id, pages] : choices) {
        for (const DciId page : pages) {
            if (means.find(page) == means.end()) {
                means.emplace(page, points.mean_of(keys, members(page)));
            }
        }
    }
    std::vector<float> key(points.padded());
    for (const auto & [id, pages] : choices) {
        const DciId before = of(id);
        if (at(before).n == 1) {
            continue;
        }
        points.read(keys, id, key.data());
        DciId best = before;
        float most = points.nearness(key.data(), id, means.at(before));
        for (const DciId page : pages) {
            const bool has_room = static_cast<std::size_t>(at(page).n) < rows_max_;
            if (page == before || !has_room) {
                continue;
            }
            const float here = points.nearness(key.data(), id, means.at(page));
            if (here > most) {
                best = page;
                most = here;
            }
        }
        if (best != before) {
            take(id);
            put(id, best);
        }
    }
}

void DciPages::remove(const std::uint8_t * is_gone) {
    for (std::size_t page = 0; page < pages_.size(); ++page) {
        const auto  all   = members(static_cast<DciId>(page));
        const DciId pivot = pages_[page].pivot;
        pages_[page]      = {};
        for (const DciId id : all) {
            if (is_gone[id] == 0) {
                put(id, static_cast<DciId>(page));
            } else {
                page_of_[static_cast<std::size_t>(id)] = -1;
            }
        }
        pages_[page].pivot = pivot >= 0 && is_gone[pivot] == 0 ? pivot : pages_[page].first;
    }
}

}  // namespace towerd
