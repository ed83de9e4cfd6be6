// The stored block codes: q8 and q6 never more than half a step off, q5 and q4 with a search for the scale.
// Same operations in the same order as lab/reference/blocks.py; scales and minima saturate at what f16 holds.
#pragma once

#include "blocks_ggml-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

constexpr float         kF16Max = 65504.0f;
constexpr std::uint16_t kF16MaxBits = 0x7bff;
constexpr float         kLeast = 0x1p-25f;  // numbers below it are nearest to 0 at any f16 scale

// `number` (not negative) as f16, or the next f16 if that is less than `least`.
TOWERD_INLINE std::uint16_t f16_above(float number, float least) {
    const std::uint16_t nearest = f32_to_f16(clamp(number, 0.0f, kF16Max));
    return nearest < kF16MaxBits && f16_to_f32(nearest) < least ? nearest + 1 : nearest;
}

// The largest f16 that is not above the number.
TOWERD_INLINE std::uint16_t f16_below(float number) {
    const std::uint16_t nearest = f32_to_f16(clamp(number, -kF16Max, kF16Max));
    if (!(f16_to_f32(nearest) > number) || nearest == (0x8000u | kF16MaxBits)) {
        return nearest;
    }
    return (nearest & 0x8000u) != 0 ? nearest + 1 : nearest != 0 ? nearest - 1 : 0x8001u;
}

template <int kBits>
struct StoredSymmetric : Symmetric<kBits> {
    using Symmetric<kBits>::kZero;

    // The larger side takes the codes down to -kZero; no number may be more than half a step off.
    static TOWERD_INLINE void encode(const float * from, std::uint8_t * to) {
        const Numbers x = load_block(from);
        const Range   range = range_of(x);
        const float   depth = -range.low;
        const float   lead = range.high > depth ? range.high : depth;
        const float   other = range.high < depth ? range.high : depth;
        const float   bound = other * static_cast<float>(1.0 / (kZero - 0.5));
        const float   plain = lead * (1.0f / kZero);
        const float   tight = lead * static_cast<float>(1.0 / (kZero + 0.5));
        std::uint16_t scale = f16_above(plain > bound ? plain : bound, tight > bound ? tight : bound);
        const bool flip = (range.high >= depth) & (range.high > 0.0f) & (scale != 0);  // unpredictable, so no branch
        scale |= static_cast<std::uint16_t>(flip << 15);
        const Codes codes = nearest_codes(x, 0.0f, reciprocal(f16_to_f32(scale)), -kZero, kZero - 1);
        Symmetric<kBits>::write(scale, codes, to);
    }
};

template <int kBits>
struct StoredAsymmetric : Asymmetric<kBits> {
    using Asymmetric<kBits>::kTop;

    static TOWERD_INLINE void encode(const float * from, std::uint8_t * to) {
        const Numbers       x = load_block(from);
        const Range         range = range_of(x);
        const std::uint16_t lowest = f16_below(range.low + 0.0f);
        const float         minimum = f16_to_f32(lowest) + 0.0f;
        const float         extent = range.high - minimum;
        const std::uint16_t scale =
            f16_above(extent * static_cast<float>(1.0 / kTop), extent * static_cast<float>(1.0 / (kTop + 0.5)));
        const Codes codes = nearest_codes(x, minimum, reciprocal(f16_to_f32(scale)), 0, kTop);
        Asymmetric<kBits>::write(scale, f32_to_f16(minimum), codes, to);
    }
};

// The search tries 8 scales, with elements 0 to 15 and 16 to 31 apart: 16 sums, one per lane of kSets vectors.
constexpr std::size_t kCandidates = 8;
constexpr std::size_t kSets = 2 * kCandidates / kLanes;
constexpr std::size_t kWholeSets = kSets > 1 ? kSets / 2 : 1;  // with the two halves of a block added up

struct Candidates {
    F at[kSets];
};

#define TOWERD_TWICE(...) {__VA_ARGS__, __VA_ARGS__}
alignas(64) constexpr float kWider[2 * kCandidates] =
    TOWERD_TWICE(0.0f, -1.125f, -0.75f, -0.375f, 0.0f, 0.375f, 0.75f, 1.125f);
alignas(64) constexpr float kBelow[2 * kCandidates] =
    TOWERD_TWICE(0.0f, -0.25f, 0.0f, 0.25f, 0.25f, 0.0f, 0.5f, -0.25f);
alignas(64) constexpr float kAbove[2 * kCandidates] =
    TOWERD_TWICE(0.0f, 0.25f, -0.25f, 0.25f, -0.5f, 0.5f, 0.0f, 0.0f);
#undef TOWERD_TWICE

