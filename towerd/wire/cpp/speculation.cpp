#include "speculation.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>

#include "head_check.h"
#include "refused.h"

namespace towerd::wire {

namespace {

constexpr size_t kCapacity = 1024;  // tokens of each text that the draft model has before it, at most
constexpr size_t kFirst    = 4;     // of these the text's first tokens, as attention sinks
constexpr size_t kChunk    = 64;    // tokens that a draft model reads in one call, so that others need not wait

bool has(const std::vector<common_speculative_type> & types, common_speculative_type type) {
    return std::find(types.begin(), types.end(), type) != types.end();
}

// What follows from a draft model's file. What is wrong with the file is said where it is loaded.
common_speculative_type type_of(const std::string & path) {
    try {
        const AbortGuard guard;
        if (const auto type = head_type_of(path); type != COMMON_SPECULATIVE_TYPE_NONE) {
            return type;
        }
        const auto types = common_speculative_types_from_gguf(path);
        return types.empty() ? COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE : types[0];
    } catch (const std::exception &) {
        return COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE;
    }
}

void check(const common_params_speculative & params) {
    const bool is_simple = has(params.types, COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
    if (is_simple && !params.has_dft()) {
        throw std::runtime_error("--spec-type draft-simple needs a draft model: name one with --model-draft");
    }
    if (is_simple && head_type_of(params.draft.mparams.path) != COMMON_SPECULATIVE_TYPE_NONE) {
        throw std::runtime_error("the draft model " + params.draft.mparams.path +
                                 " is a head, which reads no text: leave out --spec-type");
    }
    if (!is_simple && params.has_dft()) {
        throw std::runtime_error("--model-draft needs --spec-type draft-simple among the types");
    }
    for (const auto & path : {params.ngram_cache.lookup_cache_static, params.ngram_cache.lookup_cache_dynamic}) {
        if (!path.empty() && !std::ifstream(path)) {
            throw std::runtime_error("the lookup cache " + path + " cannot be read");
        }
    }
}

}  // namespace

std::vector<common_speculative_type> speculative_types(const common_params_speculative & params) {
    std::vector<common_speculative_type> types;
    for (const auto type : params.types) {
        if (type != COMMON_SPECULATIVE_TYPE_NONE) {
            types.push_back(type);
        }
    }
    if (types.empty() && params.has_dft()) {
        types.push_back(type_of(params.draft.mparams.path));
    }
    return types;
}

bool Speculation::is_asked_for(const Model & model) {
    return !speculative_types(model.params().speculative).empty();
}

Speculation::Speculation(const Model & model, llama_context * ctx, int n_slots, int n_threads, int n_threads_batch) :
    n_vocab_(llama_vocab_n_tokens(model.vocab)), params_(model.params()), slots_(n_slots) {
    const AbortGuard guard;
    auto &           speculative = params_.speculative;
    speculative.types            = speculative_types(speculative);
    speculative.draft.ctx_tgt    = ctx;
    check(speculative);
    if (speculative.has_dft()) {
        params_.n_parallel                = n_slots;
        params_.cpuparams.n_threads       = n_threads;
        params_.cpuparams_batch.n_threads = n_threads_batch;
        load_draft_model(common_base_params_to_speculative(params_), n_slots);
        speculative.draft.ctx_dft = draft_context_.get();
        batch_                    = common_batch(draft_context_.get());
    }
    speculative_.reset(common_speculative_init(speculative, n_slots));
}

// As common_speculative_init_from_params, but for a context that holds only the end of each text.
void Speculation::load_draft_model(const common_params & params, int n_slots) {
    common_params      dft  = params;
    const std::string & path = dft.model.path;
    if (!dft.tensor_buft_overrides.empty()) {
        dft.tensor_buft_overrides.push_back({nullptr, nullptr});
    }
    draft_model_.reset(llama_model_load_from_file(path.c_str(), common_model_params_to_llama(dft)));
    if (!draft_model_) {
        throw std::runtime_error("the draft model " + path + " cannot be loaded");
    }
    n_draft_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(draft_model_.get()));
    capacity_      = std::min<size_t>(kCapacity, llama_model_n_ctx_train(draft_model_.get()));
    if (capacity_ < 4 * kFirst + 2 * static_cast<size_t>(std::max(1, dft.speculative.draft.n_max))) {
        throw std::runtime_error("--spec-draft-n-max leaves no room for a text in the draft model's context");
    }
    auto cparams       = common_context_params_to_llama(dft);
    cparams.n_ctx      = static_cast<uint32_t>(n_slots * capacity_);
    cparams.kv_unified = true;
    cparams.swa_full   = true;  // else rows overwritten by a rejected draft would be lost
    cparams.n_rs_seq   = 0;
    draft_context_.reset(llama_init_from_model(draft_model_.get(), cparams));
    if (!draft_context_) {
        throw std::runtime_error("the draft model " + path + " gets no context");
    }
    if (common_context_can_seq_rm(draft_context_.get()) != COMMON_CONTEXT_SEQ_RM_TYPE_PART) {
        throw std::runtime_error("the draft model " + path + " has a state that cannot take a draft back");
    }
}

std::vector<llama_tokens> Speculation::draft(std::vector<Asked> asked) {
    return answering(ERROR_TYPE_SERVER, [&] {
        std::vector<bool> ready;
        batch_.clear();
        for (auto & one : asked) {
            const llama_token last = one.ids.back();
            take_text(one.slot, std::move(one.ids));
            one.ids = {last};
            ready.push_back(!draft_context_ || read(one.slot, last, one.n_max));
        }
        if (batch_.size() > 0 && !common_speculative_process(speculative_.get(), batch_)) {
            for (const auto & one : asked) {
                forget(one.slot);
            }
            return std::vector<llama_tokens>(asked.size());
        }
        for (size_t i = 0; i < asked.size(); ++i) {
            Slot & slot = slots_.at(asked[i].slot);
            slot.result.clear();
            common_speculative_get_draft_params(speculative_.get(), asked[i].slot) = {
                ready[i], asked[i].n_max, static_cast<llama_pos>(slot.held.size()), asked[i].ids.back(),
                &slot.prompt, &slot.result};
        }
        common_speculative_draft(speculative_.get());
        std::vector<llama_tokens> drafts;
        for (size_t i = 0; i < asked.size(); ++i) {
            Slot & slot = slots_[asked[i].slot];
            if (draft_context_ && ready[i]) {
                keep_evaluated(asked[i].slot, asked[i].ids.back());
            }
            const auto is_odd = [this](llama_token id) { return id < 0 || id >= n_vocab_; };
            const auto end    = std::find_if(slot.result.begin(), slot.result.end(), is_odd);
            slot.result.erase(end, slot.result.end());
            slot.result.resize(std::min<size_t>(slot.result.size(), asked[i].n_max));
            drafts.push_back(slot.result);
        }
        return drafts;
    });
}

void Speculation::accept(int slot, int n_accepted) {
    answering(ERROR_TYPE_SERVER, [&] { common_speculative_accept(speculative_.get(), slot, n_accepted); });
}

// The n-grams are told when a slot has another text than before, or a shorter one.
void Speculation::take_text(int slot, llama_tokens ids) {
    llama_tokens & prompt = slots_.at(slot).prompt;
    ids.pop_back();
    const bool goes_on = !prompt.empty() && ids.size() >= prompt.size() &&
                         std::equal(prompt.begin(), prompt.end(), ids.begin());
    prompt = std::move(ids);
    if (!goes_on) {
        common_speculative_begin(speculative_.get(), slot, prompt);
    }
}

// Adds the tokens of a slot's text that the draft model lacks to the batch; returns whether all of them fit.
bool Speculation::read(int slot, llama_token last, int n_max) {
    Slot & state = slots_[slot];
    keep_window(state, std::min(n_max, params_.speculative.draft.n_max));
    if (!llama_memory_seq_rm(llama_get_memory(draft_context_.get()), slot, static_cast<llama_pos>(state.held.size()), -1)) {
        forget(slot);
        return false;
    }
    const size_t n    = state.prompt.size() - state.gap;
    const size_t stop = std::min(n, state.held.size() + kChunk);
    for (size_t at = state.held.size(); at < stop; ++at) {
        const llama_token id = state.prompt[at < kFirst ? at : at + state.gap];
        if (id < 0 || id >= n_draft_vocab_) {  // a medium, which no draft model sees
            return false;
        }
        batch_.add(id, static_cast<llama_pos>(at), slot, false);
        state.held.push_back(id);
    }
    return stop == n && last >= 0 && last < n_draft_vocab_;
}

// Cuts `held` to its common prefix with the text, and leaves out the middle of a text that is too long: at most half of
// the capacity is read at once.
void Speculation::keep_window(Slot & slot, int n_max) const {
    const llama_tokens & text   = slot.prompt;
    const size_t         window = capacity_ / 2;
    size_t               n      = 0;
    while (n < slot.held.size()) {
        const size_t at = n < kFirst ? n : n + slot.gap;
        if (at >= text.size() || slot.held[n] != text[at]) {
            break;
        }
        ++n;
    }
    const bool is_behind_gap = text.size() >= slot.gap + kFirst;
    const bool fits = is_behind_gap && text.size() - slot.gap + n_max + 1 <= capacity_ && text.size() - slot.gap - n <= window;
    if (!fits || (slot.gap > 0 && n <= kFirst)) {
        const size_t gap = text.size() > window ? text.size() - window : 0;
        n                = gap == slot.gap ? n : std::min(n, kFirst);
        slot.gap         = gap;
    }
    slot.held.resize(n);
}

void Speculation::forget(int slot) {
    llama_memory_seq_rm(llama_get_memory(draft_context_.get()), slot, -1, -1);
    slots_[slot].held.clear();
    slots_[slot].gap = 0;
}

// What the draft model evaluated while drafting stays valid if the draft is accepted.
void Speculation::keep_evaluated(int slot, llama_token last) {
    Slot &         state  = slots_[slot];
    llama_memory_t memory = llama_get_memory(draft_context_.get());
    const size_t   n      = static_cast<size_t>(llama_memory_seq_pos_max(memory, slot) + 1);
    if (state.held.size() < n) {
        state.held.push_back(last);
        state.held.insert(state.held.end(), state.result.begin(), state.result.end());
    }
    if (state.held.size() > n) {
        state.held.resize(n);
    }
    llama_memory_seq_rm(memory, slot, static_cast<llama_pos>(state.held.size()), -1);
}

}  // namespace towerd::wire
