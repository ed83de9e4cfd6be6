// Bodies of requests for the fuzzer: real ones, and what is put into them.

#pragma once

#include <string>
#include <vector>

struct Body {
    const char * endpoint;
    const char * text;
};

const std::vector<Body> kBodies = {
    {"completion", R"({"prompt": "Once upon a time", "n_predict": 4, "temperature": 0.7, "seed": 3})"},
    {"completion", R"({"prompt": ["a", [1, 403, "b"]], "n": 2, "n_predict": 3, "n_probs": 2, "stop": ["x", "girl"], "stream": true})"},
    {"completion", R"({"prompt": "a", "grammar": "root ::= (\"a\" | [b-d]{2,3} w)* \"end\"?\nw ::= [^x]+ # c\n", "n_predict": 6})"},
    {"completion", R"({"prompt": "a", "n_predict": 8, "json_schema": {"type": "object", "properties": {"a": {"type": "integer",
        "minimum": 3, "maximum": 4000}, "b": {"type": ["string", "null"], "pattern": "^[a-c]{2,3}(x|y)?$"}, "c": {"enum": [1, "x"]},
        "d": {"$ref": "#/$defs/d"}}, "required": ["a"], "additionalProperties": {"type": "number"}, "$defs": {"d": {"allOf":
        [{"$ref": "#/$defs/e"}, {"anyOf": [{"properties": {"q": {}}}]}]}, "e": {"type": "array", "items": {"$ref": "#/$defs/d"},
        "minItems": 1, "maxItems": 3}}}})"},
    {"completion", R"({"prompt": "a b a b a b", "n_predict": 6, "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc",
        "temperature", "penalties", "top_n_sigma", "infill", "adaptive_p"], "dry_multiplier": 1, "typical_p": 0.5, "xtc_probability": 0.5,
        "repeat_penalty": 1.2, "dynatemp_range": 0.3, "mirostat": 0, "logit_bias": [[5, -1], ["the", false]], "min_keep": 2,
        "dry_sequence_breakers": ["\n", "a"], "post_sampling_probs": true, "n_probs": 4})"},
    {"completion", R"({"prompt": "a", "grammar": "root ::= \"x\"", "grammar_lazy": true, "grammar_triggers": [{"type": 1, "value": "the"},
        {"type": 0, "value": "a", "token": 5}], "preserved_tokens": ["the"], "reasoning_budget_tokens": 2, "reasoning_budget_start_tag":
        "a", "reasoning_budget_end_tags": ["b", "the"], "reasoning_budget_message": "c", "n_predict": 6, "generation_prompt": "a"})"},
    {"completions", R"({"prompt": "Once", "max_tokens": 5, "logprobs": 2, "echo": false, "stream": true, "stream_options":
        {"include_usage": true}, "response_fields": ["content", "a/b"], "timings_per_token": true, "verbose": true})"},
    {"infill", R"({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}], "prompt": "e", "n_predict": 3})"},
    {"chat", R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hm", "reasoning_content": "Why"}, {"role": "user", "content": "Well?"}], "max_tokens": 4,
        "stream": true, "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "low", "thinking_budget_tokens": 2})"},
    {"chat", R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type":
        "function", "function": {"name": "f", "arguments": "{\"a\": [1, {}]}"}}]}, {"role": "tool", "tool_call_id": "c1", "name": "f",
        "content": "y"}], "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": {"type": "string", "enum": ["p", "q"]}}, "required":
        ["b"]}}}], "tool_choice": "required", "parallel_tool_calls": true, "max_tokens": 6, "stream": true})"},
    {"chat", R"({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema": {"schema":
        {"type": "object", "properties": {"z": {"const": {"k": [1, null]}}, "t": {"type": "string", "format": "date-time"}}}}},
        "logprobs": true, "top_logprobs": 2, "max_tokens": 6})"},
    {"chat", R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "begun"}], "continue_final_message":
        "content", "add_generation_prompt": false, "max_tokens": 3, "reasoning_format": "none", "n": 2})"},
    {"responses", R"({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "reasoning", "content":
        [{"type": "reasoning_text", "text": "r"}], "summary": []}, {"type": "function_call", "call_id": "c", "name": "f", "arguments":
        "{}"}, {"type": "function_call_output", "call_id": "c", "output": "y"}, {"type": "message", "role": "assistant", "content":
        [{"type": "output_text", "text": "z"}]}], "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "max_output_tokens": 4, "stream": true})"},
    {"messages", R"({"system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "x"}, {"role": "assistant",
        "content": [{"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}]}, {"role":
        "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "r"}]}]}], "tools":
        [{"name": "f", "description": "d", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}, "max_tokens": 4,
        "stop_sequences": ["q"], "thinking": {"type": "enabled", "budget_tokens": 3}, "stream": true})"},
    {"embeddings", R"({"input": ["a", [1, 2], {"prompt_string": "b"}], "encoding_format": "base64", "embd_normalize": 1, "model": "m"})"},
    {"rerank", R"({"query": "q", "documents": ["a", "b"], "top_n": 1, "return_text": true})"},
};

// JSON values that stand in for others.
const std::vector<const char *> kValues = {
    "null", "true", "false", "0", "-1", "1", "2", "3.5", "-0.0", "1e-40", "1e39", "1e308", "-1e308", "2147483647", "-2147483648",
    "4294967295", "9223372036854775807", "-9223372036854775808", "18446744073709551615", "20000000000000000", "[]", "{}", "[[]]", "[{}]",
    "[null]", "[[[[[[[[1]]]]]]]]", "{\"a\":{\"a\":{\"a\":{}}}}", "\"\"", "\" \"", "\"a\"", "\"\\u0000\"", "\"\\ud83d\\ude00\"",
    "\"<tool_call>\"", "\"</think>\"", "\"<s></s><unk>\"", "\"root ::= root\"", "\"root ::= a\\na ::= b a \\\"x\\\" | \\\"y\\\"\\nb ::= \\\"\\\"\"",
    "\"root ::= ((\\\"a\\\"*)*)* \\\"b\\\"{0,7}\"", "\"root ::= [^\\\\x00-\\\\xFF]\"", "\"root ::= <[5]> !<[5]> .\"", "\"%llguidance {}\"",
    "\"^(((a|b)*)+){2,9}$\"", "\"^a{9,2}$\"", "\"^[$\"", "\"#/$defs/d\"", "\"#/\"", "\"object\"", "\"array\"", "\"string\"", "\"integer\"",
    "[\"object\", \"object\"]", "[\"top_k\", \"temperature\"]", "{\"type\": \"array\", \"minItems\": 4, \"maxItems\": 2}",
    "{\"type\": \"integer\", \"minimum\": 7, \"maximum\": -7}", "{\"$ref\": \"#/json_schema\"}", "{\"$ref\": \"#\"}",
    "{\"type\": 2, \"value\": \"(a*)*b\"}", "[[0, 1e30], [1, false], [2, true], [9999, 1]]", "\"user\"", "\"assistant\"", "\"tool\"",
    "\"developer\"", "{\"role\": \"user\", \"content\": \"x\"}", "{\"role\": \"tool\", \"content\": \"x\"}",
    "{\"type\": \"image_url\", \"image_url\": {\"url\": \"http://127.0.0.1:9/x\"}}", "\"data:image/png;base64,AAAA\"",
};

// Fields that a body may get.
const std::vector<const char *> kKeys = {
    "prompt", "messages", "input", "tools", "tool_choice", "parallel_tool_calls", "json_schema", "grammar", "grammar_lazy",
    "grammar_triggers", "grammar_type", "preserved_tokens", "generation_prompt", "chat_format", "chat_parser", "parse_tool_calls",
    "response_format", "stop", "stream", "stream_options", "n", "n_cmpl", "n_predict", "max_tokens", "n_keep", "n_discard", "n_indent",
    "t_max_predict_ms", "n_probs", "logprobs", "top_logprobs", "post_sampling_probs", "min_keep", "samplers", "seed", "temperature",
    "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p",
    "repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
    "logit_bias", "ignore_eos", "backend_sampling", "lora", "id_slot", "cache_prompt", "return_tokens", "return_progress",
    "timings_per_token", "verbose", "response_fields", "reasoning_format", "reasoning_effort", "reasoning_control",
    "reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget_start_tag", "reasoning_budget_end_tag",
    "reasoning_budget_end_tags", "reasoning_budget_message", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "message_delimiters", "echo", "sse_ping_interval", "retention", "role", "content", "type", "text", "name", "arguments", "function",
    "tool_calls", "tool_call_id", "id", "reasoning_content", "properties", "required", "additionalProperties", "items", "prefixItems",
    "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "format",
    "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "a", "b", "",
};
