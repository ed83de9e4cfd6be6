// Decisions to bits and back as constriction's range coder has them (words of 32 bits, a state of 64, probabilities of
// 24): stream.queue.RangeEncoder and RangeDecoder with stream.model.Bernoulli(perfect=False).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace towerd {

// The share of 1 << 24 that a 0 has, where a 1 has `probability` out of 65536 (1 to 65535).
inline std::uint64_t share_of_zero(int probability) {
    return static_cast<std::uint64_t>(65536 - probability) * 256 - (probability < 32768 ? 1 : 0);
}

class RangeEncoder {
  public:
    // Appends a decision that is 1 with `probability` out of 65536 (1 to 65535).
    void put(bool bit, int probability) {
        const std::uint64_t zeros = share_of_zero(probability);
        const std::uint64_t unit  = range_ >> 24;
        if (bit) {
            lower_ = raised(words_, unit * zeros);
        }
        range_ = unit * (bit ? (1u << 24) - zeros : zeros);
        if (range_ >> 32 == 0) {
            words_.push_back(static_cast<std::uint32_t>(lower_ >> 32));
            lower_ <<= 32;
            range_ <<= 32;
        }
    }

    // The words of all decisions; a decoder adds the zeros behind them.
    std::vector<std::uint32_t> finish() const {
        std::vector<std::uint32_t> words = words_;
        if (range_ != ~std::uint64_t{0}) {
            const std::uint64_t point = raised(words, 0xffffffffu);
            words.push_back(static_cast<std::uint32_t>(point >> 32));
        }
        return words;
    }

  private:
    // `lower_` and `more`; what does not fit into 64 bits is carried into the words before.
    std::uint64_t raised(std::vector<std::uint32_t> & words, std::uint64_t more) const {
        const std::uint64_t sum = lower_ + more;
        if (sum < lower_) {
            for (std::size_t i = words.size(); i-- > 0 && ++words[i] == 0;) {
            }
        }
        return sum;
    }

    std::vector<std::uint32_t> words_;
    std::uint64_t              lower_ = 0, range_ = ~std::uint64_t{0};
};

// Bits beyond the end are zeros.
class RangeDecoder {
  public:
    explicit RangeDecoder(std::vector<std::uint32_t> words) : words_(std::move(words)) {
        point_ = std::uint64_t{word()} << 32;
        point_ |= word();
    }

    // The next decision, which is 1 with `probability` out of 65536 (1 to 65535); -1 for bits that no encoder writes.
    int take(int probability) {
        const std::uint64_t zeros = share_of_zero(probability);
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
