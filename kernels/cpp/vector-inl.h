// Vectors of TOWERD_LANES numbers for the bodies in *-inl.h: compiler vectors with + - * and
// bitwise operators (GCC and Clang, any architecture). A unit adds, after this file:
//
//   F load_f16(const uint8_t *)             kLanes halves, exact, signalling NaN made quiet
//   load_eight_f16(const uint8_t *)         with 16 lanes: eight halves, as eight floats
//   void store_f16(uint8_t *, F)            to nearest, ties to even
//   float f16_to_f32(uint16_t), uint16_t f32_to_f16(float)      the same for one number
//   I widen_i8(const uint8_t *), I widen_u8(const uint8_t *)    kLanes signed or unsigned bytes
//   void narrow_8(uint8_t *, I)             the low byte of each lane
//   F to_float(I)
//   F max(F, F), F min(F, F), F abs(F)      for numbers, not NaN
//   F multiply_add(F a, F b, F c)           a * b + c, rounded once if the instructions can
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "isa.h"

#define TOWERD_INLINE inline __attribute__((always_inline, unused))

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

constexpr std::size_t kLanes = TOWERD_LANES;

typedef float         F __attribute__((vector_size(4 * TOWERD_LANES)));
typedef std::int32_t  I __attribute__((vector_size(4 * TOWERD_LANES)));
typedef std::uint32_t U __attribute__((vector_size(4 * TOWERD_LANES)));
typedef std::uint16_t H __attribute__((vector_size(2 * TOWERD_LANES)));
typedef std::uint8_t  B __attribute__((vector_size(1 * TOWERD_LANES)));
typedef std::int8_t   S __attribute__((vector_size(1 * TOWERD_LANES)));

// Bytes without alignment as a vector or number, and back.
template <typename T>
TOWERD_INLINE T load_as(const void * from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename T>
TOWERD_INLINE void store_as(void * to, T value) {
    std::memcpy(to, &value, sizeof value);
}

template <typename To, typename From>
TOWERD_INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &value, sizeof to);
    return to;
}

// Prefetches a line: the hardware does not prefetch across the end of a page. The address need not be
// mapped.
TOWERD_INLINE void read_ahead(const std::uint8_t * from) {
    constexpr std::uintptr_t kAheadBytes = 4096;  // more than memory delivers during the latency of one line; measured
    __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<std::uintptr_t>(from) + kAheadBytes));
}

TOWERD_INLINE F    load(const float * from) { return load_as<F>(from); }
TOWERD_INLINE void store(float * to, F value) { store_as(to, value); }
TOWERD_INLINE F    splat(float value) { return value - F{}; }
TOWERD_INLINE I    splat_int(std::int32_t value) { return value - I{}; }

// Lane i of the result is lane i ^ K.
#if TOWERD_LANES == 4
#define TOWERD_XORED(K) 0 ^ K, 1 ^ K, 2 ^ K, 3 ^ K
#elif TOWERD_LANES == 8
#define TOWERD_XORED(K) 0 ^ K, 1 ^ K, 2 ^ K, 3 ^ K, 4 ^ K, 5 ^ K, 6 ^ K, 7 ^ K
#else
#define TOWERD_XORED(K) \
    0 ^ K, 1 ^ K, 2 ^ K, 3 ^ K, 4 ^ K, 5 ^ K, 6 ^ K, 7 ^ K, 8 ^ K, 9 ^ K, 10 ^ K, 11 ^ K, 12 ^ K, 13 ^ K, 14 ^ K, 15 ^ K
#endif

template <int K>
TOWERD_INLINE F xor_lanes(F value) {
#if defined(__clang__)
    return __builtin_shufflevector(value, value, TOWERD_XORED(K));
#else
    return __builtin_shuffle(value, I{TOWERD_XORED(K)});
#endif
}

// -1 in lanes whose number has bit K set, else 0.
template <int K>
TOWERD_INLINE I lanes_with() {
    constexpr I number = {TOWERD_XORED(0)};
    return (number & K) != 0;
}

// value with the sign flipped in the lanes where `mask` is -1.
TOWERD_INLINE F negate_where(F value, I mask) {
    return bits<F>(bits<U>(value) ^ (bits<U>(mask) & 0x80000000u));
}

TOWERD_INLINE F load_bf16(const std::uint8_t * from) {
    return bits<F>(__builtin_convertvector(load_as<H>(from), U) << 16);
}

// To nearest, ties to even; a NaN keeps its upper bits and is made quiet.
TOWERD_INLINE void store_bf16(std::uint8_t * to, F value) {
    const U raw = bits<U>(value);
    const U nearest = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
    const U quiet = (raw >> 16) | 0x40u;
    const U nan = bits<U>((raw & 0x7fffffffu) > 0x7f800000u);
    store_as(to, __builtin_convertvector((quiet & nan) | (nearest & ~nan), H));
}

TOWERD_INLINE float bf16_to_f32(std::uint16_t value) { return bits<float>(std::uint32_t{value} << 16); }

TOWERD_INLINE std::uint16_t f32_to_bf16(float value) {
    const auto raw = bits<std::uint32_t>(value);
    if ((raw & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<std::uint16_t>((raw >> 16) | 0x40u);
    }
    return static_cast<std::uint16_t>((raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16);
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
