// Probabilities of return: the contract is in lab/reference/hazard.py. Most features and half of the
// hidden units are 0, so they are skipped.

#include "hazard.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace towerd {

namespace {

constexpr double kScoreMax = 30.0;

void add_scaled(double * to, const double * row, double by, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        to[i] += by * row[i];
    }
}

}  // namespace

void hazard_chances(const Hazard & hazard, const double * x, const std::int64_t * of, std::size_t n, double * out) {
    std::vector<double> units(hazard.hidden);
    for (std::size_t row = 0; row < n; ++row, x += hazard.features, out += hazard.bins) {
        std::copy_n(hazard.b1, hazard.hidden, units.data());
        for (std::size_t i = 0; i < hazard.features; ++i) {
            if (x[i] != 0.0) {
                add_scaled(units.data(), hazard.w1 + i * hazard.hidden, x[i], hazard.hidden);
            }
        }
        std::copy_n(hazard.logits + of[row] * hazard.bins, hazard.bins, out);
        for (std::size_t i = 0; i < hazard.hidden; ++i) {
            if (units[i] > 0.0) {
                add_scaled(out, hazard.correction + i * hazard.bins, units[i], hazard.bins);
            }
        }
        for (std::size_t b = 0; b < hazard.bins; ++b) {
            out[b] = 1.0 / (1.0 + std::exp(-std::clamp(out[b], -kScoreMax, kScoreMax)));
        }
    }
}

}  // namespace towerd
