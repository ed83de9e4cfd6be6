#include "head.h"

#include <algorithm>
#include <stdexcept>

#include "head_check.h"
#include "refused.h"
#include "speculation.h"

// Declared in llama.cpp's src/llama-ext.h, which is no part of its public sources.
LLAMA_API llama_context * llama_get_ctx_other(llama_context * ctx);
LLAMA_API float *         llama_get_embeddings_nextn(llama_context * ctx);
LLAMA_API float *         llama_get_embeddings_layer_inp(llama_context * ctx, uint32_t lid);
LLAMA_API ggml_cgraph *   llama_graph_reserve(llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs);
LLAMA_API const int32_t * llama_model_target_layer_ids(const llama_model * model);
LLAMA_API uint32_t        llama_model_target_layer_ids_n(const llama_model * model);

namespace towerd::wire {

namespace {

constexpr uint32_t kRound     = 256;       // llama.cpp's contexts have multiples of so many cells
constexpr size_t   kHeldBytes = 64 << 20;  // of hidden states that common_speculative holds, about

constexpr llama_pos kNone  = -1;  // no hidden state is held
constexpr llama_pos kOther = -2;  // one is held that must not be used

common_speculative_type head_type(const common_params_speculative & params) {
    for (const auto type : speculative_types(params)) {
        if (type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP || type == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 ||
            type == COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH || type == COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK) {
            return type;
        }
    }
    return COMMON_SPECULATIVE_TYPE_NONE;
}

bool is_block(common_speculative_type type) {
    return type == COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH || type == COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK;
}

// While one is alive, the hidden states of the first token of a context's last batch are zeros, or, of a head that reads
// one, `state`.
class OtherStates {
public:
    OtherStates(llama_context * ctx, const llama_model * head, const std::vector<float> & state) {
        const llama_model * model   = llama_get_model(ctx);
        const int32_t       n_layer = llama_model_n_layer(model);
        const uint32_t      n       = llama_model_target_layer_ids_n(head);
        const int32_t *     ids     = llama_model_target_layer_ids(head);
        for (uint32_t i = 0; i < n; ++i) {
            hide(ids[i] < n_layer ? llama_get_embeddings_layer_inp(ctx, static_cast<uint32_t>(ids[i]))
                                  : llama_get_embeddings_nextn(ctx),
                 llama_model_n_embd(model));
        }
        if (n == 0) {
            hide(llama_get_embeddings_nextn(ctx), llama_model_n_embd_out(model));
            std::copy(state.begin(), state.end(), hidden_.back().first);
        }
    }
    ~OtherStates() {
        for (auto each = hidden_.rbegin(); each != hidden_.rend(); ++each) {
            std::copy(each->second.begin(), each->second.end(), each->first);
        }
    }
    OtherStates(const OtherStates &)             = delete;
    OtherStates & operator=(const OtherStates &) = delete;

private:
    void hide(float * row, int n) {
        hidden_.emplace_back(row, std::vector<float>(row, row + n));
        std::fill(row, row + n, 0.0f);
    }

