// Random input for the fuzzer: everything follows from one seed, so a finding can be run again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t bits() {  // splitmix64
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    // From `low` to `high`, both included.
    std::size_t between(std::size_t low, std::size_t high) { return low + bits() % (high - low + 1); }
    bool        chance(std::size_t one_in) { return bits() % one_in == 0; }

    std::size_t one_of(std::initializer_list<std::size_t> choices) { return choices.begin()[bits() % choices.size()]; }

    // Between -1 and 1.
    float fraction() { return static_cast<float>(static_cast<double>(bits() >> 11) * 0x1p-52 - 1.0); }

    void fill(std::uint8_t * to, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            to[i] = static_cast<std::uint8_t>(bits());
        }
    }

    // Numbers of every kind that are finite, none beyond `limit`; whole runs alike, zeros of both signs.
    void fill_numbers(float * to, std::size_t n, float limit) {
        for (std::size_t i = 0; i < n;) {
            const std::size_t kind = between(0, 7);
            const float       size = power_of_two(limit);
            for (const std::size_t end = i + between(1, 64); i < end && i < n; ++i) {
                to[i] = number(kind, size);
                to[i] = to[i] > limit ? limit : to[i] < -limit ? -limit : to[i];
            }
        }
    }

private:
    float power_of_two(float limit) {
        float power = 1.0f;
        for (std::size_t n = between(0, 140); n > 0; --n) {
            power *= 0.5f;
        }
        return chance(3) ? power : chance(8) ? limit : 1.0f;
    }

    float number(std::size_t kind, float size) {
        switch (kind) {
            case 0: return chance(2) ? 0.0f : -0.0f;
            case 1: return size;
            case 2: return static_cast<float>(static_cast<int>(between(0, 32)) - 16) * 0.5f * size;  // ties
            case 3: return chance(2) ? size : -size;
            case 4: return 1000.0f + fraction();
            default: return fraction() * fraction() * size;
        }
    }

    std::uint64_t state_;
};
