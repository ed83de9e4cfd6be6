#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

class Mixer;
class RangeDecoder;

void bind_mixer(nanobind::module_ & m);
Mixer &        mixer_of(nanobind::handle bound);    // raises TypeError for anything but a Mixer
RangeDecoder & decoder_of(nanobind::handle bound);  // the same of a RangeDecoder

}  // namespace towerd
