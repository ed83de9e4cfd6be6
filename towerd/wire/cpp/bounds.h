// Limits on what a request may ask of llama.cpp's code, which trusts its input: beyond them it would recurse, allocate
// or search without end.

#pragma once

#include <cstddef>
#include <string>

#include "server-common.h"
#include "server-task.h"

namespace towerd::wire {

namespace bounds {

// A body, and JSON inside one.
constexpr size_t kDepthMax  = 200;        // levels of nesting
constexpr size_t kKeysMax   = 4'000;      // of one object, whose keys are looked up one after another
constexpr size_t kValuesMax = 4'000'000;

// Fields.
constexpr size_t kPromptsMax      = 1'024;
constexpr size_t kMessagesMax     = 65'536;  // rendering one takes some 60 us
constexpr size_t kCountedBytesMax = 1u << 20;  // text that is tokenized even if it cannot fit, to say how long it is
constexpr size_t kProbsMax        = 1'024;
constexpr size_t kStopsMax        = 1'024;
constexpr size_t kStopBytesMax    = 32'768;
constexpr size_t kSamplersMax     = 64;
constexpr size_t kBreakersMax     = 64;
constexpr size_t kBiasesMax       = 131'072;  // each is applied at every token
constexpr size_t kEndTagsMax      = 64;       // each is compared with every other
constexpr size_t kFieldsMax       = 64;   // response_fields, each a copy of the reply
constexpr size_t kDelimitersMax   = 64;
constexpr size_t kTriggersMax     = 64;
constexpr size_t kTriggerBytesMax = 1'024;  // each becomes a regular expression, compiled by recursion
constexpr float  kNumberMax       = 1e9f;   // of sampling: greater ones lead to results that are not finite
constexpr float  kTemperatureMin  = 1e-6f;  // lower ones sample greedily
constexpr float  kDynamicMin      = 1e-5f;  // lowest of a dynamic temperature, and part of its highest
constexpr size_t kKeptBytesMax    = 65'536;  // of a field that towerd reads itself, on the event loop
constexpr size_t kMediaBytesMax   = 1u << 30;  // all media of a prompt, decoded

// A picture, decoded to three bytes a pixel; no camera's file takes less than a byte for so many bytes of it.
constexpr size_t kPictureBytesMax     = 384u << 20;
constexpr size_t kPictureBytesPerByte = 8192;
constexpr size_t kPictureBytesFree    = 1u << 20;

// A JSON schema, as it is written out.
constexpr size_t kSchemaNodesMax        = 20'000;
constexpr size_t kSchemaRefsMax         = 1'000;
constexpr size_t kSchemaOptionalMax     = 200;  // optional properties of one object, taken in every combination
constexpr size_t kSchemaNameBytesMax    = 1'024;  // property names on the way to a value
constexpr size_t kSchemaPatternBytesMax = 4'096;
constexpr int    kSchemaPatternDepthMax = 100;  // llama.cpp's own: it prints deeper ones and takes any text for them
constexpr size_t kSchemaStepsMax        = 1'000'000;  // ways through alternatives and references
constexpr size_t kToolNodesMax          = 200'000;    // all tools together

// A grammar.
constexpr size_t kGrammarBytesMax    = 8'000'000;
constexpr size_t kGrammarNestingMax  = 1'000;
constexpr size_t kGrammarElementsMax = 4'000'000;  // repetitions written out
constexpr size_t kGrammarRepeatMax   = 2'000;      // llama.cpp's own: a larger maximum means none
constexpr size_t kLeftDepthMax       = 2'000;      // of leftmost references, followed by recursion
constexpr size_t kLeftWaysMax        = 10'000;     // to begin a rule, each compared with every other and every token

// Generated text that is parsed for tool calls, by recursion.
constexpr size_t kOutputDepthMax = 500;

}  // namespace bounds

// Each of these raises Refused.
void check_json(const std::string & text);
// A body, after check_json: as JSON, but with many biases as an array of [token, bias]. An object's keys are looked up one
// after another, and every token may be one.
json parsed_body(const std::string & text);
void check_schema(const json & schema);
void check_tools(const json & tools);
void check_grammar(const std::string & text, const llama_vocab * vocab);
// Also shortens windows of history to the context, beyond which there is none.
void check_params(task_params & params, int n_ctx, bool is_chat);

}  // namespace towerd::wire
