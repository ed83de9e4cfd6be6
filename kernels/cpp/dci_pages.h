// Pages of the DCI tree: keys of one leaf that lie near each other, at most `rows_max` of them. A page is a list
// through its keys, so a key costs two numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "dci_points.h"

namespace towerd {

class DciPages {
  public:
    using Choices = std::vector<std::pair<DciId, std::vector<DciId>>>;  // key, pages

    explicit DciPages(std::size_t rows_max) : rows_max_(rows_max) {}

    std::size_t size() const { return pages_.size(); }
    std::size_t nbytes() const { return pages_.capacity() * sizeof(Page) + 2 * page_of_.capacity() * sizeof(DciId); }
    DciId       of(DciId id) const { return page_of_[static_cast<std::size_t>(id)]; }  // -1: on none
    const std::vector<DciId> & of_each() const { return page_of_; }

    void grow(std::size_t n_keys);  // keys without a page
    void open(DciId id);            // a page of its own
    void lay(const DciPoints & points, const DciKeys & keys, std::vector<DciId> & leaf, DciId id);
    void settle(const DciPoints & points, const DciKeys & keys, const Choices & choices);
    void remove(const std::uint8_t * is_gone);  // [n keys]
    bool is_empty(DciId page) const { return at(page).n == 0; }

  private:
    struct Page {
        DciId pivot = -1;  // a key joins the page of its leaf with the nearest pivot
        DciId first = -1, last = -1, n = 0;
    };

    Page &             at(DciId page) { return pages_[static_cast<std::size_t>(page)]; }
    const Page &       at(DciId page) const { return pages_[static_cast<std::size_t>(page)]; }
    std::vector<DciId> members(DciId page) const;
    DciId              split(const DciPoints & points, const DciKeys & keys, DciId page);
    void               put(DciId id, DciId page);
    void               take(DciId id);

    std::size_t        rows_max_;
    std::vector<Page>  pages_;
    std::vector<DciId> page_of_, next_;  // [n keys]; the next key on the same page, or -1
};

}  // namespace towerd