// The numbers that the search works on: scaled to be around 1.
struct Scaled {
#if TOWERD_LANES == 16
    F front;
    F back;
#else
    alignas(64) float at[kBlock];
#endif
};

TOWERD_INLINE Scaled scaled_by(const Numbers & x, float minimum, float inverse) {
    Scaled scaled;
#if TOWERD_LANES == 16
    scaled.front = (x.at[0] - splat(minimum)) * splat(inverse);
    scaled.back = (x.at[1] - splat(minimum)) * splat(inverse);
#else
    for (std::size_t v = 0; v < kVectors; ++v) {
        store(scaled.at + v * kLanes, (x.at[v] - splat(minimum)) * splat(inverse));
    }
#endif
    return scaled;
}

// Element j where the lanes of set s sum the first half of the block, j + 16 where they sum the second.
TOWERD_INLINE F number_for(const Scaled & scaled, std::size_t j, [[maybe_unused]] std::size_t s) {
#if TOWERD_LANES == 16
    constexpr I       lane = {TOWERD_XORED(0)};
    constexpr I       half = (lane & 8) * 2;
    return (F)_mm512_permutex2var_ps((__m512)scaled.front, (__m512i)(half + static_cast<int>(j)), (__m512)scaled.back);
#else
    return splat(scaled.at[j + s / kWholeSets * 16]);
#endif
}

TOWERD_INLINE Candidates add_halves(const Candidates & sums) {
    Candidates whole{};
    for (std::size_t s = 0; s < kWholeSets; ++s) {
#if TOWERD_LANES == 16
        whole.at[s] = sums.at[s] + xor_lanes<8>(sums.at[s]);
#else
        whole.at[s] = sums.at[s] + sums.at[s + kWholeSets];
#endif
    }
    return whole;
}

// Bit i is set where lane i is -1; all other lanes are 0.
TOWERD_INLINE unsigned lanes_set(I mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#else
    const I      kept = mask & bits<I>(bits_of_elements(0));
    std::int32_t set = 0;
    for (std::size_t i = 0; i < kLanes; ++i) {
        set |= kept[i];
    }
    return static_cast<unsigned>(set);
#endif
}

// `value` with another value for the first candidate.
TOWERD_INLINE F with_first(F value, float first, std::size_t s) {
    constexpr I lane = {TOWERD_XORED(0)};
    return s == 0 ? choose(lane % 8 == 0, splat(first), value) : value;
}

// To the nearest integer, ties to even; |x| < 2^22.
TOWERD_INLINE F rounded(F value) { return (value + splat(kRounding)) - splat(kRounding); }

TOWERD_INLINE F rounded_to_f16(F value) {
    std::uint8_t halves[2 * kLanes];
    store_f16(halves, clamp(value, -kF16Max, kF16Max));
    return load_f16(halves);
}

// The first candidate with the largest gain.
TOWERD_INLINE std::size_t best_of(const Candidates & gains) {
    F most = gains.at[0];
    for (std::size_t s = 1; s < kWholeSets; ++s) {
        most = max(most, gains.at[s]);
    }
    const F  largest = splat(across<max>(most));
    unsigned found = 0;
    for (std::size_t s = 0; s < kWholeSets; ++s) {
        found |= lanes_set(gains.at[s] == largest) << (s * kLanes);
    }
    return static_cast<std::size_t>(__builtin_ctz(found | 1u << (kCandidates - 1)));
}

TOWERD_INLINE float lane_of(const Candidates & candidates, std::size_t lane) {
    alignas(64) float numbers[kWholeSets * kLanes];
    for (std::size_t s = 0; s < kWholeSets; ++s) {
        store(numbers + s * kLanes, candidates.at[s]);
    }
    return numbers[lane];
}

template <int kBits>
struct SearchedSymmetric : Symmetric<kBits> {
    using Symmetric<kBits>::kZero;

    // What the codes of a block add up to at each candidate's scale.
    struct Sums {
        float      lead;
        bool       usable;  // neither too small nor too large for a search
        Candidates product;
        Candidates square;
    };

    static TOWERD_INLINE Sums add_up(const float * from) {
        const Numbers x = load_block(from);
        Sums          sums{};
        sums.lead = leading(range_of(x), from);
        const float size = sums.lead < 0.0f ? -sums.lead : sums.lead;
        sums.usable = size >= kLeast && size <= kF16Max * kZero;
        const Scaled scaled = scaled_by(x, 0.0f, 1.0f / sums.lead);
        for (std::size_t j = 0; j < kBlock / 2; ++j) {
            for (std::size_t s = 0; s < kSets; ++s) {
                const F number = number_for(scaled, j, s);
                const F stretch = splat(-kZero) - load(kWider + s * kLanes);
                const F code = clamp(rounded(number * stretch), -kZero, kZero - 1);
                sums.product.at[s] = sums.product.at[s] + code * number;
                sums.square.at[s] = sums.square.at[s] + code * code;
            }
        }
        return sums;
    }

