// The primitives of vector-inl.h in plain C++, for units whose instructions do nothing better.
#pragma once

#include "vector-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

TOWERD_INLINE I    widen_i8(const std::uint8_t * from) { return __builtin_convertvector(load_as<S>(from), I); }
TOWERD_INLINE I    widen_u8(const std::uint8_t * from) { return __builtin_convertvector(load_as<B>(from), I); }
TOWERD_INLINE void narrow_8(std::uint8_t * to, I value) { store_as(to, __builtin_convertvector(bits<U>(value), B)); }
TOWERD_INLINE F    to_float(I value) { return __builtin_convertvector(value, F); }

TOWERD_INLINE U pick(I mask, U yes, U no) { return (yes & bits<U>(mask)) | (no & ~bits<U>(mask)); }
TOWERD_INLINE F max(F a, F b) { return bits<F>(pick(a > b, bits<U>(a), bits<U>(b))); }
TOWERD_INLINE F min(F a, F b) { return bits<F>(pick(a < b, bits<U>(a), bits<U>(b))); }
TOWERD_INLINE F abs(F value) { return bits<F>(bits<U>(value) & 0x7fffffffu); }

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
