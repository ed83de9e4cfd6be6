#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

void bind_pages(nanobind::module_ & m);

}  // namespace towerd
