// The Python interface: one class with all kernels for one instruction set.

#include "bind.h"
#include "bind_dci.h"
#include "bind_gittins.h"
#include "bind_hazard.h"
#include "bind_lm.h"
#include "bind_mix.h"
#include "bind_pages.h"
#include "bind_side_by_side.h"
#include "bind_taps.h"

#include <string>

#include "dispatch.h"
#include "formats.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;
using towerd::Format;
using towerd::Isa;
using nb::handle;

namespace {

struct Kernels {
    const Isa & isa;

    explicit Kernels(const char * name) : isa(named(name)) {}

    static const Isa & named(const char * name) {
        const Isa * isa = towerd::isa_named(name);
        if (isa == nullptr) {
            towerd::refuse("name", "no kernels called " + std::string(name) + " on this machine");
        }
        return *isa;
    }
};

nb::list available() {
    nb::list names;
    for (const Isa * isa : towerd::available()) {
        names.append(nb::str(isa->name));
    }
    return names;
}

nb::list formats() {
    nb::list rows;
    for (const Format & row : towerd::kFormats) {
        rows.append(nb::make_tuple(row.name, row.type_id, row.block_elements, row.block_bytes, row.hadamard));
    }
    return rows;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "C++ kernels of towerd; the contracts are in lab.reference.";
    m.def("available", &available, "Names of the instruction sets that this machine has, best first.");
    m.attr("STREAM_BYTES") = towerd::kStreamBytes;
    m.def("formats", &formats, "(name, type id, block elements, block bytes, rotated) of each format.");
    nb::class_<Kernels>(m, "Kernels", "All kernels for one instruction set. ValueError if it is not available.")
        .def(nb::init<const char *>(), "name"_a)
        .def_prop_ro("name", [](const Kernels & self) { return self.isa.name; })
        .def("copy_planes", [](const Kernels &, handle dst, handle jobs, handle n_threads) {
                towerd::bind_copy_planes(dst, jobs, n_threads);
            }, "dst"_a.none(), "jobs"_a.none(), "n_threads"_a.none() = 1,
            "Copy the rows of every job (offset, rows, index) into dst.")
        .def("gather_rows", [](const Kernels &, handle src, handle index, handle out, handle n_threads) {
                towerd::bind_gather_rows(src, index, out, n_threads);
            }, "src"_a.none(), "index"_a.none(), "out"_a.none(), "n_threads"_a.none() = 1,
            "out[i] = src[index[i]].")
        .def("transpose", [](const Kernels &, handle src, handle out, handle element_bytes, handle n_threads) {
                towerd::bind_transpose(src, out, element_bytes, n_threads);
            }, "src"_a.none(), "out"_a.none(), "element_bytes"_a.none(), "n_threads"_a.none() = 1,
            "out[c, r] = src[r, c] for elements of 1, 2 or 4 bytes.")
        .def("transcode", [](const Kernels & self, handle dst, handle jobs, handle n_threads, handle is_new) {
                towerd::bind_transcode(self.isa, dst, jobs, n_threads, is_new);
            }, "dst"_a.none(), "jobs"_a.none(), "n_threads"_a.none() = 1, "is_new"_a.none() = false,
            "Write the rows of every job (offset, rows, index, src_format, dst_format) into dst.")
        .def("transcoded", [](const Kernels & self, handle rows, handle src_format, handle dst_format, handle n_threads) {
                return towerd::bind_transcoded(self.isa, rows, src_format, dst_format, n_threads);
            }, "rows"_a.none(), "src_format"_a.none(), "dst_format"_a.none(), "n_threads"_a.none() = 1,
            "Rows in another format, in new memory.")
        .def("rope_shift", [](const Kernels & self, handle src, handle out, handle format, handle cos, handle sin,
                              handle row_table, handle head_dim, handle n_rot, handle first, handle neox,
                              handle hadamard_block, handle n_threads) {
                towerd::bind_rope_shift(self.isa, src, out, format, cos, sin, row_table, head_dim, n_rot, first, neox,
                                        hadamard_block, n_threads);
            }, "src"_a.none(), "out"_a.none(), "format"_a.none(), "cos"_a.none(), "sin"_a.none(), "row_table"_a.none(),
            "head_dim"_a.none(), "n_rot"_a.none(), "first"_a.none(), "neox"_a.none(), "hadamard_block"_a.none(),
            "n_threads"_a.none() = 1, "Rotate the RoPE pairs of K rows.")
        .def("hadamard", [](const Kernels & self, handle src, handle out, handle block, handle n_threads) {
                towerd::bind_hadamard(self.isa, src, out, block, n_threads);
            }, "src"_a.none(), "out"_a.none(), "block"_a.none(), "n_threads"_a.none() = 1,
            "Transform each run of `block` numbers.")
        .def("attention_mass", [](const Kernels & self, handle queries, handle keys, handle format, handle n_seen,
                                  handle head_dim, handle scale, handle n_threads) {
                return towerd::bind_attention_mass(self.isa, queries, keys, format, n_seen, head_dim, scale, n_threads);
            }, "queries"_a.none(), "keys"_a.none(), "format"_a.none(), "n_seen"_a.none(), "head_dim"_a.none(),
            "scale"_a.none(), "n_threads"_a.none() = 1, "The attention that each key gets from the queries.");
    towerd::bind_dci(m);
    towerd::bind_gittins(m);
    towerd::bind_hazard(m);
    towerd::bind_lm(m);
    towerd::bind_mixer(m);
    towerd::bind_pages(m);
    towerd::bind_side_by_side(m);
    towerd::bind_taps(m);
}
