// Memory aligned for whole vector loads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace towerd {

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
