#include "tokenizing.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>

#include "refused.h"

namespace towerd::wire {

namespace {

constexpr size_t kTextBytesSafe = 2'000;  // shorter texts fit any stack

struct Guarded {
    const TokenizingGuard *          owner;
    const void *                     by;  // a vocabulary or a projector
    std::shared_ptr<const DeepStack> deep_stack;
};

std::mutex           mutex;
std::vector<Guarded> guards;

std::shared_ptr<const DeepStack> guard_of(const void * by) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = std::find_if(guards.begin(), guards.end(), [&](const Guarded & one) { return one.by == by; });
    return found == guards.end() ? nullptr : found->deep_stack;
}

template <typename Work>
void run(const void * by, const std::string & text, Work && work) {
    const auto deep_stack = text.size() > kTextBytesSafe ? guard_of(by) : nullptr;
    if (!deep_stack) {
        work();
        return;
    }
    std::exception_ptr thrown;  // on another thread, maybe
    (*deep_stack)(text, [&] {
        try {
            const AbortGuard guard;
            work();
        } catch (...) {
            thrown = std::current_exception();
        }
    });
    if (thrown) {
        std::rethrow_exception(thrown);
    }
}

}  // namespace

void on_deep_stack(const llama_vocab * vocab, const std::string & text, const std::function<void()> & work) {
    run(vocab, text, work);
}

TokenizingGuard::TokenizingGuard(const llama_vocab * vocab, const mtmd_context * projector, const DeepStack & deep_stack) {
    if (!deep_stack) {
        return;
    }
    const auto                        held = std::make_shared<const DeepStack>(deep_stack);
    const std::lock_guard<std::mutex> lock(mutex);
    guards.push_back({this, vocab, held});
    if (projector != nullptr) {
        guards.push_back({this, projector, held});
    }
}

TokenizingGuard::~TokenizingGuard() {
    std::vector<Guarded> dropped;  // behind the lock: what it holds may wait for others
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto mine =
            std::stable_partition(guards.begin(), guards.end(), [&](const Guarded & one) { return one.owner != this; });
        dropped.assign(std::make_move_iterator(mine), std::make_move_iterator(guards.end()));
        guards.erase(mine, guards.end());
    }
}

}  // namespace towerd::wire

std::vector<llama_token> towerd_tokenize(const llama_vocab * vocab, const std::string & text, bool add_special,
                                         bool parse_special) {
    std::vector<llama_token> out;
    towerd::wire::run(vocab, text, [&] { out = common_tokenize(vocab, text, add_special, parse_special); });
    return out;
}

int32_t towerd_mtmd_tokenize(const mtmd_context * ctx, mtmd_input_chunks * output, const mtmd_input_text * text,
                             const mtmd_bitmap * const * bitmaps, size_t n_bitmaps) {
    int32_t out = 0;
    towerd::wire::run(ctx, std::string(text->text, text->text_len),
                      [&] { out = mtmd_tokenize(ctx, output, text, bitmaps, n_bitmaps); });
    return out;
}
