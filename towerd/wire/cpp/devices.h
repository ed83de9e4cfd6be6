// The devices that llama.cpp put a model on.

#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "llama.h"

namespace towerd::wire {

// Bytes that are free and all bytes of each device beside the CPU; both 0 where a device does not tell.
std::vector<std::pair<size_t, size_t>> device_bytes(const llama_model & model);

}  // namespace towerd::wire
