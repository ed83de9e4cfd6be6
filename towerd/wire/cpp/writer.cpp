#include "writer.h"

#include <algorithm>
#include <stdexcept>

#include "bounds.h"
#include "fields.h"
#include "refused.h"

namespace towerd::wire {

namespace {

void add_fields(json & object, const std::string & extra) {
    if (extra.empty()) {
        return;
    }
    json * target = &object;
    if (object.is_array()) {
        if (object.empty()) {
            return;
        }
        target = &object.back();
        if (target->contains("event") && target->contains("data")) {
            target = &target->at("data");
        }
    }
    const json fields = json::parse(extra);
    for (const auto & [key, value] : fields.items()) {
        (*target)[key] = value;
    }
}

// The object of a response that an event, or a reply, has; null if it has none.
json * response_in(json & data) {
    if (text_in(data, "object") == "response") {
        return &data;
    }
    return has_object(data, "data") && has_object(data.at("data"), "response") ? &data.at("data").at("response") : nullptr;
}

}  // namespace

Writer::Writer(std::shared_ptr<const Request> request, const std::string & shown) : request_(std::move(request)) {
    answering(ERROR_TYPE_SERVER, [&] {
        const size_t n = request_->n_choices();
        states_.reserve(n);
        for (size_t choice = 0; choice < n; ++choice) {
            states_.emplace_back(request_->params().chat_parser_params);
        }
        depths_.assign(n, 0);
        has_begun_.assign(n, false);
        finals_.assign(n, "");
        responses_.assign(n, "null");
        if (!shown.empty()) {
            shown_ = json::parse(shown);
        }
    });
}

template <typename Result>
void Writer::describe(Result & result, size_t choice) const {
    const auto & params        = request_->params();
    result.index               = choice;
    result.post_sampling_probs = params.post_sampling_probs;
    result.verbose             = params.verbose;
    result.res_type            = params.res_type;
    result.oaicompat_model     = params.oaicompat_model;
    result.oaicompat_cmpl_id   = params.oaicompat_cmpl_id;
}

// send_partial_response of llama-server's context.
std::string Writer::partial(const Chunk & chunk) {
    return answering(ERROR_TYPE_SERVER, [&] {
        if (!chunk.is_sent || !request_->params().stream) {
            return std::string();
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        check_depth(chunk.choice, chunk.token.text_to_send);
        server_task_result_cmpl_partial result;
        describe(result, chunk.choice);
        result.content               = chunk.token.text_to_send;
        result.tokens                = {chunk.token.tok};
        result.n_decoded             = n_shown(chunk.choice, chunk.n_decoded);
        result.n_prompt_tokens       = chunk.n_prompt;
        result.n_prompt_tokens_cache = chunk.n_prompt_cached;
        result.stats                 = chunk.stats;
        if (request_->params().sampling.n_probs > 0) {
            result.prob_output = chunk.token;
        }
        result.update(states_.at(chunk.choice));
        json data = result.to_json();
        show(data, shown_);
        return events(data);
    });
}

// llama-server begins a message or a response with its first token, which is not sent if it ends within a character.
int32_t Writer::n_shown(size_t choice, int32_t n_decoded) {
    const auto type = request_->params().res_type;
    if (type == TASK_RESPONSE_TYPE_NONE) {
        return n_decoded;  // its client sees it
    }
    const bool is_first = !has_begun_.at(choice);
    has_begun_.at(choice) = true;
    return is_first ? 1 : std::max(2, n_decoded);
}

std::string Writer::progress(size_t choice, int32_t total, int32_t cached, int32_t processed, int64_t time_ms) {
    return answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        server_task_result_cmpl_partial   result;
        describe(result, choice);
        result.is_progress           = true;
        result.progress.total        = total;
        result.progress.cache        = cached;
        result.progress.processed    = processed;
        result.progress.time_ms      = time_ms;
        result.tokens                = {0};
        result.n_decoded             = 0;
        result.n_prompt_tokens       = total;
        result.n_prompt_tokens_cache = cached;
        if (request_->params().timings_per_token) {
            result.stats.t_start            = 1;
            result.stats.t_prompt_last      = 1 + 1000 * std::max<int64_t>(0, time_ms);
            result.stats.n_prompt_cached    = static_cast<uint64_t>(cached);
            result.stats.n_prompt_processed = static_cast<uint64_t>(std::max(0, processed - cached));
        }
        result.update(states_.at(choice));
        json data = result.to_json();
        show(data, shown_);
        return events(data);
    });
}

