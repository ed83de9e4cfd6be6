#include "history.h"

#include <algorithm>
#include <cctype>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bounds.h"
#include "fields.h"
#include "refused.h"

namespace towerd::wire {

namespace {

// Any value as text: JSON of what is none.
std::string as_text(const json & value) {
    return value.is_string() ? value.get<std::string>() : value.is_null() ? "" : value.dump_safe();
}

bool is_blank(const std::string & text) {
    return std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isspace(c); });
}

// The length of the billing line at the start of a text, with the blanks behind it; 0: there is none. It is a name, then
// `cc...=...;` any number of times; the instructions may follow in the same line.
size_t billing_bytes(const std::string & text) {
    static const std::string kName = "x-anthropic-billing-header:";
    if (text.compare(0, kName.size(), kName) != 0) {
        return 0;
    }
    size_t end = kName.size();
    while (true) {
        const size_t key   = text.find_first_not_of(" \t", end);
        const size_t stop  = key == std::string::npos ? key : text.find_first_of(";\r\n", key);
        const size_t equal = key == std::string::npos ? key : text.find('=', key);
        if (key == std::string::npos || text.compare(key, 2, "cc") != 0 || equal > std::min(stop, text.size())) {
            break;
        }
        const bool is_name = std::all_of(text.begin() + key, text.begin() + equal,
                                         [](unsigned char c) { return std::isalnum(c) || c == '_'; });
        if (!is_name) {
            break;
        }
        end = stop == std::string::npos ? text.size() : text[stop] == ';' ? stop + 1 : stop;
    }
    return end == kName.size() ? 0 : std::min(text.find_first_not_of(" \t\r\n", end), text.size());
}

// The four digits of an escaped character; -1: they are none.
int escaped(const std::string & text, size_t at) {
    if (at + 6 > text.size() || text[at] != '\\' || text[at + 1] != 'u') {
        return -1;
    }
    int value = 0;
    for (size_t i = at + 2; i < at + 6; ++i) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        if (!std::isxdigit(c)) {
            return -1;
        }
        value = value * 16 + (std::isdigit(c) ? c - '0' : std::tolower(c) - 'a' + 10);
    }
    return value;
}

bool is_high(int unit) { return unit >= 0xD800 && unit <= 0xDBFF; }
bool is_low(int unit) { return unit >= 0xDC00 && unit <= 0xDFFF; }

// The ids of calls without a result so far, in their order. Ids may be equal.
class OpenCalls {
public:
    void add(const std::string & id) {
        ids_.push_back(id);
        ++n_open_[id];
    }

    void answer(const std::string & id) {
        const auto found = n_open_.find(id);
        if (found != n_open_.end() && found->second > 0) {
            --found->second;
            ++n_answered_[id];
        }
    }

    // The first of them; null: there is none.
    const std::string * first() {
        while (!ids_.empty() && n_answered_[ids_.front()] > 0) {
            --n_answered_[ids_.front()];
            ids_.pop_front();
        }
        return ids_.empty() ? nullptr : &ids_.front();
    }

private:
    std::deque<std::string>                 ids_;  // also of some that were answered
    std::unordered_map<std::string, size_t> n_open_;
    std::unordered_map<std::string, size_t> n_answered_;  // of those in ids_
};

// One body. It repairs in place, in a time that grows with the body's length alone.
class Mender {
public:
    void run(task_response_type type, json & body) {
        if (body.is_object()) {
            switch (type) {
                case TASK_RESPONSE_TYPE_OAI_RESP:  responses(body); break;
                case TASK_RESPONSE_TYPE_ANTHROPIC: anthropic(body); break;
                default:                           chat(body); break;
            }
        }
    }

private:
    // Repairs every item with `mend`, and leaves out those for which it returns false.
    template <typename Mend>
    static void mend_each(json & items, Mend && mend) {
        json kept = json::array();
        for (json & item : items) {
            if (mend(item)) {
                kept.push_back(std::move(item));
            }
        }
        items = std::move(kept);
    }

