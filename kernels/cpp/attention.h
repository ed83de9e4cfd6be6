// Attention mass: how much attention each cached key gets from some queries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "isa.h"
#include "rows.h"

namespace towerd {

struct AttentionMass {
    Rows                 queries;  // of f32, aligned to 4 bytes: n_heads * head_dim numbers
    Rows                 keys;     // n_kv_heads * head_dim elements
    const Format *       format;   // of the keys, not quantized
    const std::int64_t * n_seen;   // of each query: the first so many keys, at least one
    std::size_t          n_heads;  // a multiple of n_kv_heads; head h reads KV head h / (n_heads / n_kv_heads)
    std::size_t          n_kv_heads;
    std::size_t          head_dim;  // at most kHeadDimMax
    float                scale;     // of scores before the softmax
    float *              mass;      // one for each key
};

constexpr std::size_t kHeadDimMax = 1024;

// Why there are no masses.
struct BadAttention {
    enum class What { kQuery, kKey, kScore } what;
    std::size_t row;  // that is not finite; nothing for a score
};

// Writes to each key the softmax weights that all heads of all queries give it, added up. After a failure what
// is in `mass` is not to be read. The result does not depend on the number of threads.
std::optional<BadAttention> attention_mass(const AttentionMass & job, const Isa & isa, std::size_t n_threads);

}  // namespace towerd
