// towerd.kernels._native.read_side_by_side: arguments are checked once, and all work is done without the GIL.

#include "bind_side_by_side.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <set>
#include <vector>

#include "arguments.h"
#include "bind_lm.h"
#include "bind_mix.h"
#include "side_by_side.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

using Order = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<Lm *> checked_models(const nb::list & models, std::size_t n_texts, std::size_t n_tokens, std::int32_t instead) {
    std::vector<Lm *> found;
    for (nb::handle each : models) {
        found.push_back(&lm_of(each));
        found.back()->reset();
        const std::size_t n_vocab = found.back()->shape().n_vocab;
        if (n_vocab > n_tokens || instead < 0 || static_cast<std::size_t>(instead) >= n_vocab) {
            refuse("models", "expected no more tokens than the mixer has, and `instead` among them");
        }
    }
    const bool differ = std::set<Lm *>(found.begin(), found.end()).size() == found.size();
    if (found.empty() || !differ || n_texts > found.size() * kLmLanesMax) {
        refuse("models", "expected different ones, at least one for 256 texts");
    }
    return found;
}

nb::list read(const nb::list & models, nb::handle bound_mixer, const nb::list & decoders,
              const std::vector<std::size_t> & sizes, const Order & order, std::int32_t first, std::int32_t instead) {
    Mixer &                      mixer = mixer_of(bound_mixer);
    const std::vector<Lm *>      lms = checked_models(models, sizes.size(), mixer.n_tokens(), instead);
    const auto                   is_token = [&](std::int64_t id) { return id >= 0 && static_cast<std::size_t>(id) < mixer.n_tokens(); };
    std::vector<CodedText>       texts;
    if (mixer.busy() || sizes.size() > mixer.lanes() || decoders.size() != sizes.size()) {
        refuse("decoders", "expected one for each size, and a lane of an idle mixer");
    }
    if (order.shape(0) != mixer.n_tokens() || !std::all_of(order.data(), order.data() + order.shape(0), is_token) || !is_token(first)) {
        refuse("order", "expected the token of each rank, and a token to start with");
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        texts.push_back({&decoder_of(decoders[i]), sizes[i], {}});
    }
    const char * why = nullptr;
    {
        const nb::gil_scoped_release free;
        why = read_side_by_side(lms, mixer, texts, order.data(), first, instead);
    }
    if (why != nullptr) {
        throw nb::value_error(why);
    }
    nb::list ranks;
    for (const CodedText & text : texts) {
        nb::list each;
        for (const std::int32_t rank : text.ranks) {
            each.append(rank);
        }
        ranks.append(each);
    }
    return ranks;
}

}  // namespace

void bind_side_by_side(nb::module_ & m) {
    m.def("read_side_by_side", &read, "models"_a, "mixer"_a, "decoders"_a, "sizes"_a, "order"_a, "first"_a, "instead"_a,
          "The ranks of coded texts, one per lane of the mixer; a thread for each model.");
}

}  // namespace towerd
