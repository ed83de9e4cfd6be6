#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_side_by_side(nanobind::module_ & m);

}  // namespace towerd
