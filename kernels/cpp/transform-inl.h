// The product of a matrix with many columns of x at once, to the same bits with all instruction sets as `lm_products`.
#pragma once

#include "lm-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

// With 32 registers of 16 lanes 24 sums fit, so that a half is turned into a float once for 8 products; the others have
// as many sums as `lm_tile`.
constexpr std::size_t kTransformPanels = kLanes == 16 ? 3 : 1;
constexpr std::size_t kTransformXs = kLanes == 16 ? 8 : 4;

template <std::size_t kPanels>
TOWERD_INLINE void transform_tile(const TransformProduct & job, std::size_t panel, std::size_t first) {
    F                    sums[kPanels][kParts][kTransformXs] = {};
    const std::uint8_t * panels = job.panels + panel * job.panel_bytes;
    const float *        x = job.x + first;
    for (std::size_t column = 0; column < job.n_columns; ++column, x += job.n_x) {
        for (std::size_t p = 0; p < kPanels; ++p) {
            for (std::size_t v = 0; v < kParts; ++v) {
                const F weights = LmF16::at(panels + p * job.panel_bytes, column, v);
                for (std::size_t i = 0; i < kTransformXs; ++i) {
                    sums[p][v][i] = fused(weights, splat(x[i]), sums[p][v][i]);
                }
            }
        }
    }
    for (std::size_t p = 0; p < kPanels; ++p) {
        for (std::size_t v = 0; v < kParts; ++v) {
            for (std::size_t i = 0; i < kTransformXs; ++i) {
                store(job.out + (first + i) * job.out_stride + (panel + p) * kLmRows + v * kLanes, sums[p][v][i]);
            }
        }
    }
}

template <std::size_t kPanels>
void transform_strip(const TransformProduct & job, std::size_t panel) {
    static_assert(kTransformRows % kTransformXs == 0, "whole tiles");
    for (std::size_t first = 0; first < job.n_x; first += kTransformXs) {
        transform_tile<kPanels>(job, panel, first);
    }
}

void transform_product(const TransformProduct & job) {
    std::size_t panel = 0;
    for (; job.n_panels - panel >= kTransformPanels; panel += kTransformPanels) {
        transform_strip<kTransformPanels>(job, panel);
    }
    for (; panel < job.n_panels; ++panel) {
        transform_strip<1>(job, panel);
    }
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
