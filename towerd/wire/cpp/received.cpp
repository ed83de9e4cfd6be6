#include "received.h"

#include <algorithm>
#include <cmath>

#include "refused.h"

namespace towerd::wire {

namespace {

using MaybeToken = std::optional<llama_token>;

PromptProgress progress_of(const json & said) {
    return {said.at("total").get<int32_t>(), said.at("cache").get<int32_t>(), said.at("processed").get<int32_t>(),
            said.at("time_ms").get<int64_t>()};
}

stop_type stop_named(const std::string & name) {
    return name == "eos" ? STOP_TYPE_EOS : name == "word" ? STOP_TYPE_WORD : STOP_TYPE_LIMIT;
}

// Finds the tokens of a text when only some of them are known. llama-server names no token whose text ends within a
// character, so each unknown one is a part of a character.
class TokenSearch {
public:
    TokenSearch(const Model & model, const std::vector<MaybeToken> & known, const std::string & text) :
        model_(model), known_(known), text_(text) {
        go_on(0);
    }

    // The tokens, if there is exactly one way; else empty.
    const llama_tokens & only() const { return n_ways_ == 1 ? found_ : none_; }
    // The tokens of the first way; empty if there is none.
    const llama_tokens & first() const { return found_; }

private:
    void go_on(size_t pos) {
        const size_t at = path_.size();
        if (n_ways_ > 1) {
            return;
        }
        if (at == known_.size()) {
            if (pos == text_.size() && ++n_ways_ == 1) {
                found_ = path_;
            }
            return;
        }
        if (known_[at]) {
            try_token(*known_[at], model_.piece(*known_[at]), pos);
            return;
        }
        for (size_t n = 1; n <= std::min(model_.broken_piece_bytes_max(), text_.size() - pos); ++n) {
            const std::string piece = text_.substr(pos, n);
            for (const llama_token token : model_.broken_pieces(piece)) {
                try_token(token, piece, pos);
            }
        }
    }

    void try_token(llama_token token, const std::string & piece, size_t pos) {
        if (text_.compare(pos, piece.size(), piece) == 0) {
            path_.push_back(token);
            go_on(pos + piece.size());
            path_.pop_back();
        }
    }

