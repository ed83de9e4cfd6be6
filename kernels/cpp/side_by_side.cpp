// towerd.kernels._native.read_side_by_side: coded texts are read on several cores. Each thread evaluates its model for
// some of the texts, while one mixer takes their tokens in an order that does not depend on the number of threads: a
// token of each text in turn. Arguments are checked once, and all work is done without the GIL.

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "arguments.h"
#include "bind.h"
#include "lm.h"
#include "mix.h"
#include "range_coder.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace towerd {

namespace {

struct CodedText {
    RangeDecoder *            bits;
    std::size_t               n_tokens;
    std::vector<std::int32_t> ranks;  // decoded
};

constexpr int kSpins = 4096;  // some 50 us: less than it takes to sleep and wake up

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Threads take turns in order of their numbers, again and again, until one stops them all.
class Turns {
  public:
    void start(std::size_t n_threads) { n_threads_.store(n_threads, std::memory_order_release); }

    // Waits until it is known how many have started.
    std::size_t n_threads() const {
        while (n_threads_.load(std::memory_order_acquire) == 0) {
            std::this_thread::yield();
        }
        return n_threads_.load(std::memory_order_relaxed);
    }

    bool wait(std::size_t thread) const {
        for (int spins = 0; !stopped(); ++spins) {
            if (turn_.load(std::memory_order_acquire) == thread) {
                return true;
            }
            if (spins < kSpins) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
        return false;
    }

    void pass(std::size_t thread) { turn_.store((thread + 1) % n_threads_.load(std::memory_order_relaxed), std::memory_order_release); }

    void stop(const char * why) {
        const char * none = nullptr;
        why_.compare_exchange_strong(none, why);
    }

    bool         stopped() const { return why_.load(std::memory_order_relaxed) != nullptr; }
    const char * why() const { return why_.load(); }

  private:
    std::atomic<std::size_t>  n_threads_{0}, turn_{0};
    std::atomic<const char *> why_{nullptr};
};

// What one thread reads: the texts from `first_text` on, each a lane of its model.
class Part {
  public:
    Part(Lm & model, Mixer & mixer, CodedText * texts, std::size_t first_text, std::size_t n, const std::int64_t * order,
         std::int32_t first, std::int32_t instead)
        : model_(model), mixer_(mixer), texts_(texts + first_text), first_text_(first_text), order_(order),
          n_vocab_(model.shape().n_vocab), n_tokens_(mixer.n_tokens()), instead_(instead), last_(n, known(first)),
          lanes_(n), tokens_(n), logits_(n * n_vocab_), counts_(n_tokens_, 1), by_rank_(n * n_tokens_) {}

    // The distributions of the next tokens. False if a number is out of range.
    bool evaluate(std::size_t step) {
        n_reading_ = 0;
        for (std::size_t i = 0; i < last_.size(); ++i) {
            if (step < texts_[i].n_tokens) {
                lanes_[n_reading_]    = static_cast<std::int32_t>(i);
                tokens_[n_reading_++] = last_[i];
            }
        }
        if (!model_.step(lanes_.data(), tokens_.data(), n_reading_, logits_.data(), 1)) {
            return false;
        }
        for (std::size_t k = 0; k < n_reading_; ++k) {
            if (!model_.count(&logits_[k * n_vocab_], n_vocab_, counts_.data())) {
                return false;
            }
            for (std::size_t rank = 0; rank < n_tokens_; ++rank) {
                by_rank_[k * n_tokens_ + rank] = counts_[static_cast<std::size_t>(order_[rank])];
            }
        }
        return true;
    }

    // The next tokens. False for bits that no encoder writes.
    bool take() {
        for (std::size_t k = 0; k < n_reading_; ++k) {
            const auto  i = static_cast<std::size_t>(lanes_[k]);
            CodedText & text = texts_[i];
            int         answer = mixer_.begin(first_text_ + i, &by_rank_[k * n_tokens_]);
            while (answer >= 0) {
                const int bit = text.bits->take(answer);
                if (bit < 0) {
                    return false;
                }
                answer = mixer_.step(bit);
            }
            text.ranks.push_back(-1 - answer);
            last_[i] = known(static_cast<std::int32_t>(order_[-1 - answer]));
        }
        return true;
    }

  private:
    std::int32_t known(std::int32_t token) const { return static_cast<std::size_t>(token) < n_vocab_ ? token : instead_; }

    Lm &                       model_;
    Mixer &                    mixer_;
    CodedText *                texts_;
    std::size_t                first_text_;
    const std::int64_t *       order_;
    std::size_t                n_vocab_, n_tokens_, n_reading_ = 0;
    std::int32_t               instead_;
    std::vector<std::int32_t>  last_, lanes_, tokens_;
    std::vector<float>         logits_;
    std::vector<std::uint32_t> counts_, by_rank_;
};

// Text i is lane i of the mixer. Each model, which has read nothing, is for one thread, and the caller is the first.
// order [n_tokens]: the token of each rank; first: the token that all texts start with. Of tokens beyond a model's own
// it reads `instead`, and each of them counts 1. Returns what is wrong, or nullptr.
const char * read_side_by_side(const std::vector<Lm *> & models, Mixer & mixer, std::vector<CodedText> & texts,
                               const std::int64_t * order, std::int32_t first, std::int32_t instead) {
    std::size_t n_steps = 0;
    for (const CodedText & text : texts) {
        n_steps = std::max(n_steps, text.n_tokens);
    }
    Turns      turns;
    const auto read = [&](std::size_t thread) {
        const std::size_t n_threads = turns.n_threads();
        const std::size_t from = thread * texts.size() / n_threads;
        const std::size_t to = (thread + 1) * texts.size() / n_threads;
        try {
            Part part(*models[thread], mixer, texts.data(), from, to - from, order, first, instead);
            for (std::size_t step = 0; step < n_steps; ++step) {
                if (!part.evaluate(step)) {
                    turns.stop("a number is beyond what float32 holds");
                }
                if (!turns.wait(thread)) {
                    return;
                }
                if (!part.take()) {
                    turns.stop("no encoder writes these bits");
                }
                turns.pass(thread);
            }
        } catch (const std::bad_alloc &) {
            turns.stop("there is not enough memory");
        }
    };
    std::vector<std::thread> helpers;
    helpers.reserve(models.size());
    try {
        while (helpers.size() + 1 < models.size()) {
            helpers.emplace_back(read, helpers.size() + 1);
        }
    } catch (const std::system_error &) {
        // The process may start no more threads; those that started and this one do the work.
    }
    turns.start(helpers.size() + 1);
    read(0);
    for (auto & helper : helpers) {
        helper.join();
    }
    return turns.why();
}

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
