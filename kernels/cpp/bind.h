// What the files of this module bind, each its own part.
#pragma once

#include <nanobind/nanobind.h>

namespace towerd {

class Lm;
class Mixer;
class RangeDecoder;

void bind_dci(nanobind::module_ & m);
void bind_gittins(nanobind::module_ & m);
void bind_hazard(nanobind::module_ & m);
void bind_lm(nanobind::module_ & m);
void bind_mixer(nanobind::module_ & m);
void bind_pages(nanobind::module_ & m);
void bind_row_transform(nanobind::module_ & m);
void bind_sealed_pages(nanobind::module_ & m);
void bind_side_by_side(nanobind::module_ & m);
void bind_taps(nanobind::module_ & m);
void bind_token_index(nanobind::module_ & m);

// What a Python object holds; each raises TypeError for another one.
Lm &           lm_of(nanobind::handle bound);
Mixer &        mixer_of(nanobind::handle bound);
RangeDecoder & decoder_of(nanobind::handle bound);

}  // namespace towerd
