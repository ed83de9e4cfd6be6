// Puts the bodies into the table that dispatch.cpp reads. Included last, because the bodies use what a unit defines.
#pragma once

#include "convert-inl.h"
#include "hadamard-inl.h"
#include "rotate-inl.h"
#include "attention-inl.h"
#include "lm-inl.h"
#include "transform-inl.h"
#include "blocks-inl.h"

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

#if defined(TOWERD_STREAMS)
// The parts of lines at both ends are written as usual: streaming half a line costs more than a whole one.
void stream(const std::uint8_t * from, std::uint8_t * to, std::size_t n) {
    const std::size_t begun = reinterpret_cast<std::uintptr_t>(to) % kLineBytes;
    const std::size_t rest = begun == 0 ? 0 : kLineBytes - begun;
    const std::size_t head = rest < n ? rest : n;
    std::memcpy(to, from, head);
    std::size_t i = head;
    for (; i + kLineBytes <= n; i += kLineBytes) {
        stream_line(to + i, from + i);
    }
    std::memcpy(to + i, from + i, n - i);
}
#endif

#define TOWERD_TEXT_OF(name) #name
#define TOWERD_TEXT(name)    TOWERD_TEXT_OF(name)

Isa assemble() {
    Isa isa{};
    isa.name = TOWERD_TEXT(TOWERD_ISA_NAMESPACE);
    isa.codecs[kF32] = {decode_elements<F32>, encode_elements<F32>};
    isa.codecs[kF16] = {decode_elements<F16>, encode_elements<F16>};
    isa.codecs[kBf16] = {decode_elements<Bf16>, encode_elements<Bf16>};
    block_codecs(isa.codecs);
    isa.hadamard = hadamard;
    isa.rotate[kF32] = rotate<F32>;
    isa.rotate[kF16] = rotate<F16>;
    isa.rotate[kBf16] = rotate<Bf16>;
    isa.scores = scores;
    isa.add_softmax = add_softmax;
    isa.dots[kF32] = dots<F32>;
    isa.dots[kF16] = dots<F16>;
    isa.dots[kBf16] = dots<Bf16>;
    isa.peak = peak;
#if defined(TOWERD_STREAMS)
    isa.stream = stream;
    isa.finish_stream = finish_stream;
#endif
    isa.lm = {{lm_products<LmF32>, lm_products<LmF16>, lm_products<LmQ8>}, lm_norm, lm_exponentials, lm_gated, lm_counts};
    isa.transform_product = transform_product;
    return isa;
}

}  // namespace

// Only called on a CPU that has the instructions.
const Isa & isa() {
    static const Isa table = assemble();
    return table;
}

}  // namespace towerd::TOWERD_ISA_NAMESPACE
