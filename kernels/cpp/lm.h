// A small language model of the llama architecture: what comes next in several texts, to the same bits on every
// machine and with any number of threads. The contract is in lab/reference/lm.py; both must agree to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "isa.h"

namespace towerd {

constexpr std::size_t kLmLanesMax = 256;
constexpr std::size_t kLmGroupMax = 64;  // heads that share a KV head

struct LmShape {
    std::size_t n_vocab, n_embd, n_layer, n_head, n_head_kv, head_dim, n_ff, n_ctx, n_keep;
    float       norm_eps;
};

std::size_t lm_panel_bytes(LmFormat format, std::size_t columns);

struct LmMatrix {
    const std::uint8_t * panels;
    LmFormat             format;
    std::size_t          rows, columns;

    std::size_t panel_bytes() const { return lm_panel_bytes(format, columns); }
    std::size_t n_panels() const { return (rows + kLmRows - 1) / kLmRows; }
};

struct LmLayer {
    const float * attention_norm;  // norms have zeros up to a multiple of 16
    const float * ffn_norm;
    LmMatrix      query, key, value, output, gate, up, down;
};

struct LmModel {
    LmShape              shape;
    LmMatrix             embedding, output;
    std::vector<LmLayer> layers;
    const float *        output_norm;
    const float *        cos;  // [n_ctx][n_rot / 2]
    const float *        sin;
    std::size_t          n_rot;
};

class Lm {
public:
    // Everything that the arguments point to must outlive the model.
    Lm(const Isa & isa, LmModel model);
    ~Lm();
    Lm(const Lm &) = delete;
    Lm & operator=(const Lm &) = delete;

    const LmShape & shape() const { return model_.shape; }

    // Forgets all texts.
    void reset();

    // Appends a token to a lane for each of the `n` pairs, which are in order of lane; a lane that is full is cut to its
    // last n_keep tokens, which are evaluated again. logits: [n][n_vocab]. False if a number exceeds the range
    // of a float, after which only `reset` may be called.
    bool step(const std::int32_t * lanes, const std::int32_t * tokens, std::size_t n, float * logits,
              std::size_t n_threads);

    // counts[i] = 1 + 2^24 e^(logits[i] - the highest), rounded down. False unless all of `n`, at least one, are finite.
    bool count(const float * logits, std::size_t n, std::uint32_t * counts) const;

private:
    struct Lane;
    struct Item;
    class Work;

    std::vector<Item> placed(const std::int32_t * lanes, const std::int32_t * tokens, std::size_t n, float * logits);

    const Isa &                        isa_;
    const LmModel                      model_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::vector<std::unique_ptr<Work>> works_;  // of the threads
};

}  // namespace towerd
