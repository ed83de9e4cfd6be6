#include "prompts.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base64.hpp"
#include "bounds.h"
#include "fields.h"
#include "history.h"
#include "refused.h"
#include "request.h"

namespace towerd::wire {

namespace {

json parsed(const std::string & body) {
    const std::string text = mended_json(body);
    check_json(text);
    return json::parse(text);
}

json chat_data(const Model & model, task_response_type type, const std::string & body, std::vector<raw_buffer> & files) {
    json chat = as_chat_body(model, type, parsed(body));
    if (model.projector()) {
        refuse_remote_media(chat);
    }
    check_chat_text(model, chat);
    return oaicompat_chat_params_parse(chat, model.chat(), files);
}

bool is_several(const json & prompt) {
    return prompt.is_array() && !json_is_array_and_contains_numbers(prompt);
}

// The parts of a request that its reply repeats.
json only(const json & body, const char * name) {
    json out = json::object();
    if (body.contains(name)) {
        out[name] = body.at(name);
    }
    return out;
}

bool is_id(const json & value) {
    constexpr double kMax = std::numeric_limits<int32_t>::max();
    return !value.is_number() || (value.get<double>() >= 0.0 && value.get<double>() <= kMax);
}

// Ids that llama.cpp would truncate to 32 bits. Among texts it takes any number for an id.
void check_ids(const json & prompt) {
    if (prompt.is_array()) {
        const bool is_mixed = json_is_array_of_mixed_numbers_strings(prompt);
        for (const json & value : prompt) {
            if (is_mixed && !is_id(value)) {
                refuse("Prompt contains invalid tokens");
            }
            check_ids(value);
        }
    } else if (prompt.is_number_integer() && !is_id(prompt)) {
        refuse("Prompt contains invalid tokens");
    }
}

// Texts only: an embedding model gets no media.
const server_chat_params & text_only() {
    static const server_chat_params params = [] {
        server_chat_params made{};
        made.allow_image = made.allow_audio = made.allow_video = false;
        return made;
    }();
    return params;
}

size_t least_of_text(const Model & model, size_t n_bytes, size_t n_media = 0) {
    const size_t per_token = model.token_bytes_max();
    const size_t markers   = n_media * std::strlen(get_media_marker());  // a medium may be one token
    // A prompt that is not very long is counted: clients shorten theirs by the right number.
    return per_token == 0 || n_bytes <= std::max(markers, bounds::kCountedBytesMax) ? 0 : (n_bytes - markers + per_token - 1) / per_token;
}

size_t least_of(const Model & model, const json & prompt, size_t n_media = 0) {
    if (prompt.is_string()) {
        return least_of_text(model, prompt.get<std::string>().size(), n_media);
    }
    size_t n = 0;
    if (prompt.is_array()) {
        size_t n_ids = 0;
        for (const json & part : prompt) {
            n += part.is_string() ? least_of(model, part) : 0;
            n_ids += part.is_string() ? 0 : 1;
        }
        n += n == 0 ? 0 : n_ids;  // ids alone are counted
    } else if (prompt.is_object() && prompt.contains("prompt_string")) {
        const size_t n_media = has_array(prompt, "multimodal_data") ? prompt.at("multimodal_data").size() : 0;
        n                    = least_of(model, prompt.at("prompt_string"), n_media);
    }
    return n;
}

// What an embedding model could not take: a text is evaluated as a whole.
void check_fits(const Model & model, size_t n_least) {
    const size_t n_ctx = static_cast<size_t>(model.n_ctx());
    if (n_least > n_ctx) {
        json error = format_error_response("input (at least " + std::to_string(n_least) + " tokens) is larger than the max " +
                                               "context size (" + std::to_string(n_ctx) + " tokens). skipping",
                                           ERROR_TYPE_EXCEED_CONTEXT_SIZE);
        error["n_prompt_tokens"] = n_least;
        error["n_ctx"]           = n_ctx;
        throw Refused(error);
    }
}

// The media of a prompt that is not a chat, as llama.cpp decodes them: up to the first character that is not base64.
std::vector<raw_buffer> media_in(const json & prompt) {
    static const std::string kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::vector<raw_buffer>  files;
    if (!prompt.is_object() || !prompt.contains("multimodal_data")) {
        return files;
    }
    for (const json & entry : prompt.at("multimodal_data")) {
        const std::string text = entry.get<std::string>();
        const size_t      n    = std::min(text.size(), text.find_first_not_of(kAlphabet));
        const std::string data = base64::decode(text.substr(0, n / 4 * 4));
        files.emplace_back(data.begin(), data.end());
    }
    return files;
}

}  // namespace

std::vector<raw_buffer> media_at(const json & prompt, size_t i) {
    return media_in(is_several(prompt) ? prompt.at(i) : prompt);
}

size_t text_bytes(const json & value) {
    size_t n = 0;
    if (value.is_string()) {
        n = value.get<std::string>().size();
    } else if (value.is_array()) {
        for (const json & part : value) {
            n += text_bytes(part);
        }
    } else if (value.is_object()) {
        for (const char * name : {"prompt_string", "content", "text"}) {
            n += value.contains(name) ? text_bytes(value.at(name)) : 0;
        }
    }
    return n;
}

void check_chat_text(const Model & model, const json & chat) {
    if (chat.is_object() && chat.contains("messages")) {
        model.check_text(text_bytes(chat.at("messages")));
    }
}

std::vector<size_t> least_tokens(const Model & model, const json & prompt, size_t n_files) {
    std::vector<size_t> out;
    if (is_several(prompt)) {
        for (const json & one : prompt) {
            out.push_back(least_of(model, one));
        }
    } else {
        out.push_back(least_of(model, prompt, n_files));
    }
    return out;
}

std::vector<server_tokens> tokenized(const Model & model, const json & prompt,
                                     const std::vector<raw_buffer> & files, bool are_counted) {
    model.check_text(text_bytes(prompt));
    if (!files.empty()) {
        check_media(model, files);
        std::vector<server_tokens> out;
        out.push_back(process_mtmd_prompt(model.mtmd(), prompt.get<std::string>(), files, model.helper_options(), are_counted));
        return out;
    }
    check_ids(prompt);
    if (is_several(prompt) && prompt.size() > bounds::kPromptsMax) {
        refuse("Field 'prompt': at most " + std::to_string(bounds::kPromptsMax) + " prompts are allowed");
    }
    if (prompt.is_string()) {
        std::vector<server_tokens> out;
        out.emplace_back(model.tokenize(prompt.get<std::string>()), false);
        return out;
    }
    for (const json & one : is_several(prompt) ? prompt : json::array({prompt})) {
        check_media(model, media_in(one));
    }
    return tokenize_input_prompts(model.vocab, model.mtmd(), prompt, true, true, model.helper_options());
}

void check_tokens(const Model & model, const llama_tokens & tokens) {
    const llama_token n_vocab = llama_vocab_n_tokens(model.vocab);
    const bool        has_media = model.projector() != nullptr;
    if (std::any_of(tokens.begin(), tokens.end(),
                    [&](llama_token token) { return (token < 0 && !has_media) || token >= n_vocab; })) {
        refuse("Prompt contains invalid tokens");
    }
}

void check_can_infill(const Model & model) {
    std::string missing;
    for (const auto & [token, name] : {std::pair{llama_vocab_fim_pre(model.vocab), "prefix"},
                                       std::pair{llama_vocab_fim_suf(model.vocab), "suffix"},
                                       std::pair{llama_vocab_fim_mid(model.vocab), "middle"}}) {
        if (token == LLAMA_TOKEN_NULL) {
            missing += std::string(name) + " token is missing. ";
        }
    }
    if (!missing.empty()) {
        throw Refused("Infill is not supported by this model: " + missing, ERROR_TYPE_NOT_SUPPORTED);
    }
}

json infill_data(const Model & model, json data) {
    if (data.contains("input_extra") && !data.at("input_extra").is_array()) {
        refuse("\"input_extra\" must be an array of {\"filename\": string, \"text\": string}");
    }
    const json extra = json_value(data, "input_extra", json::array());
    for (const auto & chunk : extra) {
        if (!has_text(chunk, "text")) {
            refuse("extra_context chunk must contain a \"text\" field with a string value");
        }
        if (chunk.contains("filename") && !has_text(chunk, "filename")) {
            refuse("extra_context chunk's \"filename\" field must be a string");
        }
    }
    const json prompt = json_value(data, "prompt", std::string());
    size_t     n_bytes = text_bytes(prompt) + text_bytes(extra);
    for (const char * name : {"input_prefix", "input_suffix"}) {
        n_bytes += data.contains(name) ? text_bytes(data.at(name)) : 0;
    }
    model.check_text(n_bytes);
    const auto begun  = tokenize_input_prompts(model.vocab, nullptr, prompt, false, true, model.helper_options());
    data["prompt"]    = format_prompt_infill(model.vocab, data.at("input_prefix"), data.at("input_suffix"), extra,
                                             model.params().n_batch, model.params().n_predict, model.n_ctx(),
                                             model.params().spm_infill, begun.at(0).get_tokens());
    return data;
}

std::string template_reply(const Model & model, const std::string & body) {
    return answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        std::vector<raw_buffer> files;
        const json              data = chat_data(model, TASK_RESPONSE_TYPE_OAI_CHAT, body, files);
        return safe_json_to_str(json{{"prompt", data.at("prompt")}});
    });
}

