#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_relay(nanobind::module_ & m);

}  // namespace towerd
