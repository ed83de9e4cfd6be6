// A model as llama-server serves it: its vocabulary, chat templates and the defaults of its requests.

#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "media.h"
#include "server-common.h"
#include "server-task.h"
#include "tokenizing.h"

namespace towerd::wire {

using Tokenizer = std::function<llama_tokens(const std::string &)>;

class Model {
public:
    // `model` outlives this object. `settings` is the JSON of towerd.wire.Settings. `tokenizer`, unless it is empty, gives
    // the very ids that llama.cpp does for a text with special tokens in it; it may remember some. `projector`, unless it
    // is null, makes the model take media. `deep_stack`, unless it is empty, is used for tokenizing.
    // Throws std::exception: a chat template that does not parse, a setting that llama.cpp does not know.
    Model(const llama_model * model, const std::string & settings, Tokenizer tokenizer = {},
          std::shared_ptr<const Projector> projector = {}, const DeepStack & deep_stack = {});

    const llama_model * const model;
    const llama_vocab * const vocab;

    const common_params &         params() const { return params_; }
    const server_chat_params &    chat() const { return chat_; }
    const std::vector<llama_logit_bias> & eog() const { return params_.sampling.logit_bias_eog; }
    const std::string &           name() const { return name_; }
    int                           n_ctx() const { return params_.n_ctx; }
    // Bytes of text that a token stands for, at most; 0: any number.
    size_t                        token_bytes_max() const { return token_bytes_max_; }
    size_t media_bytes_max() const { return media_bytes_max_; }
    // Raises Refused (413) for a text that is too long to be tokenized: that takes many times its bytes.
    void                          check_text(size_t n_bytes) const;
    // Null if it takes text alone.
    const std::shared_ptr<const Projector> & projector() const { return projector_; }
    mtmd_context *                mtmd() const { return projector_ ? projector_->context() : nullptr; }
    // Fields of a body that are towerd's own: a request keeps them for it.
    const std::vector<std::string> & kept_fields() const { return kept_fields_; }

    // Whether requests keep what is sent to a llama-server for them.
    bool                          is_upstream() const { return is_upstream_; }

    // The text of a token in a reply; of a special one empty, unless it is kept.
    std::string                   piece(llama_token token, const std::set<llama_token> & kept = {}) const;
    // The tokens with this text, where it begins or ends within a character.
    const std::vector<llama_token> & broken_pieces(const std::string & text) const;
    size_t                        broken_piece_bytes_max() const;

    // How bytes of media are read.
    mtmd_helper_init_opt          helper_options() const;

    task_params parse_params(const json & data) const;

    llama_tokens tokenize(const std::string & text) const;

    // What GET /props says about templates and defaults.
    json props() const;

private:
    void take_settings(const json & settings);
    void take_defaults(const json & defaults);
    void take_biases();
    void take_templates(const std::string & source);
    void find_broken_pieces() const;

    Tokenizer                tokenizer_;
    std::shared_ptr<const Projector> projector_;
    TokenizingGuard          guard_;
    common_params            params_;
    server_chat_params       chat_;
    std::string              name_;
    size_t                   token_bytes_max_ = 0;
    size_t                   text_bytes_max_  = 0;
    size_t                   media_bytes_max_ = 0;
    std::vector<std::string> kept_fields_;
    bool                     is_upstream_ = false;

    mutable std::once_flag                                            broken_once_;
    mutable std::unordered_map<std::string, std::vector<llama_token>> broken_;
    mutable size_t                                                    broken_bytes_max_ = 0;
};

}  // namespace towerd::wire
