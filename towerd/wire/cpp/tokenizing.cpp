#include "tokenizing.h"

#include <algorithm>
#include <bitset>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>

#include "refused.h"

namespace towerd::wire {

namespace {

// Tokenizers whose tokens stand for every byte of a text, as long as there is a token for each single byte.
constexpr const char * kWholeText[] = {"gpt2", "llama", "gemma4"};

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

size_t token_bytes_max(const llama_model * model) {
    char name[32] = {};
    llama_model_meta_val_str(model, "tokenizer.ggml.model", name, sizeof(name));
    if (std::find(std::begin(kWholeText), std::end(kWholeText), std::string(name)) == std::end(kWholeText)) {
        return 0;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::bitset<256>    bytes;
    size_t              longest = 0;
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        if (llama_vocab_get_attr(vocab, token) & (LLAMA_TOKEN_ATTR_LSTRIP | LLAMA_TOKEN_ATTR_RSTRIP)) {
            return 0;
        }
        const std::string piece = common_token_to_piece(vocab, token, true);
        if (piece.size() == 1) {
            bytes.set(static_cast<unsigned char>(piece[0]));
        }
        // As the vocabulary writes it, a space may be a character of three bytes, which a text may have as well.
        longest = std::max({longest, piece.size(), std::strlen(llama_vocab_get_text(vocab, token))});
    }
    return bytes.all() ? longest : 0;
}

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
