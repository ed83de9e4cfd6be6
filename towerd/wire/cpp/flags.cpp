#include "flags.h"

#include <algorithm>
#include <stdexcept>

#include "arg.h"
#include "log.h"
#include "refused.h"

namespace towerd::wire {

// What follows the flag in the error for its value; said: by llama.cpp's handler.
static std::string reason_of(const std::string & said) {
    if (said.rfind("sto", 0) == 0) {  // of text that is no number the C++ library says "stoi"
        return " does not take this value";
    }
    if (said.rfind("[json.", 0) == 0) {  // "[json.exception.parse_error.101] parse error at line 1, column 1: ..."
        return " takes JSON: " + said.substr(std::min(said.size(), said.find("] ") + 2));
    }
    return ": " + said;
}

static bool is_among(const std::vector<const char *> & names, const std::string & word) {
    return std::find(names.begin(), names.end(), word) != names.end();
}

// Throws std::runtime_error for a word that is no flag.
static const common_arg * option_of(const common_params_context & parser, const std::string & word) {
    const auto option = std::find_if(parser.options.begin(), parser.options.end(), [&](const auto & one) {
        return is_among(one.args, word) || is_among(one.args_neg, word);
    });
    if (option == parser.options.end()) {
        throw std::runtime_error("llama.cpp does not know the flag " + word);
    }
    return &*option;
}

std::vector<ServerFlag> server_flags() {
    const AbortGuard        guard;
    common_params           params;
    const auto              parser = common_params_parser_init(params, LLAMA_EXAMPLE_SERVER, nullptr);
    std::vector<ServerFlag> flags;
    for (const auto & one : parser.options) {
        const int n_values = one.value_hint_2 ? 2 : one.value_hint ? 1 : 0;
        for (const auto & names : {one.args, one.args_neg}) {
            if (!names.empty()) {
                flags.push_back({{names.begin(), names.end()}, n_values});
            }
        }
    }
    return flags;
}

std::string number_of(const std::string & name) {
    const AbortGuard guard;
    common_params    params;
    const auto       parser = common_params_parser_init(params, LLAMA_EXAMPLE_SERVER, nullptr);
    const auto *     option = option_of(parser, name);
    if (option->handler_int) {
        return "int";
    }
    if (option->handler_string) {
        common_log_set_verbosity_thold(-1);  // handlers say what is wrong with a word
        try {  // what the C++ library says of text that is no number is the function's name: "stof"
            option->handler_string(params, "hot");
        } catch (const std::exception & error) {
            const std::string said = error.what();
            return said.rfind("sto", 0) ? "" : said == "stof" || said == "stod" ? "float" : "int";
        }
    }
    return "";
}

void take_flags(common_params & params, const std::vector<std::string> & words) {
    const int n_parallel = params.n_parallel;
    auto      parser     = common_params_parser_init(params, LLAMA_EXAMPLE_SERVER, nullptr);
    params.n_parallel    = n_parallel;
    if (std::find(words.begin(), words.end(), "--dry-sequence-breaker") != words.end()) {
        params.sampling.dry_sequence_breakers.clear();  // llama.cpp's handler does so for the first model of a process alone
    }
    for (size_t i = 0; i < words.size(); ++i) {
        const std::string & word = words[i];
        const common_arg *  option = option_of(parser, word);
        try {
            if (option->handler_void) {
                option->handler_void(params);
            } else if (option->handler_bool) {
                option->handler_bool(params, is_among(option->args, word));
            } else if (option->handler_int) {
                option->handler_int(params, std::stoi(words.at(++i)));
            } else if (option->handler_string) {
                option->handler_string(params, words.at(++i));
            }
        } catch (const std::exception & error) {
            throw std::runtime_error(word + reason_of(error.what()));
        }
    }
    if (params.escape) {
        std::for_each(params.antiprompt.begin(), params.antiprompt.end(), string_process_escapes);
        auto & breakers = params.sampling.dry_sequence_breakers;
        std::for_each(breakers.begin(), breakers.end(), string_process_escapes);
    }
    common_log_set_verbosity_thold(-1);  // --verbose is for replies
}

LoadFlags::LoadFlags(const std::vector<std::string> & words) {
    const AbortGuard guard;
    take_flags(params_, words);
    if (!params_.kv_overrides.empty()) {  // both lists end with an empty entry
        params_.kv_overrides.emplace_back();
        params_.kv_overrides.back().key[0] = 0;
    }
    if (!params_.tensor_buft_overrides.empty()) {
        params_.tensor_buft_overrides.push_back({nullptr, nullptr});
    }
}

void LoadFlags::apply(llama_model_params & params) const {
    auto                     given = params_;  // llama.cpp's function takes what it may not keep
    const llama_model_params from  = common_model_params_to_llama(given);

    params.devices               = params_.devices.empty() ? nullptr : const_cast<ggml_backend_dev_t *>(params_.devices.data());
    params.kv_overrides          = params_.kv_overrides.empty() ? nullptr : params_.kv_overrides.data();
    params.tensor_buft_overrides = params_.tensor_buft_overrides.empty() ? nullptr : params_.tensor_buft_overrides.data();
    params.tensor_split          = params_.tensor_split;
    params.split_mode            = from.split_mode;
    params.main_gpu              = from.main_gpu;
    params.lazy_mode             = from.lazy_mode;
    params.check_tensors         = from.check_tensors;
    params.use_extra_bufts       = from.use_extra_bufts;
    params.no_host               = from.no_host;
}

void LoadFlags::apply(llama_context_params & params) const {
    const llama_context_params from = common_context_params_to_llama(params_);

    params.rope_scaling_type = from.rope_scaling_type;
    params.rope_freq_scale   = from.rope_freq_scale;
    params.yarn_ext_factor   = from.yarn_ext_factor;
    params.yarn_attn_factor  = from.yarn_attn_factor;
    params.yarn_beta_fast    = from.yarn_beta_fast;
    params.yarn_beta_slow    = from.yarn_beta_slow;
    params.yarn_orig_ctx     = from.yarn_orig_ctx;
    params.offload_kqv       = params.offload_kqv && from.offload_kqv;
    params.op_offload        = from.op_offload;
}

}  // namespace towerd::wire
