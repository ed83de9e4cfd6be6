#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_taps(nanobind::module_ & m);

}  // namespace towerd
