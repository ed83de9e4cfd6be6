#include "request.h"

#include <algorithm>
#include <stdexcept>

#include "bounds.h"
#include "fields.h"
#include "history.h"
#include "prompts.h"
#include "refused.h"
#include "server-chat.h"

namespace towerd::wire {

namespace {

constexpr Endpoint kEndpoints[] = {
    {"completion",    TASK_RESPONSE_TYPE_NONE,      false},
    {"infill",        TASK_RESPONSE_TYPE_NONE,      true },
    {"completions",   TASK_RESPONSE_TYPE_OAI_CMPL,  false},
    {"chat",          TASK_RESPONSE_TYPE_OAI_CHAT,  false},
    {"responses",     TASK_RESPONSE_TYPE_OAI_RESP,  false},
    {"messages",      TASK_RESPONSE_TYPE_ANTHROPIC, false},
    {"transcription", TASK_RESPONSE_TYPE_OAI_ASR,   false},
};

// A chat of more messages is not kept for `next_prompt`.
constexpr size_t kChatMessagesMax = 1'000;
// The tokens common to two possible beginnings of the next message are common to all.
constexpr const char * kGuesses[] = {"Hello there", "2 + 2"};

bool is_chat(task_response_type type) {
    return type != TASK_RESPONSE_TYPE_NONE && type != TASK_RESPONSE_TYPE_OAI_CMPL;
}

// Fields that llama-server passes from its chat routes to itself.
void refuse_internal_fields(const json & body, bool is_chat) {
    if (body.contains("chat_parser")) {
        refuse("Field 'chat_parser': not accepted from clients");
    }
    for (const char * name : {"chat_format", "grammar_type", "generation_prompt"}) {
        if (!is_chat && body.contains(name) && body.at(name) != "") {
            refuse(std::string("Field '") + name + "': not accepted from clients");
        }
    }
}

std::string agent_of(const json & body) {
    json said = json::array();
    if (has_array(body, "messages")) {
        for (const auto & message : body.at("messages")) {
            if (!is_system(message) || !message.contains("content")) {
                break;
            }
            said.push_back(message.at("content"));
        }
    }
    const json tools = body.contains("tools") ? body.at("tools") : json();
    return said.empty() && tools.empty() ? "" : json::array({said, tools}).dump_safe();
}

// Whether the client sends thinking back: judged by its earlier messages, or before the first reply by what clients of
// the endpoint usually do.
bool speaks_reasoning(task_response_type type, const json & messages) {
    const auto any = [&](auto && is) { return std::any_of(messages.begin(), messages.end(), is); };
    if (any([](const json & message) { return message.is_object() && message.contains("reasoning_content"); })) {
        return true;
    }
    return !any(is_assistant) && (type == TASK_RESPONSE_TYPE_OAI_RESP || type == TASK_RESPONSE_TYPE_ANTHROPIC);
}

// A reply that the client began: its text is in two places.
bool ends_in_reply(const json & messages) {
    return messages.empty() || is_assistant(messages.back());
}

// Removes thinking for a client whose earlier answers have none, if the template's format does not remove it.
void take_thinking_out(json & reply, const json & messages) {
    static const std::string kEnd = "</think>";
    const std::string text = text_in(reply, "content");
    const size_t      end  = text.rfind(kEnd);
    bool              has_earlier = false;
    for (const auto & message : messages) {
        const std::string earlier = text_in(message, "content");
        if (earlier.empty() || !is_assistant(message)) {
            continue;
        }
        if (earlier.find(kEnd) != std::string::npos) {
            return;
        }
        has_earlier = true;
    }
    if (end != std::string::npos && has_earlier) {
        const size_t start = text.find_first_not_of('\n', end + kEnd.size());
        reply["content"]   = start == std::string::npos ? "" : text.substr(start);
    }
}

// JSON with one blank after each comma and colon and no others, as models write it; values, and a text that is not JSON,
// are left unchanged.
std::string respaced(const std::string & text) {
    if (json::parse_no_throw(text).is_discarded()) {
        return text;
    }
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c == '"') {
            const size_t start = i++;
            while (text[i] != '"') {
                i += text[i] == '\\' ? 2 : 1;
            }
            out += json::parse(text.substr(start, i + 1 - start)).dump_safe();
        } else if (c == ',' || c == ':') {
            out += {c, ' '};
        } else if (c != ' ' && c != '\t' && c != '\n' && c != '\r') {
            out += c;
        }
    }
    return out;
}

// Whether the chat template takes the arguments of calls as text, and as nothing else.
bool takes_text(const Model & model) {
    const auto caps = common_chat_templates_get_caps(model.chat().tmpls.get());
    const auto said = caps.find("supports_object_arguments");
    return said != caps.end() && !said->second;
}

