#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_mixer(nanobind::module_ & m);

}  // namespace towerd
