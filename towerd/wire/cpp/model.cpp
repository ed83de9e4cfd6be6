#include "model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "chat.h"
#include "flags.h"
#include "log.h"
#include "refused.h"
#include "server-schema.h"

namespace towerd::wire {

namespace {

std::string special_token(const llama_vocab * vocab, llama_token token) {
    return token == LLAMA_TOKEN_NULL ? "" : common_token_to_piece(vocab, token, true);
}

}  // namespace

Model::Model(const llama_model * model, const std::string & settings, Tokenizer tokenizer,
             std::shared_ptr<const Projector> projector, const DeepStack & deep_stack) :
    model(model), vocab(llama_model_get_vocab(model)), tokenizer_(std::move(tokenizer)),
    projector_(std::move(projector)), guard_(vocab, mtmd(), deep_stack), chat_() {
    const AbortGuard guard;
    common_log_set_verbosity_thold(-1);
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
        if (llama_vocab_is_eog(vocab, token)) {
            params_.sampling.logit_bias_eog.push_back({token, -INFINITY});
        }
    }
    token_bytes_max_  = towerd::wire::token_bytes_max(model);
    const json values = json::parse(settings);
    take_settings(values);
    take_defaults(values.at("defaults"));
    take_flags(params_, values.at("flags").get<std::vector<std::string>>());
    params_.default_template_kwargs.emplace("preserve_reasoning", "true");  // as llama-server's command line
    take_biases();
    take_templates(values.at("chat_template").get<std::string>());
}

void Model::take_settings(const json & settings) {
    name_           = settings.at("name").get<std::string>();
    text_bytes_max_ = settings.at("text_bytes_max").get<size_t>();
    media_bytes_max_ = settings.at("media_bytes_max").get<size_t>();
    kept_fields_    = settings.at("kept_fields").get<std::vector<std::string>>();
    is_upstream_    = settings.at("is_upstream").get<bool>();

    params_.n_ctx      = settings.at("n_ctx").get<int>();
    params_.n_batch    = settings.at("n_batch").get<int>();
    params_.n_parallel = settings.at("n_parallel").get<int>();
}

void Model::take_defaults(const json & defaults) {
    const task_params parsed  = parse_params(defaults);
    params_.sampling          = parsed.sampling;
    params_.n_predict         = parsed.n_predict;
    params_.n_keep            = parsed.n_keep;
    params_.cache_prompt      = parsed.cache_prompt;
    params_.antiprompt        = parsed.antiprompt;
}

// As llama-server: the schema adds the biases itself only if a request asks for it.
void Model::take_biases() {
    auto & sampling     = params_.sampling;
    sampling.ignore_eos = sampling.ignore_eos && llama_vocab_eos(vocab) != LLAMA_TOKEN_NULL;
    if (sampling.ignore_eos) {
        sampling.logit_bias.insert(sampling.logit_bias.end(), eog().begin(), eog().end());
    }
}

void Model::take_templates(const std::string & source) {
    if (!source.empty() && source != "chatml") {
        const common_chat_template parsed(source, "", "");  // says what is wrong, which the next line does not
    }
    chat_.tmpls                    = common_chat_templates_init(model, source);
    chat_.use_jinja                = params_.use_jinja;
    chat_.prefill_assistant        = params_.prefill_assistant;
    chat_.reasoning_format         = params_.reasoning_format;
    chat_.chat_template_kwargs     = params_.default_template_kwargs;
    chat_.reasoning_budget         = params_.sampling.reasoning_budget_tokens;
    chat_.reasoning_budget_message = params_.sampling.reasoning_budget_message;
    chat_.force_pure_content       = params_.force_pure_content_parser;
    chat_.enable_thinking          = params_.enable_reasoning != 0 && params_.use_jinja &&
                                     common_chat_templates_support_enable_thinking(chat_.tmpls.get());
    if (projector_) {
        chat_.media_path  = params_.media_path;
        chat_.allow_image = projector_->has_vision();
        chat_.allow_audio = projector_->has_audio();
        chat_.allow_video = projector_->has_video() && !params_.video_ffmpeg_bin_dir.empty();
    }
    // As llama-server: a template that cannot render an example is refused at the start.
    common_chat_format_example(chat_.tmpls.get(), params_.use_jinja, params_.default_template_kwargs);
}

task_params Model::parse_params(const json & data) const {
    return server_schema::eval_llama_cmpl_schema(vocab, params_, eog(), data);
}

// libmtmd passes media other than pictures to an ffmpeg in PATH, which opens any files and links that the bytes name. So
// an ffmpeg is only used if it was asked for.
mtmd_helper_init_opt Model::helper_options() const {
    static const char * const kNowhere = "/dev/null";
    mtmd_helper_init_opt      options  = mtmd_helper_init_opt_default();
    const auto &              folder   = params_.video_ffmpeg_bin_dir;

    options.video_params.fps_target            = params_.video_fps;
    options.video_params.timestamp_interval_ms = params_.video_timestamp_interval_ms;
    options.video_params.ffmpeg_bin_dir        = folder.empty() ? kNowhere : folder.c_str();
    return options;
}

void Model::check_text(size_t n_bytes) const {
    if (text_bytes_max_ != 0 && n_bytes > text_bytes_max_) {
        throw Refused({{"code", 413},
                       {"message", "The text has " + std::to_string(n_bytes) + " bytes; at most " +
                                       std::to_string(text_bytes_max_) + " are tokenized at once"},
                       {"type", "invalid_request_error"}});
    }
}

llama_tokens Model::tokenize(const std::string & text) const {
    return tokenizer_ ? tokenizer_(text) : towerd_tokenize(vocab, text, true, true);
}

std::string Model::piece(llama_token token, const std::set<llama_token> & kept) const {
    return common_token_to_piece(vocab, token, params_.special || kept.count(token) != 0);
}

void Model::find_broken_pieces() const {
    std::call_once(broken_once_, [&] {
        for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
            const std::string text = piece(token);
            const bool is_broken = !text.empty() && ((text[0] & 0xC0) == 0x80 || validate_utf8(text) < text.size());
            if (is_broken) {
                broken_[text].push_back(token);
                broken_bytes_max_ = std::max(broken_bytes_max_, text.size());
            }
        }
    });
}

const std::vector<llama_token> & Model::broken_pieces(const std::string & text) const {
    static const std::vector<llama_token> kNone;
    find_broken_pieces();
    const auto found = broken_.find(text);
    return found == broken_.end() ? kNone : found->second;
}

size_t Model::broken_piece_bytes_max() const {
    find_broken_pieces();
    return broken_bytes_max_;
}

json Model::props() const {
    task_params defaults;
    defaults.sampling = params_.sampling;
    json out          = {
        {"default_generation_settings", {{"params", defaults.to_json(true)}, {"n_ctx", params_.n_ctx}}},
        {"chat_template", common_chat_templates_source(chat_.tmpls.get(), "")},
        {"chat_template_caps", common_chat_templates_get_caps(chat_.tmpls.get())},
        {"modalities", {{"vision", chat_.allow_image}, {"video", chat_.allow_video}, {"audio", chat_.allow_audio}}},
        {"media_marker", get_media_marker()},
        {"bos_token", special_token(vocab, llama_vocab_bos(vocab))},
        {"eos_token", special_token(vocab, llama_vocab_eos(vocab))},
    };
    const std::string with_tools = common_chat_templates_source(chat_.tmpls.get(), "tool_use");
    if (params_.use_jinja && !with_tools.empty()) {
        out["chat_template_tool_use"] = with_tools;
    }
    return out;
}

}  // namespace towerd::wire
