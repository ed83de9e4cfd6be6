// Blocks of 32 numbers: the layout of their codes in bytes, and of their scale and minimum.
//
// A block is an f16 scale, perhaps an f16 minimum, then its codes: the high bits first (5-bit codes: bit i of a
// word is element i's; 6-bit codes: byte j holds those of elements j, j + 8, j + 16, j + 24), then 16 bytes with
// elements 0 to 15 in the low and 16 to 31 in the high nibbles. 8-bit codes are bytes in order.
#pragma once

#include "vector-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

constexpr std::size_t kBlock = 32;
constexpr std::size_t kVectors = kBlock / kLanes;
constexpr std::size_t kHalfVectors = kVectors / 2;

// Near 1.5 * 2^23 the last bit of a float is worth 1, so adding it rounds to nearest, ties to even.
constexpr float        kRounding = 0x1.8p23f;
constexpr std::int32_t kRoundingBits = 0x4b400000;

struct Numbers {
    F at[kVectors];
};

struct Codes {
    I at[kVectors];
};

TOWERD_INLINE Numbers load_block(const float * from) {
    Numbers x;
    for (std::size_t v = 0; v < kVectors; ++v) {
        x.at[v] = load(from + v * kLanes);
    }
    return x;
}

TOWERD_INLINE F choose(I mask, F yes, F no) {
    return bits<F>((bits<U>(yes) & bits<U>(mask)) | (bits<U>(no) & ~bits<U>(mask)));
}

TOWERD_INLINE F clamp(F value, float low, float high) { return min(max(value, splat(low)), splat(high)); }

TOWERD_INLINE float clamp(float value, float low, float high) {
    const float above = value > low ? value : low;
    return above < high ? above : high;
}

// All lanes folded into one number; `fold` must not depend on the order.
template <F (*fold)(F, F)>
TOWERD_INLINE float across(F value) {
#if TOWERD_LANES >= 16
    value = fold(value, xor_lanes<8>(value));
#endif
#if TOWERD_LANES >= 8
    value = fold(value, xor_lanes<4>(value));
#endif
    value = fold(value, xor_lanes<2>(value));
    value = fold(value, xor_lanes<1>(value));
    return value[0];
}

struct Range {
    float low;
    float high;
};

TOWERD_INLINE Range range_of(const Numbers & x) {
    F low = x.at[0];
    F high = x.at[0];
    for (std::size_t v = 1; v < kVectors; ++v) {
        low = min(low, x.at[v]);
        high = max(high, x.at[v]);
    }
    return {across<min>(low), across<max>(high)};
}

TOWERD_INLINE float peak_of(const Numbers & x) {
    F peak = abs(x.at[0]);
    for (std::size_t v = 1; v < kVectors; ++v) {
        peak = max(peak, abs(x.at[v]));
    }
    return across<max>(peak);
}

TOWERD_INLINE float reciprocal(float step) { return step != 0.0f ? 1.0f / step : 0.0f; }

TOWERD_INLINE F either(F a, F b) { return bits<F>(bits<U>(a) | bits<U>(b)); }

// Lane i has the bit of element v * kLanes + i.
TOWERD_INLINE U bits_of_elements(std::size_t v) {
    constexpr U number = {TOWERD_XORED(0)};
    return (U{} + (1u << (v * kLanes))) << number;
}

#if TOWERD_LANES == 16
TOWERD_INLINE I repeat_low_half(I value) {
#if defined(__clang__)
    return __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return __builtin_shuffle(value, I{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7});
#endif
}
#endif

// Bits 4 and 5 of the codes of vector v, from the 8 bytes at `high`.
TOWERD_INLINE I sixth_bits(const std::uint8_t * high, std::size_t v) {
#if TOWERD_LANES == 16
    const I     bytes = widen_u8(high);  // the last 8 are nibbles
    const I     both = repeat_low_half(bytes);
    constexpr I group = {0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2};
    return ((both >> (group + static_cast<int>(4 * v))) & 3) << 4;
#else
    const std::size_t element = v * kLanes;
    return ((widen_u8(high + element % 8) >> static_cast<int>(element / 8 * 2)) & 3) << 4;
#endif
}

