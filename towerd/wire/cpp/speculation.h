// Drafts the next tokens of running replies: llama.cpp's common_speculative, with a draft model, n-grams, or both.

#pragma once

#include <vector>

#include "llama-cpp.h"
#include "model.h"
#include "speculative.h"

namespace towerd::wire {

// The types that flags ask for, or that follow from the draft model's file; empty: none.
std::vector<common_speculative_type> speculative_types(const common_params_speculative & params);

class Speculation {
public:
    struct Asked {
        int          slot;   // below n_slots, each at most once in a call
        llama_tokens ids;    // all that the reply's sequence is to hold; the last one is the newest
        int          n_max;  // more tokens are of no use; at least 1
    };

    // Whether the model's flags ask for speculation.
    static bool is_asked_for(const Model & model);

    // `model` and `ctx`, the context that will verify the drafts, outlive this object.
    // Throws std::exception: unsupported flags, or a draft model that cannot be used.
    Speculation(const Model & model, llama_context * ctx, int n_slots, int n_threads, int n_threads_batch);

    // A draft for each, possibly empty. A draft model that has to read much of a text first does so over several calls,
    // and drafts nothing until then.
    std::vector<llama_tokens> draft(std::vector<Asked> asked);
    // Says how many tokens of the slot's last draft were right.
    void accept(int slot, int n_accepted);

    // See common_speculative_get_synth_probs; empty: drafts are accepted where they are right.
    const std::vector<double> & synthetic() const { return common_speculative_get_synth_probs(speculative_.get()); }

private:
    struct Slot {
        llama_tokens prompt;   // of the last call, all but its last token
        llama_tokens held;     // what the draft context has evaluated, by its positions
        size_t       gap = 0;  // tokens of the text that were left out, behind the first ones
        llama_tokens result;
    };

    void load_draft_model(const common_params & params, int n_slots);
    void take_text(int slot, llama_tokens ids);
    bool read(int slot, llama_token last, int n_max);
    void keep_window(Slot & slot, int n_max) const;
    void forget(int slot);
    void keep_evaluated(int slot, llama_token last);

    const int              n_vocab_;
    int                    n_draft_vocab_ = 0;
    size_t                 capacity_      = 0;  // tokens of one slot in the draft context
    common_params          params_;
    llama_model_ptr        draft_model_;
    llama_context_ptr      draft_context_;
    common_speculative_ptr speculative_;
    common_batch           batch_;  // what the draft model reads
    std::vector<Slot>      slots_;
};

}  // namespace towerd::wire