std::string Writer::final(Reply & reply, int id_slot, int32_t n_cached, const std::string & extra,
                          const std::string & shown) {
    return answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto &                      params = request_->params();
        if (&reply.request() != request_.get()) {
            throw std::invalid_argument("the reply belongs to another request");
        }
        server_task_result_cmpl_final result;
        describe(result, reply.choice());
        reply.fill(result);
        const std::string before = params.stream ? rest(reply, result) : "";
        check_depth(reply.choice(), result.content);
        result.id_slot           = id_slot;
        result.n_tokens_cached   = n_cached;
        result.stream            = params.stream;
        result.include_usage     = params.include_usage;
        result.response_fields   = params.response_fields;
        result.generation_params = params;
        result.generation_params.sampling.seed = request_->seed_of(reply.choice());
        if (params.res_type == TASK_RESPONSE_TYPE_NONE || params.verbose) {
            result.prompt = common_detokenize(request_->model().vocab, text_of(request_->prompt_of(reply.choice())), true);
        }
        if (params.sampling.n_probs <= 0) {
            result.probs_output.clear();
        }
        result.update(states_.at(reply.choice()));
        json data = result.to_json();
        if (params.res_type == TASK_RESPONSE_TYPE_OAI_RESP) {
            json fields = shown_;
            add_fields(fields, shown);
            show(data, fields, reply.stop());
            const json * made = response_in(data.is_array() ? data.back() : data);
            responses_.at(reply.choice()) = made == nullptr ? "null" : safe_json_to_str(*made);
        }
        add_fields(data, extra);
        if (params.stream) {
            return before + events(data);
        }
        keep(reply.choice(), std::move(data));
        return whole();
    });
}

// llama-server calls a response completed that ended at a limit. The event stays, for the clients that wait for it.
void Writer::show(json & data, const json & shown, stop_type stop) {
    if (shown.is_null()) {
        return;
    }
    if (data.is_array()) {
        for (json & event : data) {
            show(event, shown, stop);
        }
        const json * response = data.empty() ? nullptr : response_in(data.back());
        json *       before   = data.size() < 2 ? nullptr : &data.at(data.size() - 2);
        if (response != nullptr && before != nullptr && text_in(*before, "event") == "response.output_item.done") {
            before->at("data")["item"] = response->at("output").back();  // which says how it ended
        }
        return;
    }
    if (json * response = response_in(data)) {
        for (const auto & [key, value] : shown.items()) {
            (*response)[key] = value;
        }
        if (stop == STOP_TYPE_LIMIT && text_in(shown, "status").empty()) {
            (*response)["status"]             = "incomplete";
            (*response)["incomplete_details"] = json{{"reason", "max_output_tokens"}};
        }
        const std::string status = text_in(*response, "status");
        if ((status == "incomplete" || status == "failed") && response->contains("output") && !response->at("output").empty()) {
            response->at("output").back()["status"] = "incomplete";  // nothing follows where it was cut
        }
    }
}

// Text that might have become a stop string was held back, and of a stream that its client left, tokens may not have
// been written. Half a character at the end stays unsent, as in llama-server.
std::string Writer::unsent(const Reply & reply) const {
    const std::string text = reply.text();
    const size_t      n    = states_.at(reply.choice()).generated_text.size();
    std::string       left = text.substr(std::min(text.size(), n));
    left.resize(validate_utf8(left));
    return left;
}

