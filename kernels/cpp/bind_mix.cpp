// towerd.kernels._native.Mixer: every table is checked once when the mixer is made. Long calls work
// without the GIL; a mixer is for one thread at a time.

#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "mix.h"
#include "range_coder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

template <typename T> using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table                       = std::tuple<Array<std::uint32_t>, Array<std::uint16_t>>;

constexpr std::size_t kTokensMax = 1u << 19;

[[noreturn]] void refuse(const std::string & why) {
    throw std::invalid_argument(why);
}

// Checks a bucket of order 2 and up: lists, each after its head, whose ranks are tokens in order.
void check_bucket(const std::uint16_t * data, std::uint32_t at, std::uint32_t stop, bool heads, std::size_t n_tokens) {
    while (at < stop) {
        std::uint32_t n = stop - at;
        if (heads) {
            n = data[at++] & 63u;
            if (n == 63u) {
                n = at < stop ? data[at++] : std::numeric_limits<std::uint32_t>::max();
            }
        }
        if (n > stop - at) {
            refuse("tables: a list is longer than its bucket");
        }
        for (std::uint32_t i = 0; i < n; ++i) {
            if (data[at + i] >> 4 >= n_tokens || (i != 0 && data[at + i] >> 4 <= data[at + i - 1] >> 4)) {
                refuse("tables: a list is not of tokens in order");
            }
        }
        at += n;
    }
}

MixOrder checked(const Table & table, int order, std::size_t n_tokens) {
    const auto & [index, data] = table;
    if (index.shape(0) == 0) {
        return {};
    }
    const std::size_t buckets = index.shape(0) - 1;
    if (order == 1 ? buckets != n_tokens : buckets == 0 || (buckets & (buckets - 1)) != 0) {
        refuse("tables: a wrong number of buckets");
    }
    for (std::size_t i = 0; i < buckets; ++i) {
        if (index.data()[i] > index.data()[i + 1] || index.data()[i + 1] > data.shape(0)) {
            refuse("tables: a bucket lies outside the data");
        }
        check_bucket(data.data(), index.data()[i], index.data()[i + 1], order > 1, n_tokens);
    }
    return {index.data(), data.data(), buckets};
}

class BoundEncoder {
  public:
    void put(const Array<std::int32_t> & bits, const Array<double> & chances) {
        if (bits.shape(0) != chances.shape(0)) {
            refuse("chances: one for each bit");
        }
        for (std::size_t i = 0; i < bits.shape(0); ++i) {
            const double probability = chances.data()[i] * 65536;
            if (!(probability >= 1 && probability <= 65535) || bits.data()[i] < 0 || bits.data()[i] > 1) {
                refuse("bits: 0 or 1, with chances of 1 to 65535 out of 65536");
            }
            encoder_.put(bits.data()[i] == 1, static_cast<int>(probability));
        }
    }

    nb::bytes finish() const {
        std::string bytes;
        for (const std::uint32_t word : encoder_.finish()) {
            for (int shift = 0; shift < 32; shift += 8) {
                bytes.push_back(static_cast<char>(word >> shift & 255));
            }
        }
        bytes.resize(bytes.find_last_not_of('\0') + 1);
        return nb::bytes(bytes.data(), bytes.size());
    }

  private:
    RangeEncoder encoder_;
};

// nanobind tells types apart by name: no other file may use this name.
class BoundDecoder {
  public:
    explicit BoundDecoder(const nb::bytes & data) : decoder_(words(data)) {}

    int take(int probability) {
        if (probability < 1 || probability > 65535) {
            refuse("probability: 1 to 65535");
        }
        return checked(decoder_.take(probability));
    }

    RangeDecoder & decoder() { return decoder_; }

    static int checked(int bit) {
        if (bit < 0) {
            refuse("decoder: no encoder writes these bits");
        }
        return bit;
    }

  private:
    static std::vector<std::uint32_t> words(const nb::bytes & data) {
        const auto *               bytes = reinterpret_cast<const std::uint8_t *>(data.c_str());
        std::vector<std::uint32_t> words((data.size() + 3) / 4);
        for (std::size_t i = 0; i < data.size(); ++i) {
            words[i / 4] |= std::uint32_t{bytes[i]} << (i % 4 * 8);
        }
        return words;
    }

    RangeDecoder decoder_;
};