std::string count_reply(const Model & model, task_response_type type, const std::string & body) {
    return answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        std::vector<raw_buffer> files;
        const json              data  = chat_data(model, type, body, files);
        json                    reply = {{"input_tokens", tokenized(model, data.at("prompt"), files, true).at(0).size()}};
        if (type != TASK_RESPONSE_TYPE_ANTHROPIC) {
            reply["object"] = "response.input_tokens";
        }
        return safe_json_to_str(reply);
    });
}

std::string detokenize_reply(const Model & model, const std::string & body) {
    return answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        const json  data = parsed(body);
        std::string content;
        if (!is_missing(data, "tokens")) {
            const json & given = data.at("tokens");
            const auto   is_id = [](const json & token) { return token.is_number_integer(); };
            if (!given.is_array() || !std::all_of(given.begin(), given.end(), is_id)) {
                refuse("Field 'tokens': must be an array of integers");
            }
            check_ids(given);
            const llama_tokens tokens = given.get<llama_tokens>();
            check_tokens(model, tokens);
            content = tokens_to_str(model.vocab, tokens);
        }
        return safe_json_to_str(json{{"content", content}});
    });
}

EmbeddingRequest::EmbeddingRequest(const Model & model, bool openai, const std::string & body) :
    model_name_(model.name()), normalize_(model.params().embd_normalize), openai_(openai) {
    answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        const json data = parsed(body);
        const bool has_input = data.count("input") != 0;
        if (!has_input && !data.contains("content")) {
            refuse("\"input\" or \"content\" must be provided");
        }
        openai_           = openai && has_input;
        const json prompt = data.at(has_input ? "input" : "content");
        if (data.count("encoding_format") != 0) {
            const std::string format = data.at("encoding_format");
            base64_                  = format == "base64";
            if (!base64_ && format != "float") {
                refuse("The format to return the embeddings in. Can be either float or base64");
            }
        }
        const auto take = [&](const json & one) {
            model.check_text(text_bytes(one));
            check_fits(model, least_of(model, one));
            server_tokens tokens = one.is_object() && one.contains("content")
                ? tokenize_oai_content_array(model.vocab, nullptr, text_only(), one.at("content"), true, true, model.helper_options())
                : tokenize_input_subprompt(model.vocab, nullptr, one, true, true, model.helper_options());
            prompts_.push_back(tokens.get_tokens());
        };
        if (!is_several(prompt)) {
            take(prompt);
        } else {
            if (prompt.size() > bounds::kPromptsMax) {
                refuse("Field 'input': at most " + std::to_string(bounds::kPromptsMax) + " inputs are allowed");
            }
            std::for_each(prompt.begin(), prompt.end(), take);
        }
        if (prompts_.empty()) {
            refuse("\"input\" must not be empty");
        }
        for (const auto & tokens : prompts_) {
            if (tokens.empty()) {
                refuse("Input content cannot be empty");
            }
            check_tokens(model, tokens);
        }
        if (data.count("embd_normalize") != 0) {
            normalize_ = data.at("embd_normalize").get<int>();
        }
        request_ = only(data, "model");
    });
}

