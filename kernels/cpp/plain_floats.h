// How this thread rounds, while work lasts whose bits must be the same everywhere.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace towerd {

// Sets this thread to round to nearest and keep subnormal numbers while the object lives.
class PlainFloats {
public:
#if defined(__x86_64__)
    PlainFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~PlainFloats() { _mm_setcsr(saved_); }

private:
    unsigned int saved_;
#elif defined(__aarch64__)
    PlainFloats() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}) : "memory");
    }
    ~PlainFloats() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }

private:
    std::uint64_t saved_ = 0;
#else
    PlainFloats() {}
    ~PlainFloats() {}
#endif
};

}  // namespace towerd
