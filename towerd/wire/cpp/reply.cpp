#include "reply.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <memory>

#include "refused.h"

namespace towerd::wire {

namespace {

// What common_sampler_init gives to a grammar before the first sampled token.
llama_tokens prefill_of(const llama_vocab * vocab, const std::string & text) {
    llama_tokens tokens = towerd_tokenize(vocab, text, false, true);
    if (!tokens.empty()) {
        const std::string piece    = common_token_to_piece(vocab, tokens.front(), true);
        const auto        is_space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
        if (!piece.empty() && is_space(piece[0]) && !is_space(text[0])) {
            tokens.erase(tokens.begin());
        }
    }
    return tokens;
}

// common_sampler_init leaks its samplers when the grammar does not accept the reply's beginning, so that is tried before.
void check_prefill(const llama_vocab * vocab, const common_params_sampling & sampling) {
    if (sampling.generation_prompt.empty() || sampling.grammar_lazy || !common_grammar_needs_prefill(sampling.grammar)) {
        return;
    }
    const llama_tokens tokens = prefill_of(vocab, sampling.generation_prompt);
    const std::unique_ptr<llama_sampler, decltype(&llama_sampler_free)> grammar(
        tokens.empty() ? nullptr
                       : llama_sampler_init_grammar(vocab, common_grammar_value(sampling.grammar).c_str(), "root"),
        llama_sampler_free);
    if (!grammar) {
        return;
    }
    try {
        for (const llama_token token : tokens) {
            llama_sampler_accept(grammar.get(), token);
        }
    } catch (const std::exception & error) {
        refuse(std::string("Failed to initialize samplers: the reply that the request begins does not fit its grammar or "
                           "schema. ") + error.what());
    }
}

common_sampler_ptr made_sampler(const Request & request, size_t choice) {
    return answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        common_params_sampling sampling = request.sampling_of(choice);
        sampling.no_perf                = true;
        const Model &      model        = request.model();
        common_sampler_ptr made;
        check_prefill(model.vocab, sampling);
        try {
            // Tokenizes the generation prompt.
            on_deep_stack(model.vocab, sampling.generation_prompt,
                          [&] { made.reset(common_sampler_init(model.model, sampling)); });
        } catch (const Refused &) {
            throw;
        } catch (const std::exception & error) {
            throw std::invalid_argument(std::string("Failed to initialize samplers: ") + error.what());
        }
        return made;
    });
}

// llama.cpp asserts that there are logits, and sorts them as numbers.
void check_logits(llama_context * ctx, int index, int n_vocab) {
    const float * logits = llama_get_logits_ith(ctx, index);
    if (logits == nullptr) {
        throw std::invalid_argument("No logits were computed for batch position " + std::to_string(index));
    }
    float sum = 0.0f;  // of zeros, unless one is not finite
    for (int i = 0; i < n_vocab; ++i) {
        sum += logits[i] * 0.0f;
    }
    if (sum != 0.0f) {
        throw std::runtime_error("The model computed logits that are no numbers.");
    }
}

}  // namespace

Reply::Reply(std::shared_ptr<const Request> request, size_t choice) : request_(std::move(request)), choice_(choice) {
    if (request_->model().is_upstream()) {
        request_->sampling_of(choice);  // checks the grammar
    } else {
        sampler_ = made_sampler(*request_, choice);
    }
}

void Reply::accept_prompt(const llama_token * tokens, size_t n) {
    answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!sampler_) {
            return;
        }
        const auto & sampling = request_->params().sampling;
        // Nothing looks further back.
        const size_t window = std::max({sampling.penalty_last_n, sampling.dry_penalty_last_n, sampling.n_prev});
        for (size_t i = n - std::min(n, window); i < n; ++i) {
            if (tokens[i] >= 0) {  // a medium's are no tokens
                common_sampler_accept(sampler_.get(), tokens[i], false);
            }
        }
    });
}

void Reply::started(uint64_t n_cached, uint64_t n_processed, double prompt_ms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stats_.is_set()) {
        return;
    }
    const int64_t now         = std::max<int64_t>(2, ggml_time_us());
    stats_.n_prompt_cached    = n_cached;
    stats_.n_prompt_processed = n_processed;
    stats_.t_prompt_last      = now;
    stats_.t_start            = std::max<int64_t>(1, now - std::llround(prompt_ms * 1e3));
}

