// towerd.kernels._native.Lm: sizes and weights are checked once when it is made, tokens at every step. Steps work
// without the GIL; a model is for one thread at a time.

#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "lm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

template <typename T> using Array  = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T> using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = std::tuple<std::string, Array<std::uint8_t>>;

constexpr std::size_t kSizes = 9, kMatricesOfLayer = 7, kSizeMax = std::size_t{1} << 20, kItemsMax = 1 << 16;

LmShape checked_shape(const std::vector<std::size_t> & sizes, float norm_eps) {
    if (sizes.size() != kSizes) {
        refuse("sizes", "expected 9 numbers");
    }
    for (std::size_t i = 0; i < kSizes; ++i) {
        if (sizes[i] < (i + 1 < kSizes ? 1u : 0u) || sizes[i] > kSizeMax) {
            refuse("sizes", "expected numbers from 1 to 1048576");
        }
    }
    const LmShape s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], norm_eps};
    if (s.n_keep >= s.n_ctx) {
        refuse("sizes", "as many tokens to keep as there are");
    }
    if (s.n_head % s.n_head_kv != 0 || s.n_head / s.n_head_kv > kLmGroupMax) {
        refuse("sizes", "the KV heads do not divide the heads, or more than 64 heads share one");
    }
    if (!(norm_eps >= 0.0f && norm_eps < 1.0f)) {
        refuse("norm_eps", "expected a number from 0 to 1");
    }
    return s;
}

LmMatrix checked_matrix(const Weights & weights, std::size_t rows, std::size_t columns, const std::string & name) {
    static const char * const names[kLmFormats] = {"f32", "f16", "q8"};
    const auto & [format_name, panels] = weights;
    for (int i = 0; i < kLmFormats; ++i) {
        if (format_name != names[i]) {
            continue;
        }
        const LmMatrix matrix{panels.data(), static_cast<LmFormat>(i), rows, columns};
        if (i == kLmQ8 && columns % 32 != 0) {
            refuse(name, "rows are not whole blocks of 32");
        }
        if (panels.shape(0) != matrix.n_panels() * matrix.panel_bytes()) {
            refuse(name, "expected " + std::to_string(matrix.n_panels() * matrix.panel_bytes()) + " bytes");
        }
        return matrix;
    }
    refuse(name, "unknown format " + format_name);
}

// nanobind tells types apart by name: no other file may use this name.
class BoundLm {
public:
    BoundLm(const std::string & name, const std::vector<std::size_t> & sizes, float norm_eps, std::vector<Weights> matrices,
          std::vector<Array<float>> norms, Array2<float> cos, Array2<float> sin)
        : matrices_(std::move(matrices)),
          norms_(std::move(norms)),
          cos_(std::move(cos)),
          sin_(std::move(sin)),
          lm_(checked_isa(name), checked_model(checked_shape(sizes, norm_eps))) {}

    Lm & lm() { return lm_; }
    void reset() { lm_.reset(); }

    nb::object step(const Array<std::int32_t> & lanes, const Array<std::int32_t> & tokens, nb::handle n_threads) {
        const std::size_t threads = threads_of(n_threads);
        const std::size_t n = lanes.shape(0);
        check_items(lanes, tokens);
        auto *      logits = new std::vector<float>(n * lm_.shape().n_vocab);
        nb::capsule owner(logits, [](void * p) noexcept { delete static_cast<std::vector<float> *>(p); });
        bool        fine = false;
        {
            const nb::gil_scoped_release free;
            fine = lm_.step(lanes.data(), tokens.data(), n, logits->data(), threads);
        }
        if (!fine) {
            throw nb::value_error("weights: a number is beyond what float32 holds");
        }
        return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(logits->data(), {n, lm_.shape().n_vocab}, owner));
    }

    nb::object counts(const Array2<float> & logits) const {
        const std::size_t n = logits.shape(0);
        const std::size_t n_vocab = logits.shape(1);
        auto *      counts = new std::vector<std::uint32_t>(n * n_vocab);
        nb::capsule owner(counts, [](void * p) noexcept { delete static_cast<std::vector<std::uint32_t> *>(p); });
        for (std::size_t i = 0; i < n; ++i) {
            if (!lm_.count(logits.data() + i * n_vocab, n_vocab, counts->data() + i * n_vocab)) {
                refuse("logits", "row " + std::to_string(i) + " is not of finite numbers");
            }
        }
        return nb::cast(nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<2>>(counts->data(), {n, n_vocab}, owner));
    }

