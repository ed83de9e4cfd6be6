// Drafts from the model's own hidden states: llama.cpp's common_speculative with heads that predict several tokens (MTP).

#pragma once

#include <vector>

#include "llama-cpp.h"
#include "model.h"
#include "speculative.h"

namespace towerd::wire {

// A head reads every token that the model evaluates, beside the model's hidden state of the token before. Its rows are
// in a context of its own, under the model's sequences and positions, or in the model's memory (Gemma 4). Where its rows
// are missing it drafts worse, and nothing else is wrong: drafts are verified.
class Head {
public:
    struct Asked {
        llama_seq_id seq;    // each at most once in a call
        llama_token  last;   // the newest token, which is not evaluated yet
        llama_pos    pos;    // its position
        int          n_max;  // more tokens are of no use; at least 1
    };

    // Whether the model's flags ask for one.
    static bool is_asked_for(const Model & model);

    // `model` and `ctx`, the context that will verify the drafts, outlive this object. flags: those of `ctx`.
    // n_running: sequences that get drafts at once.
    // Throws std::exception: flags that do not go together, or a model without such a head.
    Head(const Model & model, llama_context * ctx, const llama_context_params & flags, int n_running);

    // The context whose sequences are to be shared and cut as those of `ctx` are; null: the head has no rows of its own.
    llama_context * followed_context() const { return is_shared_ ? nullptr : context_.get(); }

    // Reads a batch that `ctx` has just evaluated; the tokens of one sequence are beside each other.
    void follow(const std::vector<llama_token> & ids, const std::vector<llama_pos> & pos,
                const std::vector<llama_seq_id> & seqs);
    // A draft for each, possibly empty.
    std::vector<llama_tokens> draft(const std::vector<Asked> & asked);
    // Says how many tokens of the last draft were right, before anything else of the sequence is evaluated.
    void accept(llama_seq_id seq, int n_accepted);
    // The sequence no longer holds what was evaluated in it last: what follows there continues other tokens.
    void forget(llama_seq_id seq);

private:
    using Hidden = std::vector<float>;  // a hidden state of the model

    struct Start {
        llama_seq_id seq;
        llama_pos    pos;
        Hidden       before;  // empty: nothing is known of the token before
    };

    struct Sequence {
        bool         is_blank  = true;   // common_speculative holds no hidden state of it
        bool         has_draft = false;  // common_speculative knows of its last draft
        llama_token  first_id  = -1;     // its first token in the last batch
        Hidden       before, carried;    // of the tokens before its first and after its last evaluated one; empty: none
        std::vector<Hidden> rows;        // of its first tokens in the last batch, as many as a draft may have and one
        llama_pos    first = -1;  // position of its first token in the last batch
        llama_pos    state = -1;  // position of the token whose hidden state common_speculative holds; -1: of none
        size_t       n_rows_held = 0;  // hidden states of it that common_speculative keeps
        llama_tokens result;
    };

    void load(common_params params, const llama_context_params & flags, llama_context * ctx, int n_running);
    void renew();
    std::vector<Start> starts_of(const std::vector<llama_token> & ids, const std::vector<llama_pos> & pos,
                                 const std::vector<llama_seq_id> & seqs);
    void carry(const std::vector<Start> & starts);
    void note_hidden(Sequence & sequence, size_t at, size_t n);
    void note_rows(Sequence & sequence, size_t n);
    void begin(llama_seq_id seq, llama_pos p);

    const llama_tokens     nothing_;
    const int              n_vocab_;
    llama_context *        model_context_;
    bool                   is_shared_   = false;
    size_t                 n_rows_held_ = 0;
    common_params          params_;
    llama_model_ptr        model_;  // of a head that has a file of its own
    llama_context_ptr      context_;
    common_speculative_ptr speculative_;
    common_batch           batch_;
    std::vector<Sequence>  sequences_;
};

}  // namespace towerd::wire