// A last event of text, since the final ones do not know which blocks and items are open; and the beginning of a reply
// that ended within its first character.
std::string Writer::rest(const Reply & reply, const server_task_result_cmpl_final & ended) {
    const std::string left     = unsent(reply);
    const auto        type     = request_->params().res_type;
    const bool        begins   = type == TASK_RESPONSE_TYPE_OAI_CHAT || type == TASK_RESPONSE_TYPE_OAI_RESP ||
                        type == TASK_RESPONSE_TYPE_ANTHROPIC;
    const bool lacks_beginning = begins && !has_begun_.at(reply.choice()) && ended.n_decoded > 0;
    if (left.empty() && !lacks_beginning) {
        return "";
    }
    check_depth(reply.choice(), left);
    server_task_result_cmpl_partial result;
    describe(result, reply.choice());
    result.content               = left;
    result.n_decoded             = n_shown(reply.choice(), ended.n_decoded);
    result.n_prompt_tokens       = ended.n_prompt_tokens;
    result.n_prompt_tokens_cache = ended.n_prompt_tokens_cache;
    result.update(states_.at(reply.choice()));
    json data = result.to_json();
    show(data, shown_);
    return events(data);
}

std::string Writer::response_id(size_t choice) const {
    return states_.at(choice).oai_resp_id;
}

std::string Writer::response(size_t choice) const {
    return answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        return responses_.at(choice);
    });
}

// Keeps what a choice ended with until all have.
void Writer::keep(size_t choice, json data) {
    const auto type = request_->params().res_type;
    if (finals_.size() == 1 || (type != TASK_RESPONSE_TYPE_OAI_CHAT && type != TASK_RESPONSE_TYPE_OAI_CMPL)) {
        finals_.at(choice) = safe_json_to_str(data);
        return;
    }
    finals_.at(choice) = safe_json_to_str(data.at("choices").at(size_t(0)));
    if (choice == 0) {
        data["choices"] = json::array();
        common_         = std::move(data);
    }
}

// Combines the results as handle_completions_impl does; empty while one is missing. Nothing is kept of them then.
std::string Writer::whole() {
    if (std::any_of(finals_.begin(), finals_.end(), [](const std::string & one) { return one.empty(); })) {
        return "";
    }
    std::vector<std::string> finals(finals_.size());
    finals.swap(finals_);
    if (finals.size() == 1) {
        return std::move(finals[0]);
    }
    std::string list = "[";
    for (std::string & one : finals) {
        list += (list.size() > 1 ? "," : "") + one;
        std::string().swap(one);
    }
    list += "]";
    if (common_.is_null()) {
        return list;
    }
    std::string text = "{";
    for (const auto & [key, value] : common_.items()) {
        text += (text.size() > 1 ? "," : "") + safe_json_to_str(json(key)) + ":";
        text += key == "choices" ? list : safe_json_to_str(value);
    }
    return text + "}";
}

std::string Writer::events(const json & data) const {
    switch (request_->params().res_type) {
        case TASK_RESPONSE_TYPE_ANTHROPIC: return format_anthropic_sse(data);
        case TASK_RESPONSE_TYPE_OAI_RESP:  return format_oai_resp_sse(data);
        default:                           return format_oai_sse(data);
    }
}

std::string Writer::end() const {
    switch (request_->params().res_type) {
        case TASK_RESPONSE_TYPE_NONE:
        case TASK_RESPONSE_TYPE_OAI_RESP:
        case TASK_RESPONSE_TYPE_ANTHROPIC: return "";
        default:                           return "data: [DONE]\n\n";
    }
}

std::string Writer::message(size_t choice) const {
    return answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        common_chat_msg                   message = states_.at(choice).chat_msg;
        message.role                              = "assistant";
        return safe_json_to_str(message.to_json_oaicompat());
    });
}

// A parser of JSON goes as deep as the text does.
void Writer::check_depth(size_t choice, const std::string & text) {
    if (!request_->has_structure()) {
        return;
    }
    size_t & depth = depths_.at(choice);
    for (const char c : text) {
        if (c == '[' || c == '{') {
            ++depth;
        } else if ((c == ']' || c == '}') && depth > 0) {
            --depth;
        }
        if (depth > bounds::kOutputDepthMax) {
            throw std::runtime_error("The model produced output of more than " +
                                     std::to_string(bounds::kOutputDepthMax) + " open brackets, which cannot be parsed");
        }
    }
}

}  // namespace towerd::wire
