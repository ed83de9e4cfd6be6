#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_lm(nanobind::module_ & m);

}  // namespace towerd