    static TOWERD_INLINE void finish(const Sums & sums, const float * from, std::uint8_t * to) {
        if (!sums.usable) {
            StoredSymmetric<kBits>::encode(from, to);
            return;
        }
        const Candidates product = add_halves(sums.product);
        const Candidates square = add_halves(sums.square);
        const float      inverse = 1.0f / sums.lead;
        Candidates       scales;
        Candidates       gains;
        for (std::size_t s = 0; s < kWholeSets; ++s) {
            const F step = with_first(product.at[s] / square.at[s], -1.0f / kZero, s);
            scales.at[s] = rounded_to_f16(step * splat(sums.lead));
            const F stored = scales.at[s] * splat(inverse);
            gains.at[s] = stored * (product.at[s] + product.at[s] - stored * square.at[s]);
        }
        const float scale = lane_of(scales, best_of(gains));
        const Codes codes = nearest_codes(load_block(from), 0.0f, reciprocal(scale), -kZero, kZero - 1);
        Symmetric<kBits>::write(f32_to_f16(scale), codes, to);
    }
};

template <int kBits>
struct SearchedAsymmetric : Asymmetric<kBits> {
    using Asymmetric<kBits>::kTop;

    struct Sums {
        float      low;
        float      extent;
        bool       usable;
        Candidates total;  // of the numbers: the same for all
        Candidates count;  // of the codes
        Candidates product;
        Candidates square;
    };

    static TOWERD_INLINE Sums add_up(const float * from) {
        const Numbers x = load_block(from);
        const Range   range = range_of(x);
        Sums          sums{};
        sums.low = range.low + 0.0f;
        sums.extent = range.high - sums.low;
        sums.usable = sums.extent >= kLeast && sums.extent <= 2.0f * kF16Max;
        const Scaled scaled = scaled_by(x, sums.low, 1.0f / sums.extent);
        for (std::size_t j = 0; j < kBlock / 2; ++j) {
            for (std::size_t s = 0; s < kSets; ++s) {
                const F number = number_for(scaled, j, s);
                const F below = load(kBelow + s * kLanes);
                const F stretch = splat(kTop) + (below + load(kAbove + s * kLanes));
                const F code = clamp(rounded(number * stretch - below), 0.0f, kTop);
                sums.total.at[s] = sums.total.at[s] + number;
                sums.count.at[s] = sums.count.at[s] + code;
                sums.product.at[s] = sums.product.at[s] + code * number;
                sums.square.at[s] = sums.square.at[s] + code * code;
            }
        }
        return sums;
    }

    static TOWERD_INLINE void finish(const Sums & sums, const float * from, std::uint8_t * to) {
        if (!sums.usable) {
            StoredAsymmetric<kBits>::encode(from, to);
            return;
        }
        Candidates       scales;
        Candidates       minima;
        const Candidates gains = fit(sums, scales, minima);
        const auto       best = best_of(gains);
        const float      scale = lane_of(scales, best);
        const float      minimum = lane_of(minima, best);
        const Codes      codes = nearest_codes(load_block(from), minimum, reciprocal(scale), 0, kTop);
        Asymmetric<kBits>::write(f32_to_f16(scale), f32_to_f16(minimum), codes, to);
    }

private:
    static TOWERD_INLINE Candidates fit(const Sums & sums, Candidates & scales, Candidates & minima) {
        const Candidates total = add_halves(sums.total);
        const Candidates count = add_halves(sums.count);
        const Candidates product = add_halves(sums.product);
        const Candidates square = add_halves(sums.square);
        const float      inverse = 1.0f / sums.extent;
        const F          n = splat(kBlock);
        Candidates       gains;
        for (std::size_t s = 0; s < kWholeSets; ++s) {
            const F t = total.at[s];
            const F c = count.at[s];
            const F p = product.at[s];
            const F q = square.at[s];
            const F step = with_first((n * p - c * t) / (n * q - c * c), static_cast<float>(1.0 / kTop), s);
            scales.at[s] = rounded_to_f16(step * splat(sums.extent));
            const F stored = scales.at[s] * splat(inverse);
            const F shift = with_first((t - stored * c) * splat(1.0f / kBlock), 0.0f, s);
            minima.at[s] = rounded_to_f16(splat(sums.low) + shift * splat(sums.extent));
            const F moved = (minima.at[s] - splat(sums.low)) * splat(inverse);
            const F gain = stored * (p + p - stored * q - (moved + moved) * c);
            gains.at[s] = gain + moved * (t + t - n * moved);
        }
        return gains;
    }
};

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
