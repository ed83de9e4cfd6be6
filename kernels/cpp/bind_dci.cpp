// towerd.kernels._native.DciTree: every argument is checked with the GIL held; adding and searching
// work without it. A tree is for one thread at a time. DciKeys holds the buffers that the keys of a tree lie in.

#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dci.h"
#include "dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;
using nb::handle;

namespace towerd {

namespace {

constexpr long long kDimsMax = 4096, kDirectionsMax = 64, kPageMax = 1 << 20, kCountMax = 1ll << 40;
constexpr std::size_t kKeysMax = std::size_t{1} << 30;

// Rows of `n_dims` finite numbers that are not too long; both must hold before any is stored.
void check_rows(const Buffer & rows, std::size_t n_dims, const char * name) {
    rows.require_contiguous(name);
    rows.require_aligned(name);
    if (rows.shape(1) != n_dims) {
        refuse(name, "rows of " + std::to_string(rows.shape(1)) + " numbers, expected " + std::to_string(n_dims));
    }
    const auto * values = reinterpret_cast<const float *>(rows.data());
    for (std::size_t i = 0; i < rows.shape(0) * n_dims; ++i) {
        if (!std::isfinite(values[i]) || std::abs(static_cast<double>(values[i])) > kDciKeyMax) {
            refuse(name, "a number is not finite or larger than 1e15");
        }
    }
}

double ratio_of(handle value) {
    const double ratio = PyFloat_Check(value.ptr()) ? PyFloat_AsDouble(value.ptr()) : -1.0;
    if (!(ratio > 0 && ratio <= 0.5)) {
        refuse("ratio", "expected a float above 0, at most 0.5");
    }
    return ratio;
}

DciLimits limits_of(handle visits, handle beam) {
    return {count_of(visits, "visits_max", 0, kCountMax), count_of(beam, "beam", 0, kCountMax)};
}

std::vector<float> directions_of(handle value, std::size_t n_dims) {
    const Buffer rows(value, "directions", false, 2, sizeof(float), kFloat);
    check_rows(rows, n_dims + 1, "directions");
    if (rows.shape(0) < 1 || rows.shape(0) > kDirectionsMax) {
        refuse("directions", "expected 1 to 64 rows");
    }
    const auto * values = reinterpret_cast<const float *>(rows.data());
    return {values, values + rows.shape(0) * (n_dims + 1)};
}

const Isa & isa_of(handle name) {
    if (name.is_none()) {
        return *available().front();
    }
    const Isa * isa = PyUnicode_Check(name.ptr()) ? isa_named(nb::cast<std::string>(name).c_str()) : nullptr;
    if (isa == nullptr) {
        refuse("isa", "expected one of available()");
    }
    return *isa;
}

DciTree made(handle n_dims, handle directions, handle ratio, handle page_rows, handle seed, handle visits, handle beam,
             handle isa) {
    DciOptions options;
    options.n_dims    = count_of(n_dims, "n_dims", 1, kDimsMax);
    options.ratio     = ratio_of(ratio);
    options.page_rows = count_of(page_rows, "page_rows", 1, kPageMax);
    options.seed      = count_of(seed, "seed", 0, std::numeric_limits<long long>::max());
    return DciTree(options, directions_of(directions, options.n_dims), limits_of(visits, beam), isa_of(isa));
}

template <typename T> nb::object as_array(const std::vector<T> & values, std::size_t rows, std::size_t columns = 0) {
    auto *      copy = new std::vector<T>(values);
    nb::capsule owner(copy, [](void * p) noexcept { delete static_cast<std::vector<T> *>(p); });
    if (columns == 0) {
        return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy->data(), {rows}, owner));
    }
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(copy->data(), {rows, columns}, owner));
}