    const Model &                   model_;
    const std::vector<MaybeToken> & known_;
    const std::string &             text_;
    const llama_tokens              none_;
    llama_tokens                    path_;
    llama_tokens                    found_;
    int                             n_ways_ = 0;
};

}  // namespace

Received Reply::received(const std::string & event) {
    return answering(ERROR_TYPE_SERVER, [&] {
        const json                        outer = json::parse(event);
        const std::lock_guard<std::mutex> lock(mutex_);
        Received                          out;
        if (outer.contains("error")) {
            throw Refused(outer.at("error"));
        }
        if (outer.contains("id")) {
            upstream_id_ = outer.at("id").get<std::string>();
        }
        const json & said = outer.contains("__verbose") ? outer.at("__verbose") : outer;
        if (said.contains("prompt_progress")) {
            out.progress = progress_of(said.at("prompt_progress"));
            out.progress->cached -= std::min(out.progress->cached, n_before_);
            out.progress->time_ms += us_before_ / 1000;
            take_progress(*out.progress);
        } else if (said.contains("stop")) {
            if (said.contains("timings")) {
                take_timings(said.at("timings"));
            }
            out.is_last = said.at("stop").get<bool>();
            if (out.is_last) {
                out.ids = take_end(said);
            } else {
                out.chunk = take_token(said, out.ids);
            }
        }
        return out;
    });
}

void Reply::evaluated_before(int32_t n, double ms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    n_before_  = n;
    us_before_ = std::llround(ms * 1e3);
}

void Reply::take_progress(const PromptProgress & progress) {
    stats_.n_prompt_cached    = static_cast<uint64_t>(progress.cached);
    stats_.n_prompt_processed = static_cast<uint64_t>(std::max(0, progress.processed - progress.cached));
    stats_.t_prompt_last      = std::max<int64_t>(2, ggml_time_us());
    stats_.t_start            = std::max<int64_t>(1, stats_.t_prompt_last - 1000 * progress.time_ms);
}

void Reply::take_timings(const json & said) {
    const auto us = [&](const char * name) { return std::llround(said.at(name).get<double>() * 1e3); };
    const auto cached         = said.at("cache_n").get<uint64_t>();
    const auto n_before       = std::min(cached, static_cast<uint64_t>(n_before_));
    n_reused_                 = cached;
    stats_.n_prompt_cached    = cached - n_before;
    stats_.n_prompt_processed = said.at("prompt_n").get<uint64_t>() + n_before;
    stats_.n_draft_tokens     = json_value(said, "draft_n", uint64_t(0));
    stats_.n_draft_accepted   = json_value(said, "draft_n_accepted", uint64_t(0));
    stats_.t_start            = std::max<int64_t>(1, stats_.t_start);
    stats_.t_prompt_last      = stats_.t_start + us("prompt_ms") + us_before_;
    stats_.t_gen_last         = stats_.t_prompt_last + us("predicted_ms");
}

Chunk Reply::take_token(const json & said, llama_tokens & ids) {
    const auto & params = request_->params();
    const auto   n_gen  = said.at("tokens_predicted").get<uint64_t>();
    const auto   token  = said.at("tokens").at(size_t(0)).get<llama_token>();
    for (uint64_t i = stats_.n_gen + 1; i < n_gen; ++i) {
        unnamed_.emplace_back();
    }
    unnamed_.emplace_back(token);
    if (!said.contains("timings")) {
        stats_.t_gen_last = ggml_time_us();
        if (stats_.n_gen == 0 || stats_.t_prompt_last == 0) {
            stats_.t_prompt_last = stats_.t_gen_last;
        }
    }
    stats_.n_gen = n_gen;

    completion_token_output out;
    out.tok          = token;
    out.prob         = 1.0f;
    out.text_to_send = said.at("content").get<std::string>();
    take_probs(said, out);
    generated_text_ += out.text_to_send;
    has_new_line_ = has_new_line_ || out.text_to_send.find('\n') != std::string::npos;
    if (params.sampling.n_probs > 0 && !params.stream) {
        generated_probs_.push_back(out);
    }
    ids = name_tokens();

    Chunk chunk;
    chunk.is_sent = true;
    if (said.contains("timings")) {
        chunk.stats = stats_;
    }
    chunk.token           = std::move(out);
    chunk.choice          = choice_;
    chunk.n_decoded       = static_cast<int32_t>(n_gen);
    chunk.n_prompt        = static_cast<int32_t>(request_->prompt_of(choice_).size());
    chunk.n_prompt_cached = static_cast<int32_t>(stats_.n_prompt_cached);
    return chunk;
}

// completion_token_output::probs_vector_to_json, read back.
void Reply::take_probs(const json & said, completion_token_output & out) const {
    if (!said.contains("completion_probabilities")) {
        return;
    }
    const bool   after   = request_->params().post_sampling_probs;
    const char * name    = after ? "prob" : "logprob";
    const auto   prob_of = [&](const json & one) {
        const float value = one.at(name).get<float>();
        return after ? value : std::exp(value);
    };
    const json & probs = said.at("completion_probabilities").at(size_t(0));
    out.prob           = prob_of(probs);
    for (const json & one : probs.at(after ? "top_probs" : "top_logprobs")) {
        std::string text;
        for (const json & byte : one.at("bytes")) {
            text.push_back(static_cast<char>(byte.get<int>()));
        }
        out.probs.push_back({one.at("id").get<llama_token>(), std::move(text), prob_of(one)});
    }
}

// The text that was sent is that of all tokens so far, unless some is held back because a stop string may begin in it.
llama_tokens Reply::name_tokens() {
    llama_tokens named;
    if (std::all_of(unnamed_.begin(), unnamed_.end(), [](const MaybeToken & one) { return one.has_value(); })) {
        for (const auto & one : unnamed_) {
            named.push_back(*one);
        }
    } else {
        const std::string text = generated_text_.substr(std::min(generated_text_.size(), n_named_bytes_));
        const TokenSearch search(request_->model(), unnamed_, text);
        named     = search.first();
        is_exact_ = is_exact_ && (named.empty() || !search.only().empty());
    }
    keep(named);
    return named;
}

void Reply::keep(const llama_tokens & named) {
    for (const llama_token token : named) {
        n_named_bytes_ += request_->model().piece(token, request_->params().sampling.preserved_tokens).size();
        ends_.push_back(n_named_bytes_);
        generated_tokens_.push_back(token);
    }
    if (!named.empty()) {
        unnamed_.clear();
    }
}

llama_tokens Reply::take_end(const json & said) {
    llama_tokens named;
    end(stop_named(said.at("stop_type").get<std::string>()));
    stopping_word_ = said.at("stopping_word").get<std::string>();
    truncated_     = said.at("truncated").get<bool>();
    has_new_line_  = said.at("has_new_line").get<bool>();
    stats_.n_gen   = said.at("tokens_predicted").get<uint64_t>();
    if (!unnamed_.empty() && stop_ != STOP_TYPE_WORD && generated_text_.size() > n_named_bytes_) {
        is_exact_ = false;
        named     = towerd_tokenize(request_->model().vocab, generated_text_.substr(n_named_bytes_), false, true);
        keep(named);
    }
    return named;
}

std::string Reply::upstream_id() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return upstream_id_;
}

bool Reply::is_exact() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_exact_;
}

size_t Reply::n_unnamed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_.n_gen - std::min<size_t>(stats_.n_gen, generated_tokens_.size());
}

}  // namespace towerd::wire
