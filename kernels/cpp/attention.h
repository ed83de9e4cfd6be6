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
    const Format *       format;   // of the keys; head_dim is a whole number of its blocks
    const std::int64_t * n_seen;   // for each query, how many keys it sees, from the first on; at least one
    std::size_t          n_heads;  // a multiple of n_kv_heads; head h reads KV head h / (n_heads / n_kv_heads)
    std::size_t          n_kv_heads;
    std::size_t          head_dim;  // at most kHeadDimMax
    float                scale;     // of scores before the softmax
    const float *        sinks;     // for each head, the score of what is beside all keys; null: there is nothing
    const float *        weights;   // for each query, what each of its heads spreads; null: 1
    float *              mass;      // n_kv_heads rows of one for each key
};

constexpr std::size_t kHeadDimMax = 1024;

// Why a call failed.
struct BadAttention {
    enum class What { kQuery, kKey, kScore } what;
    std::size_t row;  // the row that is not finite; unset for a score
};

// Writes for each KV head and key the sum of the softmax weights that the KV head's heads of all queries give it, each times
// the weight of the query. After a failure the contents of `mass` are undefined. The result does not depend on the number of threads.
std::optional<BadAttention> attention_mass(const AttentionMass & job, const Isa & isa, std::size_t n_threads);

}  // namespace towerd
