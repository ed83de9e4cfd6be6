// Codecs of the element formats, and the largest magnitude of a run of them.
#pragma once

#include "vector-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

// How one element format is loaded and stored: kLanes numbers at once, or a single one.
struct F32 {
    static constexpr std::size_t kBytes = 4;
    static TOWERD_INLINE F       load(const std::uint8_t * from) { return load_as<F>(from); }
    static TOWERD_INLINE void    store(std::uint8_t * to, F value) { store_as(to, value); }
    static TOWERD_INLINE float   load_one(const std::uint8_t * from) { return load_as<float>(from); }
    static TOWERD_INLINE void    store_one(std::uint8_t * to, float value) { store_as(to, value); }
};

struct F16 {
    static constexpr std::size_t kBytes = 2;
    static TOWERD_INLINE F       load(const std::uint8_t * from) { return load_f16(from); }
    static TOWERD_INLINE void    store(std::uint8_t * to, F value) { store_f16(to, value); }
    static TOWERD_INLINE float   load_one(const std::uint8_t * from) {
        return f16_to_f32(load_as<std::uint16_t>(from));
    }
    static TOWERD_INLINE void    store_one(std::uint8_t * to, float value) { store_as(to, f32_to_f16(value)); }
};

struct Bf16 {
    static constexpr std::size_t kBytes = 2;
    static TOWERD_INLINE F       load(const std::uint8_t * from) { return load_bf16(from); }
    static TOWERD_INLINE void    store(std::uint8_t * to, F value) { store_bf16(to, value); }
    static TOWERD_INLINE float   load_one(const std::uint8_t * from) {
        return bf16_to_f32(load_as<std::uint16_t>(from));
    }
    static TOWERD_INLINE void    store_one(std::uint8_t * to, float value) { store_as(to, f32_to_bf16(value)); }
};

template <typename Element>
void decode_elements(const std::uint8_t * from, float * to, std::size_t n) {
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        read_ahead(from + i * Element::kBytes);
        store(to + i, Element::load(from + i * Element::kBytes));
    }
    for (; i < n; ++i) {
        to[i] = Element::load_one(from + i * Element::kBytes);
    }
}

template <typename Element>
float encode_elements(const float * from, std::uint8_t * to, std::size_t n) {
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        Element::store(to + i * Element::kBytes, load(from + i));
    }
    for (; i < n; ++i) {
        Element::store_one(to + i * Element::kBytes, from[i]);
    }
    return 0.0f;
}

// As integers: the bits of non-negative floats sort like the floats, and a NaN's are the largest.
float peak(const float * from, std::size_t n) {
    std::int32_t found = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t raw = load_as<std::int32_t>(from + i) & 0x7fffffff;
        found = raw > found ? raw : found;
    }
    return found > 0x7f800000 ? __builtin_inff() : bits<float>(found);
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
