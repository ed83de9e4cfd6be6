// Which instruction sets this build has and this machine can run.
#pragma once

#include <vector>

#include "isa.h"

namespace towerd {

// Best first; the last one runs anywhere. Asks the CPU once.
const std::vector<const Isa *> & available();

// nullptr if this build or this machine lacks that instruction set.
const Isa * isa_named(const char * name);

}  // namespace towerd
