// Stores that bypass the caches, for units whose instructions have them. Those define TOWERD_STREAMS and, after
// vector-inl.h:
//
//   void stream_line(uint8_t *, const uint8_t *)   one whole line, aligned where it is written
//   void finish_stream()                           streamed bytes become visible before all later stores
#pragma once

#include "vector-inl.h"

#if defined(TOWERD_STREAMS)

namespace towerd::TOWERD_ISA_NAMESPACE {
namespace {

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

}  // namespace
}  // namespace towerd::TOWERD_ISA_NAMESPACE

#endif