// Arguments that are no JSON become some; raises Refused beyond the bounds. Clients send calls back with spacing of their own: a template that takes
// arguments as text gets them normalized, so that a chat's history stays the same from turn to turn.
void mend_tool_arguments(const Model & model, json & messages) {
    if (!messages.is_array()) {
        return;
    }
    const bool is_text = takes_text(model);
    for (auto & message : messages) {
        if (!has_array(message, "tool_calls")) {
            continue;
        }
        for (auto & call : message.at("tool_calls")) {
            if (!has_object(call, "function")) {
                continue;
            }
            json & function = call.at("function");
            if (has_text(function, "arguments")) {
                const std::string text = text_in(function, "arguments");
                check_json(text);
                function["arguments"]  = respaced(mended_arguments(text, is_text));
            }
        }
    }
}

// What may follow a reply: a user's message, or a tool's result if it called one.
json next_message(const json & reply, const char * content) {
    if (has_array(reply, "tool_calls") && !reply.at("tool_calls").empty()) {
        return {{"role", "tool"}, {"tool_call_id", text_in(reply.at("tool_calls").front(), "id")}, {"content", content}};
    }
    return {{"role", "user"}, {"content", content}};
}

// What has its effect here already: it became the prompt, or is about the reply's shape.
constexpr const char * kNotSent[] = {
    "prompt", "messages", "input", "instructions", "system", "tools", "tool_choice", "response_format", "chat_parser",
    "chat_format", "chat_template_kwargs", "input_prefix", "input_suffix", "input_extra", "model", "n", "n_cmpl",
    "best_of", "stream_options", "response_fields", "verbose", "echo", "metadata", "user", "id_slot",
};

// The fields of a request for llama-server, also those that only a newer one knows.
json sent_fields(const json & data) {
    json sent = data;
    for (const char * name : kNotSent) {
        sent.erase(name);
    }
    return sent;
}

}  // namespace

const Endpoint & endpoint_named(const std::string & name) {
    for (const auto & endpoint : kEndpoints) {
        if (name == endpoint.name) {
            return endpoint;
        }
    }
    throw std::invalid_argument("there is no endpoint " + name);
}

json as_chat_body(const Model & model, task_response_type type, json body) {
    mend_history(type, body);
    if (type == TASK_RESPONSE_TYPE_OAI_RESP) {
        body = server_chat_convert_responses_to_chatcmpl(body);
    } else if (type == TASK_RESPONSE_TYPE_ANTHROPIC) {
        body = server_chat_convert_anthropic_to_oai(body);
    }
    if (!body.is_object()) {
        return body;
    }
    if (body.contains("messages")) {
        if (body.at("messages").size() > bounds::kMessagesMax) {
            refuse("Field 'messages': at most " + std::to_string(bounds::kMessagesMax) + " messages are allowed");
        }
        mend_tool_arguments(model, body.at("messages"));
    }
    if (body.contains("tools")) {
        check_tools(body.at("tools"));
    }
    if (body.contains("json_schema")) {
        check_schema(body.at("json_schema"));
    }
    if (has_object(body, "response_format")) {
        const json & format = body.at("response_format");
        for (const json & holder : {format, json_value(format, "json_schema", json())}) {
            if (holder.is_object() && holder.contains("schema")) {
                check_schema(holder.at("schema"));
            }
        }
    }
    return body;
}

Request::Request(std::shared_ptr<const Model> model, const Endpoint & endpoint, const std::string & body,
                 const FitCheck & check_fit, std::vector<raw_buffer> uploads,
                 const std::optional<Continued> & continued) :
    model_(std::move(model)), type_(endpoint.type) {
    answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        if (endpoint.is_infill) {
            check_can_infill(*model_);
        }
        json                    data  = parsed_body(mended_json(body));
        std::vector<raw_buffer> files = std::move(uploads);
        keep_fields(data);
        refuse_internal_fields(data, is_chat(type_));
        if (type_ == TASK_RESPONSE_TYPE_OAI_ASR) {
            data = transcription_data(data, files);
        } else if (is_chat(type_)) {
            data = chat_data(data, files);
        } else if (endpoint.is_infill) {
            data = infill_data(*model_, std::move(data));
        } else if (data.contains("json_schema")) {
            check_schema(data.at("json_schema"));
        }
        check_length(data.at("prompt"), files.size(), check_fit);
        take(data, files);
        if (continued) {
            continue_from(*continued);
        }
    });
}