std::string EmbeddingRequest::reply(const std::vector<std::vector<std::vector<float>>> & rows) const {
    return answering(ERROR_TYPE_SERVER, [&] {
        json results = json::array();
        for (size_t i = 0; i < rows.size(); ++i) {
            server_task_result_embd result;
            result.index     = i;
            result.embedding = rows[i];
            result.n_tokens  = static_cast<int32_t>(prompts_.at(i).size());
            result.res_type  = openai_ ? TASK_RESPONSE_TYPE_OAI_EMBD : TASK_RESPONSE_TYPE_NONE;
            if (openai_ && result.embedding.empty()) {
                throw std::invalid_argument("a prompt has no embedding");
            }
            results.push_back(result.to_json());
        }
        return safe_json_to_str(
            openai_ ? format_embeddings_response_oaicompat(request_, model_name_, results, base64_) : results);
    });
}

RerankRequest::RerankRequest(const Model & model, const std::string & body) : model_name_(model.name()) {
    answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        const json data = parsed(body);
        tei_            = data.contains("texts");
        if (data.count("query") != 1) {
            refuse("\"query\" must be provided");
        }
        const json query = data.at("query");
        if (!query.is_string()) {
            refuse("\"query\" must be a string");
        }
        documents_ = json_value(data, "documents", json_value(data, "texts", std::vector<std::string>()));
        if (documents_.empty()) {
            refuse("\"documents\" must be a non-empty string array");
        }
        if (documents_.size() > bounds::kPromptsMax) {
            refuse("Field 'documents': at most " + std::to_string(bounds::kPromptsMax) + " documents are allowed");
        }
        top_n_ = std::clamp(json_value(data, "top_n", static_cast<int>(documents_.size())), 0,
                            static_cast<int>(documents_.size()));
        for (const auto & document : documents_) {
            model.check_text(document.size() + text_bytes(query));
            check_fits(model, least_of_text(model, text_bytes(query) + document.size()));
            prompts_.push_back(
                format_prompt_rerank(model.model, model.vocab, nullptr, query, document, model.helper_options()).get_tokens());
        }
        request_                = only(data, "model");
        request_["return_text"] = json_value(data, "return_text", false);
    });
}

std::string RerankRequest::reply(const std::vector<float> & scores) const {
    return answering(ERROR_TYPE_SERVER, [&] {
        json results = json::array();
        for (size_t i = 0; i < prompts_.size(); ++i) {
            server_task_result_rerank result;
            result.index    = i;
            result.score    = scores.at(i);
            result.n_tokens = static_cast<int32_t>(prompts_[i].size());
            results.push_back(result.to_json());
        }
        std::vector<std::string> texts = documents_;
        return safe_json_to_str(format_response_rerank(request_, model_name_, results, tei_, texts, top_n_));
    });
}

}  // namespace towerd::wire
