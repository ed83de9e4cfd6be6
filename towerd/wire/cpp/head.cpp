#include "head.h"

#include <algorithm>
#include <stdexcept>

#include "refused.h"
#include "speculation.h"

// Declared in llama.cpp's src/llama-ext.h, which is no part of its public sources.
LLAMA_API llama_context * llama_get_ctx_other(llama_context * ctx);
LLAMA_API float *         llama_get_embeddings_nextn(llama_context * ctx);

namespace towerd::wire {

namespace {

constexpr uint32_t kRound     = 256;       // llama.cpp's contexts have multiples of so many cells
constexpr size_t   kHeldBytes = 64 << 20;  // of hidden states that common_speculative holds, about

bool has_head(const common_params_speculative & params) {
    const auto types = speculative_types(params);
    return std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_MTP) != types.end();
}

}  // namespace

bool Head::is_asked_for(const Model & model) {
    return has_head(model.params().speculative);
}

Head::Head(const Model & model, llama_context * ctx, const llama_context_params & flags, int n_running) :
    n_vocab_(llama_vocab_n_tokens(model.vocab)), model_context_(ctx), params_(model.params()), sequences_(llama_n_seq_max(ctx)) {
    const AbortGuard guard;
    auto &           speculative = params_.speculative;
    for (const auto type : speculative_types(speculative)) {
        if (type != COMMON_SPECULATIVE_TYPE_DRAFT_MTP) {
            throw std::runtime_error("--spec-type draft-mtp does not go together with " +
                                     common_speculative_type_to_str(type) + ": name one of them");
        }
    }
    speculative.types         = {COMMON_SPECULATIVE_TYPE_DRAFT_MTP};
    speculative.draft.ctx_tgt = ctx;

    load(common_base_params_to_speculative(params_), flags, ctx, n_running);
    speculative.draft.ctx_dft = context_.get();
    batch_                    = common_batch(context_.get());
    renew();
    if (!speculative_) {
        throw std::runtime_error("--spec-type draft-mtp: llama.cpp makes no drafts of this model");
    }
}

// Makes common_speculative anew: it keeps the hidden states of the largest batch that each sequence ever had. The first
// row of each that follows is computed with none.
void Head::renew() {
    speculative_.reset();
    speculative_.reset(common_speculative_init(params_.speculative, static_cast<uint32_t>(sequences_.size())));
    n_rows_held_ = 0;
    for (auto & sequence : sequences_) {
        sequence.state       = -1;
        sequence.is_blank    = true;
        sequence.has_draft   = false;
        sequence.n_rows_held = 0;
    }
}

// As common_speculative_init_result, for a context with the sequences of `ctx`.
void Head::load(common_params params, const llama_context_params & flags, llama_context * ctx, int n_running) {
    auto *      model = const_cast<llama_model *>(llama_get_model(ctx));
    std::string whose = "this model";
    if (params_.speculative.has_dft()) {
        whose = params.model.path;
        if (!params.tensor_buft_overrides.empty()) {
            params.tensor_buft_overrides.push_back({nullptr, nullptr});
        }
        model_.reset(llama_model_load_from_file(whose.c_str(), common_model_params_to_llama(params)));
        model = model_.get();
        if (!model) {
            throw std::runtime_error("the draft model " + whose + " cannot be loaded");
        }
    }
    auto           cparams = flags;
    const uint32_t n_most  = n_running * static_cast<uint32_t>(std::max(1, params_.speculative.draft.n_max) + 1);
    cparams.cb_eval        = nullptr;
    cparams.type_k         = params_.speculative.draft.cache_type_k;
    cparams.type_v         = params_.speculative.draft.cache_type_v;
    cparams.n_batch        = llama_n_batch(ctx);
    cparams.n_ubatch       = llama_n_ubatch(ctx);
    cparams.ctx_type       = LLAMA_CONTEXT_TYPE_MTP;
    cparams.ctx_other      = ctx;
    cparams.n_ctx          = llama_n_ctx(ctx) + (n_most + kRound - 1) / kRound * kRound;
    cparams.n_seq_max      = llama_n_seq_max(ctx);
    cparams.n_outputs_max  = std::max(cparams.n_outputs_max, cparams.n_seq_max);
    cparams.n_rs_seq       = 0;
    cparams.kv_unified     = true;
    cparams.swa_full       = true;
    context_.reset(llama_init_from_model(model, cparams));
    if (!context_) {
        throw std::runtime_error("--spec-type draft-mtp: " + whose + " has no head that predicts several tokens");
    }
    is_shared_ = llama_get_ctx_other(context_.get()) == ctx;
    if (!is_shared_ && common_context_can_seq_rm(context_.get()) != COMMON_CONTEXT_SEQ_RM_TYPE_PART) {
        throw std::runtime_error("--spec-type draft-mtp: the head of " + whose + " has a state that cannot take a draft back");
    }
}

