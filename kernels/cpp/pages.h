// Pages of memory that the system has not given yet.
#pragma once

#include <cstddef>
#include <cstdint>

namespace towerd {

// Has the pages of `n` runs of `run_bytes` bytes in RAM and writable; the first run is at `start`, each other one
// `stride` bytes after the one before. What is stored in them stays. Returns false where the system cannot: elsewhere
// than on Linux, before its version 5.14, or without free memory.
bool populate(std::uintptr_t start, std::size_t stride, std::size_t n, std::size_t run_bytes);

}  // namespace towerd
