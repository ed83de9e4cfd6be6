// The Walsh-Hadamard transform of blocks of 32 to 512 numbers.
#pragma once

#include "vector-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

// Sums and differences of lanes at distance K within each vector. A number times 1 or -1 is exact, so that the sum is
// rounded once whether or not the instructions fuse the two.
template <int K, std::size_t N>
TOWERD_INLINE void within(F (&x)[N]) {
    if constexpr (K < TOWERD_LANES) {
        const F sign = negate_where(splat(1.0f), lanes_with<K>());
        for (std::size_t i = 0; i < N; ++i) {
            x[i] = multiply_add(x[i], sign, xor_lanes<K>(x[i]));
        }
    }
}

// A run of kRun numbers in registers: scaled, then all sums at distances below kRun.
template <std::size_t kRun>
TOWERD_INLINE void transform_run(float * at, F scale) {
    constexpr std::size_t kVectors = kRun / kLanes;
    F                     x[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) {
        x[i] = load(at + i * kLanes) * scale;
    }
    within<1>(x);
    within<2>(x);
    within<4>(x);
    within<8>(x);
    for (std::size_t distance = 1; distance < kVectors; distance *= 2) {
        for (std::size_t i = 0; i < kVectors; ++i) {
            if ((i & distance) == 0) {
                const F sum = x[i] + x[i + distance];
                x[i + distance] = x[i] - x[i + distance];
                x[i] = sum;
            }
        }
    }
    for (std::size_t i = 0; i < kVectors; ++i) {
        store(at + i * kLanes, x[i]);
    }
}

// Sums of numbers further apart than a run.
void transform_far(float * at, std::size_t block, std::size_t distance) {
    for (std::size_t start = 0; start < block; start += 2 * distance) {
        for (std::size_t i = start; i < start + distance; i += kLanes) {
            const F a = load(at + i);
            const F b = load(at + i + distance);
            store(at + i, a + b);
            store(at + i + distance, a - b);
        }
    }
}

void hadamard(float * x, std::size_t n, std::size_t block) {
    const F scale = splat(1.0f / __builtin_sqrtf(static_cast<float>(block)));
    if (block == 32) {
        for (std::size_t i = 0; i < n; i += 32) {
            transform_run<32>(x + i, scale);
        }
        return;
    }
    for (std::size_t i = 0; i < n; i += block) {
        for (std::size_t j = 0; j < block; j += 64) {
            transform_run<64>(x + i + j, scale);
        }
        for (std::size_t distance = 64; distance < block; distance *= 2) {
            transform_far(x + i, block, distance);
        }
    }
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
