// Codecs of the block formats: 32 numbers a block, after lab/reference/blocks.py and equal to it in every byte.
//
// ggml's block codes are as its x86 CPU backend writes and reads its cache (the reference names its sources). Where
// 1 / step overflows (a step below 2^-128) ggml converts infinite floats to integers and keeps what x86 gives: the
// smallest integer, of which the low bits or the saturated value end up as code. Of the stored codes, q8 and q6 are
// never more than half a step off, and q5 and q4 search for the scale; scales and minima saturate at what f16 holds.
#pragma once

#include "blocks_layout-inl.h"
#include "convert-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

constexpr float kHuge = 3.40282346638528859812e+38f;

// The first of the numbers with the largest magnitude; +0 if all are zero.
TOWERD_INLINE float leading(const Range & range, const float * from) {
    if (range.high != -range.low) {  // which of them is unpredictable, so there is no branch
        return range.high > -range.low ? range.high : range.low;
    }
    std::size_t i = 0;
    while (i + 1 < kBlock && from[i] != range.high && from[i] != range.low) {
        ++i;
    }
    return range.high == 0.0f ? 0.0f : from[i];
}

// The smallest number; where it is +0 and -0, the first of those.
TOWERD_INLINE float first_low(const Range & range, const float * from) {
    if (range.low != 0.0f) {
        return range.low;
    }
    std::size_t i = 0;
    while (i + 1 < kBlock && from[i] != 0.0f) {
        ++i;
    }
    return from[i];
}

// (x - minimum) / step + half cut to an integer of at most `top`; 0 if 1 / step is not finite.
TOWERD_INLINE Codes cut_codes(const Numbers & x, float minimum, float inverse, float half, int top) {
    Codes codes{};
    if (!(inverse <= kHuge && inverse >= -kHuge)) {
        return codes;
    }
    for (std::size_t v = 0; v < kVectors; ++v) {
        const F scaled = (x.at[v] - splat(minimum)) * splat(inverse) + splat(half);
        codes.at[v] = __builtin_convertvector(clamp(scaled, 0.0f, static_cast<float>(top)), I);
    }
    return codes;
}

template <int kBits>
struct GgmlSymmetric : Symmetric<kBits> {
    using Symmetric<kBits>::kZero;

    static TOWERD_INLINE void encode(const float * from, std::uint8_t * to) {
        const Numbers x = load_block(from);
        const float   step = leading(range_of(x), from) * (-1.0f / kZero);
        Codes         codes = cut_codes(x, 0.0f, reciprocal(step), kZero + 0.5f, 2 * kZero - 1);
        for (std::size_t v = 0; v < kVectors; ++v) {
            codes.at[v] -= kZero;
        }
        Symmetric<kBits>::write(f32_to_f16(step), codes, to);
    }
};

template <int kBits>
struct GgmlAsymmetric : Asymmetric<kBits> {
    using Asymmetric<kBits>::kTop;

    static TOWERD_INLINE void encode(const float * from, std::uint8_t * to) {
        const Numbers x = load_block(from);
        const Range   range = range_of(x);
        const float   low = first_low(range, from);
        const float   step = (range.high - low + 0.0f) / kTop;
        const Codes   codes = cut_codes(x, low, reciprocal(step), 0.5f, kTop);
        Asymmetric<kBits>::write(f32_to_f16(step), f32_to_f16(low), codes, to);
    }
};

struct GgmlQ8 : Symmetric<8> {
    static TOWERD_INLINE void encode(const float * from, std::uint8_t * to) {
        const Numbers x = load_block(from);
        const float   largest = peak_of(x);
        const float   inverse = largest != 0.0f ? 127.0f / largest : 0.0f;
        Codes         codes;
        if (inverse <= kHuge) {
            codes = nearest_codes(x, 0.0f, inverse, -128, 127);
        } else {
            for (std::size_t v = 0; v < kVectors; ++v) {
                codes.at[v] = splat_int(-128);
            }
        }
        Symmetric<8>::write(f32_to_f16(largest / 127.0f), codes, to);
    }
};

// 4-bit codes into a table of numbers that lie closer around 0.
struct GgmlIq4Nl {
    static constexpr std::size_t kBytes = 18;
    static constexpr float       kLeast = 1e-15f;  // below it ggml sets no codes; these are 1 * 0
    alignas(64) static constexpr float kTable[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                                     1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};

    static TOWERD_INLINE F look_up(I codes) {
#if defined(__AVX512F__)
        return (F)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(kTable));
#elif defined(__AVX2__)
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(kTable), (__m256i)codes);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(kTable + 8), (__m256i)codes);
        return (F)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
        F found;
        for (std::size_t i = 0; i < kLanes; ++i) {
            found[i] = kTable[codes[i]];
        }
        return found;
