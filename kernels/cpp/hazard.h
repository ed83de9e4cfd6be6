#pragma once

#include <cstddef>
#include <cstdint>

namespace towerd {

// As in lab/reference/hazard.py, all float64 and contiguous.
struct Hazard {
    const double * w1;          // [features, hidden]
    const double * b1;          // [hidden]
    const double * correction;  // [hidden, bins]
    const double * logits;      // [curves, bins]
    std::size_t    features, hidden, bins;
};

// x: [n, features]; of: [n], each the index of a curve; out: [n, bins].
void hazard_chances(const Hazard & hazard, const double * x, const std::int64_t * of, std::size_t n, double * out);

}  // namespace towerd
