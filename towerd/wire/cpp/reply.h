// One choice of a reply while it is generated: its sampler, and its text as llama-server's slots keep it.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "request.h"
#include "sampling.h"

namespace towerd::wire {

// The effect of one token on the reply.
struct Chunk {
    completion_token_output token;
    server_slot_stats       stats;  // not set unless the request shows them
    size_t                  choice          = 0;
    int32_t                 n_decoded       = 0;
    int32_t                 n_prompt        = 0;
    int32_t                 n_prompt_cached = 0;
    bool                    is_sent         = false;  // false: the character is not complete
    stop_type               stop            = STOP_TYPE_NONE;
};

struct PromptProgress;
struct Received;

class Reply {
public:
    // Of a request for a llama-server it is received, not sampled. Raises Refused: samplers that cannot be made, a bad
    // grammar.
    Reply(std::shared_ptr<const Request> request, size_t choice);

    const Request &                request() const { return *request_; }
    std::shared_ptr<const Request> shared_request() const { return request_; }
    size_t                         choice() const { return choice_; }

    // Lets the penalties see the tokens that are evaluated before the reply.
    void accept_prompt(const llama_token * tokens, size_t n);
    // The prompt is evaluated. Of a reply that was preempted only the first call counts.
    void started(uint64_t n_cached, uint64_t n_processed, double prompt_ms);
    // Samples from the logits of the last batch, in which `draft` followed the last token, from that token's index on: as
    // many tokens as were drafted right, and the one after them; fewer if the reply ends before. `n_room`: how many tokens
    // there is room for; the one after them ends the reply. `synthetic`: unless it is empty, drafted tokens are taken with
    // these probabilities, right or not. Raises Refused: no token is allowed, or logits are not finite.
    std::vector<Chunk> steps(llama_context * ctx, int index, const llama_tokens & draft, int32_t n_room,
                             const std::vector<double> & synthetic = {});
    // What an event of a llama-server's stream, a JSON object, adds to the reply. Raises Refused: the error that it is.
    Received received(const std::string & event);
    // Of the prompt of a received reply, tokens that llama-server evaluated before it got the request, and so says to have
    // reused, and how long all that took.
    void evaluated_before(int32_t n, double ms);
    // Tokens of the prompt that llama-server said to have reused, with those.
    uint64_t n_reused() const { return locked(n_reused_); }
    // The name that llama-server has for it; empty if it did not say.
    std::string upstream_id() const;
    // Whether the ids of a received reply are certainly those that were sampled.
    bool is_exact() const;
    // Tokens of a received reply whose ids are not known: they were evaluated after the last text that was sent.
    size_t n_unnamed() const;
    // Ends it at a limit other than the request's.
    void limit(bool truncated);
    // Tokens before it were dropped because the context was full.
    void truncate();
    // Ends its reasoning as soon as possible; returns whether it is reasoning.
    bool end_reasoning();

    std::string       text() const { return locked(generated_text_); }
    stop_type         stop() const { return locked(stop_); }
    std::string       stopping_word() const { return locked(stopping_word_); }
    bool              has_new_line() const { return has_new_line_; }
    server_slot_stats stats() const { return locked(stats_); }
    // Leading tokens whose text is in the reply: all except those cut off by a stop string.
    size_t n_kept() const;

    // What the reply's end says, but for what was told to the writer. The probabilities are handed over: a reply has them
    // once.
    void fill(server_task_result_cmpl_final & result);

private:
    template <typename T>
    T locked(const T & member) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return member;
    }

    Chunk  sample(llama_context * ctx, int index, bool is_full, std::optional<llama_token> instead = std::nullopt);
    bool   is_lucky(double probability, llama_token drafted);
    void   add_probs(completion_token_output & out, llama_context * ctx, int index);
    Chunk  process(completion_token_output out, bool is_full);
    void   hold_back_stops(completion_token_output & out);
    size_t find_stop(const std::string & text, size_t last_bytes, bool is_full_stop);
    void   check_indent();
    void   end(stop_type stop);

    void         take_progress(const PromptProgress & progress);
    void         take_timings(const json & said);
    Chunk        take_token(const json & said, llama_tokens & ids);
    void         take_probs(const json & said, completion_token_output & out) const;
    llama_tokens name_tokens();
    void         keep(const llama_tokens & named);
    llama_tokens take_end(const json & said);

    std::shared_ptr<const Request> request_;
    const size_t                   choice_;
    common_sampler_ptr             sampler_;  // null if it is received
    mutable std::mutex             mutex_;

    // As in server_slot.
    std::string                          generated_text_;
    llama_tokens                         generated_tokens_;
    std::vector<completion_token_output> generated_probs_;
    server_slot_stats                    stats_;
    std::string                          stopping_word_;
    stop_type                            stop_           = STOP_TYPE_NONE;
    size_t                               n_sent_text_    = 0;
    size_t                               last_nl_pos_    = 0;
    bool                                 has_next_token_ = true;
    std::atomic<bool>                    has_new_line_   = false;  // asked for while others sample
    bool                                 truncated_      = false;

    std::optional<std::mt19937> luck_;  // of drafts that are taken by chance

    std::vector<size_t> ends_;  // of each token: where its text ends

    // Of a received reply.
    std::vector<std::optional<llama_token>> unnamed_;  // the last tokens, from the first unknown one on
    size_t                                  n_named_bytes_ = 0;
    bool                                    is_exact_      = true;
    int32_t                                 n_before_      = 0;
    uint64_t                                n_reused_      = 0;
    int64_t                                 us_before_     = 0;
    std::string                             upstream_id_;
};

}  // namespace towerd::wire
