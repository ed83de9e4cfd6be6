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
        sequence.before.clear();
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
            size_t       at;
        };
        std::vector<Part> parts;
        carry(starts_of(ids, pos, seqs));
        batch_.clear();
        for (size_t i = 0; i < ids.size(); ++i) {
            if (parts.empty() || parts.back().seq != seqs[i]) {
                begin(seqs[i], pos[i]);
                parts.push_back({seqs[i], pos[i], pos[i], i});
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
            sequence.first_id = ids[part.at];
            sequence.is_blank = sequence.is_blank && !is_read;
            note_hidden(sequence, part.at, static_cast<size_t>(part.end - part.first));
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
            if (static_cast<size_t>(n_accepted) < sequence.rows.size()) {
                sequence.carried = sequence.rows[n_accepted];
            }
        } else if (sequence.state != last) {  // it was made anew since, and has the state of the last guess alone
            sequence.state = -1;
        }
    });
}

void Head::forget(llama_seq_id seq) {
    Sequence & sequence = sequences_.at(seq);
    sequence.state      = -1;
    sequence.first      = -1;
}

// The sequences of a batch whose first row common_speculative would compute with the hidden state of another token, since
// they do not continue where they were evaluated last. One whose first tokens are evaluated once more, as after a wrong
// draft where the model's state cannot be cut, has the same token before them as then.
std::vector<Head::Start> Head::starts_of(const std::vector<llama_token> & ids, const std::vector<llama_pos> & pos,
                                         const std::vector<llama_seq_id> & seqs) {
    std::vector<Start> starts;
    for (size_t i = 0; i < ids.size(); ++i) {
        if (i > 0 && seqs[i] == seqs[i - 1]) {
            continue;
        }
        Sequence & sequence = sequences_.at(seqs[i]);
        if (sequence.state >= 0 && sequence.state == pos[i] - 1) {
            sequence.before = sequence.carried;
            continue;
        }
        if (sequence.first != pos[i] || sequence.first_id != ids[i]) {
            sequence.before.clear();
        }
        if (!sequence.is_blank || !sequence.before.empty()) {
            starts.push_back({seqs[i], pos[i], sequence.before});
        }
    }
    return starts;
}

// Has common_speculative hold what is known of the tokens before these, or zeros: what it holds may be another tenant's.
// It has no call for that. So it reads a token with this hidden state, and what the head has of that token is taken out.
void Head::carry(const std::vector<Start> & starts) {
    float * hidden = is_shared_ || starts.empty() ? nullptr : llama_get_embeddings_nextn(model_context_);
    if (!hidden) {
        return;
    }
    const size_t n_embd = llama_model_n_embd_out(llama_get_model(context_.get()));
    const Hidden kept(hidden, hidden + starts.size() * n_embd);
    batch_.clear();
    for (size_t i = 0; i < starts.size(); ++i) {
        const Start & start = starts[i];
        begin(start.seq, start.pos);
        batch_.add(0, start.pos, start.seq, false);
        float * row = hidden + i * n_embd;
        std::fill(row, row + n_embd, 0.0f);
        std::copy(start.before.begin(), start.before.end(), row);
    }
    const bool is_read = common_speculative_process(speculative_.get(), batch_);
    std::copy(kept.begin(), kept.end(), hidden);
    for (const auto & start : starts) {
        begin(start.seq, start.pos);
        sequences_[start.seq].is_blank = start.before.empty();
    }
    if (!is_read) {
        renew();
    }
}

void Head::note_hidden(Sequence & sequence, size_t at, size_t n) {
    const float * hidden = is_shared_ ? nullptr : llama_get_embeddings_nextn(model_context_);
    if (!hidden) {
        return;
    }
    const size_t n_embd = llama_model_n_embd_out(llama_get_model(context_.get()));
    const auto   row    = [&](size_t i) { return Hidden(hidden + i * n_embd, hidden + (i + 1) * n_embd); };
    const size_t n_kept = std::min<size_t>(n, std::max(0, params_.speculative.draft.n_max) + 1);
    sequence.rows.clear();
    for (size_t i = 0; i < n_kept; ++i) {
        sequence.rows.push_back(row(at + i));
    }
    sequence.carried = row(at + n - 1);
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
