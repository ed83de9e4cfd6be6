// The functions that Python sees. Each checks every argument with the GIL held, then works without it.
#pragma once

#include "arguments.h"
#include "isa.h"

namespace towerd {

void bind_copy_planes(nb::handle dst, nb::handle jobs, nb::handle n_threads);
void bind_gather_rows(nb::handle src, nb::handle index, nb::handle out, nb::handle n_threads);
void bind_transpose(nb::handle src, nb::handle out, nb::handle element_bytes, nb::handle n_threads);

void       bind_transcode(const Isa & isa, nb::handle dst, nb::handle jobs, nb::handle n_threads, nb::handle is_new);
nb::object bind_transcoded(const Isa & isa, nb::handle rows, nb::handle src_format, nb::handle dst_format,
                           nb::handle n_threads);

void bind_rope_shift(const Isa & isa, nb::handle src, nb::handle out, nb::handle format, nb::handle cos, nb::handle sin,
                     nb::handle row_table, nb::handle head_dim, nb::handle n_rot, nb::handle first, nb::handle neox,
                     nb::handle hadamard_block, nb::handle n_threads);
nb::object bind_attention_mass(const Isa & isa, nb::handle queries, nb::handle keys, nb::handle format,
                               nb::handle n_seen, nb::handle head_dim, nb::handle scale, nb::handle n_threads);
void bind_hadamard(const Isa & isa, nb::handle src, nb::handle out, nb::handle block, nb::handle n_threads);

}  // namespace towerd
