// Tokenizing for llama.cpp's server code. Some vocabularies are split by a regular expression that recurses once for each
// character of an unbroken run: a long one needs a stack that threads do not have.

#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "common.h"
#include "mtmd.h"

// What llama.cpp's server code calls instead of common_tokenize and mtmd_tokenize, see CMakeLists.txt. Raise Refused: a run
// that no stack is deep enough for.
std::vector<llama_token> towerd_tokenize(const llama_vocab * vocab, const std::string & text, bool add_special,
                                         bool parse_special);
extern "C" int32_t towerd_mtmd_tokenize(const mtmd_context * ctx, mtmd_input_chunks * output, const mtmd_input_text * text,
                                        const mtmd_bitmap * const * bitmaps, size_t n_bitmaps);

namespace towerd::wire {

// Runs `work`, which tokenizes `text`, on a stack that is deep enough, or raises Refused.
using DeepStack = std::function<void(const std::string & text, const std::function<void()> & work)>;

// Runs `work`, which tokenizes `text`, on the deep stack that the vocabulary needs, if it needs one. Raises Refused.
void on_deep_stack(const llama_vocab * vocab, const std::string & text, const std::function<void()> & work);

// Bytes of text that a token stands for, at most. 0: any number, where the tokenizer may drop text or change it, or a
// special token takes the space beside it.
size_t token_bytes_max(const llama_model * model);

// While one is alive, what is tokenized with a vocabulary or a projector goes through it.
class TokenizingGuard {
public:
    // An empty `deep_stack` guards nothing, a null projector is none.
    TokenizingGuard(const llama_vocab * vocab, const mtmd_context * projector, const DeepStack & deep_stack);
    ~TokenizingGuard();
    TokenizingGuard(const TokenizingGuard &)             = delete;
    TokenizingGuard & operator=(const TokenizingGuard &) = delete;
};

}  // namespace towerd::wire
