#include "formats.h"

#include <cstring>
#include <numeric>

namespace towerd {

// Segment files contain the ids: never reassign one. From 256 on they are towerd's, below they are ggml's.
const Format kFormats[25] = {
    {"f32", 0, kF32, 1, 4, 0, false, true},
    {"f16", 1, kF16, 1, 2, 0, false, true},
    {"q4_0", 2, kQ4_0, 32, 18, 1, false, true},
    {"q4_1", 3, kQ4_1, 32, 20, 2, false, true},
    {"q5_0", 6, kQ5_0, 32, 22, 1, false, true},
    {"q5_1", 7, kQ5_1, 32, 24, 2, false, true},
    {"q8_0", 8, kQ8_0, 32, 34, 1, false, true},
    {"iq4_nl", 20, kIq4Nl, 32, 18, 1, false, true},
    {"bf16", 30, kBf16, 1, 2, 0, false, true},
    // Stored formats: an f16 scale, then codes of 8, 6, 5 or 4 bits; "h": rotated by a Hadamard matrix first.
    {"q8", 256, kQ8, 32, 34, 1, false, false},
    {"q8h", 257, kQ8, 32, 34, 1, true, false},
    {"q6", 258, kQ6, 32, 26, 1, false, false},
    {"q6h", 259, kQ6, 32, 26, 1, true, false},
    {"q5", 260, kQ5, 32, 22, 1, false, false},
    {"q5h", 261, kQ5, 32, 22, 1, true, false},
    {"q4", 262, kQ4, 32, 18, 1, false, false},
    {"q4h", 263, kQ4, 32, 18, 1, true, false},
    // "a", asymmetric: f16 scale, f16 minimum, then the codes.
    {"q8a", 264, kQ8a, 32, 36, 2, false, false},
    {"q8ah", 265, kQ8a, 32, 36, 2, true, false},
    {"q6a", 266, kQ6a, 32, 28, 2, false, false},
    {"q6ah", 267, kQ6a, 32, 28, 2, true, false},
    {"q5a", 268, kQ5a, 32, 24, 2, false, false},
    {"q5ah", 269, kQ5a, 32, 24, 2, true, false},
    {"q4a", 270, kQ4a, 32, 20, 2, false, false},
    {"q4ah", 271, kQ4a, 32, 20, 2, true, false},
};

const Format * format_named(const char * name) {
    for (const Format & format : kFormats) {
        if (std::strcmp(format.name, name) == 0) {
            return &format;
        }
    }
    return nullptr;
}

std::size_t hadamard_block(const Format & format, std::size_t n_elements) {
    return format.hadamard ? std::gcd(n_elements, std::size_t{64}) : 0;
}

}  // namespace towerd
