// Results that are larger than the caches, written with streaming stores.
//
// A normal store reads its line from memory before it writes to it. For a result that the caches cannot keep
// anyway, this is a third of all traffic, and a core has a limited number of reads in flight. A streaming store writes
// the line without reading it; the line must be whole, and is in no cache afterwards.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace towerd {

// A call that writes at least this many bytes streams. glibc's memcpy uses three quarters of a thread's share of the
// last-level cache: 20 MB on a virtual machine with two cores and 48 MB of cache, under 1 MB where dozens of threads
// share it. It cannot know who reads next. We do: `tiers` composes pieces of up to 15 MB that llama.cpp reads at once,
// so these stay in the cache on every machine. Anything larger is a whole slot file, whose beginning has left the cache
// by the time its end is written.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

// For memory that was touched before. The kernel has just cleared a new page, so its lines are in the cache, and
// streaming over them is slower by a tenth to a fifth.
bool should_stream(const Isa & isa, std::size_t bytes);

// Stages rows for streaming: collects them in a few KiB that stay in L1 and writes whole lines from there. Without
// `streams` they go straight to their place. For one thread; the destructor writes the rest.
class Stage {
public:
    Stage(const Isa & isa, bool streams) : isa_(isa), streams_(streams) {}
    Stage(const Stage &) = delete;
    Stage & operator=(const Stage &) = delete;
    ~Stage();

    // Where to write the `n` bytes that belong at `to`, until the next call. As aligned as `to` is for numbers of 4 bytes
    // if all other places are.
    std::uint8_t * place(std::uint8_t * to, std::size_t n);

private:
    static constexpr std::size_t kEnough = 1024;  // bytes to write at once: the size of a core's store buffer
    static constexpr std::size_t kRoom = 8192;    // the longest run that is staged

    void write(std::size_t n);

    const Isa &    isa_;
    bool           streams_;
    std::uint8_t * to_ = nullptr;  // where the bytes belong
    std::size_t    n_ = 0;
    alignas(kLineBytes) std::uint8_t bytes_[kRoom + kLineBytes];
};

}  // namespace towerd
