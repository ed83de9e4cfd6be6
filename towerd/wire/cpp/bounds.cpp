#include "bounds.h"

#include <algorithm>
#include <cmath>
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

}  // namespace

void check_json(const std::string & text) {
    std::vector<size_t> keys;  // of each open object or array
    size_t              values    = 1;
    bool                in_string = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (in_string) {
            if (c == '\\') {
                ++i;
            } else if (c == '"') {
                in_string = false;
            }
            continue;
        }
        switch (c) {
            case '"': in_string = true; break;
            case '{':
            case '[':
                keys.push_back(0);
                ++values;
                if (keys.size() > bounds::kDepthMax) {
                    refuse(over("JSON of the request", bounds::kDepthMax, "levels"));
                }
                break;
            case '}':
            case ']':
                if (!keys.empty()) {
                    keys.pop_back();
                }
                break;
            case ':':
                if (!keys.empty() && ++keys.back() > bounds::kKeysMax) {
                    refuse(over("An object of the request", bounds::kKeysMax, "keys"));
                }
                break;
            case ',': ++values; break;
            default: break;
        }
        if (values > bounds::kValuesMax) {
            refuse(over("JSON of the request", bounds::kValuesMax, "values"));
        }
    }
}

void check_tool_arguments(const json & messages) {
    if (!messages.is_array()) {
        return;
    }
    for (const auto & message : messages) {
        if (!message.is_object() || !message.contains("tool_calls") || !message.at("tool_calls").is_array()) {
            continue;
        }
        for (const auto & call : message.at("tool_calls")) {
            if (!call.is_object() || !call.contains("function")) {
                continue;
            }
            const json & function = call.at("function");
            if (function.is_object() && function.contains("arguments") && function.at("arguments").is_string()) {
                check_json(function.at("arguments").get<std::string>());
            }
        }
    }
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