TOWERD_INLINE void store_sixth_bits(const Codes & codes, std::uint8_t * high) {
#if TOWERD_LANES == 16
    const I half = (codes.at[0] >> 4) | (codes.at[1] >> 4 << 4);
    const I all = half | (bits<I>(xor_lanes<8>(bits<F>(half))) << 2);
    std::uint8_t both[16];
    narrow_8(both, all);
    std::memcpy(high, both, 8);
#else
    for (std::size_t j = 0; j < 8; j += kLanes) {
        I all{};
        for (std::size_t group = 0; group < 4; ++group) {
            all |= codes.at[(8 * group + j) / kLanes] >> 4 << static_cast<int>(2 * group);
        }
        narrow_8(high + j, all);
    }
#endif
}

#if TOWERD_LANES == 16
// 32 codes of 4 bits to what each stands for, of 16 numbers in a vector: fewer instructions than arithmetic.
TOWERD_INLINE void look_up_nibbles(F numbers, const std::uint8_t * from, float * to) {
    const __m512i pairs = (__m512i)widen_u8(from);  // a look-up uses only the low 4 bits
    store(to, (F)_mm512_permutexvar_ps(pairs, (__m512)numbers));
    store(to + kLanes, (F)_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), (__m512)numbers));
}

// 0 to 15, or sixteen other consecutive numbers.
TOWERD_INLINE F row_of_codes(int first) {
    constexpr I number = {TOWERD_XORED(0)};
    return to_float(number + first);
}
#endif

// Unsigned codes of kBits bits; they take kBytes in a block.
template <int kBits>
struct Layout {
    static constexpr std::size_t kHigh = kBits == 5 ? 4 : kBits == 6 ? 8 : 0;
    static constexpr std::size_t kBytes = 4 * kBits;

    static TOWERD_INLINE Codes unpack(const std::uint8_t * from) {
        Codes codes;
        for (std::size_t v = 0; v < kHalfVectors; ++v) {
            const I pair = widen_u8(from + kHigh + v * kLanes);
            codes.at[v] = pair & 15;
            codes.at[v + kHalfVectors] = pair >> 4;
        }
        for (std::size_t v = 0; v < kVectors; ++v) {
            if constexpr (kBits == 5) {
                codes.at[v] |= (((U{} + load_as<std::uint32_t>(from)) & bits_of_elements(v)) != 0) & 16;
            }
            if constexpr (kBits == 6) {
                codes.at[v] |= sixth_bits(from, v);
            }
        }
        return codes;
    }

    static TOWERD_INLINE void pack(const Codes & codes, std::uint8_t * to) {
        if constexpr (kBits == 5) {
            U set{};
            for (std::size_t v = 0; v < kVectors; ++v) {
                set |= bits<U>(codes.at[v] > 15) & bits_of_elements(v);
            }
            store_as(to, bits<std::uint32_t>(across<either>(bits<F>(set))));
        }
        if constexpr (kBits == 6) {
            store_sixth_bits(codes, to);
        }
        for (std::size_t v = 0; v < kHalfVectors; ++v) {
            narrow_8(to + kHigh + v * kLanes, (codes.at[v] & 15) | (codes.at[v + kHalfVectors] << 4));
        }
    }
};

template <>
struct Layout<8> {
    static constexpr std::size_t kBytes = 32;

    static TOWERD_INLINE Codes unpack(const std::uint8_t * from) {
        Codes codes;
        for (std::size_t v = 0; v < kVectors; ++v) {
            codes.at[v] = widen_u8(from + v * kLanes);
        }
        return codes;
    }

