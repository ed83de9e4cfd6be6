// towerd.kernels._native.DciTree: every argument is checked with the GIL held; adding and searching
// work without it. A tree is for one thread at a time.

#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
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

void add(DciTree & tree, handle keys) {
    const Buffer rows(keys, "keys", false, 2, sizeof(float), kFloat);
    check_rows(rows, tree.n_dims(), "keys");
    const nb::gil_scoped_release free;
    tree.add(reinterpret_cast<const float *>(rows.data()), rows.shape(0));
}

nb::object search(const DciTree & tree, handle queries, handle k, handle visits, handle beam) {
    const Buffer rows(queries, "queries", false, 2, sizeof(float), kFloat);
    check_rows(rows, tree.n_dims(), "queries");
    const std::size_t n_wanted = count_of(k, "k", 1, kPageMax);
    const DciLimits   limits   = limits_of(visits, beam);
    const std::size_t columns  = std::min(n_wanted, std::max<std::size_t>(1, tree.size()));
    std::vector<std::int64_t> ids(rows.shape(0) * columns, -1);
    {
        const nb::gil_scoped_release free;
        const auto * values = reinterpret_cast<const float *>(rows.data());
        for (std::size_t i = 0; i < rows.shape(0); ++i) {
            const auto found = tree.search(values + i * tree.n_dims(), columns, limits);
            std::copy(found.begin(), found.end(), ids.begin() + static_cast<std::ptrdiff_t>(i * columns));
        }
    }
    return as_array(ids, rows.shape(0), columns);
}

nb::object vote(const DciTree & tree, handle queries, handle k, handle visits, handle beam, handle others,
                handle there) {
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
    DciVotes votes;
    {
        const nb::gil_scoped_release free;
        votes = tree.vote(reinterpret_cast<const float *>(rows.data()), rows.shape(0), n_wanted, limits,
                          reinterpret_cast<const float *>(beside.data()), beside.shape(0), flags.data());
    }
    return nb::make_tuple(as_array(votes.ids, votes.ids.size()), as_array(votes.shares, votes.shares.size()));
}

nb::object keys(const DciTree & tree, handle numbers) {
    const Buffer index(numbers, "numbers", false, 1, sizeof(std::int64_t), kInt64);
    check_index(index, tree.size(), "numbers");
    const auto *       ids = reinterpret_cast<const std::int64_t *>(index.data());
    std::vector<float> rows(index.shape(0) * tree.n_dims());
    for (std::size_t i = 0; i < index.shape(0); ++i) {
        std::copy_n(tree.key(ids[i]), tree.n_dims(), rows.begin() + static_cast<std::ptrdiff_t>(i * tree.n_dims()));
    }
    return as_array(rows, index.shape(0), tree.n_dims());
}

}  // namespace

void bind_dci(nb::module_ & m) {
    nb::class_<DciTree>(m, "DciTree", "Multi-level prioritized DCI; the contract is in lab.reference.dci.")
        .def("__init__", [](DciTree * self, handle n_dims, handle directions, handle ratio, handle page_rows, handle seed,
                            handle visits, handle beam, handle isa) {
                new (self) DciTree(made(n_dims, directions, ratio, page_rows, seed, visits, beam, isa));
            }, "n_dims"_a.none(), "directions"_a.none(), "ratio"_a.none(), "page_rows"_a.none(), "seed"_a.none(),
            "visits_max"_a.none(), "beam"_a.none(), "isa"_a.none() = nb::none())
        .def("__len__", &DciTree::size)
        .def_prop_ro("n_levels", &DciTree::n_levels)
        .def_prop_ro("n_pages", &DciTree::n_pages)
        .def("add", &add, "keys"_a.none(), "Insert keys; they get the next numbers.")
        .def("search", &search, "queries"_a.none(), "k"_a.none(), "visits_max"_a.none(), "beam"_a.none(),
             "Numbers of the k keys with the largest inner products, for each query.")
        .def("vote", &vote, "queries"_a.none(), "k"_a.none(), "visits_max"_a.none(), "beam"_a.none(), "others"_a.none(),
             "there"_a.none(), "Keys in the pages of the k nearest ones, and the attention that they get.")
        .def("keys", &keys, "numbers"_a.none(), "A copy of the keys with these numbers.")
        .def("levels", [](const DciTree & self) { return as_array(self.levels(), self.size()); }, "The level of each key.")
        .def("parents", [](const DciTree & self) { return as_array(self.parents(), self.size()); },
             "The key that each one hangs below, or -1.")
        .def("pages", [](const DciTree & self) { return as_array(self.pages(), self.size()); }, "The page of each key.")
        .def("copy", [](const DciTree & self) { return DciTree(self); }, "The same tree, apart from now on.");
}

}  // namespace towerd
