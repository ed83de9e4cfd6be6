#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_gittins(nanobind::module_ & m);

}  // namespace towerd
