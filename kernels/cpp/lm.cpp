#include "lm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "parallel.h"
#include "plain_floats.h"

namespace towerd {

namespace {

constexpr std::size_t kGroup = 16;  // tokens for which the weights are read once
constexpr std::size_t kAlign = 64 / sizeof(float);

std::size_t padded(std::size_t n) { return (n + kLmRows - 1) / kLmRows * kLmRows; }

// Zeroed floats aligned to 64 bytes; pages that are never written take no memory.
class ZeroedFloats {
public:
    explicit ZeroedFloats(std::size_t n)
        : memory_(static_cast<float *>(std::calloc(n + kAlign, sizeof(float))), &std::free) {
        if (memory_ == nullptr) {
            throw std::bad_alloc();
        }
        const auto at = reinterpret_cast<std::uintptr_t>(memory_.get());
        data_ = memory_.get() + (kAlign - at / sizeof(float) % kAlign) % kAlign;
    }

    float * at(std::size_t i) const { return data_ + i; }

private:
    std::unique_ptr<float, void (*)(void *)> memory_;
    float *                                  data_;
};

}  // namespace

std::size_t lm_panel_bytes(LmFormat format, std::size_t columns) {
    switch (format) {
        case kLmF32: return columns * kLmRows * sizeof(float);
        case kLmF16: return columns * kLmRows * 2;
        default: return columns / 32 * (kLmRows * sizeof(float) + 32 * kLmRows);
    }
}

// Keys by layer, KV head, 16 positions, element: [16]; values by layer, KV head, 16 elements, position: [16]. Both are
// panels of a product, with the query and with the weights of the positions.
struct Lm::Lane {
    explicit Lane(const LmShape & s)
        : key_floats(padded(s.n_ctx) * s.head_dim),
          value_floats(padded(s.n_ctx) * padded(s.head_dim)),
          keys(s.n_layer * s.n_head_kv * key_floats),
          values(s.n_layer * s.n_head_kv * value_floats) {}

    std::vector<std::size_t> tokens;                    // that later tokens attend to
    std::size_t              key_floats, value_floats;  // of one head of one layer
    ZeroedFloats             keys, values;
};

struct Lm::Item {
    Lane *      lane;
    std::size_t token, position;
    float *     logits;  // nullptr: not wanted
};

// Evaluates tokens; one for each thread. Token i of a group has a row in each buffer, whose length is a multiple of 16.
class Lm::Work {
public:
    Work(const Isa & isa, const LmModel & model)
        : isa_(isa),
          model_(model),
          s_(model.shape),
          embd_(padded(s_.n_embd)),
          heads_(padded(s_.n_head * s_.head_dim)),
          kv_(padded(s_.n_head_kv * s_.head_dim)),
          ff_(padded(s_.n_ff)),
          vocab_(padded(s_.n_vocab)),
          ctx_(padded(s_.n_ctx)),
          dim_(padded(s_.head_dim)),
          x_(kGroup * embd_),
          y_(kGroup * embd_),
          q_(kGroup * heads_),
          k_(kGroup * kv_),
          v_(kGroup * kv_),
          seen_(kGroup * heads_),
          gate_(kGroup * ff_),
          up_(kGroup * ff_),
          scores_(s_.n_head / s_.n_head_kv * ctx_),
          mixed_(s_.n_head / s_.n_head_kv * dim_),
          logits_(kGroup * vocab_) {}

    bool run(const Item * items, std::size_t n) {
        const PlainFloats plain;
        for (std::size_t some; n != 0; items += some, n -= some) {
            some = together(items, n);
            if (!evaluate(items, some)) {
                return false;
            }
        }
        return true;
    }

private:
    // How many of the next tokens go in one group: not beyond where a lane is cut, because the tokens before
    // still attend to what would be overwritten.
    static std::size_t together(const Item * items, std::size_t n) {
        std::size_t some = 1;
        while (some < std::min(n, kGroup) && (items[some].position != 0 || items[some].lane != items[some - 1].lane)) {
            ++some;
        }
        return some;
    }

    __attribute__((noinline)) bool evaluate(const Item * items, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            embed(items[i].token, x_.at(i * embd_));
        }
        for (std::size_t l = 0; l < s_.n_layer; ++l) {
            if (!attend(items, n, l) || !feed_forward(model_.layers[l], n)) {
                return false;
            }
        }
        return put_logits(items, n);
    }

    bool put_logits(const Item * items, std::size_t n) {
        std::size_t asked[kGroup];
        std::size_t n_asked = 0;
        for (std::size_t i = 0; i < n; ++i) {
            if (items[i].logits != nullptr) {
                isa_.lm.norm(x_.at(i * embd_), model_.output_norm, s_.n_embd, s_.norm_eps, y_.at(n_asked * embd_));
                asked[n_asked++] = i;
            }
        }
        product(model_.output, y_.at(0), embd_, n_asked, logits_.at(0), vocab_);
        for (std::size_t i = 0; i < n_asked; ++i) {
            const float * logits = logits_.at(i * vocab_);
            if (!finite(logits, s_.n_vocab)) {
                return false;
            }
            std::copy(logits, logits + s_.n_vocab, items[asked[i]].logits);
        }
        return true;
    }

    // Checked before every operation other than + - * / and sqrt: only these treat numbers that are not finite alike
    // on all machines.
    bool finite(const float * x, std::size_t n) const { return isa_.peak(x, n) < __builtin_inff(); }

    void embed(std::size_t token, float * to) const {
        const LmMatrix &     matrix = model_.embedding;
        const std::uint8_t * panel = matrix.panels + token / kLmRows * matrix.panel_bytes();
        for (std::size_t i = 0; i < s_.n_embd; ++i) {
            to[i] = number(panel, matrix.format, i, token % kLmRows);
        }
    }

    float number(const std::uint8_t * panel, LmFormat format, std::size_t column, std::size_t row) const {
        const std::size_t at = column * kLmRows + row;
        float             value = 0.0f;
        if (format == kLmF32) {
            std::memcpy(&value, panel + at * sizeof value, sizeof value);
        } else if (format == kLmF16) {
            isa_.codecs[kF16].decode(panel + at * 2, &value, 1);
        } else {
            panel += column / 32 * lm_panel_bytes(format, 32);
            std::memcpy(&value, panel + row * sizeof value, sizeof value);
            value *= static_cast<std::int8_t>(panel[kLmRows * sizeof value + column % 32 * kLmRows + row]);
        }
        return value;
    }

    void normalize(const float * weights, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            isa_.lm.norm(x_.at(i * embd_), weights, s_.n_embd, s_.norm_eps, y_.at(i * embd_));
        }
    }

    void product(const LmMatrix & matrix, const float * x, std::size_t x_stride, std::size_t n, float * out,
                 std::size_t out_stride) const {
        isa_.lm.products[matrix.format](
            {matrix.panels, matrix.panel_bytes(), matrix.n_panels(), matrix.columns, x, x_stride, n, out, out_stride});
    }

    // The output of a part of a layer is added to the residual stream.
    void add(const LmMatrix & matrix, const float * from, std::size_t stride, std::size_t n) {
        product(matrix, from, stride, n, y_.at(0), embd_);
        float *       x = x_.at(0);
        const float * y = y_.at(0);
        for (std::size_t i = 0; i < n * embd_; ++i) {
            x[i] += y[i];
        }
    }

    bool attend(const Item * items, std::size_t n, std::size_t l) {
        const LmLayer & layer = model_.layers[l];
        normalize(layer.attention_norm, n);
        product(layer.query, y_.at(0), embd_, n, q_.at(0), heads_);
        product(layer.key, y_.at(0), embd_, n, k_.at(0), kv_);
        product(layer.value, y_.at(0), embd_, n, v_.at(0), kv_);
        const float scale = 1.0f / std::sqrt(static_cast<float>(s_.head_dim));
        for (std::size_t i = 0; i < n; ++i) {
            float * q = q_.at(i * heads_);
            rotate(q, s_.n_head, items[i].position);
            rotate(k_.at(i * kv_), s_.n_head_kv, items[i].position);
            std::for_each(q, q + s_.n_head * s_.head_dim, [&](float & value) { value *= scale; });
            remember(items[i], l, k_.at(i * kv_), v_.at(i * kv_));
        }
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t h = 0; h < s_.n_head_kv; ++h) {
                if (!look_back(items[i], l, h, q_.at(i * heads_), seen_.at(i * heads_))) {
                    return false;
                }
            }
        }
        add(layer.output, seen_.at(0), heads_, n);
        return true;
    }

    bool feed_forward(const LmLayer & layer, std::size_t n) {
        normalize(layer.ffn_norm, n);
        product(layer.gate, y_.at(0), embd_, n, gate_.at(0), ff_);
        product(layer.up, y_.at(0), embd_, n, up_.at(0), ff_);
        if (!finite(gate_.at(0), n * ff_)) {
            return false;
        }
        isa_.lm.gated(gate_.at(0), up_.at(0), n * ff_);
        add(layer.down, gate_.at(0), ff_, n);
        return true;
    }

    void rotate(float * x, std::size_t n_heads, std::size_t position) const {
        const std::size_t n_pairs = model_.n_rot / 2;
        const float *     cos = model_.cos + position * n_pairs;
        const float *     sin = model_.sin + position * n_pairs;
        for (std::size_t h = 0; h < n_heads; ++h, x += s_.head_dim) {
            for (std::size_t j = 0; j < n_pairs; ++j) {
                const float a = x[2 * j];
                const float b = x[2 * j + 1];
                x[2 * j]      = a * cos[j] - b * sin[j];
                x[2 * j + 1]  = a * sin[j] + b * cos[j];
            }
        }
    }

    void remember(const Item & item, std::size_t l, const float * k, const float * v) const {
        const Lane &      lane = *item.lane;
        const std::size_t block = item.position / kLmRows;
        for (std::size_t h = 0; h < s_.n_head_kv; ++h, k += s_.head_dim, v += s_.head_dim) {
            const std::size_t head = l * s_.n_head_kv + h;
            float * keys = lane.keys.at(head * lane.key_floats + block * s_.head_dim * kLmRows + item.position % kLmRows);
            float * values = lane.values.at(head * lane.value_floats + item.position * kLmRows);
            for (std::size_t d = 0; d < s_.head_dim; ++d) {
                keys[d * kLmRows] = k[d];
                values[d / kLmRows * ctx_ * kLmRows + d % kLmRows] = v[d];
            }
        }
    }

    // The heads that read KV head h.
    bool look_back(const Item & item, std::size_t l, std::size_t h, const float * q, float * out) {
        const Lane &      lane = *item.lane;
        const std::size_t head = l * s_.n_head_kv + h;
        const std::size_t group = s_.n_head / s_.n_head_kv;
        const std::size_t n_seen = item.position + 1;
        const auto *      keys = reinterpret_cast<const std::uint8_t *>(lane.keys.at(head * lane.key_floats));
        const auto *      values = reinterpret_cast<const std::uint8_t *>(lane.values.at(head * lane.value_floats));
        isa_.lm.products[kLmF32]({keys, s_.head_dim * kLmRows * sizeof(float), padded(n_seen) / kLmRows, s_.head_dim,
                                  q + h * group * s_.head_dim, s_.head_dim, group, scores_.at(0), ctx_});
        float sums[kLmGroupMax];
        for (std::size_t g = 0; g < group; ++g) {
            if (!finite(scores_.at(g * ctx_), n_seen)) {
                return false;
            }
            sums[g] = isa_.lm.exponentials(scores_.at(g * ctx_), n_seen);
        }
        isa_.lm.products[kLmF32]({values, ctx_ * kLmRows * sizeof(float), dim_ / kLmRows, n_seen, scores_.at(0), ctx_, group,
                                  mixed_.at(0), dim_});
        for (std::size_t g = 0; g < group; ++g) {
            for (std::size_t d = 0; d < s_.head_dim; ++d) {
                out[(h * group + g) * s_.head_dim + d] = *mixed_.at(g * dim_ + d) / sums[g];
            }
        }
        return true;
    }

    const Isa &       isa_;
    const LmModel &   model_;
    const LmShape &   s_;
    const std::size_t embd_, heads_, kv_, ff_, vocab_, ctx_, dim_;
    ZeroedFloats      x_, y_, q_, k_, v_, seen_, gate_, up_, scores_, mixed_, logits_;
};

Lm::Lm(const Isa & isa, LmModel model) : isa_(isa), model_(std::move(model)), lanes_(kLmLanesMax) {}

Lm::~Lm() = default;

void Lm::reset() {
    for (auto & lane : lanes_) {
        if (lane != nullptr) {
            lane->tokens.clear();
        }
    }
}

std::vector<Lm::Item> Lm::placed(const std::int32_t * lanes, const std::int32_t * tokens, std::size_t n, float * logits) {
    std::vector<Item> items;
    items.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
        auto & lane = lanes_[static_cast<std::size_t>(lanes[i])];
        if (lane == nullptr) {
            lane = std::make_unique<Lane>(model_.shape);
        }
    }
    for (std::size_t i = 0; i < n; ++i) {
        Lane & lane = *lanes_[static_cast<std::size_t>(lanes[i])];
        auto & past = lane.tokens;
        if (past.size() == model_.shape.n_ctx) {
            past.erase(past.begin(), past.end() - static_cast<std::ptrdiff_t>(model_.shape.n_keep));
            for (std::size_t position = 0; position < past.size(); ++position) {
                items.push_back({&lane, past[position], position, nullptr});
            }
        }
        past.push_back(static_cast<std::size_t>(tokens[i]));
        items.push_back({&lane, past.back(), past.size() - 1, logits + i * model_.shape.n_vocab});
    }
    return items;
}

bool Lm::step(const std::int32_t * lanes, const std::int32_t * tokens, std::size_t n, float * logits,
              std::size_t n_threads) {
    n_threads = std::max<std::size_t>(1, std::min(n_threads, n));
    while (works_.size() < n_threads) {
        works_.push_back(std::make_unique<Work>(isa_, model_));
    }
    const std::vector<Item>  items = placed(lanes, tokens, n, logits);
    std::vector<std::size_t> starts{0};  // of what each thread does: whole lanes
    for (std::size_t i = 1; i < items.size(); ++i) {
        if (i >= starts.size() * items.size() / n_threads && items[i].lane != items[i - 1].lane) {
            starts.push_back(i);
        }
    }
    const std::size_t n_parts = items.empty() ? 0 : starts.size();
    starts.push_back(items.size());
    std::vector<char> fine(n_parts, 0);
    parallel_for(n_parts, n_threads, [&](std::size_t part, std::size_t worker) {
        fine[part] = works_[worker]->run(items.data() + starts[part], starts[part + 1] - starts[part]) ? 1 : 0;
    });
    return std::count(fine.begin(), fine.end(), 0) == 0;
}

bool Lm::count(const float * logits, std::size_t n, std::uint32_t * counts) const {
    const PlainFloats plain;
    if (n == 0 || !(isa_.peak(logits, n) < __builtin_inff())) {
        return false;
    }
    isa_.lm.counts(logits, n, counts);
    return true;
}

}  // namespace towerd