    // Clients write null for what they do not say.
    void erase_null(json & object, const char * key) {
        if (object.contains(key) && object.at(key).is_null()) {
            object.erase(std::string(key));
        }
    }

    // ---- OpenAI's chats

    void chat(json & body) {
        if (!has_array(body, "messages")) {
            return;
        }
        json & messages = body.at("messages");
        for (json & message : messages) {
            if (message.is_object()) {
                chat_message(message);
            }
        }
        pair_chat_results(messages);
        take_billing_from(messages, "text");
        if (is_missing(body, "continue_final_message")) {
            join_replies(messages, Replies::kTexts);
        }
    }

    void chat_message(json & message) {
        if (text_in(message, "role") == "function") {
            message["role"] = "tool";
        }
        for (const char * key : {"name", "tool_call_id", "reasoning_content"}) {
            erase_null(message, key);
        }
        if (is_assistant(message) && is_missing(message, "tool_calls") && has_object(message, "function_call")) {
            message["tool_calls"] = json::array({json{{"function", message.at("function_call")}}});
            message.erase(std::string("function_call"));
        }
        if (has_array(message, "tool_calls")) {
            for (json & call : message.at("tool_calls")) {
                chat_call(call);
            }
        }
        chat_content(message);
    }

    void chat_content(json & message) {
        if (is_missing(message, "content")) {
            const bool has_calls = has_array(message, "tool_calls") && !message.at("tool_calls").empty();
            const bool is_made   = is_assistant(message) || text_in(message, "role") == "tool";
            if (!has_calls && (is_made || message.contains("content"))) {
                message["content"] = "";
            }
            return;
        }
        json & content = message.at("content");
        if (has_text(content, "text")) {
            content = json::array({content});
        }
        if (content.is_array()) {
            parts(content, "text");
        } else if (!content.is_string()) {
            content = as_text(content);
        }
    }

    // Parts that carry a text become texts of this type; those that say nothing to a model are left out. Others are left
    // as they are, and an empty array becomes an empty text.
    void parts(json & content, const char * type) {
        mend_each(content, [&](json & part) { return part_says(part, type); });
        if (content.empty()) {
            content = "";
        }
    }

    // Repairs a part; false for one that says nothing to a model.
    bool part_says(json & part, const char * type) {
        const std::string kind = text_in(part, "type");
        if (part.is_string()) {
            part = json{{"type", type}, {"text", part}};
        } else if (!part.is_object() || kind == "thinking" || kind == "redacted_thinking") {
            return false;
        } else if (kind == type && !has_text(part, "text")) {
            part["text"] = part.contains("text") ? as_text(part.at("text")) : "";
        } else if (kind != type && has_text(part, "refusal")) {
            part = json{{"type", type}, {"text", part.at("refusal")}};
        } else if (kind != type && has_text(part, "text")) {
            part["type"] = type;
        }
        return true;
    }

    void chat_call(json & call) {
        if (!call.is_object()) {
            return;
        }
        if (has_object(call, "custom")) {
            const json & custom = call.at("custom");
            call["function"] = json{{"name", text_in(custom, "name")}, {"arguments", input_of(custom)}};
            call.erase(std::string("custom"));
        }
        if (!call.contains("function") && has_text(call, "name")) {
            call["function"] = json{{"name", call.at("name")}, {"arguments", call.value("arguments", json())}};
        }
        if (!has_object(call, "function")) {
            return;
        }
        if (text_in(call, "type") != "function") {
            call["type"] = "function";
        }
        erase_null(call, "id");
        if (call.contains("id") && !has_text(call, "id")) {
            call["id"] = as_text(call.at("id"));
        }
        text_fields(call.at("function"), {"name", "arguments"});
    }

    // Calls and results without an id get one, in their order; templates may look for it. A result before any call, which
    // is left of a history that was cut, becomes the user's.
    void pair_chat_results(json & messages) {
        OpenCalls open;
        size_t    n_calls = 0;
        for (json & message : messages) {
            if (is_assistant(message) && has_array(message, "tool_calls")) {
                open = OpenCalls();
                for (json & call : message.at("tool_calls")) {
                    if (call.is_object() && is_missing(call, "id")) {
                        call["id"] = nth_id(n_calls);
                    }
                    open.add(text_in(call, "id"));
                    ++n_calls;
                }
            } else if (text_in(message, "role") == "tool") {
                chat_result(message, open, n_calls > 0);
            }
        }
    }

