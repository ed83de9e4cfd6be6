// Prompts that are no chat: text and tokens, infill, embeddings, reranking.

#pragma once

#include <string>
#include <vector>

#include "model.h"

namespace towerd::wire {

// `files`: the media of a chat, whose markers stand in the prompt. `are_counted`: only how many tokens there are matters.
std::vector<server_tokens> tokenized(const Model & model, const json & prompt,
                                     const std::vector<raw_buffer> & files = {}, bool are_counted = false);

// The media of the `i`th of these prompts, which are no chat.
std::vector<raw_buffer> media_at(const json & prompt, size_t i);

// Bytes of all texts in a prompt, in several, or in the messages of a chat.
size_t text_bytes(const json & value);

// Raises Refused (413) for a chat with more text than is tokenized at once, before it is rendered.
void check_chat_text(const Model & model, const json & chat);

// How many tokens each prompt has at least, by its length alone: a token stands for no more than some bytes of text. 0 is a
// prompt of which that is not known, or one that is short enough to be counted. `n_files`: media of a chat, whose markers stand in the prompt.
std::vector<size_t> least_tokens(const Model & model, const json & prompt, size_t n_files = 0);

// Raises Refused if one is neither the vocabulary's nor a medium's.
void check_tokens(const Model & model, const llama_tokens & tokens);

// Raises Refused if the vocabulary has no tokens for it.
void check_can_infill(const Model & model);
// The body of /infill with the prompt that it means.
json infill_data(const Model & model, json data);

// The JSON that POST /apply-template answers.
std::string template_reply(const Model & model, const std::string & body);
// The JSON of the token counters of chat, responses and messages.
std::string count_reply(const Model & model, task_response_type type, const std::string & body);
// The reply to POST /detokenize. Raises Refused.
std::string detokenize_reply(const Model & model, const std::string & body);

// What is asked of an embedding model.
class EmbeddingRequest {
public:
    // With `openai` the reply has OpenAI's form, unless the body has "content". Raises Refused.
    EmbeddingRequest(const Model & model, bool openai, const std::string & body);

    const std::vector<llama_tokens> & prompts() const { return prompts_; }
    int                               normalize() const { return normalize_; }
    // `rows`: of each prompt its embeddings, one with pooling, else one for each token.
    std::string reply(const std::vector<std::vector<std::vector<float>>> & rows) const;

private:
    std::vector<llama_tokens> prompts_;
    json                      request_;  // what the reply repeats of it
    std::string               model_name_;
    int                       normalize_;
    bool                      openai_;
    bool                      base64_ = false;
};

// What is asked of a reranking model.
class RerankRequest {
public:
    RerankRequest(const Model & model, const std::string & body);  // raises Refused

    const std::vector<llama_tokens> & prompts() const { return prompts_; }
    std::string                       reply(const std::vector<float> & scores) const;

private:
    std::vector<llama_tokens> prompts_;
    json                      request_;
    std::vector<std::string>  documents_;
    std::string               model_name_;
    bool                      tei_;
    int                       top_n_;
};

}  // namespace towerd::wire
