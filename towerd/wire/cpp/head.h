// Drafts from the model's own hidden states: llama.cpp's common_speculative with heads (MTP, EAGLE-3, DFlash, DSpark).

#pragma once

#include <vector>

#include "llama-cpp.h"
#include "model.h"
#include "mtmd-helper.h"
#include "speculative.h"

namespace towerd::wire {

// A head reads every token that the model evaluates, beside hidden states of the model:
// - MTP computes the row of a token from it and the hidden state of the token before;
// - EAGLE-3 computes the row of a token from its hidden states and the token after, once that is known;
// - DFlash and DSpark compute the row of a token from its hidden states alone, those of media included.
// Its rows are in a context of its own, under the model's sequences and positions, or in the model's memory (Gemma 4).
// Where its rows are missing it drafts worse, and nothing else is wrong: drafts are verified.
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
    // n_running: sequences that get drafts at once. path: the model's file.
    // Throws std::exception: flags that do not go together, or a model without such a head.
    Head(const Model & model, llama_context * ctx, const llama_context_params & flags, int n_running,
         const std::string & path);

    // The context whose sequences are to be shared and cut as those of `ctx` are; null: the head has no rows of its own.
    llama_context * followed_context() const { return is_shared_ ? nullptr : context_.get(); }

    // The row of a sequence's last token is computed this many tokens later.
    int lag() const { return lag_; }

    // What a sequence held from position `p` on is not what it was any more: to be called wherever `ctx` is cut or filled.
    void changed(llama_seq_id seq, llama_pos p);
    // Reads a batch that `ctx` has just evaluated; the tokens of one sequence are beside each other.
    void follow(const std::vector<llama_token> & ids, const std::vector<llama_pos> & pos,
                const std::vector<llama_seq_id> & seqs);
    // Reads a part of a medium that `ctx` has just evaluated. Rows that the head has of media are those that llama.cpp
    // computes; it drafts again from the next token on.
    void follow_medium(const mtmd_helper_embd_batch & part);
    // A draft for each, possibly empty.
    std::vector<llama_tokens> draft(const std::vector<Asked> & asked);
    // Says how many tokens of the last draft were right, before anything else of the sequence is evaluated.
    void accept(llama_seq_id seq, int n_accepted);

    // See common_speculative_get_synth_probs; empty: drafts are accepted where they are right.
    const std::vector<double> & synthetic() const { return common_speculative_get_synth_probs(speculative_.get()); }

private:
    using Hidden = std::vector<float>;  // a hidden state of the model

    struct Sequence {
        llama_pos            first       = -1;     // position of its first token in the last batch
        llama_pos            state       = -1;     // of the token whose hidden state is held; -1: of none, -2: of another one
        bool                 has_drafted = false;  // since common_speculative was made
        size_t               n_rows_held = 0;      // hidden states of it that common_speculative keeps
        std::vector<uint8_t> before;  // what common_speculative held before the last draft, where a model returns to it
        llama_pos            before_state = -1;
        Hidden               before_hidden;  // the same of MTP, which has no call for it
        Hidden               carried;  // of its last evaluated token, of which MTP computes the next row
        std::vector<Hidden>  rows;     // of its first tokens in the last batch, as many as a draft may have and one
        llama_tokens         result;
    };

    std::string named() const;
    void load(common_params params, const llama_context_params & flags, llama_context * ctx, int n_running,
              const std::string & model_path);
    void check_states() const;
    void renew();
    void note_rows(Sequence & sequence, size_t n);
    void begin(llama_seq_id seq, llama_pos p);
    bool continue_at(llama_seq_id seq, llama_pos p, llama_token id);
    bool hold(llama_seq_id seq, llama_pos p, llama_token id, const Hidden & state);
    void note_states(Sequence & sequence, size_t at, size_t n);
    void draft_some(const Asked * asked, size_t n);

    const llama_tokens            nothing_;
    const int                     n_vocab_;
    const common_speculative_type type_;
    const int                     lag_;       // the row of a token is computed this many tokens later
    const bool                    is_block_;  // all tokens of a draft are guessed at once, from no state that is held
    bool                          is_shared_   = false;
    bool                          may_jump_    = false;     // llama.cpp evaluates behind a gap
    size_t                        n_at_once_   = SIZE_MAX;  // sequences that draft in one call
    size_t                        n_rows_held_ = 0;
    common_params                 params_;
    llama_model_ptr               model_;  // of a head that has a file of its own
    llama_context_ptr             context_;
    common_speculative_ptr        speculative_;
    common_batch                  batch_, single_;
    std::vector<Sequence>         sequences_;
};

}  // namespace towerd::wire