// The keys of a tree, and the buffers that they lie in.
class HeldKeys {
  public:
    HeldKeys(handle planes, handle formats, handle which, handle numbers, handle n_dims)
        : which_(which, "which", false, 1, sizeof(std::int32_t), kInt32),
          numbers_(numbers, "numbers", false, 1, sizeof(std::int32_t), kInt32) {
        which_.require_contiguous("which");
        numbers_.require_contiguous("numbers");
        const std::size_t           dims = count_of(n_dims, "n_dims", 1, kDimsMax);
        std::vector<DciKeys::Plane> found;
        const nb::sequence          names = sequence_of(formats, "formats");
        for (handle plane : sequence_of(planes, "planes")) {
            const std::string name = "planes[" + std::to_string(found.size()) + "]";
            if (found.size() == nb::len(names)) {
                refuse("formats", "expected one for each plane");
            }
            const Format & format = format_of(names[found.size()], "formats");
            held_.emplace_back(plane, name, false, 2, 1, kBytes);
            const Rows rows = rows_of(held_.back(), name);
            if (format.hadamard || dims % format.block_elements != 0 || rows.bytes != format.bytes(dims)) {
                refuse(name, "rows of " + std::to_string(rows.bytes) + " bytes are not " + std::to_string(dims) +
                                 " numbers in " + format.name);
            }
            found.push_back({rows, &format});
        }
        check(found);
        keys_.emplace(dims, std::move(found), reinterpret_cast<const std::int32_t *>(which_.data()),
                      reinterpret_cast<const std::int32_t *>(numbers_.data()), numbers_.shape(0));
    }

    const DciKeys & keys() const { return *keys_; }

  private:
    void check(const std::vector<DciKeys::Plane> & planes) const {
        if (which_.shape(0) != numbers_.shape(0) || numbers_.shape(0) > kKeysMax) {
            refuse("which", "expected the plane of each key");
        }
        const auto * which   = reinterpret_cast<const std::int32_t *>(which_.data());
        const auto * numbers = reinterpret_cast<const std::int32_t *>(numbers_.data());
        for (std::size_t i = 0; i < numbers_.shape(0); ++i) {
            if (numbers[i] < 0) {
                continue;
            }
            if (which[i] < 0 || static_cast<std::size_t>(which[i]) >= planes.size()) {
                refuse("which", "no plane " + std::to_string(which[i]));
            }
            if (static_cast<std::size_t>(numbers[i]) >= planes[static_cast<std::size_t>(which[i])].rows.n) {
                refuse("numbers", "no row " + std::to_string(numbers[i]));
            }
        }
    }

    Buffer                 which_, numbers_;
    std::deque<Buffer>     held_;
    std::optional<DciKeys> keys_;
};

// The keys for a call of `tree`: those that are in it and were not removed, and `n_new` more, all of them finite.
const DciKeys & keys_for(const DciTree & tree, const HeldKeys & held, bool adds) {
    const DciKeys & keys = held.keys();
    if (keys.n_dims() != tree.n_dims()) {
        refuse("keys", "rows of " + std::to_string(keys.n_dims()) + " numbers, expected " + std::to_string(tree.n_dims()));
    }
    if (adds ? keys.size() < tree.size() : keys.size() != tree.size()) {
        refuse("keys", std::to_string(keys.size()) + " keys for a tree of " + std::to_string(tree.size()));
    }
    std::vector<float> key(keys.n_dims());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        const bool is_new = i >= tree.size();
        if (!keys.has(i) && (is_new || !tree.is_gone(i))) {
            refuse("keys", "key " + std::to_string(i) + " has no row");
        }
        if (is_new) {
            keys.read(i, tree.isa(), key.data());
            if (!(static_cast<double>(tree.isa().peak(key.data(), key.size())) <= kDciKeyMax)) {
                refuse("keys", "a number is not finite or larger than 1e15");
            }
        }
    }
    return keys;
}

void add(DciTree & tree, const HeldKeys & held) {
    const DciKeys &              keys = keys_for(tree, held, true);
    const nb::gil_scoped_release free;
    tree.add(keys);
}

void remove(DciTree & tree, handle gone) {
    const Buffer flags(gone, "gone", false, 1, 1, kBytes);
    flags.require_contiguous("gone");
    if (flags.shape(0) != tree.size()) {
        refuse("gone", std::to_string(flags.shape(0)) + " flags for " + std::to_string(tree.size()) + " keys");
    }
    const nb::gil_scoped_release free;
    tree.remove(flags.data());
}

nb::object search(const DciTree & tree, const HeldKeys & held, handle queries, handle k, handle visits, handle beam) {
    const Buffer rows(queries, "queries", false, 2, sizeof(float), kFloat);
    check_rows(rows, tree.n_dims(), "queries");
    const std::size_t n_wanted = count_of(k, "k", 1, kPageMax);
    const DciLimits   limits   = limits_of(visits, beam);
    const DciKeys &   keys     = keys_for(tree, held, false);
    const std::size_t columns  = std::min(n_wanted, std::max<std::size_t>(1, tree.size()));
    std::vector<std::int64_t> ids(rows.shape(0) * columns, -1);
    {
        const nb::gil_scoped_release free;
        const auto * values = reinterpret_cast<const float *>(rows.data());
        for (std::size_t i = 0; i < rows.shape(0); ++i) {
            const auto found = tree.search(keys, values + i * tree.n_dims(), columns, limits);
            std::copy(found.begin(), found.end(), ids.begin() + static_cast<std::ptrdiff_t>(i * columns));
        }
    }
    return as_array(ids, rows.shape(0), columns);
}

