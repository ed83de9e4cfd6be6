// The arithmetic of a small language model, to the same bits with all instruction sets: every product that is added is
// a fused multiply-add, sums have a fixed order, and the rest is + - * / and sqrt, which IEEE 754 rounds. Vectors hold
// rows of a matrix (or positions, or elements of a head), so their length does not affect the order of a sum.
#pragma once

#include <math.h>

#include "attention-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

constexpr std::size_t kParts = kLmRows / kLanes;  // vectors of one column of a panel

#ifdef TOWERD_NO_FUSED

typedef double        Wide __attribute__((vector_size(8 * TOWERD_LANES)));
typedef std::int64_t  WideInt __attribute__((vector_size(8 * TOWERD_LANES)));
typedef std::uint64_t WideBits __attribute__((vector_size(8 * TOWERD_LANES)));

// a * b + c with one rounding, in doubles. The product is exact; where the sum is not, its last bit is made odd (of the
// two doubles beside the exact sum, the odd one), after which rounding to a float cannot err (Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
TOWERD_INLINE F fused(F a, F b, F c) {
    const Wide     product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
    const Wide     addend = __builtin_convertvector(c, Wide);
    const Wide     sum = product + addend;
    const Wide     part = sum - product;
    const Wide     error = (product - (sum - part)) + (addend - part);
    const WideInt  differs = (error > Wide{}) | (error < Wide{});  // not for a NaN
    const WideBits raw = (WideBits)sum;
    const WideBits even = (WideBits)differs & ~raw & 1u;
    const WideBits inward = even & ((raw ^ (WideBits)error) >> 63);
    return __builtin_convertvector((Wide)(raw + even - 2 * inward), F);
}

#else

TOWERD_INLINE F fused(F a, F b, F c) { return multiply_add(a, b, c); }

#endif

struct LmF32 {
    static TOWERD_INLINE F at(const std::uint8_t * panel, std::size_t column, std::size_t part) {
        return load_as<F>(panel + (column * kLmRows + part * kLanes) * sizeof(float));
    }
};

struct LmF16 {
    static TOWERD_INLINE F at(const std::uint8_t * panel, std::size_t column, std::size_t part) {
        return load_f16(panel + (column * kLmRows + part * kLanes) * 2);
    }
};

struct LmQ8 {
    // Exact: a scale has 11 bits and a code 8.
    static TOWERD_INLINE F at(const std::uint8_t * panel, std::size_t column, std::size_t part) {
        constexpr std::size_t scales = kLmRows * sizeof(float);
        const std::uint8_t *  block = panel + column / kBlock * (scales + kBlock * kLmRows);
        const std::uint8_t *  codes = block + scales + column % kBlock * kLmRows + part * kLanes;
        return to_float(widen_i8(codes)) * load_as<F>(block + part * kLanes * sizeof(float));
    }
};

// As many sums as hide the latency of an addition and fit into the registers.
constexpr std::size_t kPanelsOfOne = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
constexpr std::size_t kPanelsOfMany = kLanes == 16 ? 4 : 1;

template <typename Weights, std::size_t kPanels, std::size_t kXs>
TOWERD_INLINE void lm_tile(const LmProduct & job, std::size_t panel, std::size_t first) {
    F                    sums[kPanels][kParts][kXs] = {};
    const std::uint8_t * panels = job.panels + panel * job.panel_bytes;
    const float *        x = job.x + first * job.x_stride;
    for (std::size_t column = 0; column < job.n_columns; ++column) {
        F values[kXs];
        for (std::size_t i = 0; i < kXs; ++i) {
            values[i] = splat(x[i * job.x_stride + column]);
        }
        for (std::size_t p = 0; p < kPanels; ++p) {
            for (std::size_t v = 0; v < kParts; ++v) {
                const F weights = Weights::at(panels + p * job.panel_bytes, column, v);
                for (std::size_t i = 0; i < kXs; ++i) {
                    sums[p][v][i] = fused(weights, values[i], sums[p][v][i]);
                }
            }
        }
    }
    for (std::size_t p = 0; p < kPanels; ++p) {
        for (std::size_t v = 0; v < kParts; ++v) {
            for (std::size_t i = 0; i < kXs; ++i) {
                store(job.out + (first + i) * job.out_stride + (panel + p) * kLmRows + v * kLanes, sums[p][v][i]);
            }
        }
    }
}

// Reads the panels from memory once for all x.
template <typename Weights, std::size_t kPanels>
void lm_strip(const LmProduct & job, std::size_t panel) {
    std::size_t x = 0;
    if constexpr (kPanels <= kPanelsOfMany) {
        for (; job.n_x - x >= 4; x += 4) {
            lm_tile<Weights, kPanels, 4>(job, panel, x);
        }
        for (; job.n_x - x >= 2; x += 2) {
            lm_tile<Weights, kPanels, 2>(job, panel, x);
        }
    }
    for (; x < job.n_x; ++x) {
        lm_tile<Weights, kPanels, 1>(job, panel, x);
    }
}

