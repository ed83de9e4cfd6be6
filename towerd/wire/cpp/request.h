// One parsed completion request.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "model.h"

namespace towerd::wire {

struct Endpoint {
    const char *       name;
    task_response_type type;
    bool               is_infill;
};

// Throws std::invalid_argument for an unknown name.
const Endpoint & endpoint_named(const std::string & name);

// Raises Refused unless prompts of at least so many tokens may be evaluated, for a body with these kept fields.
using FitCheck = std::function<void(const std::map<std::string, std::string> & kept, const std::vector<size_t> & least)>;

// Tokens that stand in place of the first `n_replaced` tokens of a prompt: those of a conversation that it continues.
struct Continued {
    llama_tokens ids;
    size_t       n_replaced;
};

// RAM that a request's replies take at most, as far as more than their text is asked for.
struct ReplyBytes {
    size_t kept     = 0;  // until they are sent
    size_t written  = 0;  // what one choice takes besides while it is written
    size_t of_token = 0;  // of `kept`, what is there with each token that came
};

class Request {
public:
    // `check_fit`, unless it is empty, is called before a prompt is tokenized that is longer than the context.
    // Raises Refused, as llama-server would answer; where llama-server answers 500 for what the client sent, with 400.
    // `uploads`: the sound of a transcription, which `body` has the other fields of. `continued`: of the only prompt.
    Request(std::shared_ptr<const Model> model, const Endpoint & endpoint, const std::string & body,
            const FitCheck & check_fit = {}, std::vector<raw_buffer> uploads = {},
            const std::optional<Continued> & continued = {});

    const Model &                             model() const { return *model_; }
    task_response_type                        type() const { return type_; }
    const task_params &                       params() const { return params_; }
    // The most tokens to generate; -1: no limit.
    int32_t                                   n_predict() const;
    const std::vector<llama_tokens> &         prompts() const { return prompts_; }
    // The media of a prompt in their order.
    const std::vector<Medium> &               media(size_t prompt) const { return media_.at(prompt); }
    const common_chat_msg_spans &             spans(size_t prompt) const { return spans_.at(prompt); }
    size_t                                    n_choices() const { return prompts_.size() * params_.n_cmpl; }
    // For replies of `n_tokens` in each choice.
    ReplyBytes                                reply_bytes(size_t n_tokens) const;
    const llama_tokens &                      prompt_of(size_t choice) const;
    const std::map<std::string, std::string> & kept() const { return kept_; }
    // The leading system messages' contents and the tools of a chat, as JSON; empty if there are neither.
    const std::string &                       agent() const { return agent_; }

    // Whether generated text is parsed as more than text: a chat with tools or a schema.
    bool has_structure() const { return has_structure_; }
    // The seed that was asked for; choices of one prompt count it up.
    uint32_t seed_of(size_t choice) const;
    // Sampling parameters of one choice. The grammar is checked once. Raises Refused.
    common_params_sampling sampling_of(size_t choice) const;

    // The body of a llama-server's POST /completion for one choice, as JSON: what llama-server's own routes would make of
    // this request, with the prompt as tokens, and the fields of `own`, a JSON object. Only where `Model::is_upstream`.
    std::string upstream_body(size_t choice, const std::string & own) const;
    // Whether its reasoning may be ended while it runs.
    bool has_reasoning_control() const { return params_.sampling.reasoning_control; }

    // The tokens that every next request of this chat begins with, if `message` (JSON) is sent back as the reply.
    // Raises Refused; empty for a request that is not a chat.
    llama_tokens next_prompt(const std::string & message) const;

private:
    void keep_fields(const json & body);
    json chat_data(json & body, std::vector<raw_buffer> & files);
    json transcription_data(const json & body, std::vector<raw_buffer> & files) const;
    void check_length(const json & prompt, size_t n_files, const FitCheck & check_fit) const;
    void take(const json & data, const std::vector<raw_buffer> & files);
    void continue_from(const Continued & continued);
    llama_tokens rendered(json body) const;

    std::shared_ptr<const Model>       model_;
    task_response_type                 type_;
    task_params                        params_;
    std::vector<llama_tokens>          prompts_;
    std::vector<std::vector<Medium>>   media_;
    std::vector<common_chat_msg_spans> spans_;
    std::map<std::string, std::string> kept_;
    std::string                        agent_;
    bool                               has_structure_ = false;
    json                               sent_;  // the fields that a llama-server gets
    json                               chat_;  // the body in OpenAI's form, of a chat that is not too long
    mutable std::mutex                 grammar_mutex_;
    mutable bool                       grammar_checked_ = false;
};

// A chat body in any dialect as the one of /v1/chat/completions, repaired and within its bounds.
json as_chat_body(const Model & model, task_response_type type, json body);

}  // namespace towerd::wire
