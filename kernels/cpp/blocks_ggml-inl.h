// ggml's block codes as its x86 CPU backend writes and reads its cache (the reference names its sources).
//
// Where 1 / step overflows (a step below 2^-128) ggml converts infinite floats to integers and keeps what x86
// gives: the smallest integer, of which the low bits or the saturated value end up as code.
#pragma once

#include "blocks_layout-inl.h"

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

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