void Request::check_length(const json & prompt, size_t n_files, const FitCheck & check_fit) const {
    if (!check_fit) {
        return;
    }
    const auto   least = least_tokens(*model_, prompt, n_files);
    const size_t n_ctx = static_cast<size_t>(model_->n_ctx());
    if (std::any_of(least.begin(), least.end(), [&](size_t n) { return n >= n_ctx; })) {
        check_fit(kept_, least);
    }
}

void Request::keep_fields(const json & body) {
    if (!body.is_object()) {
        return;
    }
    for (const auto & name : model_->kept_fields()) {
        if (body.contains(name)) {
            kept_[name] = body.at(name).dump_safe();
            if (kept_[name].size() > bounds::kKeptBytesMax) {
                refuse("Field '" + name + "': at most " + std::to_string(bounds::kKeptBytesMax) + " bytes are allowed");
            }
        }
    }
}

json Request::chat_data(json & body, std::vector<raw_buffer> & files) {
    body   = as_chat_body(*model_, type_, std::move(body));
    agent_ = agent_of(body);
    for (const char * name : {"tools", "json_schema", "response_format"}) {
        has_structure_ = has_structure_ || (body.contains(name) && !body.at(name).empty());
    }
    if (has_array(body, "messages") && body.at("messages").size() <= kChatMessagesMax) {
        chat_ = body;
    }
    if (model_->projector()) {
        refuse_remote_media(body);
    }
    check_chat_text(*model_, body);
    return oaicompat_chat_params_parse(body, model_->chat(), files);
}

// `files` has what was uploaded, and then what the prompt refers to.
json Request::transcription_data(const json & body, std::vector<raw_buffer> & files) const {
    if (!model_->projector() || !model_->chat().allow_audio) {
        throw Refused("The current model does not support audio input.", ERROR_TYPE_NOT_SUPPORTED);
    }
    std::map<std::string, uploaded_file> uploaded;
    if (!files.empty()) {
        uploaded["file"].data = std::move(files.front());
    }
    for (const char * name : {"max_tokens", "temperature"}) {
        if (body.contains(name) && !body.at(name).is_string()) {
            refuse(std::string("Field '") + name + "': given more than once");
        }
    }
    json chat = convert_transcriptions_to_chatcmpl(body, model_->chat().tmpls.get(), uploaded, files);
    check_chat_text(*model_, chat);
    return oaicompat_chat_params_parse(chat, model_->chat(), files);
}

// The order is that of handle_completions_impl.
void Request::take(const json & data, const std::vector<raw_buffer> & files) {
    const auto inputs     = tokenized(*model_, data.at("prompt"), files);
    auto       delimiters = common_chat_msg_delimiters_parse(json_value(data, "message_delimiters", json::array()));
    if (delimiters.delimiters.size() > bounds::kDelimitersMax) {
        refuse("Field 'message_delimiters': too many");
    }
    for (auto & one : delimiters.delimiters) {
        one.tokens = towerd_tokenize(model_->vocab, one.delimiter, false, true);
    }
    params_ = model_->parse_params(data);
    check_params(params_, model_->n_ctx(), is_chat(type_));
    params_.res_type          = type_;
    params_.oaicompat_cmpl_id = gen_chatcmplid();
    params_.oaicompat_model   = model_->name();
    if (model_->is_upstream()) {
        sent_ = sent_fields(data);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
        const auto & input  = inputs[i];
        const auto   own    = files.empty() && model_->projector() ? media_at(data.at("prompt"), i) : std::vector<raw_buffer>();
        Prompt       prompt = prompt_of_tokens(input, model_->projector().get(), files.empty() ? own : files);
        prompts_.push_back(std::move(prompt.ids));
        media_.push_back(std::move(prompt.media));
        check_tokens(*model_, prompts_.back());
        spans_.push_back(input.find_message_spans(delimiters));
    }
}

// Its spans and its next prompt are not known: they are told by what is replaced.
void Request::continue_from(const Continued & continued) {
    llama_tokens & prompt = prompts_.front();
    const size_t   n      = continued.n_replaced;
    if (prompts_.size() != 1 || n > prompt.size() ||
        std::any_of(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(n), [](llama_token id) { return id < 0; })) {
        throw std::runtime_error("these tokens cannot be replaced");
    }
    prompt.erase(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(n));
    prompt.insert(prompt.begin(), continued.ids.begin(), continued.ids.end());
    check_tokens(*model_, prompt);
    spans_.front() = {};
    chat_          = json();
    agent_.clear();
}

int32_t Request::n_predict() const {
    return params_.n_predict != -1 ? params_.n_predict : model_->params().n_predict;
}

const llama_tokens & Request::prompt_of(size_t choice) const {
    return prompts_.at(choice / static_cast<size_t>(params_.n_cmpl));
}

