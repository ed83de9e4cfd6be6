// Whether a head can draft for a model: a head made for another one has llama.cpp read behind its buffers.

#pragma once

#include <string>

#include "common.h"
#include "llama.h"

namespace towerd::wire {

// `head` was loaded from the file at `path`, and is to draft for `model`. Throws std::runtime_error that says what does not
// fit.
void check_head(const llama_model * head, const std::string & path, const llama_model * model, const std::string & model_path,
                common_speculative_type type);

// The kind of head that a file holds, by its architecture; NONE: no head, or one of a model that may draft by itself.
common_speculative_type head_type_of(const std::string & path);

}  // namespace towerd::wire
