// The table of formats, which kernels/formats.py shows to Python.
#pragma once

#include "isa.h"

namespace towerd {

extern const Format kFormats[25];

const Format * format_named(const char * name);  // nullptr if there is none

// Run of elements that a stored row of `n_elements` is rotated by; 0 for no rotation.
std::size_t hadamard_block(const Format & format, std::size_t n_elements);

}  // namespace towerd
