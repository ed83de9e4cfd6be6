// The keys of a DCI tree. They are rows of others, in any format; a view of them lasts for a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "isa.h"
#include "rows.h"

namespace towerd {

class DciKeys {
  public:
    struct Plane {
        Rows           rows;  // of n_dims numbers
        const Format * format;
    };

    // which, numbers: [n], for each key its plane and its row there; a number below 0: the key is gone. Both must
    // outlive this, and so must the planes' bytes.
    DciKeys(std::size_t n_dims, std::vector<Plane> planes, const std::int32_t * which, const std::int32_t * numbers,
            std::size_t n)
        : n_dims_(n_dims), planes_(std::move(planes)), which_(which), numbers_(numbers), n_(n) {}

    std::size_t size() const { return n_; }
    std::size_t n_dims() const { return n_dims_; }
    bool        has(std::size_t id) const { return numbers_[id] >= 0; }
    CodecId     codec(std::size_t id) const { return plane(id).format->codec; }

    const std::uint8_t * at(std::size_t id) const {
        const Rows & rows = plane(id).rows;
        return rows.data + static_cast<std::size_t>(numbers_[id]) * rows.stride;
    }

    void read(std::size_t id, const Isa & isa, float * to) const { isa.codecs[codec(id)].decode(at(id), to, n_dims_); }

  private:
    const Plane & plane(std::size_t id) const { return planes_[static_cast<std::size_t>(which_[id])]; }

    std::size_t          n_dims_;
    std::vector<Plane>   planes_;
    const std::int32_t * which_;
    const std::int32_t * numbers_;
    std::size_t          n_;
};

}  // namespace towerd
