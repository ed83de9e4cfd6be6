// Memory: rows of bytes, and floats aligned for whole vector loads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace towerd {

// The rows of a two-dimensional array: each contiguous, in ascending order.
struct Rows {
    std::uint8_t * data;
    std::size_t    n;
    std::size_t    bytes;   // of one row
    std::size_t    stride;  // from one row to the next, >= bytes unless n <= 1

    std::size_t span() const { return n == 0 || bytes == 0 ? 0 : (n - 1) * stride + bytes; }
};

// Floats aligned to 64 bytes.
class Floats {
public:
    explicit Floats(std::size_t n) : memory_(n + kAlign) {}

    float * data() {
        const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
        return memory_.data() + (kAlign - at / sizeof(float) % kAlign) % kAlign;
    }

private:
    static constexpr std::size_t kAlign = 64 / sizeof(float);

    std::vector<float> memory_;
};

}  // namespace towerd