class Bound {
  public:
    Bound(Array<std::uint32_t> weights, std::vector<Table> tables, Array<std::uint32_t> state, Array<std::uint8_t> kinds)
        : weights_(std::move(weights)), tables_(std::move(tables)), state_(std::move(state)), kinds_(std::move(kinds)),
          mixer_(tokens(), weights_.data(), orders(), checked_state(), checked_kinds()) {}

    Mixer & mixer() { return mixer_; }

    void reset(std::size_t lanes, int table_bits) {
        if (lanes < 1 || lanes > 256 || table_bits < 8 || table_bits > 24) {
            refuse("lanes: 1 to 256; table_bits: 8 to 24");
        }
        mixer_.reset(lanes, table_bits);
    }

    int begin(std::size_t lane, const std::optional<Array<std::uint32_t>> & counts) {
        check_lane(lane);
        if (mixer_.busy()) {
            refuse("begin: a token is not finished");
        }
        if (counts && counts->shape(0) != mixer_.n_tokens()) {
            refuse("counts: one for each token");
        }
        return mixer_.begin(lane, counts ? counts->data() : nullptr);
    }

    int step(int bit) {
        if (!mixer_.busy() || bit < 0 || bit > 1) {
            refuse(mixer_.busy() ? "bit: 0 or 1" : "step: no token was begun");
        }
        return mixer_.step(bit);
    }

    nb::object encode(std::size_t lane, const Array<std::int32_t> & ranks,
                      const std::optional<Array<std::uint32_t>> & counts) {
        check_ranks(ranks);
        auto * bits    = new std::vector<std::int32_t>;
        auto * chances = new std::vector<double>;
        nb::capsule bits_owner(bits, [](void * p) noexcept { delete static_cast<std::vector<std::int32_t> *>(p); });
        nb::capsule chances_owner(chances, [](void * p) noexcept { delete static_cast<std::vector<double> *>(p); });
        if (counts && ranks.shape(0) > 1) {
            refuse("counts: they are of one token");
        }
        {
            const nb::gil_scoped_release free;
            for (std::size_t i = 0; i < ranks.shape(0); ++i) {
                int p = begin(lane, counts);
                while (p >= 0) {
                    const int bit = mixer_.towards(static_cast<std::size_t>(ranks.data()[i]));
                    bits->push_back(bit);
                    chances->push_back(p / 65536.0);
                    p = mixer_.step(bit);
                }
            }
        }
        return nb::make_tuple(
            nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>(bits->data(), {bits->size()}, bits_owner),
            nb::ndarray<nb::numpy, double, nb::ndim<1>>(chances->data(), {chances->size()}, chances_owner));
    }

    nb::object decode(std::size_t lane, BoundDecoder & decoder, std::size_t n,
                      const std::optional<Array<std::uint32_t>> & counts) {
        if (counts && n > 1) {
            refuse("counts: they are of one token");
        }
        auto *      ranks = new std::vector<std::int32_t>;
        nb::capsule owner(ranks, [](void * p) noexcept { delete static_cast<std::vector<std::int32_t> *>(p); });
        {
            const nb::gil_scoped_release free;
            while (ranks->size() < n) {
                int answer = begin(lane, counts);
                while (answer >= 0) {
                    answer = mixer_.step(BoundDecoder::checked(decoder.decoder().take(answer)));
                }
                ranks->push_back(-1 - answer);
            }
        }
        return nb::cast(nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>(ranks->data(), {ranks->size()}, owner));
    }

    void learn(std::size_t lane, const Array<std::int32_t> & ranks) {
        check_ranks(ranks);
        const nb::gil_scoped_release free;
        for (std::size_t i = 0; i < ranks.shape(0); ++i) {
            for (int p = begin(lane, std::nullopt); p >= 0;) {
                p = mixer_.step(mixer_.towards(static_cast<std::size_t>(ranks.data()[i])));
            }
        }
    }

    nb::object state() const {
        auto *      copy = new std::vector<std::uint32_t>(mixer_.state());
        nb::capsule owner(copy, [](void * p) noexcept { delete static_cast<std::vector<std::uint32_t> *>(p); });
        return nb::cast(nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>(copy->data(), {copy->size()}, owner));
    }

