// towerd.kernels._native.TokenIndex: every argument is checked with the GIL held; adding and searching work without it.
// An index is for one thread at a time.

#include "bind.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <vector>

#include "arguments.h"
#include "token_index.h"

namespace nb = nanobind;
using namespace nb::literals;
using nb::handle;

namespace towerd {

namespace {

constexpr long long kIdMax = static_cast<long long>(kOwnerMax), kPositionMax = static_cast<long long>(kEndMax);

std::uint64_t key_of(handle value, const char * name) {
    const unsigned long long key = PyLong_Check(value.ptr()) ? PyLong_AsUnsignedLongLong(value.ptr()) : 0;
    if (!PyLong_Check(value.ptr()) || PyErr_Occurred()) {
        PyErr_Clear();
        refuse(name, "expected an integer of 64 bits");
    }
    return key;
}

struct Tokens {
    const std::int32_t * ids;
    std::size_t          n;
};

Tokens tokens_of(handle value, const char * name) {
    char *     data = nullptr;
    Py_ssize_t size = 1;
    if (PyBytes_Check(value.ptr())) {
        PyBytes_AsStringAndSize(value.ptr(), &data, &size);
    }
    if (size % 4 != 0) {
        refuse(name, "expected the bytes of int32");
    }
    return {reinterpret_cast<const std::int32_t *>(data), static_cast<std::size_t>(size) / 4};
}

TokenRun run_of(handle item) {
    if (!PyTuple_Check(item.ptr()) || PyTuple_Size(item.ptr()) != 7) {
        refuse("runs", "expected tuples of 7");
    }
    const nb::tuple of = nb::borrow<nb::tuple>(item);
    TokenRun        run{};
    run.key              = key_of(of[0], "key");
    run.parent           = count_of(of[1], "parent", 0, kIdMax);
    run.owner            = count_of(of[2], "owner", 1, kIdMax);
    run.instead_of       = count_of(of[3], "instead_of", 0, kIdMax);
    run.first            = count_of(of[4], "first", 0, kPositionMax);
    const Tokens context = tokens_of(of[5], "context");
    const Tokens own     = tokens_of(of[6], "ids");
    if (context.n > run.first) {
        refuse("context", "more tokens than there are before the first");
    }
    if (own.n > kEndMax - run.first) {
        refuse("ids", "too many tokens");
    }
    run.context   = context.ids;
    run.n_context = context.n;
    run.ids       = own.ids;
    run.n         = own.n;
    return run;
}

void add(TokenIndex & index, handle runs) {
    std::vector<nb::object> held;  // the list may change while the GIL is free
    std::vector<TokenRun>   work;
    for (handle item : sequence_of(runs, "runs")) {
        held.push_back(nb::borrow(item));
        work.push_back(run_of(item));
    }
    const nb::gil_scoped_release free;
    for (const TokenRun & run : work) {
        index.add(run);
    }
}

nb::object find(const TokenIndex & index, handle keys, handle ids, handle start, handle stop) {
    std::vector<std::uint64_t> of;
    for (handle key : sequence_of(keys, "keys")) {
        of.push_back(key_of(key, "keys"));
    }
    const Tokens      prompt = tokens_of(ids, "ids");
    const std::size_t end    = count_of(stop, "stop", 0, static_cast<long long>(prompt.n));
    const std::size_t begin  = count_of(start, "start", 0, static_cast<long long>(end));
    std::vector<TokenHit> hits;
    {
        const nb::object             held = nb::borrow(ids);
        const nb::gil_scoped_release free;
        hits = index.find(of, prompt.ids, begin, end);
    }
    auto * rows = new std::vector<std::int64_t>();
    nb::capsule owner(rows, [](void * p) noexcept { delete static_cast<std::vector<std::int64_t> *>(p); });
    rows->reserve(3 * hits.size());
    for (const TokenHit & hit : hits) {
        rows->insert(rows->end(), {static_cast<std::int64_t>(hit.at), static_cast<std::int64_t>(hit.place.owner),
                                   static_cast<std::int64_t>(hit.place.end)});
    }
    return nb::cast(nb::ndarray<nb::numpy, std::int64_t, nb::ndim<2>>(rows->data(), {hits.size(), 3}, owner));
}

void compact(TokenIndex & index, handle live, handle start, handle stop) {
    const Buffer ids(live, "live", false, 1, sizeof(std::int64_t), kInt64);
    ids.require_contiguous("live");
    ids.require_aligned("live");
    const std::size_t end   = count_of(stop, "stop", 0, TokenIndex::kShards);
    const std::size_t begin = count_of(start, "start", 0, static_cast<long long>(end));
    const nb::gil_scoped_release free;
    for (std::size_t shard = begin; shard < end; ++shard) {
        index.compact(shard, reinterpret_cast<const std::int64_t *>(ids.data()), ids.shape(0));
    }
}

// The number of tokens, at most `n`, before a[i] and b[j] that agree, or from there on.
template <bool kBefore> std::size_t common(handle a, handle i, handle b, handle j, handle n) {
    const Tokens      left = tokens_of(a, "a"), right = tokens_of(b, "b");
    const std::size_t at_left = count_of(i, "i", 0, static_cast<long long>(left.n));
    const std::size_t at_right = count_of(j, "j", 0, static_cast<long long>(right.n));
    const std::size_t room = kBefore ? std::min(at_left, at_right) : std::min(left.n - at_left, right.n - at_right);
    const std::size_t most = count_of(n, "n", 0, static_cast<long long>(room));
    return kBefore ? common_before(left.ids + at_left, right.ids + at_right, most)
                   : common_after(left.ids + at_left, right.ids + at_right, most);
}

}  // namespace

void bind_token_index(nb::module_ & m) {
    nb::class_<TokenIndex>(m, "TokenIndex", "Where in stored paths windows of tokens occur; the contract is in lab.reference.token_index.")
        .def("__init__", [](TokenIndex * self, handle seed) { new (self) TokenIndex(key_of(seed, "seed")); }, "seed"_a.none())
        .def("__len__", &TokenIndex::size)
        .def_prop_ro("nbytes", &TokenIndex::nbytes)
        .def("add", &add, "runs"_a.none(), "Enter the sampled windows of nodes.")
        .def("find", &find, "keys"_a.none(), "ids"_a.none(), "start"_a.none(), "stop"_a.none(),
             "Where the sampled windows of a prompt are stored.")
        .def("compact", &compact, "live"_a.none(), "start"_a.none(), "stop"_a.none(), "Forget places of other owners.");
    m.def("common_before", &common<true>, "a"_a.none(), "i"_a.none(), "b"_a.none(), "j"_a.none(), "n"_a.none(),
          "How many tokens before a[i] and b[j] agree, of at most n.");
    m.def("common_after", &common<false>, "a"_a.none(), "i"_a.none(), "b"_a.none(), "j"_a.none(), "n"_a.none(),
          "How many tokens from a[i] and b[j] on agree, of at most n.");
    m.attr("TOKEN_INDEX_SHARDS") = TokenIndex::kShards;
    m.attr("TOKEN_INDEX_CONTEXT") = kRun;
    m.attr("TOKEN_INDEX_PLACES") = kPlacesMax;
}

}  // namespace towerd