void Head::follow(const std::vector<llama_token> & ids, const std::vector<llama_pos> & pos,
                  const std::vector<llama_seq_id> & seqs) {
    answering(ERROR_TYPE_SERVER, [&] {
        struct Part {
            llama_seq_id seq;
            llama_pos    first, end;
        };
        std::vector<Part> parts;
        std::vector<std::pair<llama_seq_id, llama_pos>> starts;
        for (size_t i = 0; i < ids.size(); ++i) {
            const bool      is_first = i == 0 || seqs[i] != seqs[i - 1];
            const llama_pos state    = sequences_.at(seqs[i]).state;
            if (is_first && (state < 0 || state != pos[i] - 1)) {
                starts.emplace_back(seqs[i], pos[i]);
            }
        }
        blank(starts);
        batch_.clear();
        for (size_t i = 0; i < ids.size(); ++i) {
            if (parts.empty() || parts.back().seq != seqs[i]) {
                begin(seqs[i], pos[i]);
                parts.push_back({seqs[i], pos[i], pos[i]});
            }
            batch_.add(ids[i], pos[i], seqs[i], false);
            parts.back().end = pos[i] + 1;
        }
        for (const auto & part : parts) {
            note_rows(sequences_.at(part.seq), static_cast<size_t>(part.end - part.first));
        }
        const bool is_read = common_speculative_process(speculative_.get(), batch_);
        for (const auto & part : parts) {
            Sequence & sequence = sequences_.at(part.seq);
            if (!is_read) {  // it has no room
                begin(part.seq, part.first);
            }
            sequence.first    = part.first;
            sequence.state    = is_read ? part.end - 1 : -1;
            sequence.is_blank = sequence.is_blank && !is_read;
        }
    });
}

std::vector<llama_tokens> Head::draft(const std::vector<Asked> & asked) {
    return answering(ERROR_TYPE_SERVER, [&] {
        for (const auto & one : asked) {
            Sequence & sequence = sequences_.at(one.seq);
            sequence.result.clear();
            common_speculative_get_draft_params(speculative_.get(), one.seq) = {
                sequence.state == one.pos - 1, one.n_max, one.pos, one.last, &nothing_, &sequence.result};
        }
        common_speculative_draft(speculative_.get());
        std::vector<llama_tokens> drafts;
        for (const auto & one : asked) {
            begin(one.seq, one.pos);  // its batch may never be evaluated
            llama_tokens & result = sequences_[one.seq].result;
            sequences_[one.seq].has_draft |= !result.empty();
            const auto     is_odd = [this](llama_token id) { return id < 0 || id >= n_vocab_; };
            result.erase(std::find_if(result.begin(), result.end(), is_odd), result.end());
            result.resize(std::min<size_t>(result.size(), one.n_max));
            drafts.push_back(result);
        }
        return drafts;
    });
}

void Head::accept(llama_seq_id seq, int n_accepted) {
    answering(ERROR_TYPE_SERVER, [&] {
        Sequence & sequence = sequences_.at(seq);
        const llama_pos last = sequence.first + n_accepted;
        if (sequence.has_draft) {
            common_speculative_accept(speculative_.get(), seq, n_accepted);
            sequence.state = sequence.state < 0 ? -1 : last;
        } else if (sequence.state != last) {  // it was made anew since, and has the state of the last guess alone
            sequence.state = -1;
        }
    });
}

void Head::forget(llama_seq_id seq) {
    sequences_.at(seq).state = -1;
}

// The first row of sequences that do not continue where they were evaluated last must not be computed with the hidden
// state of another token, which may be another tenant's. common_speculative has no call to drop it, so it reads a
// token whose hidden state is zero; what it has of that token is then taken out.
void Head::blank(const std::vector<std::pair<llama_seq_id, llama_pos>> & starts) {
    float * hidden = is_shared_ ? nullptr : llama_get_embeddings_nextn(model_context_);
    if (!hidden) {
        return;
    }
    std::vector<std::pair<llama_seq_id, llama_pos>> held;
    for (const auto & start : starts) {
        if (!sequences_.at(start.first).is_blank) {
            held.push_back(start);
        }
    }
    if (held.empty()) {
        return;
    }
    const size_t             n = held.size() * llama_model_n_embd_out(llama_get_model(context_.get()));
    const std::vector<float> kept(hidden, hidden + n);
    batch_.clear();
    for (const auto & [seq, pos] : held) {
        begin(seq, pos);
        batch_.add(0, pos, seq, false);
    }
    std::fill(hidden, hidden + n, 0.0f);
    const bool is_read = common_speculative_process(speculative_.get(), batch_);
    std::copy(kept.begin(), kept.end(), hidden);
    for (const auto & [seq, pos] : held) {
        begin(seq, pos);
        sequences_[seq].is_blank = is_read;
    }
    if (!is_read) {
        renew();
    }
}

void Head::note_rows(Sequence & sequence, size_t n) {
    const size_t row_bytes = sizeof(float) * static_cast<size_t>(llama_model_n_embd_out(llama_get_model(context_.get())));
    if ((n_rows_held_ + n) * row_bytes > kHeldBytes && n_rows_held_ > 0 && n > sequence.n_rows_held) {
        renew();
    }
    if (n > sequence.n_rows_held) {
        n_rows_held_ += n - sequence.n_rows_held;
        sequence.n_rows_held = n;
    }
}

// Takes out what it guessed from position `p` on, or evaluated before the sequence was cut there. llama.cpp evaluates
// nothing behind a gap: where rows are missing before `p`, the others go as well. After one, and wherever a sequence
// does not continue where it was evaluated last, the first row is computed with the hidden state of another token.
void Head::begin(llama_seq_id seq, llama_pos p) {
    if (is_shared_) {
        return;
    }
    llama_memory_t memory = llama_get_memory(context_.get());
    llama_memory_seq_rm(memory, seq, p, -1);
    if (llama_memory_seq_pos_max(memory, seq) != p - 1) {
        llama_memory_seq_rm(memory, seq, -1, -1);
    }
}

}  // namespace towerd::wire
