// Codecs of the block formats: 32 numbers a block, after lab/reference/blocks.py and equal to it in every byte.
#pragma once

#include "blocks_ggml-inl.h"
#include "blocks_layout-inl.h"
#include "blocks_stored-inl.h"
#include "convert-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

template <typename Code>
void decode_blocks(const std::uint8_t * from, float * to, std::size_t n) {
    for (std::size_t i = 0; i + kBlock <= n; i += kBlock, from += Code::kBytes) {
        read_ahead(from);
        Code::decode(from, to + i);
    }
}

// The largest magnitudes so far, lane by lane, as integers: the bits of non-negative floats sort like the floats.
TOWERD_INLINE void raise(I & magnitudes, const float * from) {
    const Numbers x = load_block(from);
    for (std::size_t v = 0; v < kVectors; ++v) {
        const I raw = bits<I>(x.at[v]) & 0x7fffffff;
        magnitudes = raw > magnitudes ? raw : magnitudes;
    }
}

TOWERD_INLINE float largest(I magnitudes) {
    alignas(64) float numbers[kLanes];
    store(numbers, bits<F>(magnitudes));
    return peak(numbers, kLanes);
}

template <typename Code>
float encode_blocks(const float * from, std::uint8_t * to, std::size_t n) {
    I magnitudes{};
    for (std::size_t i = 0; i + kBlock <= n; i += kBlock, to += Code::kBytes) {
        for (std::size_t line = 0; line < kBlock * sizeof(float); line += kLineBytes) {
            read_ahead(reinterpret_cast<const std::uint8_t *>(from + i) + line);
        }
        raise(magnitudes, from + i);
        Code::encode(from + i, to);
    }
    return largest(magnitudes);
}

// In two passes over a few blocks at a time: each pass is one long chain, so the CPU wants several in flight.
template <typename Code>
float encode_searching(const float * from, std::uint8_t * to, std::size_t n) {
    constexpr std::size_t kGroup = 4;
    typename Code::Sums   sums[kGroup];
    I                     magnitudes{};
    for (std::size_t done = 0; done + kBlock <= n;) {
        const std::size_t left = (n - done) / kBlock;
        const std::size_t blocks = left < kGroup ? left : kGroup;
        for (std::size_t b = 0; b < blocks; ++b) {
            raise(magnitudes, from + done + b * kBlock);
            sums[b] = Code::add_up(from + done + b * kBlock);
        }
        for (std::size_t b = 0; b < blocks; ++b, done += kBlock, to += Code::kBytes) {
            Code::finish(sums[b], from + done, to);
        }
    }
    return largest(magnitudes);
}

template <typename Code>
constexpr Codec block_codec() {
    return {decode_blocks<Code>, encode_blocks<Code>};
}

template <typename Code>
constexpr Codec searching_codec() {
    return {decode_blocks<Code>, encode_searching<Code>};
}

void block_codecs(Codec (&codecs)[kCodecs]) {
    codecs[kQ4_0] = block_codec<GgmlSymmetric<4>>();
    codecs[kQ4_1] = block_codec<GgmlAsymmetric<4>>();
    codecs[kQ5_0] = block_codec<GgmlSymmetric<5>>();
    codecs[kQ5_1] = block_codec<GgmlAsymmetric<5>>();
    codecs[kQ8_0] = block_codec<GgmlQ8>();
    codecs[kIq4Nl] = block_codec<GgmlIq4Nl>();
    codecs[kQ8] = block_codec<StoredSymmetric<8>>();
    codecs[kQ6] = block_codec<StoredSymmetric<6>>();
    codecs[kQ5] = searching_codec<SearchedSymmetric<5>>();
    codecs[kQ4] = searching_codec<SearchedSymmetric<4>>();
    codecs[kQ8a] = block_codec<StoredAsymmetric<8>>();
    codecs[kQ6a] = block_codec<StoredAsymmetric<6>>();
    codecs[kQ5a] = searching_codec<SearchedAsymmetric<5>>();
    codecs[kQ4a] = searching_codec<SearchedAsymmetric<4>>();
}

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE
