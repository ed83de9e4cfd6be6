// Scores of queries against a panel of keys, the softmax over a row of scores, and inner products with single rows. Multiplications are fused with
// additions where the instructions do that, so instruction sets differ in the last bits.
#pragma once

#include "blocks_layout-inl.h"
#include "convert-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

constexpr std::size_t kRowsAtOnce = 4;
constexpr std::size_t kVectorsAtOnce = kLanes == 16 ? 4 : 2;  // times the rows: as many sums as fit into the registers

template <std::size_t kRows>
TOWERD_INLINE void score_rows(const float * queries, const float * panel, std::size_t head_dim, float scale, float * to,
                              std::size_t stride) {
    for (std::size_t column = 0; column < kPanel; column += kVectorsAtOnce * kLanes) {
        F sums[kRows][kVectorsAtOnce] = {};
        for (std::size_t d = 0; d < head_dim; ++d) {
            const float * keys = panel + d * kPanel + column;
            for (std::size_t r = 0; r < kRows; ++r) {
                const F number = splat(queries[r * head_dim + d]);
                for (std::size_t v = 0; v < kVectorsAtOnce; ++v) {
                    sums[r][v] = multiply_add(number, load(keys + v * kLanes), sums[r][v]);
                }
            }
        }
        for (std::size_t r = 0; r < kRows; ++r) {
            for (std::size_t v = 0; v < kVectorsAtOnce; ++v) {
                store(to + r * stride + column + v * kLanes, sums[r][v] * splat(scale));
            }
        }
    }
}

void scores(const float * queries, std::size_t n, const float * panel, std::size_t head_dim, float scale, float * to,
            std::size_t stride) {
    for (; n >= kRowsAtOnce; n -= kRowsAtOnce, queries += kRowsAtOnce * head_dim, to += kRowsAtOnce * stride) {
        score_rows<kRowsAtOnce>(queries, panel, head_dim, scale, to, stride);
    }
    for (; n > 0; --n, queries += head_dim, to += stride) {
        score_rows<1>(queries, panel, head_dim, scale, to, stride);
    }
}

constexpr float kFactors[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

// e^x for x from -infinity to 0; 0 below -87, where floats stop being normal. With x = k ln 2 + r, |r| <= ln 2 / 2:
// 2^k times the Taylor series of e^r, whose next term is below 1e-8.
TOWERD_INLINE F exponential(F x) {
    constexpr float least = -87.0f;
    constexpr float ln2_high = 0x1.62ep-1f;  // few enough bits for exact products with k
    constexpr float ln2_low = 0x1.0bfbe8p-15f;
    const F         clamped = max(x, splat(least));
    const F         shifted = clamped * splat(0x1.715476p0f) + splat(kRounding);
    const F         k = shifted - splat(kRounding);
    const F         r = (clamped - k * splat(ln2_high)) - k * splat(ln2_low);
    F               sum{};
    for (const float factor : kFactors) {
        sum = multiply_add(sum, r, splat(factor));
    }
    const I power = (bits<I>(shifted) - splat_int(kRoundingBits) + 127) << 23;
    return choose(x >= splat(least), sum * bits<F>(power), F{});
}

TOWERD_INLINE F add(F a, F b) { return a + b; }

void add_softmax(float * x, std::size_t n, float weight, float * mass) {
    const std::size_t padded = (n + kLanes - 1) / kLanes * kLanes;
    for (std::size_t i = n; i < padded; ++i) {
        x[i] = -__builtin_inff();
    }
    F highest = load(x);
    for (std::size_t i = kLanes; i < padded; i += kLanes) {
        highest = max(highest, load(x + i));
    }
    const F top = splat(across<max>(highest));
    F       sum{};
    for (std::size_t i = 0; i < padded; i += kLanes) {
        const F power = exponential(load(x + i) - top);
        store(x + i, power);
        sum = sum + power;
    }
    const F share = splat(weight / across<add>(sum));
    for (std::size_t i = 0; i < padded; i += kLanes) {
        store(mass + i, multiply_add(load(x + i), share, load(mass + i)));
    }
}

// Inner products with rows at arbitrary places: eight running sums in a fixed order and no fused operations, so that
// every instruction set gives the same bits.
#if TOWERD_LANES == 16
typedef float         E __attribute__((vector_size(32)));
typedef std::uint32_t EU __attribute__((vector_size(32)));
typedef std::uint16_t EH __attribute__((vector_size(16)));

TOWERD_INLINE E load_part(F32, const std::uint8_t * from) { return load_as<E>(from); }
TOWERD_INLINE E load_part(F16, const std::uint8_t * from) { return (E)load_eight_f16(from); }
TOWERD_INLINE E load_part(Bf16, const std::uint8_t * from) {
    return bits<E>(__builtin_convertvector(load_as<EH>(from), EU) << 16);
}
#else
typedef F E;

template <typename Element>
TOWERD_INLINE E load_part(Element, const std::uint8_t * from) {
    return Element::load(from);
}
#endif
constexpr std::size_t kSums = 8;
constexpr std::size_t kPartLanes = sizeof(E) / sizeof(float);
constexpr std::size_t kSumParts = kSums / kPartLanes;
constexpr std::size_t kAhead = 8;  // rows that are prefetched ahead

TOWERD_INLINE void ask_for(const std::uint8_t * row, std::size_t n_bytes) {
    for (std::size_t at = 0; at < n_bytes; at += kLineBytes) {
        __builtin_prefetch(row + at);
    }
}

template <typename Element>
void dots(const float * query, const std::uint8_t * const * rows, std::size_t n, std::size_t width, float * to) {
    for (std::size_t i = 0; i < n && i < kAhead; ++i) {
        ask_for(rows[i], width * Element::kBytes);
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) {
            ask_for(rows[i + kAhead], width * Element::kBytes);
        }
        E sums[kSumParts] = {};
        for (std::size_t d = 0; d < width; d += kSums) {
            for (std::size_t p = 0; p < kSumParts; ++p) {
                const std::size_t at = d + p * kPartLanes;
                sums[p] += load_as<E>(query + at) * load_part(Element{}, rows[i] + at * Element::kBytes);
            }
        }
        float s[kSums];
        std::memcpy(s, sums, sizeof s);
        to[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