    void chat_result(json & message, OpenCalls & open, bool has_calls) {
        const std::string * first = open.first();
        if (!has_calls) {
            message["role"] = "user";
        } else if (is_missing(message, "tool_call_id") && first != nullptr) {
            message["tool_call_id"] = *first;
        }
        open.answer(text_in(message, "tool_call_id"));
    }

    // Nine characters: Mistral's templates take no others.
    static std::string nth_id(size_t n) {
        const std::string digits = std::to_string(100'000 + n % 100'000).substr(1);
        return "call" + digits;
    }

    // Makes them texts, JSON of what is none.
    void text_fields(json & object, std::initializer_list<const char *> keys) {
        for (const char * key : keys) {
            if (!has_text(object, key)) {
                object[key] = object.contains(key) ? as_text(object.at(key)) : "";
            }
        }
    }

    static std::string input_of(const json & call) {
        return json{{"input", call.contains("input") ? call.at("input") : json("")}}.dump_safe();
    }

    // How the replies of a chat are put together.
    enum class Replies { kTexts, kBlocks };

    // llama.cpp continues a reply at the end of a chat, but not two of them: those behind the last one with calls become
    // one, and its calls get results.
    void join_replies(json & messages, Replies form) {
        const size_t n     = messages.size();
        size_t       first = n;
        while (first > 0 && is_assistant(messages.at(first - 1)) && (first == n || calls_of(messages.at(first - 1)).empty())) {
            --first;
        }
        const bool follows_calls = first > 0 && first < n && is_assistant(messages.at(first - 1));
        if (n - first < 2 && !follows_calls) {
            return;
        }
        json joined = reply_of(messages, first, form);
        while (messages.size() > first) {
            messages.erase(messages.size() - 1);
        }
        if (follows_calls) {
            add_empty_results(messages, calls_of(messages.back()), form);
        }
        messages.push_back(std::move(joined));
    }

    // The ids of a reply's calls.
    static std::vector<std::string> calls_of(const json & reply) {
        std::vector<std::string> ids;
        if (has_array(reply, "tool_calls")) {
            for (const json & call : reply.at("tool_calls")) {
                ids.push_back(text_in(call, "id"));
            }
        }
        if (has_array(reply, "content")) {
            for (const json & block : reply.at("content")) {
                if (text_in(block, "type") == "tool_use") {
                    ids.push_back(text_in(block, "id"));
                }
            }
        }
        return ids;
    }

    static void add_empty_results(json & messages, const std::vector<std::string> & ids, Replies form) {
        json blocks = json::array();
        for (const std::string & id : ids) {
            if (form == Replies::kTexts) {
                messages.push_back(json{{"role", "tool"}, {"tool_call_id", id}, {"content", ""}});
            } else {
                blocks.push_back(json{{"type", "tool_result"}, {"tool_use_id", id}, {"content", ""}});
            }
        }
        if (form == Replies::kBlocks) {
            messages.push_back(json{{"role", "user"}, {"content", blocks}});
        }
    }

    // The replies from `first` on as one.
    static json reply_of(const json & messages, size_t first, Replies form) {
        json reply = messages.at(first);
        if (messages.size() - first < 2) {
            return reply;
        }
        for (const char * key : {"content", "reasoning_content"}) {
            json joined = joined_field(messages, first, key, form);
            if (!joined.empty()) {
                reply[key] = std::move(joined);
            }
        }
        if (messages.back().contains("tool_calls")) {
            reply["tool_calls"] = messages.back().at("tool_calls");
        }
        return reply;
    }

