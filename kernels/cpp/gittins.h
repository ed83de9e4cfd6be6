#pragma once

#include <cstddef>

namespace towerd {

// The contract is in lab/reference/gittins.py; out: [n, bins]. Throws std::invalid_argument.
void gittins(const double * chances, const double * widths, std::size_t n, std::size_t bins, double * out);

}  // namespace towerd
