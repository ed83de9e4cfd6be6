// Rotation of the RoPE pairs of one row. No multiplication is fused with an addition, so every
// instruction set and numpy round alike.
#pragma once

#include "convert-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

// Pairs (2j, 2j + 1): each number times cos, plus its neighbour times +-sin.
template <typename Element>
TOWERD_INLINE void rotate_neighbours(const std::uint8_t * from, std::uint8_t * to, std::size_t n_rot,
                                     const float * cos, const float * sin) {
    constexpr std::size_t size = Element::kBytes;
    std::size_t           i = 0;
    for (; i + kLanes <= n_rot; i += kLanes) {
        read_ahead(from + i * size);
        const F x = Element::load(from + i * size);
        Element::store(to + i * size, x * load(cos + i) + xor_lanes<1>(x) * load(sin + i));
    }
    for (; i < n_rot; i += 2) {
        const float a = Element::load_one(from + i * size);
        const float b = Element::load_one(from + (i + 1) * size);
        Element::store_one(to + i * size, a * cos[i] + b * sin[i]);
        Element::store_one(to + (i + 1) * size, b * cos[i + 1] + a * sin[i + 1]);
    }
}

// Pairs (j, j + n_rot / 2).
template <typename Element>
TOWERD_INLINE void rotate_halves(const std::uint8_t * from, std::uint8_t * to, std::size_t n_rot, const float * cos,
                                 const float * sin) {
    constexpr std::size_t size = Element::kBytes;
    const std::size_t     half = n_rot / 2;
    std::size_t           i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        for (std::size_t line = 0; line < 2 * kLanes * size; line += kLineBytes) {
            read_ahead(from + 2 * i * size + line);
        }
        const F a = Element::load(from + i * size);
        const F b = Element::load(from + (i + half) * size);
        const F c = load(cos + i);
        const F s = load(sin + i);
        Element::store(to + i * size, a * c - b * s);
        Element::store(to + (i + half) * size, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = Element::load_one(from + i * size);
        const float b = Element::load_one(from + (i + half) * size);
        Element::store_one(to + i * size, a * cos[i] - b * sin[i]);
        Element::store_one(to + (i + half) * size, b * cos[i] + a * sin[i]);
    }
}

TOWERD_INLINE void copy_bytes(const std::uint8_t * from, std::uint8_t * to, std::size_t n) {
    if (from != to && n != 0) {
        std::memcpy(to, from, n);
    }
}

template <typename Element>
void rotate(const std::uint8_t * from, std::uint8_t * to, const Heads & heads, const float * cos, const float * sin) {
    constexpr std::size_t size = Element::kBytes;
    const std::size_t     before = heads.first * size;
    const std::size_t     end = before + heads.n_rot * size;
    const std::size_t     stride = heads.head_dim * size;
    for (std::size_t head = 0; head < heads.n; ++head, from += stride, to += stride) {
        copy_bytes(from, to, before);
        if (heads.neox) {
            rotate_halves<Element>(from + before, to + before, heads.n_rot, cos, sin);
        } else {
            rotate_neighbours<Element>(from + before, to + before, heads.n_rot, cos, sin);
        }
        copy_bytes(from + end, to + end, stride - end);
    }
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