// common_sampler_sample_and_accept_n, except that nothing is sampled after the reply's end; with `synthetic`
// server_sample_and_accept_synth of llama-server's context.
std::vector<Chunk> Reply::steps(llama_context * ctx, int index, const llama_tokens & draft, int32_t n_room,
                                const std::vector<double> & synthetic) {
    return answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        const int32_t                     n_draft = static_cast<int32_t>(draft.size());
        std::vector<Chunk>                chunks;
        stats_.n_draft_tokens += draft.size();
        stats_.n_draft_verif_steps += draft.empty() ? 0 : 1;
        for (int32_t i = 0;; ++i) {
            const bool by_chance = i < n_draft && static_cast<size_t>(i) < synthetic.size();
            const bool is_taken  = by_chance && is_lucky(synthetic[i], draft[i]);
            chunks.push_back(sample(ctx, index + i, i >= n_room, is_taken ? std::optional(draft[i]) : std::nullopt));
            const bool is_right = by_chance ? is_taken : i < n_draft && chunks.back().token.tok == draft[i];
            if (chunks.back().stop != STOP_TYPE_NONE || !is_right) {
                return chunks;
            }
            stats_.n_draft_accepted += 1;
        }
    });
}

// A drafted end of the reply is not taken.
bool Reply::is_lucky(double probability, llama_token drafted) {
    if (!luck_) {
        const uint32_t seed = request_->sampling_of(choice_).seed;
        luck_.emplace(seed == LLAMA_DEFAULT_SEED ? std::random_device{}() : seed);
    }
    return std::uniform_real_distribution<double>(0.0, 1.0)(*luck_) < probability &&
           !llama_vocab_is_eog(request_->model().vocab, drafted);
}

// instead: a token that is taken whatever is sampled; neither the grammar nor the reasoning's budget looks at it
Chunk Reply::sample(llama_context * ctx, int index, bool is_full, std::optional<llama_token> instead) {
    check_logits(ctx, index, llama_vocab_n_tokens(request_->model().vocab));
    const llama_token sampled = common_sampler_sample(sampler_.get(), ctx, index);
    const auto *      left    = common_sampler_get_candidates(sampler_.get(), false);
    if (left->selected < 0 || !std::isfinite(left->data[left->selected].logit)) {
        refuse(request_->params().sampling.grammar.empty() ? "The samplers left no token to choose from."
                                                           : "No token of the vocabulary continues the grammar here.");
    }
    const llama_token token = instead.value_or(sampled);
    common_sampler_accept(sampler_.get(), token, !instead.has_value());
    stats_.n_gen += 1;
    stats_.t_gen_last = ggml_time_us();

    const auto & keep    = request_->params().sampling.preserved_tokens;
    const bool   special = request_->model().params().special || keep.find(token) != keep.end();
    completion_token_output out;
    out.tok          = token;
    out.prob         = 1.0f;
    out.text_to_send = common_token_to_piece(request_->model().vocab, token, special);
    if (request_->params().sampling.n_probs > 0) {
        add_probs(out, ctx, index);
    }
    return process(std::move(out), is_full);
}

// populate_token_probs of llama-server's context.
void Reply::add_probs(completion_token_output & out, llama_context * ctx, int index) {
    const size_t n_asked = request_->params().sampling.n_probs;
    const bool   special = request_->model().params().special;
    const bool   after   = request_->params().post_sampling_probs;

    std::vector<llama_token_data> before;
    const llama_token_data *      data = nullptr;
    size_t                        size = 0;
    if (after) {
        const auto * left = common_sampler_get_candidates(sampler_.get(), true);
        data              = left->data;
        size              = left->size;
    } else {
        before = get_token_probabilities(ctx, index, n_asked);
        data   = before.data();
        size   = before.size();
    }
    const auto * chosen = std::find_if(data, data + size, [&](const auto & one) { return one.id == out.tok; });
    if (chosen != data + size) {
        out.prob = chosen->p;
    }
    for (size_t i = 0; i < std::min(size, n_asked); ++i) {
        if (after && data[i].p == 0.0f) {  // some samplers leave these, others do not
            break;
        }
        out.probs.push_back({data[i].id, common_token_to_piece(request_->model().vocab, data[i].id, special), data[i].p});
    }
}

// process_token of llama-server's context, in its order.
Chunk Reply::process(completion_token_output out, bool is_full) {
    const auto & params = request_->params();
    Chunk        chunk;
    generated_text_ += out.text_to_send;
    generated_tokens_.push_back(out.tok);
    ends_.push_back(generated_text_.size());
    has_next_token_ = true;
    if (validate_utf8(generated_text_) == generated_text_.size()) {
        hold_back_stops(out);
        chunk.is_sent = true;
        if (params.sampling.n_probs > 0 && !params.stream) {
            generated_probs_.push_back(out);
        }
        if (stop_ != STOP_TYPE_NONE || params.timings_per_token) {
            chunk.stats = stats_;
        }
    }
    if (is_full) {
        truncated_ = true;
        end(STOP_TYPE_LIMIT);
    }
    const int32_t n_predict = request_->n_predict();
    if (has_next_token_ && n_predict != -1 && static_cast<int64_t>(stats_.n_gen) >= n_predict) {
        end(STOP_TYPE_LIMIT);
    }
    if (has_new_line_) {
        check_indent();
    }
    if (out.text_to_send.find('\n') != std::string::npos) {
        has_new_line_ = true;
        if (params.t_max_predict_ms > 0 && stats_.t_gen_ms() > static_cast<double>(params.t_max_predict_ms)) {
            end(STOP_TYPE_LIMIT);
        }
    }
    if (llama_vocab_is_eog(request_->model().vocab, out.tok)) {
        end(STOP_TYPE_EOS);
    }
    chunk.token           = std::move(out);
    chunk.choice          = choice_;
    chunk.n_decoded       = static_cast<int32_t>(stats_.n_gen);
    chunk.n_prompt        = static_cast<int32_t>(request_->prompt_of(choice_).size());
    chunk.n_prompt_cached = static_cast<int32_t>(stats_.n_prompt_cached);
    chunk.stop            = stop_;
    return chunk;
}