#endif
    }

    static TOWERD_INLINE void decode(const std::uint8_t * from, float * to) {
        const F     scale = splat(f16_to_f32(load_as<std::uint16_t>(from)));
        const Codes codes = Layout<4>::unpack(from + 2);
        for (std::size_t v = 0; v < kVectors; ++v) {
            store(to + v * kLanes, look_up(codes.at[v]) * scale);
        }
    }

    static TOWERD_INLINE void encode(const float * from, std::uint8_t * to) {
        const Numbers x = load_block(from);
        const float   lead = leading(range_of(x), from);
        Codes         codes;
        std::uint16_t scale = 0;
        if (lead >= kLeast || lead <= -kLeast) {
            alignas(64) float products[kBlock];
            alignas(64) float squares[kBlock];
            const F           inverse = splat(1.0f / (lead / kTable[0]));
            for (std::size_t v = 0; v < kVectors; ++v) {
                codes.at[v] = nearest_entries(inverse * x.at[v]);
                const F weighted = x.at[v] * x.at[v] * look_up(codes.at[v]);
                store(products + v * kLanes, weighted * x.at[v]);
                store(squares + v * kLanes, weighted * look_up(codes.at[v]));
            }
            const float square = sum_of(squares);
            scale = f32_to_f16(square > 0.0f ? sum_of(products) / square : 0.0f);
        } else {
            for (std::size_t v = 0; v < kVectors; ++v) {
                codes.at[v] = splat_int(8);
            }
        }
        store_as(to, scale);
        Layout<4>::pack(codes, to + 2);
    }

private:
    // How many of the midpoints between entries are not above the number.
    static TOWERD_INLINE I nearest_entries(F number) {
        I entry{};
        for (std::size_t k = 0; k < 15; ++k) {
            entry -= number >= splat((kTable[k] + kTable[k + 1]) * 0.5f);
        }
        return entry;
    }

    // In the order of the elements.
    static TOWERD_INLINE float sum_of(const float * terms) {
        float sum = 0.0f;
        for (std::size_t i = 0; i < kBlock; ++i) {
            sum += terms[i];
        }
        return sum;
    }
};

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

template <typename Code>
void decode_blocks(const std::uint8_t * from, float * to, std::size_t n) {
    for (std::size_t i = 0; i + kBlock <= n; i += kBlock, from += Code::kBytes) {
        read_ahead(from);
        Code::decode(from, to + i);
    }
}

// The largest magnitudes so far, lane by lane, as integers: the bits of non-negative floats sort like the floats.
TOWERD_INLINE void raise(I & magnitudes, const float * from) {
    const Numbers x = load_block(from);
    for (std::size_t v = 0; v < kVectors; ++v) {
        const I raw = bits<I>(x.at[v]) & 0x7fffffff;
        magnitudes = raw > magnitudes ? raw : magnitudes;
    }
}

TOWERD_INLINE float largest(I magnitudes) {
    alignas(64) float numbers[kLanes];
    store(numbers, bits<F>(magnitudes));
    return peak(numbers, kLanes);
}

template <typename Code>
float encode_blocks(const float * from, std::uint8_t * to, std::size_t n) {
    I magnitudes{};
    for (std::size_t i = 0; i + kBlock <= n; i += kBlock, to += Code::kBytes) {
        for (std::size_t line = 0; line < kBlock * sizeof(float); line += kLineBytes) {
            read_ahead(reinterpret_cast<const std::uint8_t *>(from + i) + line);
        }
        raise(magnitudes, from + i);
        Code::encode(from + i, to);
    }
    return largest(magnitudes);
}

// In two passes over a few blocks at a time: each pass is one long chain, so the CPU wants several in flight.
template <typename Code>
float encode_searching(const float * from, std::uint8_t * to, std::size_t n) {
    constexpr std::size_t kGroup = 4;
    typename Code::Sums   sums[kGroup];
    I                     magnitudes{};
    for (std::size_t done = 0; done + kBlock <= n;) {
        const std::size_t left = (n - done) / kBlock;
        const std::size_t blocks = left < kGroup ? left : kGroup;
        for (std::size_t b = 0; b < blocks; ++b) {
            raise(magnitudes, from + done + b * kBlock);
            sums[b] = Code::add_up(from + done + b * kBlock);
        }
        for (std::size_t b = 0; b < blocks; ++b, done += kBlock, to += Code::kBytes) {
            Code::finish(sums[b], from + done, to);
        }
    }
    return largest(magnitudes);
}

template <typename Code>
constexpr Codec block_codec() {
    return {decode_blocks<Code>, encode_blocks<Code>};
}

template <typename Code>
constexpr Codec searching_codec() {
    return {decode_blocks<Code>, encode_searching<Code>};
}

void block_codecs(Codec (&codecs)[kCodecs]) {
    codecs[kQ4_0] = block_codec<GgmlSymmetric<4>>();
    codecs[kQ4_1] = block_codec<GgmlAsymmetric<4>>();
    codecs[kQ5_0] = block_codec<GgmlSymmetric<5>>();
    codecs[kQ5_1] = block_codec<GgmlAsymmetric<5>>();
    codecs[kQ8_0] = block_codec<GgmlQ8>();
    codecs[kIq4Nl] = block_codec<GgmlIq4Nl>();
    codecs[kQ8] = block_codec<StoredSymmetric<8>>();
    codecs[kQ6] = block_codec<StoredSymmetric<6>>();
    codecs[kQ5] = searching_codec<SearchedSymmetric<5>>();
    codecs[kQ4] = searching_codec<SearchedSymmetric<4>>();
    codecs[kQ8a] = block_codec<StoredAsymmetric<8>>();
    codecs[kQ6a] = block_codec<StoredAsymmetric<6>>();
    codecs[kQ5a] = searching_codec<SearchedAsymmetric<5>>();
    codecs[kQ4a] = searching_codec<SearchedAsymmetric<4>>();
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