private:
    LmModel checked_model(const LmShape & s) const {
        if (matrices_.size() != 2 + kMatricesOfLayer * s.n_layer || norms_.size() != 1 + 2 * s.n_layer) {
            refuse("matrices", "expected embedding, output and 7 for each layer, and 2 norms for each and one more");
        }
        for (const auto & norm : norms_) {
            if (norm.shape(0) != (s.n_embd + kLmRows - 1) / kLmRows * kLmRows) {
                refuse("norms", "expected a multiple of 16 numbers");
            }
        }
        const bool same = cos_.shape(0) == sin_.shape(0) && cos_.shape(1) == sin_.shape(1);
        if (!same || cos_.shape(0) < s.n_ctx || 2 * cos_.shape(1) > s.head_dim) {
            refuse("cos", "expected a row for each position with a number for each pair, and as many of sin");
        }
        LmModel model{s, matrix(0, s.n_vocab, s.n_embd), matrix(1, s.n_vocab, s.n_embd), {}, norms_.back().data(),
                      cos_.data(), sin_.data(), 2 * cos_.shape(1)};
        for (std::size_t l = 0; l < s.n_layer; ++l) {
            model.layers.push_back(layer(s, l));
        }
        return model;
    }

    LmLayer layer(const LmShape & s, std::size_t l) const {
        const std::size_t first = 2 + kMatricesOfLayer * l;
        const std::size_t heads = s.n_head * s.head_dim;
        const std::size_t kv = s.n_head_kv * s.head_dim;
        return {norms_[2 * l].data(),
                norms_[2 * l + 1].data(),
                matrix(first, heads, s.n_embd),
                matrix(first + 1, kv, s.n_embd),
                matrix(first + 2, kv, s.n_embd),
                matrix(first + 3, s.n_embd, heads),
                matrix(first + 4, s.n_ff, s.n_embd),
                matrix(first + 5, s.n_ff, s.n_embd),
                matrix(first + 6, s.n_embd, s.n_ff)};
    }

    LmMatrix matrix(std::size_t i, std::size_t rows, std::size_t columns) const {
        return checked_matrix(matrices_[i], rows, columns, "matrices[" + std::to_string(i) + "]");
    }

    void check_items(const Array<std::int32_t> & lanes, const Array<std::int32_t> & tokens) const {
        const std::size_t n = lanes.shape(0);
        if (tokens.shape(0) != n || n > kItemsMax) {
            refuse("tokens", "expected one for each of at most 65536 lanes");
        }
        for (std::size_t i = 0; i < n; ++i) {
            const std::int32_t lane = lanes.data()[i];
            const std::int32_t token = tokens.data()[i];
            if (lane < 0 || static_cast<std::size_t>(lane) >= kLmLanesMax || (i != 0 && lane < lanes.data()[i - 1])) {
                refuse("lanes", "expected numbers from 0 to 255 in order");
            }
            if (token < 0 || static_cast<std::size_t>(token) >= lm_.shape().n_vocab) {
                refuse("tokens", std::to_string(token) + " is not a token");
            }
        }
    }

    std::vector<Weights>      matrices_;
    std::vector<Array<float>> norms_;
    Array2<float>             cos_, sin_;
    Lm                        lm_;
};

}  // namespace

Lm & lm_of(nb::handle bound) {
    return nb::cast<BoundLm &>(bound).lm();
}

void bind_lm(nb::module_ & m) {
    nb::class_<BoundLm>(m, "Lm", "A small language model; the contract is in lab.reference.lm.")
        .def(nb::init<const std::string &, const std::vector<std::size_t> &, float, std::vector<Weights>,
                      std::vector<Array<float>>, Array2<float>, Array2<float>>(),
             "name"_a, "sizes"_a, "norm_eps"_a, "matrices"_a, "norms"_a, "cos"_a, "sin"_a)
        .def("reset", &BoundLm::reset, "Forget all texts.")
        .def("step", &BoundLm::step, "lanes"_a, "tokens"_a, "n_threads"_a = 1,
             "Append tokens to lanes; the logits of what comes next.")
        .def("counts", &BoundLm::counts, "logits"_a, "The distribution of each row, as integers.");
}

}  // namespace towerd
