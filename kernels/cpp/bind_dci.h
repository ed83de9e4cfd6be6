#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_dci(nanobind::module_ & m);

}  // namespace towerd