    static TOWERD_INLINE void pack(const Codes & codes, std::uint8_t * to) {
#if defined(__AVX2__) && TOWERD_LANES == 8
        const I       low_byte = splat_int(255);
        const __m256i front = _mm256_packus_epi32((__m256i)(codes.at[0] & low_byte), (__m256i)(codes.at[1] & low_byte));
        const __m256i back = _mm256_packus_epi32((__m256i)(codes.at[2] & low_byte), (__m256i)(codes.at[3] & low_byte));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), order));
#else
        for (std::size_t v = 0; v < kVectors; ++v) {
            narrow_8(to + v * kLanes, codes.at[v]);
        }
#endif
    }
};

// Codes with a scale: kZero stands for 0, and 8-bit codes are signed bytes.
template <int kBits>
struct Symmetric {
    static constexpr std::size_t kBytes = 2 + Layout<kBits>::kBytes;
    static constexpr int         kZero = 1 << (kBits - 1);

    static TOWERD_INLINE void decode(const std::uint8_t * from, float * to) {
        const F scale = splat(f16_to_f32(load_as<std::uint16_t>(from)));
#if TOWERD_LANES == 16
        if constexpr (kBits == 4) {
            look_up_nibbles(row_of_codes(-kZero) * scale, from + 2, to);
            return;
        }
#endif
        Codes codes;
        if constexpr (kBits == 8) {
            for (std::size_t v = 0; v < kVectors; ++v) {
                codes.at[v] = widen_i8(from + 2 + v * kLanes);
            }
        } else {
            codes = Layout<kBits>::unpack(from + 2);
            for (std::size_t v = 0; v < kVectors; ++v) {
                codes.at[v] -= kZero;
            }
        }
        for (std::size_t v = 0; v < kVectors; ++v) {
            store(to + v * kLanes, to_float(codes.at[v]) * scale);
        }
    }

    // `codes` around 0, from -kZero to kZero - 1.
    static TOWERD_INLINE void write(std::uint16_t scale, Codes codes, std::uint8_t * to) {
        store_as(to, scale);
        for (std::size_t v = 0; v < kVectors; ++v) {
            codes.at[v] += kBits == 8 ? 0 : kZero;
        }
        Layout<kBits>::pack(codes, to + 2);
    }
};

// Codes with a scale and the number that code 0 stands for.
template <int kBits>
struct Asymmetric {
    static constexpr std::size_t kBytes = 4 + Layout<kBits>::kBytes;
    static constexpr int         kTop = (1 << kBits) - 1;

    static TOWERD_INLINE void decode(const std::uint8_t * from, float * to) {
        const F scale = splat(f16_to_f32(load_as<std::uint16_t>(from)));
        const F minimum = splat(f16_to_f32(load_as<std::uint16_t>(from + 2)));
#if TOWERD_LANES == 16
        if constexpr (kBits == 4) {
            look_up_nibbles(row_of_codes(0) * scale + minimum, from + 4, to);
            return;
        }
#endif
        const Codes codes = Layout<kBits>::unpack(from + 4);
        for (std::size_t v = 0; v < kVectors; ++v) {
            store(to + v * kLanes, to_float(codes.at[v]) * scale + minimum);
        }
    }

    static TOWERD_INLINE void write(std::uint16_t scale, std::uint16_t minimum, const Codes & codes,
                                    std::uint8_t * to) {
        store_as(to, scale);
        store_as(to + 2, minimum);
        Layout<kBits>::pack(codes, to + 4);
    }
};

// (x - minimum) / step to the nearest integer, ties to even, in [low, high].
TOWERD_INLINE Codes nearest_codes(const Numbers & x, float minimum, float inverse, int low, int high) {
    Codes codes;
    for (std::size_t v = 0; v < kVectors; ++v) {
        const F scaled = (x.at[v] - splat(minimum)) * splat(inverse);
        const F clamped = clamp(scaled, static_cast<float>(low), static_cast<float>(high));
        codes.at[v] = bits<I>(clamped + splat(kRounding)) - splat_int(kRoundingBits);
    }
    return codes;
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