    std::vector<std::pair<float *, std::vector<float>>> hidden_;
};

}  // namespace

bool Head::is_asked_for(const Model & model) {
    return head_type(model.params().speculative) != COMMON_SPECULATIVE_TYPE_NONE;
}

Head::Head(const Model & model, llama_context * ctx, const llama_context_params & flags, int n_running,
           const std::string & path) :
    n_vocab_(llama_vocab_n_tokens(model.vocab)),
    type_(head_type(model.params().speculative)),
    lag_(type_ == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3 ? 1 : 0),
    is_block_(is_block(type_)),
    params_(model.params()),
    sequences_(llama_n_seq_max(ctx)) {
    const AbortGuard guard;
    auto &           speculative = params_.speculative;
    for (const auto type : speculative_types(speculative)) {
        if (type != type_) {
            throw std::runtime_error(named() + " does not go together with " + common_speculative_type_to_str(type) +
                                     ": name one of them");
        }
    }
    speculative.types         = {type_};
    speculative.draft.ctx_tgt = ctx;

    load(common_base_params_to_speculative(params_), flags, ctx, n_running, path);
    speculative.draft.ctx_dft = context_.get();
    batch_                    = common_batch(context_.get());
    single_                   = common_batch(context_.get());
    renew();
    if (!speculative_) {
        throw std::runtime_error(named() + ": llama.cpp makes no drafts of this model");
    }
    check_states();
    if (lag_ > 0) {  // llama.cpp gives all sequences of a call the guesses of the last one
        n_at_once_ = 1;
    } else if (is_block_) {  // all tokens of a block see each other, so that they have to be evaluated in one go
        const int n_block = std::max(1, common_speculative_n_max(speculative_.get()) + 1);
        const int n_fit   = static_cast<int>(llama_n_ubatch(context_.get()));
        if (n_block > n_fit) {
            throw std::runtime_error(named() + " evaluates " + std::to_string(n_block) +
                                     " tokens at once: start with --ubatch-size " + std::to_string(n_block) +
                                     " or --spec-draft-n-max " + std::to_string(n_fit - 1));
        }
        n_at_once_ = static_cast<size_t>(n_fit / n_block);
    }
}

std::string Head::named() const {
    return "--spec-type " + common_speculative_type_to_str(type_);
}

// Makes common_speculative anew: it keeps the hidden states of the largest batch that each sequence ever had. The first
// row of each that follows is computed with none.
void Head::renew() {
    speculative_.reset();
    speculative_.reset(common_speculative_init(params_.speculative, static_cast<uint32_t>(sequences_.size())));
    n_rows_held_ = 0;
    for (auto & sequence : sequences_) {
        sequence.state       = kNone;
        sequence.has_drafted = false;
        sequence.n_rows_held = 0;
        sequence.before.clear();
        sequence.before_hidden.clear();
    }
}

// Of some architectures llama.cpp hands out no hidden states, and ends the process where they are asked for.
void Head::check_states() const {
    if (llama_model_target_layer_ids_n(llama_get_model(context_.get())) == 0) {
        return;
    }
    try {
        if (llama_graph_reserve(params_.speculative.draft.ctx_tgt, 1, 1, 1) != nullptr) {
            return;
        }
    } catch (const std::exception &) {  // NOLINT: said below
    }
    throw std::runtime_error(named() + ": llama.cpp hands out no hidden states of this model's layers");
}

// As common_speculative_init_result, for a context with the sequences of `ctx`.
void Head::load(common_params params, const llama_context_params & flags, llama_context * ctx, int n_running,
                const std::string & model_path) {
    const auto & draft   = params_.speculative.draft;
    const bool   is_mtp  = type_ == COMMON_SPECULATIVE_TYPE_DRAFT_MTP;
    auto *       model   = const_cast<llama_model *>(llama_get_model(ctx));
    auto         cparams = flags;
    std::string  path;
    if (params_.speculative.has_dft()) {
        path = params.model.path;
        if (!params.tensor_buft_overrides.empty()) {
            params.tensor_buft_overrides.push_back({nullptr, nullptr});
        }
        model_.reset(llama_model_load_from_file(path.c_str(), common_model_params_to_llama(params)));
        model = model_.get();
        if (!model) {
            throw std::runtime_error("the draft model " + path + " cannot be loaded");
        }
        check_head(model, path, llama_get_model(ctx), model_path, type_);
        if (draft.cpuparams.n_threads > 0) {
            cparams.n_threads = cparams.n_threads_batch = draft.cpuparams.n_threads;
        }
        if (draft.cpuparams_batch.n_threads > 0) {
            cparams.n_threads_batch = draft.cpuparams_batch.n_threads;
        }
    } else if (!is_mtp) {
        throw std::runtime_error(named() + " needs a head: name its file with --model-draft");
    }
    const uint32_t n_draft = static_cast<uint32_t>(std::max(1, draft.n_max) + 1);
    const uint32_t n_most  = n_running * n_draft;
    cparams.cb_eval        = nullptr;
    cparams.type_k         = draft.cache_type_k;
    cparams.type_v         = draft.cache_type_v;
    cparams.n_batch        = llama_n_batch(ctx);
    cparams.n_ubatch       = llama_n_ubatch(ctx);
    cparams.ctx_type       = is_mtp ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
    cparams.ctx_other      = ctx;
    cparams.n_ctx          = llama_n_ctx(ctx) + (n_most + kRound - 1) / kRound * kRound;
    cparams.n_seq_max      = llama_n_seq_max(ctx);
    cparams.n_outputs_max  = std::max(cparams.n_outputs_max, cparams.n_seq_max);
    cparams.n_rs_seq       = 0;
    cparams.kv_unified     = true;
    cparams.swa_full       = true;
    if (is_block_ && draft.backend_sampling) {
        cparams.n_outputs_max_per_seq = n_draft;
    }
    context_.reset(llama_init_from_model(model, cparams));
    const std::string whose = path.empty() ? "this model" : path;
    if (!context_) {
        throw std::runtime_error(named() + ": " + whose +
                                 (is_mtp ? " has no head that predicts several tokens" : " does not fit this model"));
    }
    is_shared_      = is_mtp && llama_get_ctx_other(context_.get()) == ctx;
    const auto rope = llama_model_rope_type(model);
    may_jump_       = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE;
    if (!is_shared_ && common_context_can_seq_rm(context_.get()) != COMMON_CONTEXT_SEQ_RM_TYPE_PART) {
        throw std::runtime_error(named() + ": the head of " + whose + " has a state that cannot take a draft back");
    }
}

void Head::changed(llama_seq_id seq, llama_pos p) {
    Sequence & sequence = sequences_.at(seq);
    if (sequence.state >= std::max(p, 0)) {
        sequence.state = kOther;
    }
    if (sequence.before_state >= std::max(p, 0)) {
        sequence.before.clear();
        sequence.before_hidden.clear();
    }
}

void Head::follow(const std::vector<llama_token> & ids, const std::vector<llama_pos> & pos,
                  const std::vector<llama_seq_id> & seqs) {
    answering(ERROR_TYPE_SERVER, [&] {
        struct Part {
            llama_seq_id seq;
            llama_token  id;
            llama_pos    first, end;
            size_t       at;
        };
        std::vector<Part> parts;
        batch_.clear();
        for (size_t i = 0; i < ids.size(); ++i) {
            if (parts.empty() || parts.back().seq != seqs[i]) {
                parts.push_back({seqs[i], ids[i], pos[i], pos[i], i});
            }
            batch_.add(ids[i], pos[i], seqs[i], false);
            parts.back().end = pos[i] + 1;
        }
        for (const auto & part : parts) {
            note_rows(sequences_.at(part.seq), static_cast<size_t>(part.end - part.first));
        }
        bool is_read = true;
        for (const auto & part : parts) {
            is_read = continue_at(part.seq, part.first, part.id) && is_read;
        }
        is_read = is_read && common_speculative_process(speculative_.get(), batch_);
        for (const auto & part : parts) {
            Sequence & sequence = sequences_.at(part.seq);
            if (!is_read) {  // it has no room
                begin(part.seq, part.first);
            }
            sequence.first = part.first;
            sequence.state = is_read ? part.end - 1 : kOther;
            note_states(sequence, part.at, static_cast<size_t>(part.end - part.first));
        }
    });
}

void Head::follow_medium(const mtmd_helper_embd_batch & part) {
    if (!is_block_ || part.n_tokens < 1) {  // no others read media
        return;
    }
    answering(ERROR_TYPE_SERVER, [&] {
        begin(part.seq_id, part.pos[0]);
        common_batch batch(params_.speculative.draft.ctx_tgt);
        for (int32_t i = 0; i < part.n_tokens; ++i) {
            llama_pos pos[GGML_MROPE_SECTIONS] = {};
            for (int32_t j = 0; j < part.n_pos; ++j) {
                pos[j] = part.pos[j * part.n_tokens + i];
            }
            const auto n_embd = static_cast<size_t>(part.n_embd);
            batch.add_embd({part.embd + static_cast<size_t>(i) * n_embd, 1, n_embd}, pos, part.seq_id, false);
        }
        if (!common_speculative_process(speculative_.get(), batch)) {
            begin(part.seq_id, part.pos[0]);
        }
    });
}

std::vector<llama_tokens> Head::draft(const std::vector<Asked> & asked) {
    return answering(ERROR_TYPE_SERVER, [&] {
        for (const auto & one : asked) {
            begin(one.seq, one.pos);
        }
        for (size_t i = 0; i < asked.size(); i += std::min(n_at_once_, asked.size() - i)) {
            draft_some(&asked[i], std::min(n_at_once_, asked.size() - i));
        }
        for (const auto & one : asked) {
            begin(one.seq, one.pos);  // rows of guesses must not be taken for those of tokens
        }
        std::vector<llama_tokens> drafts;
        for (const auto & one : asked) {
            llama_tokens & result = sequences_[one.seq].result;
            const auto     is_odd = [this](llama_token id) { return id < 0 || id >= n_vocab_; };
            result.erase(std::find_if(result.begin(), result.end(), is_odd), result.end());
            result.resize(std::min<size_t>(result.size(), one.n_max));
            drafts.push_back(result);
        }
        return drafts;
    });
}

void Head::draft_some(const Asked * asked, size_t n) {
    for (const auto * one = asked; one != asked + n; ++one) {
        Sequence & sequence = sequences_.at(one->seq);
        sequence.result.clear();
        sequence.before.clear();
        common_speculative_get_state(speculative_.get(), one->seq, sequence.before);
        sequence.before_hidden = sequence.state >= 0 ? sequence.carried : Hidden();
        sequence.before_state  = sequence.state;
        common_speculative_get_draft_params(speculative_.get(), one->seq) = {
            sequence.state == one->pos - 1, one->n_max, one->pos, one->last, &nothing_, &sequence.result};
    }
    common_speculative_draft(speculative_.get());
    for (const auto * one = asked; one != asked + n; ++one) {
        Sequence & sequence  = sequences_[one->seq];
        sequence.has_drafted = sequence.has_drafted || !sequence.result.empty();
    }
}

void Head::accept(llama_seq_id seq, int n_accepted) {
    answering(ERROR_TYPE_SERVER, [&] {
        Sequence & sequence = sequences_.at(seq);
        if (sequence.state < 0) {
            return;
        }
        if (sequence.has_drafted) {
            common_speculative_accept(speculative_.get(), seq, static_cast<uint16_t>(n_accepted));
            sequence.state = sequence.first + n_accepted;
            if (static_cast<size_t>(n_accepted) < sequence.rows.size()) {
                sequence.carried = sequence.rows[n_accepted];
            }
        } else if (sequence.state != sequence.first + n_accepted) {  // it was renewed since, and knows of no draft
            sequence.state = is_block_ ? sequence.first + n_accepted : kOther;
        }
    });
}

void Head::note_rows(Sequence & sequence, size_t n) {
    if (is_block_) {
        return;
    }
    const size_t row_bytes = sizeof(float) * static_cast<size_t>(llama_model_n_embd_out(llama_get_model(context_.get())));
    if ((n_rows_held_ + n) * row_bytes > kHeldBytes && n_rows_held_ > 0 && n > sequence.n_rows_held) {
        renew();
    }
    if (n > sequence.n_rows_held) {
        n_rows_held_ += n - sequence.n_rows_held;
        sequence.n_rows_held = n;
    }
}

// Takes out what it guessed from position `p` on, or evaluated before the sequence was cut there, and the row before it
// where that was computed from the token at `p`, which may be another one now. llama.cpp evaluates nothing behind a gap:
// where rows are missing before `p`, the others go as well.
void Head::begin(llama_seq_id seq, llama_pos p) {
    if (is_shared_) {
        return;
    }
    llama_memory_t  memory = llama_get_memory(context_.get());
    const llama_pos end    = std::max(0, p - lag_);
    llama_memory_seq_rm(memory, seq, end, -1);
    if (llama_memory_seq_pos_max(memory, seq) != end - 1 && !may_jump_) {
        llama_memory_seq_rm(memory, seq, -1, -1);
    }
}

// Prepares a sequence for its token `id` at position `p`; whether that token may be read.
bool Head::continue_at(llama_seq_id seq, llama_pos p, llama_token id) {
    begin(seq, p);
    Sequence & sequence = sequences_.at(seq);
    if (is_block_ || sequence.state == p - 1 || p < lag_ || (sequence.state == kNone && lag_ == 0)) {
        return true;
    }
    if (sequence.before_state == p - 1 && !sequence.before.empty()) {  // the model returned to its state before a draft
        common_speculative_set_state(speculative_.get(), seq, sequence.before);
        return true;
    }
    return hold(seq, p, id, sequence.before_state == p - 1 ? sequence.before_hidden : Hidden());
}

// Has common_speculative hold `state`, or none if it is empty, instead of the hidden state that it holds, which may be of
// another chat: a row is computed from it and the next token. It has no call for that, so it reads a token with this state;
// whether it did.
bool Head::hold(llama_seq_id seq, llama_pos p, llama_token id, const Hidden & state) {
    llama_memory_t  memory = is_shared_ ? nullptr : llama_get_memory(context_.get());
    const llama_pos end    = is_shared_ ? 0 : llama_memory_seq_pos_max(memory, seq) + 1;
    single_.clear();
    single_.add(id, p - lag_, seq, false);
    const OtherStates other(params_.speculative.draft.ctx_tgt, llama_get_model(context_.get()), state);
    const bool     is_read = common_speculative_process(speculative_.get(), single_);
    if (!is_shared_) {
        llama_memory_seq_rm(memory, seq, end, -1);
    }
    return is_read;
}

// Keeps what `hold` and `accept` may need of the states of a batch that MTP has read: `n` from `at` on.
void Head::note_states(Sequence & sequence, size_t at, size_t n) {
    llama_context * ctx    = params_.speculative.draft.ctx_tgt;
    const bool      is_mtp = type_ == COMMON_SPECULATIVE_TYPE_DRAFT_MTP && !is_shared_;
    const float *   states = is_mtp ? llama_get_embeddings_nextn(ctx) : nullptr;
    if (!states) {
        return;
    }
    const size_t n_embd = static_cast<size_t>(llama_model_n_embd_out(llama_get_model(ctx)));
    const auto   state  = [&](size_t i) { return Hidden(states + i * n_embd, states + (i + 1) * n_embd); };
    sequence.rows.clear();
    for (size_t i = 0; i < std::min<size_t>(n, std::max(0, params_.speculative.draft.n_max) + 1); ++i) {
        sequence.rows.push_back(state(at + i));
    }
    sequence.carried = state(at + n - 1);
}

}  // namespace towerd::wire
