// Pages: keys of one leaf that lie near each other, at most `page_rows` of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dci_points.h"

namespace towerd {

class DciPages {
  public:
    using Choices = std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>>;  // key, pages

    explicit DciPages(std::size_t rows_max) : rows_max_(rows_max) {}

    std::size_t  size() const { return pages_.size(); }
    std::int64_t of(std::int64_t id) const { return page_of_[static_cast<std::size_t>(id)]; }
    const std::vector<std::int64_t> & of_each() const { return page_of_; }

    void grow(std::size_t n_keys) { page_of_.resize(n_keys, -1); }  // keys without a page
    void open(std::int64_t id);                                     // a page of its own
    void lay(const DciPoints & points, std::vector<std::int64_t> & leaf, std::int64_t id);
    void settle(const DciPoints & points, const Choices & choices);

    std::string broken() const;  // what is wrong with the pages; empty if nothing is

  private:
    struct Page {
        std::int64_t              pivot = -1;  // a key joins the page of its leaf with the nearest pivot
        std::vector<std::int64_t> members;
    };

    std::int64_t split(const DciPoints & points, std::int64_t page);
    void         move(std::int64_t id, std::int64_t page);

    std::size_t               rows_max_;
    std::vector<Page>         pages_;
    std::vector<std::int64_t> page_of_;
};

}  // namespace towerd