// Estimated: probabilities become values of JSON, of one choice at a time, and then text, which is there up to three times.
// What a choice was asked for is in its reply.
ReplyBytes Request::reply_bytes(size_t n_tokens) const {
    constexpr size_t kValueBytes = 1229, kKeptBytes = 320, kSentBytes = 128, kQueuedBytes = 64 * 64;
    constexpr size_t kChoiceBytes = 16 * 1024, kBiasBytes = 64, kGrammarCopies = 16, kTokenBytes = 16;
    const auto &     sampling = params_.sampling;
    const size_t     n_probs  = static_cast<size_t>(std::max(0, sampling.n_probs));
    const size_t     n_bias   = sampling.logit_bias.size();
    size_t           n_prompt = 0;
    for (const auto & prompt : prompts_) {
        n_prompt = std::max(n_prompt, prompt.size());
    }
    const size_t n_kept = params_.stream ? std::min<size_t>(1, n_tokens) : n_tokens;
    size_t       choice = kChoiceBytes + kBiasBytes * 4 * n_bias + kGrammarCopies * sampling.grammar.grammar.size();
    choice += kTokenBytes * n_prompt + kKeptBytes * n_probs * n_kept + (params_.stream ? kQueuedBytes * n_probs : 0);
    ReplyBytes found;
    found.kept    = n_choices() * choice;
    found.written = kValueBytes * (n_probs * n_kept + n_bias);
    // What it is sent from is beside what was kept.
    found.of_token = params_.stream ? 0 : (kKeptBytes - kSentBytes) * n_probs;
    return found;
}

uint32_t Request::seed_of(size_t choice) const {
    const uint32_t seed = params_.sampling.seed;
    return seed == LLAMA_DEFAULT_SEED ? seed : seed + static_cast<uint32_t>(choice % static_cast<size_t>(params_.n_cmpl));
}

common_params_sampling Request::sampling_of(size_t choice) const {
    {
        const std::lock_guard<std::mutex> lock(grammar_mutex_);
        if (!grammar_checked_) {
            check_grammar(common_grammar_value(params_.sampling.grammar), model_->vocab);
            grammar_checked_ = true;
        }
    }
    common_params_sampling sampling = params_.sampling;
    sampling.seed                   = seed_of(choice);
    return sampling;
}

std::string Request::upstream_body(size_t choice, const std::string & own) const {
    json body = sent_;
    if (params_.n_cmpl > 1 && params_.sampling.seed != LLAMA_DEFAULT_SEED) {
        body["seed"] = seed_of(choice);
    }
    body["prompt"]    = prompt_of(choice);
    const json fields = json::parse(own);
    for (const auto & [name, value] : fields.items()) {
        body[name] = value;
    }
    return safe_json_to_str(body);
}

// Its media are this request's, in the same order: nothing is hashed again.
llama_tokens Request::rendered(json body) const {
    std::vector<raw_buffer> files;
    const json              data   = oaicompat_chat_params_parse(body, model_->chat(), files);
    const auto              inputs = tokenized(*model_, data.at("prompt"), files, true);
    const auto &            tokens = inputs.at(0);
    const auto &            media  = media_.at(0);
    llama_tokens            out;
    for (size_t i = 0; out.size() < tokens.size();) {
        if (tokens[out.size()] != LLAMA_TOKEN_NULL) {
            out.push_back(tokens[out.size()]);
        } else if (i < media.size() && out.size() + media[i].ids.size() <= tokens.size()) {
            out.insert(out.end(), media[i].ids.begin(), media[i].ids.end());
            ++i;
        } else {
            throw std::runtime_error("the chat has other media than it had");
        }
    }
    return out;
}

llama_tokens Request::next_prompt(const std::string & message) const {
    return answering(ERROR_TYPE_INVALID_REQUEST, [&] {
        if (!chat_.is_object() || ends_in_reply(chat_.at("messages"))) {
            return llama_tokens();
        }
        json said = json::array({json::parse(message)});
        mend_tool_arguments(*model_, said);
        json reply = said.at(0);
        if (!speaks_reasoning(type_, chat_.at("messages"))) {
            reply.erase("reasoning_content");
        }
        take_thinking_out(reply, chat_.at("messages"));
        std::vector<llama_tokens> found;
        for (const char * guess : kGuesses) {
            json body = chat_;
            body.at("messages").push_back(reply);
            body.at("messages").push_back(next_message(reply, guess));
            found.push_back(rendered(std::move(body)));
        }
        const auto & first = found.front();
        const auto   end   = std::mismatch(first.begin(), first.end(), found.back().begin(), found.back().end());
        return llama_tokens(first.begin(), end.first);
    });
}

}  // namespace towerd::wire