    static json joined_field(const json & messages, size_t first, const char * key, Replies form) {
        bool has_parts = form == Replies::kBlocks;
        for (size_t i = first; i < messages.size(); ++i) {
            has_parts = has_parts || has_array(messages.at(i), key);
        }
        json        parts = json::array();
        std::string text;
        for (size_t i = first; i < messages.size(); ++i) {
            if (has_parts) {
                parts.insert(as_parts(messages.at(i).value(key, json())));
            } else if (const std::string more = text_in(messages.at(i), key); !more.empty()) {
                text += (text.empty() ? "" : "\n") + more;
            }
        }
        return has_parts ? parts : text.empty() ? json() : json(text);
    }

    static json as_parts(const json & content) {
        if (content.is_array()) {
            return content;
        }
        const std::string text = as_text(content);
        return text.empty() ? json::array() : json::array({json{{"type", "text"}, {"text", text}}});
    }

    // ---- Anthropic's messages

    void anthropic(json & body) {
        if (body.contains("system")) {
            take_billing(body, "system", "text");
        }
        if (!has_array(body, "messages")) {
            return;
        }
        json & messages = body.at("messages");
        for (json & message : messages) {
            if (message.is_object() && message.contains("content")) {
                anthropic_content(message);
            }
        }
        take_billing_from(messages, "text");
        join_replies(messages, Replies::kBlocks);
    }

    void anthropic_content(json & message) {
        if (!has_array(message, "content")) {
            if (!has_text(message, "content")) {
                message["content"] = as_text(message.at("content"));
            }
            return;
        }
        for (json & block : message.at("content")) {
            const std::string kind = text_in(block, "type");
            has_calls_ = has_calls_ || kind == "tool_use";
            if (block.is_string()) {
                block = json{{"type", "text"}, {"text", block}};
            } else if (kind == "text" && !has_text(block, "text")) {
                block["text"] = block.contains("text") ? as_text(block.at("text")) : "";
            } else if (kind == "tool_use") {
                anthropic_input(block);
            } else if (kind == "tool_result" && has_array(block, "content")) {
                parts(block.at("content"), "text");
            } else if (kind == "tool_result" && !is_missing(block, "content") && !has_text(block, "content")) {
                block["content"] = as_text(block.at("content"));
            } else if (kind == "document" && block.contains("source") && has_text(block.at("source"), "data") &&
                       text_in(block.at("source"), "type") == "text") {
                block = json{{"type", "text"}, {"text", block.at("source").at("data")}};
            }
        }
        if (!has_calls_) {
            results_to_texts(message.at("content"));
        }
    }

    // Results before any call become the user's.
    void results_to_texts(json & blocks) {
        json out = json::array();
        for (const json & block : blocks) {
            if (text_in(block, "type") == "tool_result") {
                out.insert(as_parts(block.value("content", json())));
            } else {
                out.push_back(block);
            }
        }
        blocks = out;
    }

    void anthropic_input(json & block) {
        if (is_missing(block, "input")) {
            block["input"] = json::object();
        } else if (!block.at("input").is_object()) {
            const std::string text = mended_arguments(as_text(block.at("input")), false);
            check_json(text);  // it is written out by recursion
            block["input"] = json::parse(text);
        }
    }

    // ---- OpenAI's Responses

    void responses(json & body) {
        if (has_text(body, "instructions")) {
            take_billing(body, "instructions", "input_text");
        }
        if (!has_array(body, "input")) {
            return;
        }
        json & items = body.at("input");
        mend_each(items, [&](json & item) { return !item.is_object() || item_says(item); });
        take_billing_from(items, "input_text");
    }

    // Repairs an item; false for one that says nothing to a model.
    bool item_says(json & item) {
        const std::string kind = text_in(item, "type");
        if (kind == "web_search_call") {
            return false;
        }
        if (kind == "reasoning") {
            return reasoning_says(item);
        }
        if (kind == "custom_tool_call") {
            item["arguments"] = input_of(item);
            item["type"] = "function_call";
        } else if (kind == "custom_tool_call_output") {
            item["type"] = "function_call_output";
        }
        if (kind == "function_call" || kind == "custom_tool_call") {
            has_calls_ = true;
            item_id(item);
            text_fields(item, {"name", "arguments"});
        } else if (kind == "function_call_output" || kind == "custom_tool_call_output") {
            item_id(item);
            if (has_array(item, "output")) {
                parts(item.at("output"), "input_text");
            } else {
                text_fields(item, {"output"});
            }
            if (!has_calls_) {
                item = json{{"role", "user"}, {"content", item.at("output")}};
            }
        } else if (has_text(item, "role")) {
            item_message(item);
        }
        return true;
    }