nb::object vote(const DciTree & tree, const HeldKeys & held, handle queries, handle k, handle visits, handle beam,
                handle others, handle there) {
    const Buffer rows(queries, "queries", false, 2, sizeof(float), kFloat);
    check_rows(rows, tree.n_dims(), "queries");
    const std::size_t n_wanted = count_of(k, "k", 1, kPageMax);
    const DciLimits   limits   = limits_of(visits, beam);
    const Buffer      beside(others, "others", false, 2, sizeof(float), kFloat);
    check_rows(beside, tree.n_dims(), "others");
    const Buffer flags(there, "there", false, 1, 1, kBytes);
    flags.require_contiguous("there");
    if (flags.shape(0) != tree.size()) {
        refuse("there", std::to_string(flags.shape(0)) + " flags for " + std::to_string(tree.size()) + " keys");
    }
    const DciKeys & keys = keys_for(tree, held, false);
    DciVotes        votes;
    {
        const nb::gil_scoped_release free;
        votes = tree.vote(keys, reinterpret_cast<const float *>(rows.data()), rows.shape(0), n_wanted, limits,
                          reinterpret_cast<const float *>(beside.data()), beside.shape(0), flags.data());
    }
    const std::vector<std::int64_t> ids(votes.ids.begin(), votes.ids.end());
    return nb::make_tuple(as_array(ids, ids.size()), as_array(votes.shares, votes.shares.size()));
}

template <typename T> nb::object as_wide(const std::vector<T> & values) {
    const std::vector<std::int64_t> wide(values.begin(), values.end());
    return as_array(wide, wide.size());
}

}  // namespace

void bind_dci(nb::module_ & m) {
    nb::class_<HeldKeys>(m, "DciKeys", "Where the keys of a tree lie.")
        .def(nb::init<handle, handle, handle, handle, handle>(), "planes"_a.none(), "formats"_a.none(),
             "which"_a.none(), "numbers"_a.none(), "n_dims"_a.none())
        .def("__len__", [](const HeldKeys & self) { return self.keys().size(); });
    nb::class_<DciTree>(m, "DciTree", "Multi-level prioritized DCI; the contract is in lab.reference.dci.")
        .def("__init__", [](DciTree * self, handle n_dims, handle directions, handle ratio, handle page_rows, handle seed,
                            handle visits, handle beam, handle isa) {
                new (self) DciTree(made(n_dims, directions, ratio, page_rows, seed, visits, beam, isa));
            }, "n_dims"_a.none(), "directions"_a.none(), "ratio"_a.none(), "page_rows"_a.none(), "seed"_a.none(),
            "visits_max"_a.none(), "beam"_a.none(), "isa"_a.none() = nb::none())
        .def("__len__", &DciTree::size)
        .def_prop_ro("n_levels", &DciTree::n_levels)
        .def_prop_ro("n_pages", &DciTree::n_pages)
        .def_prop_ro("nbytes", &DciTree::nbytes)
        .def("add", &add, "keys"_a, "Insert the keys behind those that are there.")
        .def("remove", &remove, "gone"_a.none(), "Find these keys no more; their rows are not read again.")
        .def("search", &search, "keys"_a, "queries"_a.none(), "k"_a.none(), "visits_max"_a.none(), "beam"_a.none(),
             "Numbers of the k keys with the largest inner products, for each query.")
        .def("vote", &vote, "keys"_a, "queries"_a.none(), "k"_a.none(), "visits_max"_a.none(), "beam"_a.none(),
             "others"_a.none(), "there"_a.none(), "Keys in the pages of the k nearest ones, and the attention that they get.")
        .def("levels", [](const DciTree & self) { return as_wide(self.levels()); }, "The level of each key.")
        .def("parents", [](const DciTree & self) { return as_wide(self.parents()); },
             "The key that each one hangs below, or -1.")
        .def("pages", [](const DciTree & self) { return as_wide(self.pages()); }, "The page of each key, or -1.")
        .def("copy", [](const DciTree & self) { return DciTree(self); }, "The same tree, apart from now on.");
}

}  // namespace towerd
