// Any CPU: compiler vectors of 16 bytes, f16 with integer arithmetic.
#define TOWERD_ISA_NAMESPACE generic
#define TOWERD_LANES 4
#define TOWERD_NO_FUSED 1

#include "portable-inl.h"

namespace towerd::generic {
namespace {

// The exponents of the two formats differ by 112. Subnormal halves are multiples of
// 2^-24; infinity and NaN have the largest exponent of both; a NaN is made quiet.
TOWERD_INLINE F f16_to_f32(U value) {
    const U sign = (value & 0x8000u) << 16;
    const U rest = value & 0x7fffu;
    const U normal = (rest << 13) + (112u << 23);
    const U subnormal = bits<U>(to_float(bits<I>(rest)) * 0x1p-24f);
    const U special = (rest << 13) | 0x7f800000u | (bits<U>(rest > 0x7c00u) & 0x00400000u);
    const U large = pick(rest >= 0x7c00u, special, normal);
    return bits<F>(sign | pick(rest < 0x0400u, subnormal, large));
}

// Subnormal halves: near 0.5 the last bit of a float is worth 2^-24, as theirs is. 65520 and more is nearer to
// infinity than to 65504.
TOWERD_INLINE U f32_to_f16(F value) {
    const U raw = bits<U>(value);
    const U sign = (raw >> 16) & 0x8000u;
    const U rest = raw & 0x7fffffffu;
    const U normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    const U subnormal = bits<U>(bits<F>(rest) + splat(0.5f)) - 0x3f000000u;
    const U special = pick(rest > 0x7f800000u, 0x7e00u | ((rest >> 13) & 0x1ffu), U{} + 0x7c00u);
    const U large = pick(rest >= 0x477ff000u, special, normal);
    return sign | pick(rest < 0x38800000u, subnormal, large);
}

TOWERD_INLINE F multiply_add(F a, F b, F c) { return a * b + c; }
TOWERD_INLINE float f16_to_f32(std::uint16_t value) { return f16_to_f32(U{} + value)[0]; }
TOWERD_INLINE std::uint16_t f32_to_f16(float value) {
    return static_cast<std::uint16_t>(f32_to_f16(splat(value))[0]);
}
TOWERD_INLINE F load_f16(const std::uint8_t * from) {
    return f16_to_f32(__builtin_convertvector(load_as<H>(from), U));
}
TOWERD_INLINE void store_f16(std::uint8_t * to, F value) {
    store_as(to, __builtin_convertvector(f32_to_f16(value), H));
}

}  // namespace
}  // namespace towerd::generic

#include "isa-inl.h"