    void item_id(json & item) {
        if (!has_text(item, "call_id")) {
            item["call_id"] = text_in(item, "id");
        }
    }

    void item_message(json & item) {
        const char * type = is_assistant(item) ? "output_text" : "input_text";
        if (is_assistant(item) && text_in(item, "type") != "message") {
            item["type"] = "message";
        }
        if (has_array(item, "content")) {
            parts(item.at("content"), type);
        } else if (!has_text(item, "content")) {
            item["content"] = item.contains("content") ? as_text(item.at("content")) : "";
        }
    }

    // llama.cpp takes reasoning as its first content alone; what other servers keep to themselves comes without one.
    bool reasoning_says(json & item) {
        if (!has_array(item, "summary")) {
            item["summary"] = json::array();
        }
        if (has_array(item, "content") && !item.at("content").empty() && has_text(item.at("content").front(), "text")) {
            return true;
        }
        std::string text;
        for (const json & part : item.at("summary")) {
            text += (text.empty() ? "" : "\n") + text_in(part, "text");
        }
        if (!text.empty()) {
            item["content"] = json::array({json{{"type", "reasoning_text"}, {"text", text}}});
        }
        return !text.empty();
    }

    // ---- Claude Code's billing line

    void take_billing_from(json & messages, const char * type) {
        if (!messages.empty() && is_system(messages.front()) && messages.front().contains("content") &&
            !take_billing(messages.front(), "content", type)) {
            messages.erase(size_t(0));
        }
    }

    // Takes the line from the start of a text, or of the first part of several; false if there was nothing else. A field
    // that is empty without the line is removed.
    bool take_billing(json & holder, const char * key, const char * type) {
        json & field = holder.at(key);
        if (field.is_array() && !field.empty() && text_in(field.front(), "type") == type) {
            if (!take_billing(field.front(), "text", type)) {
                field.erase(size_t(0));
            }
            return !field.empty();
        }
        const size_t n = field.is_string() ? billing_bytes(field.get<std::string>()) : 0;
        if (n == 0) {
            return true;
        }
        const std::string rest = field.get<std::string>().substr(n);
        if (rest.empty()) {
            holder.erase(std::string(key));
        } else {
            field = rest;
        }
        return !rest.empty();
    }

    bool has_calls_ = false;  // so far
};

}  // namespace

std::string mended_json(std::string text) {
    static const std::string kMark = "\xEF\xBB\xBF";
    if (text.compare(0, kMark.size(), kMark) == 0) {
        text.erase(0, kMark.size());
    }
    for (size_t at = text.find('\\'); at != std::string::npos; at = text.find('\\', at)) {
        const int unit = escaped(text, at);
        if (is_high(unit) && is_low(escaped(text, at + 6))) {
            at += 12;
            continue;
        }
        if (is_high(unit) || is_low(unit)) {
            text.replace(at + 2, 4, "fffd");
        }
        at += unit < 0 ? 2 : 6;
    }
    return text;
}

std::string mended_arguments(const std::string & text, bool takes_text) {
    if (is_blank(text)) {
        return "{}";
    }
    json parsed = json::parse_no_throw(text);
    if (!parsed.is_discarded() && parsed.is_object()) {
        return text;
    }
    const std::string mended = mended_json(text);
    parsed = json::parse_no_throw(mended);
    if (!parsed.is_discarded() && (parsed.is_object() || parsed.is_null())) {
        return parsed.is_null() ? "{}" : mended;
    }
    return takes_text ? text : json{{"arguments", text}}.dump_safe();
}

void mend_history(task_response_type type, json & body) {
    Mender().run(type, body);
}

}  // namespace towerd::wire
