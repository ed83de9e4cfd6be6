// Heap memory of exactly the size that is asked for, so that AddressSanitizer sees every byte beyond it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

class Memory {
public:
    // `size` bytes, `shift` bytes behind an address that is a multiple of 64, nothing after them.
    explicit Memory(std::size_t size, std::size_t shift = 0) : size_(size), shift_(shift) {
        if (posix_memalign(&base_, 64, shift + size) != 0) {
            throw std::bad_alloc();
        }
        std::memset(base_, 0xee, shift + size);
    }
    Memory(Memory && other) noexcept : base_(other.base_), size_(other.size_), shift_(other.shift_) {
        other.base_ = nullptr;
    }
    Memory(const Memory &) = delete;
    Memory & operator=(const Memory &) = delete;
    ~Memory() { std::free(base_); }

    std::uint8_t * data() const { return static_cast<std::uint8_t *>(base_) + shift_; }
    float *        floats() const { return reinterpret_cast<float *>(data()); }
    std::size_t    size() const { return size_; }
    bool           same(const Memory & other) const {
        return size_ == other.size_ && (size_ == 0 || std::memcmp(data(), other.data(), size_) == 0);
    }

private:
    void *      base_ = nullptr;
    std::size_t size_;
    std::size_t shift_;
};