template <typename Weights>
void lm_products(const LmProduct & job) {
    std::size_t panel = 0;
    if (job.n_x == 1) {
        for (; job.n_panels - panel >= kPanelsOfOne; panel += kPanelsOfOne) {
            lm_strip<Weights, kPanelsOfOne>(job, panel);
        }
    }
    for (; job.n_panels - panel >= kPanelsOfMany; panel += kPanelsOfMany) {
        lm_strip<Weights, kPanelsOfMany>(job, panel);
    }
    for (; panel < job.n_panels; ++panel) {
        lm_strip<Weights, 1>(job, panel);
    }
}

// Of 16 partial sums: those at distance 8, 4, 2, 1.
TOWERD_INLINE float lm_total(const F (&sums)[kParts]) {
    if constexpr (kParts == 4) {
        return across<add>((sums[0] + sums[2 % kParts]) + (sums[1 % kParts] + sums[3 % kParts]));
    } else if constexpr (kParts == 2) {
        return across<add>(sums[0] + sums[1 % kParts]);
    } else {
        return across<add>(sums[0]);
    }
}

void lm_norm(const float * x, const float * weights, std::size_t n, float eps, float * out) {
    F sums[kParts] = {};
    for (std::size_t i = 0; i < n; i += kLmRows) {
        for (std::size_t v = 0; v < kParts; ++v) {
            const F values = load(x + i + v * kLanes);
            sums[v] = fused(values, values, sums[v]);
        }
    }
    const float mean = lm_total(sums) / static_cast<float>(n);
    const F     factor = splat(1.0f / sqrtf(mean + eps));
    for (std::size_t i = 0; i < n; i += kLanes) {
        store(out + i, (load(x + i) * factor) * load(weights + i));
    }
}

// e^x for x from -infinity to 0; 0 below -80, so that powers of two stay normal. With x = k ln 2 + r, |r| <= ln 2 / 2:
// 2^k times the Taylor series of e^r, whose next term is below 1e-8.
TOWERD_INLINE F lm_exponential(F x) {
    constexpr float least = -80.0f;
    const F         clamped = max(x, splat(least));
    const F         shifted = fused(clamped, splat(0x1.715476p0f), splat(kRounding));
    const F         k = shifted - splat(kRounding);
    const F         high = fused(k, splat(-0x1.62ep-1f), clamped);
    const F         r = fused(k, splat(-0x1.0bfbe8p-15f), high);
    F               sum = splat(kFactors[0]);
    for (std::size_t i = 1; i < sizeof kFactors / sizeof kFactors[0]; ++i) {
        sum = fused(sum, r, splat(kFactors[i]));
    }
    const I power = (bits<I>(shifted) - splat_int(kRoundingBits) + 127) << 23;
    return choose(x >= splat(least), sum * bits<F>(power), F{});
}

TOWERD_INLINE float lm_highest(const float * x, std::size_t n) {
    F highest = load(x);
    for (std::size_t i = kLanes; i < n; i += kLanes) {
        highest = max(highest, load(x + i));
    }
    return across<max>(highest);
}

float lm_exponentials(float * x, std::size_t n) {
    const std::size_t padded = (n + kLmRows - 1) / kLmRows * kLmRows;
    for (std::size_t i = n; i < padded; ++i) {
        x[i] = -__builtin_inff();
    }
    const F top = splat(lm_highest(x, padded));
    F       sums[kParts] = {};
    for (std::size_t i = 0; i < padded; i += kLmRows) {
        for (std::size_t v = 0; v < kParts; ++v) {
            const F weights = lm_exponential(load(x + i + v * kLanes) - top);
            store(x + i + v * kLanes, weights);
            sums[v] = sums[v] + weights;
        }
    }
    return lm_total(sums);
}

void lm_gated(float * gate, const float * up, std::size_t n) {
    for (std::size_t i = 0; i < n; i += kLanes) {
        const F value = load(gate + i);
        const F small = lm_exponential(F{} - abs(value));
        const F share = choose(value >= F{}, splat(1.0f), small) / (splat(1.0f) + small);
        store(gate + i, (value * share) * load(up + i));
    }
}

TOWERD_INLINE void lm_count(const float * logits, F top, std::uint32_t * counts) {
    const F chances = lm_exponential(load(logits) - top) * splat(0x1p24f);
    store_as(counts, __builtin_convertvector(chances, I) + 1);
}

void lm_counts(const float * logits, std::size_t n, std::uint32_t * counts) {
    float             rest[kLmRows];
    std::uint32_t     rest_counts[kLmRows];
    const std::size_t whole = n / kLmRows * kLmRows;
    for (std::size_t i = 0; i < kLmRows; ++i) {
        rest[i] = whole + i < n ? logits[whole + i] : -__builtin_inff();
    }
    const float of_rest = lm_highest(rest, kLmRows);
    const float of_whole = whole != 0 ? lm_highest(logits, whole) : of_rest;
    const F     top = splat(of_whole > of_rest ? of_whole : of_rest);
    for (std::size_t i = 0; i < whole; i += kLanes) {
        lm_count(logits + i, top, counts + i);
    }
    for (std::size_t i = 0; i < kLmRows; i += kLanes) {
        lm_count(rest + i, top, rest_counts + i);
    }
    std::memcpy(counts + whole, rest_counts, (n - whole) * sizeof(std::uint32_t));
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
