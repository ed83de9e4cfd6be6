#include "bounds.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "refused.h"

namespace towerd::wire {

namespace {

std::string over(const char * what, size_t max, const char * unit) {
    return std::string(what) + " has more than " + std::to_string(max) + " " + unit;
}

void at_most(size_t n, size_t max, const char * field, const char * unit) {
    if (n > max) {
        refuse(std::string("Field '") + field + "': at most " + std::to_string(max) + " " + unit + " are allowed");
    }
}

// Reads a body's brackets, keys and commas, and nothing else of it.
class JsonScan {
public:
    explicit JsonScan(const std::string & text) : text_(text) {}

    void run() {
        for (at_ = 0; at_ < text_.size(); ++at_) {
            symbol(text_[at_]);
            if (values_ > bounds::kValuesMax) {
                refuse(over("JSON of the request", bounds::kValuesMax, "values"));
            }
        }
    }

    // Where the body's object of more biases than other objects may have begins and ends; two zeros: it has none.
    std::pair<size_t, size_t> biases() const { return biases_; }

private:
    struct Open {
        size_t start;
        size_t n_keys;
        bool   is_biases;
    };

    void symbol(char c) {
        switch (c) {
            case '"': string(); break;
            case '{':
            case '[': open(c); break;
            case '}':
            case ']': close(); break;
            case ':': key(); break;
            case ',': ++values_; break;
            default: break;
        }
    }

    void string() {
        string_ = at_;
        for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
            at_ += text_[at_] == '\\' ? 1 : 0;
        }
    }

    void open(char c) {
        open_.push_back({at_, 0, c == '{' && open_.size() == 1 && names_biases_});
        names_biases_ = false;
        ++values_;
        if (open_.size() > bounds::kDepthMax) {
            refuse(over("JSON of the request", bounds::kDepthMax, "levels"));
        }
    }

    void close() {
        if (!open_.empty()) {
            if (open_.back().is_biases && open_.back().n_keys > bounds::kKeysMax) {
                biases_ = {open_.back().start, at_ + 1};
            }
            open_.pop_back();
        }
    }

    void key() {
        static const std::string kBiases = "\"logit_bias\"";
        names_biases_ = text_.compare(string_, kBiases.size(), kBiases) == 0;
        if (open_.empty()) {
            return;
        }
        const size_t max = open_.back().is_biases ? bounds::kBiasesMax : bounds::kKeysMax;
        if (++open_.back().n_keys > max) {
            refuse(over("An object of the request", max, "keys"));
        }
    }

    const std::string &       text_;
    size_t                    at_     = 0;
    size_t                    string_ = 0;  // where the last one begins
    size_t                    values_ = 1;
    bool                      names_biases_ = false;
    std::vector<Open>         open_;
    std::pair<size_t, size_t> biases_{0, 0};
};

// The text of an object as that of an array of [key, value].
std::string pairs_text(const std::string & text) {
    std::string out;
    size_t      depth   = 0;
    bool        is_pair = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char   c     = text[i];
        const size_t start = i;
        if (depth == 1 && !is_pair && c != '}' && !std::isspace(static_cast<unsigned char>(c))) {
            out += '[';
            is_pair = true;
        }
        if (c == '"') {
            while (text.at(++i) != '"') {
                i += text[i] == '\\' ? 1 : 0;
            }
            out += text.substr(start, i + 1 - start);
        } else if (c == '{' || c == '[') {
            out += depth++ == 0 ? '[' : c;
        } else if (c == '}' || c == ']') {
            out += --depth > 0 ? std::string(1, c) : is_pair ? "]]" : "]";
        } else if (c == ',' && depth == 1) {
            out += "],";
            is_pair = false;
        } else {
            out += c == ':' && depth == 1 ? ',' : c;
        }
    }
    return out;
}

// A key is a token's number or text, as where llama.cpp reads the object.
json as_pairs(const std::string & text) {
    json out = json::parse(pairs_text(text));
    for (json & pair : out) {
        if (pair.size() != 2 || !pair.at(size_t(0)).is_string()) {
            refuse("Field 'logit_bias': not an object");
        }
        const std::string key = pair.at(size_t(0)).get<std::string>();
        char *            end = nullptr;
        const long        id  = std::strtol(key.c_str(), &end, 10);
        if (*end == '\0') {
            pair.at(size_t(0)) = json(static_cast<int64_t>(id));
        }
    }
    return out;
}

}  // namespace

void check_json(const std::string & text) {
    JsonScan(text).run();
}

json parsed_body(const std::string & text) {
    JsonScan scan(text);
    scan.run();
    const auto [start, end] = scan.biases();
    if (end == 0) {
        return json::parse(text);
    }
    json body          = json::parse(text.substr(0, start) + "null" + text.substr(end));
    body["logit_bias"] = as_pairs(text.substr(start, end - start));
    return body;
}