// Cuts off a stop string and holds back text that may become one. A token that is held back is sent without text.
void Reply::hold_back_stops(completion_token_output & out) {
    const size_t      token_bytes = out.text_to_send.size();
    size_t            pos         = std::min(n_sent_text_, generated_text_.size());
    const std::string unsent      = generated_text_.substr(pos);
    bool              send        = true;
    const size_t      stop_pos    = find_stop(unsent, token_bytes, true);
    if (stop_pos != std::string::npos) {
        generated_text_.erase(pos + stop_pos);
        pos = std::min(n_sent_text_, generated_text_.size());
    } else if (!llama_vocab_is_eog(request_->model().vocab, out.tok)) {
        send = find_stop(unsent, token_bytes, false) == std::string::npos;
    }
    out.text_to_send = send ? generated_text_.substr(pos) : "";
    n_sent_text_ += out.text_to_send.size();
}

size_t Reply::find_stop(const std::string & text, size_t last_bytes, bool is_full_stop) {
    size_t found = std::string::npos;
    for (const auto & word : request_->params().antiprompt) {
        const size_t reach = word.size() + last_bytes;
        const size_t pos   = is_full_stop ? text.find(word, text.size() > reach ? text.size() - reach : 0)
                                          : string_find_partial_stop(text, word);
        if (pos != std::string::npos && (found == std::string::npos || pos < found)) {
            if (is_full_stop) {
                stopping_word_ = word;
                end(STOP_TYPE_WORD);
            }
            found = pos;
        }
    }
    return found;
}

void Reply::check_indent() {
    const int32_t n_indent = request_->params().n_indent;
    if (n_indent <= 0) {
        return;
    }
    if (last_nl_pos_ > 0) {
        size_t pos = last_nl_pos_;
        while (pos < generated_text_.size() && (generated_text_[pos] == ' ' || generated_text_[pos] == '\t')) {
            ++pos;
        }
        if (pos < generated_text_.size() && pos - last_nl_pos_ < static_cast<size_t>(n_indent)) {
            end(STOP_TYPE_LIMIT);
            generated_text_.erase(pos);  // the last line
        }
    }
    const size_t pos = generated_text_.find('\n', last_nl_pos_);
    if (pos != std::string::npos) {
        last_nl_pos_ = pos + 1;
    }
}

void Reply::end(stop_type stop) {
    stop_           = stop;
    has_next_token_ = false;
}

void Reply::limit(bool truncated) {
    const std::lock_guard<std::mutex> lock(mutex_);
    truncated_ = truncated_ || truncated;
    end(STOP_TYPE_LIMIT);
}

void Reply::truncate() {
    const std::lock_guard<std::mutex> lock(mutex_);
    truncated_ = true;
}

bool Reply::end_reasoning() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return sampler_ && common_sampler_reasoning_budget_force(sampler_.get());
}

size_t Reply::n_kept() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!sampler_ && stop_ != STOP_TYPE_WORD) {
        return ends_.size();
    }
    return std::upper_bound(ends_.begin(), ends_.end(), generated_text_.size()) - ends_.begin();
}

// send_final_response of llama-server's context.
void Reply::fill(server_task_result_cmpl_final & result) {
    // Before the lock: it may wait for Python, which may wait for this reply.
    const size_t n_stop = towerd_tokenize(request_->model().vocab, stopping_word(), false, false).size();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto &                      params = request_->params();
    if (!params.stream) {  // else the writer adds what it has not sent
        result.content = generated_text_;
        if (params.return_tokens) {
            result.tokens = generated_tokens_;
        }
    }
    result.stats                 = stats_;
    result.truncated             = truncated_;
    result.n_decoded             = static_cast<int32_t>(stats_.n_gen);
    result.n_prompt_tokens       = static_cast<int32_t>(request_->prompt_of(choice_).size());
    result.n_prompt_tokens_cache = static_cast<int32_t>(stats_.n_prompt_cached);
    result.has_new_line          = has_new_line_;
    result.stopping_word         = stopping_word_;
    result.stop                  = stop_;
    result.probs_output          = std::move(generated_probs_);
    generated_probs_.clear();
    if (!params.stream && stop_ == STOP_TYPE_WORD) {
        result.probs_output.resize(result.probs_output.size() - std::min(result.probs_output.size(), n_stop));
    }
}

}  // namespace towerd::wire
