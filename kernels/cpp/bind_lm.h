#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

class Lm;

void bind_lm(nanobind::module_ & m);
Lm & lm_of(nanobind::handle bound);  // raises TypeError for anything but an Lm

}  // namespace towerd
