// Inner products with rows at arbitrary places. Eight running sums in a fixed order and no fused operations: every
// instruction set gives the same bits.
#pragma once

#include "vector-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

#if TOWERD_LANES == 16
typedef float E __attribute__((vector_size(32)));
#else
typedef F E;
#endif
constexpr std::size_t kSums = 8;
constexpr std::size_t kPartLanes = sizeof(E) / sizeof(float);
constexpr std::size_t kSumParts = kSums / kPartLanes;
constexpr std::size_t kAhead = 4;            // rows that are prefetched ahead
constexpr std::size_t kLineFloats = 64 / 4;  // of a cache line

TOWERD_INLINE void ask_for(const float * row, std::size_t width) {
    for (std::size_t d = 0; d < width; d += kLineFloats) {
        __builtin_prefetch(row + d);
    }
}

void dots(const float * query, const float * rows, const std::int64_t * ids, std::size_t n, std::size_t width,
          float * to) {
    const auto row = [&](std::size_t i) { return rows + static_cast<std::size_t>(ids[i]) * width; };
    for (std::size_t i = 0; i < n && i < kAhead; ++i) {
        ask_for(row(i), width);
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) {
            ask_for(row(i + kAhead), width);
        }
        const float * numbers = row(i);
        E             sums[kSumParts] = {};
        for (std::size_t d = 0; d < width; d += kSums) {
            for (std::size_t p = 0; p < kSumParts; ++p) {
                E a, b;
                std::memcpy(&a, query + d + p * kPartLanes, sizeof a);
                std::memcpy(&b, numbers + d + p * kPartLanes, sizeof b);
                sums[p] += a * b;
            }
        }
        float s[kSums];
        std::memcpy(s, sums, sizeof s);
        to[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
