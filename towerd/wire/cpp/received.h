// One event of the stream of a llama-server's POST /completion, as a part of a reply.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reply.h"

namespace towerd::wire {

// How far the evaluation of the prompt is.
struct PromptProgress {
    int32_t total     = 0;
    int32_t cached    = 0;
    int32_t processed = 0;
    int64_t time_ms   = 0;
};

struct Received {
    std::optional<PromptProgress> progress;
    std::optional<Chunk>          chunk;
    llama_tokens                  ids;  // of the reply, known since this event
    bool                          is_last = false;
};

}  // namespace towerd::wire