namespace {

void check_triggers(const std::vector<common_grammar_trigger> & triggers, bool is_chat) {
    at_most(triggers.size(), bounds::kTriggersMax, "grammar_triggers", "triggers");
    for (const auto & trigger : triggers) {
        at_most(trigger.value.size(), bounds::kTriggerBytesMax, "grammar_triggers", "bytes");
        const bool is_word = trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN ||
                             trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD;
        const bool is_pattern = trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN ||
                                trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL;
        // A template's patterns are known; a client's could take forever to match.
        if (!is_word && !(is_pattern && is_chat)) {
            refuse("Field 'grammar_triggers': only words and tokens are allowed");
        }
    }
}

void within(float value, const char * field, float low = -bounds::kNumberMax) {
    if (!(value >= low && value <= bounds::kNumberMax)) {
        refuse(std::string("Field '") + field + "': must be between " + std::to_string(static_cast<int>(low)) + " and " +
               std::to_string(static_cast<int>(bounds::kNumberMax)));
    }
}

// A dynamic temperature that comes near zero makes logits overflow.
void raise_lowest(common_params_sampling & sampling) {
    const float highest = sampling.temp + sampling.dynatemp_range;
    const float lowest  = bounds::kDynamicMin * std::max(1.0f, highest);
    if (sampling.dynatemp_range <= 0.0f || sampling.temp - sampling.dynatemp_range >= lowest) {
        return;
    }
    const bool is_greedy    = highest <= lowest;
    sampling.temp           = is_greedy ? 0.0f : (highest + lowest) / 2.0f;
    sampling.dynatemp_range = is_greedy ? 0.0f : (highest - lowest) / 2.0f;
}

// llama.cpp sorts by logits and probabilities: they have to stay numbers.
void check_numbers(common_params_sampling & sampling) {
    within(sampling.temp, "temperature");
    within(sampling.dynatemp_range, "dynatemp_range");
    within(sampling.dynatemp_exponent, "dynatemp_exponent", 0.0f);
    within(sampling.top_n_sigma, "top_n_sigma");
    within(sampling.typ_p, "typical_p");
    within(sampling.penalty_repeat, "repeat_penalty");
    within(sampling.penalty_freq, "frequency_penalty");
    within(sampling.penalty_present, "presence_penalty");
    within(sampling.dry_multiplier, "dry_multiplier", 0.0f);
    within(sampling.dry_base, "dry_base");
    within(sampling.mirostat_tau, "mirostat_tau");
    within(sampling.mirostat_eta, "mirostat_eta");
    for (const auto & bias : sampling.logit_bias) {
        if (bias.bias != -INFINITY) {
            within(bias.bias, "logit_bias");
        }
    }
    if (sampling.temp < bounds::kTemperatureMin) {
        sampling.temp = 0.0f;
    }
    raise_lowest(sampling);
    const auto & order       = sampling.samplers;
    const auto   temperature = std::find(order.begin(), order.end(), COMMON_SAMPLER_TYPE_TEMPERATURE);
    if (sampling.dynatemp_range > 0.0f && sampling.typ_p < 1.0f &&
        std::find(temperature, order.end(), COMMON_SAMPLER_TYPE_TYPICAL_P) != order.end()) {
        refuse("Field 'samplers': typ_p cannot follow a dynamic temperature");
    }
}

}  // namespace

void check_params(task_params & params, int n_ctx, bool is_chat) {
    auto & sampling = params.sampling;
    size_t stop_bytes = 0;
    for (const auto & word : params.antiprompt) {
        stop_bytes += word.size();
    }
    at_most(params.antiprompt.size(), bounds::kStopsMax, "stop", "strings");
    at_most(stop_bytes, bounds::kStopBytesMax, "stop", "bytes");
    at_most(params.response_fields.size(), bounds::kFieldsMax, "response_fields", "fields");
    at_most(sampling.samplers.size(), bounds::kSamplersMax, "samplers", "samplers");
    at_most(sampling.dry_sequence_breakers.size(), bounds::kBreakersMax, "dry_sequence_breakers", "strings");
    at_most(sampling.logit_bias.size(), bounds::kBiasesMax, "logit_bias", "tokens");
    at_most(sampling.reasoning_budget_end.size(), bounds::kEndTagsMax, "reasoning_budget_end_tags", "strings");
    at_most(std::max(0, sampling.n_probs), bounds::kProbsMax, "n_probs", "probabilities");
    check_triggers(sampling.grammar_triggers, is_chat);
    check_numbers(sampling);
    sampling.penalty_last_n     = std::min(sampling.penalty_last_n, n_ctx);
    sampling.dry_penalty_last_n = std::min(sampling.dry_penalty_last_n, n_ctx);
}

}  // namespace towerd::wire
