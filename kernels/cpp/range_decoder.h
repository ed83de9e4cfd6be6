// Decisions out of bits: constriction's range decoder (words of 32 bits, a state of 64, probabilities of 24), as
// stream.queue.RangeDecoder with stream.model.Bernoulli(perfect=False) reads them. Bits beyond the end are zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace towerd {

class RangeDecoder {
  public:
    explicit RangeDecoder(std::vector<std::uint32_t> words) : words_(std::move(words)) {
        point_ = std::uint64_t{word()} << 32;
        point_ |= word();
    }

    // The next decision, which is 1 with `probability` out of 65536 (1 to 65535); -1 for bits that no encoder writes.
    int take(int probability) {
        const auto          zeros = static_cast<std::uint64_t>(65536 - probability) * 256 - (probability < 32768 ? 1 : 0);
        const std::uint64_t unit = range_ >> 24;
        const std::uint64_t at = (point_ - lower_) / unit;
        if (at >> 24 != 0) {
            return -1;
        }
        const bool bit = at >= zeros;
        lower_ += bit ? unit * zeros : 0;
        range_ = unit * (bit ? (1u << 24) - zeros : zeros);
        if (range_ >> 32 == 0) {
            lower_ <<= 32;
            range_ <<= 32;
            point_ = point_ << 32 | word();
        }
        return bit ? 1 : 0;
    }

  private:
    std::uint32_t word() { return next_ < words_.size() ? words_[next_++] : 0; }

    std::vector<std::uint32_t> words_;
    std::size_t                next_ = 0;
    std::uint64_t              lower_ = 0, range_ = ~std::uint64_t{0}, point_ = 0;
};

}  // namespace towerd