  private:
    std::size_t tokens() const {
        if (weights_.shape(0) < 2 || weights_.shape(0) > kTokensMax) {
            refuse("weights: 2 to 524288 tokens");
        }
        return weights_.shape(0);
    }

    std::array<MixOrder, kMixStatic> orders() const {
        if (tables_.size() > kMixStatic) {
            refuse("tables: at most " + std::to_string(kMixStatic));
        }
        std::array<MixOrder, kMixStatic> orders;
        for (std::size_t i = 0; i < tables_.size(); ++i) {
            orders[i] = checked(tables_[i], static_cast<int>(i) + 1, tokens());
        }
        return orders;
    }

    const std::uint32_t * checked_state() const {
        if (state_.shape(0) != Mixer::state_size(tokens())) {
            refuse("state: expected " + std::to_string(Mixer::state_size(tokens())) + " numbers");
        }
        return state_.data();
    }

    const MixKind * checked_kinds() const {
        if (kinds_.shape(0) != tokens()) {
            refuse("kinds: expected " + std::to_string(tokens()) + " numbers");
        }
        return reinterpret_cast<const MixKind *>(kinds_.data());
    }

    void check_lane(std::size_t lane) const {
        if (lane >= mixer_.lanes()) {
            refuse("lane: there are " + std::to_string(mixer_.lanes()));
        }
    }

    void check_ranks(const Array<std::int32_t> & ranks) const {
        for (std::size_t i = 0; i < ranks.shape(0); ++i) {
            if (ranks.data()[i] < 0 || static_cast<std::size_t>(ranks.data()[i]) >= mixer_.n_tokens()) {
                refuse("ranks: " + std::to_string(ranks.data()[i]) + " is not a token");
            }
        }
    }

    Array<std::uint32_t> weights_;
    std::vector<Table>   tables_;
    Array<std::uint32_t> state_;
    Array<std::uint8_t>  kinds_;
    Mixer                mixer_;
};

}  // namespace

Mixer & mixer_of(nb::handle bound) {
    return nb::cast<Bound &>(bound).mixer();
}

RangeDecoder & decoder_of(nb::handle bound) {
    return nb::cast<BoundDecoder &>(bound).decoder();
}

void bind_mixer(nb::module_ & m) {
    nb::class_<BoundEncoder>(m, "RangeEncoder", "Decisions to bits, as constriction's range encoder writes them.")
        .def(nb::init<>())
        .def("put", &BoundEncoder::put, "bits"_a, "chances"_a,
             "Append decisions, each with its probability of being 1, a multiple of 1 / 65536.")
        .def("finish", &BoundEncoder::finish, "The bytes of all decisions, without zeros at their end.");
    nb::class_<BoundDecoder>(m, "RangeDecoder", "Decisions out of bits, as constriction's range decoder reads them.")
        .def(nb::init<const nb::bytes &>(), "data"_a)
        .def("take", &BoundDecoder::take, "probability"_a,
             "The next decision, which is 1 with this probability out of 65536.");
    m.def("mixer_state_size", &Mixer::state_size, "n_tokens"_a, "Numbers in the state of a Mixer.");
    nb::class_<Bound>(m, "Mixer", "Context mixing; the contract is in lab.reference.mix.")
        .def(nb::init<Array<std::uint32_t>, std::vector<Table>, Array<std::uint32_t>, Array<std::uint8_t>>(),
             "weights"_a, "tables"_a, "state"_a, "kinds"_a)
        .def("reset", &Bound::reset, "lanes"_a = 1, "table_bits"_a = 16, "Forget what was seen.")
        .def("begin", &Bound::begin, "lane"_a, "counts"_a.none() = nb::none(),
             "Start the next token of a lane; P(1) of its first decision, times 65536.")
        .def("step", &Bound::step, "bit"_a, "Take a decision: P(1) of the next one, or -1 - rank.")
        .def("encode", &Bound::encode, "lane"_a, "ranks"_a, "counts"_a.none() = nb::none(),
             "(decisions, their P(1)) of tokens, which are learned.")
        .def("decode", &Bound::decode, "lane"_a, "decoder"_a, "n"_a, "counts"_a.none() = nb::none(),
             "The next n tokens of a lane, which are learned.")
        .def("learn", &Bound::learn, "lane"_a, "ranks"_a, "Take tokens as context.")
        .def("state", &Bound::state, "A copy of everything that was learned.");
}

}  // namespace towerd
