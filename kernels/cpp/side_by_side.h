// Reads coded texts on several cores: each thread evaluates its model for some of the texts, while one mixer takes
// their tokens in an order that does not depend on the number of threads: a token of each text in turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lm.h"
#include "mix.h"
#include "range_coder.h"

namespace towerd {

struct CodedText {
    RangeDecoder *            bits;
    std::size_t               n_tokens;
    std::vector<std::int32_t> ranks;  // decoded
};

// Text i is lane i of the mixer. Each model, which has read nothing, is for one thread, and the caller is the first.
// order [n_tokens]: the token of each rank; first: the token that all texts start with. Of tokens beyond a model's own
// it reads `instead`, and each of them counts 1. Returns what is wrong, or nullptr.
const char * read_side_by_side(const std::vector<Lm *> & models, Mixer & mixer, std::vector<CodedText> & texts,
                               const std::int64_t * order, std::int32_t first, std::int32_t instead);

}  // namespace towerd
