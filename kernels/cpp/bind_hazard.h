#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_hazard(nanobind::module_ & m);

}  // namespace towerd
