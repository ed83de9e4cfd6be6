// The Python interface: one class with all kernels for one instruction set, and what other files bind.

#include <cmath>
#include <cstdio>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "bind.h"
#include "copy.h"
#include "dispatch.h"
#include "formats.h"
#include "rope.h"
#include "stream.h"
#include "transcode.h"
#include "transpose.h"

namespace nb = nanobind;
using namespace nb::literals;
using nb::handle;

namespace towerd {

namespace {

// All kernels for one instruction set. Each checks every argument with the GIL held, then works without it.
struct Kernels {
    const Isa & isa;

    explicit Kernels(const char * name) : isa(checked_isa(name)) {}

    void       copy_planes(handle dst, handle jobs, handle n_threads) const;
    void       transpose(handle src, handle out, handle element_bytes, handle n_threads) const;
    void       transcode(handle dst, handle jobs, handle n_threads, handle is_new) const;
    nb::object transcoded(handle rows, handle src_format, handle dst_format, handle n_threads) const;
    void       rope_shift(handle src, handle out, handle format, handle cos, handle sin, handle row_table, handle head_dim,
                          handle n_rot, handle first, handle neox, handle hadamard_block, handle n_threads) const;
    nb::object attention_mass(handle queries, handle keys, handle format, handle n_seen, handle head_dim, handle scale,
                              handle n_threads, handle sinks, handle weights) const;
};

void Kernels::copy_planes(handle dst, handle jobs, handle n_threads) const {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      target(dst, "dst", true, 1, 1, kBytes);
    target.require_contiguous("dst");
    std::deque<Buffer>   held;
    std::vector<CopyJob> work;
    std::vector<Span>    spans;
    for (handle item : sequence_of(jobs, "jobs")) {
        const std::string name = "jobs[" + std::to_string(work.size()) + "]";
        const JobRows     job = job_rows(item, 3, name, target, held);
        check_job(job, job.source.bytes, name, target);
        work.push_back({target.data() + job.offset, job.source, job.index, job.n_rows});
        spans.emplace_back(work.back().target, work.back().bytes());
    }
    check_spans(spans);
    const nb::gil_scoped_release free;
    run_copies(work, threads);
}

void Kernels::transpose(handle src, handle out, handle element_bytes, handle n_threads) const {
    const std::size_t threads = threads_of(n_threads);
    const std::size_t element = count_of(element_bytes, "element_bytes", 1, 4);
    if (element == 3) {
        refuse("element_bytes", "expected 1, 2 or 4");
    }
    const Buffer from(src, "src", false, 2, 1, kBytes);
    const Buffer to(out, "out", true, 2, 1, kBytes);
    const Rows   source = rows_of(from, "src");
    const Rows   target = rows_of(to, "out");
    if (source.bytes % element != 0) {
        refuse("src", "rows are not whole elements");
    }
    if (target.n != source.bytes / element || target.bytes != source.n * element) {
        refuse("out", "expected shape (" + std::to_string(source.bytes / element) + ", " +
                          std::to_string(source.n * element) + ")");
    }
    check_apart(source, target);
    const nb::gil_scoped_release free;
    towerd::transpose(source, target, element, threads);
}

struct Pair {
    const Format * from;
    const Format * to;
    std::size_t    n_elements;  // of a row
};

// `prefix` goes before the names of the formats, `name` is that of the rows.
Pair pair_of(handle src_format, handle dst_format, const std::string & prefix, std::size_t row_bytes,
             const std::string & name) {
    const Format &    from = format_of(src_format, prefix + "src_format");
    const Format &    to = format_of(dst_format, prefix + "dst_format");
    const std::size_t n_elements = elements_of(from, row_bytes, name);
    if (n_elements % to.block_elements != 0) {
        refuse(prefix + "dst_format",
               std::string(to.name) + " holds no rows of " + std::to_string(n_elements) + " elements");
    }
    return {&from, &to, n_elements};
}

TranscodeJob transcode_job(handle item, const std::string & name, const Buffer & dst, std::deque<Buffer> & held) {
    const JobRows   rows = job_rows(item, 5, name, dst, held);
    const nb::tuple tuple = nb::borrow<nb::tuple>(item);
    const Pair      pair = pair_of(tuple[3], tuple[4], name + ".", rows.source.bytes, name + ".rows");
    if (can_fail(*pair.from, *pair.to)) {
        refuse(name + ".dst_format", std::string(pair.to->name) + " is quantized: only `transcoded` writes it");
    }
    check_job(rows, pair.to->bytes(pair.n_elements), name, dst);
    return {dst.data() + rows.offset, rows.source, rows.index, rows.n_rows, pair.from, pair.to, pair.n_elements};
}

[[noreturn]] void refuse_row(const BadRow & bad) {
    const std::string row = "row " + std::to_string(bad.row);
    if (!(bad.peak <= 3.4028235e38f)) {
        refuse("rows", row + " is not finite");
    }
    char limit[32];
    std::snprintf(limit, sizeof limit, "%.0f", static_cast<double>(bad.limit));
    refuse("rows", row + " has a number beyond +-" + limit);
}

void Kernels::transcode(handle dst, handle jobs, handle n_threads, handle is_new) const {
    const std::size_t threads = threads_of(n_threads);
    const bool        untouched = flag_of(is_new, "is_new");
    const Buffer      target(dst, "dst", true, 1, 1, kBytes);
    target.require_contiguous("dst");
    std::deque<Buffer>        held;
    std::vector<TranscodeJob> work;
    std::vector<Span>         spans;
    for (handle item : sequence_of(jobs, "jobs")) {
        work.push_back(transcode_job(item, "jobs[" + std::to_string(work.size()) + "]", target, held));
        spans.emplace_back(work.back().target, work.back().target_span());
    }
    check_spans(spans);
    const nb::gil_scoped_release free;
    towerd::transcode(work, isa, threads, untouched);
}

nb::object Kernels::transcoded(handle rows, handle src_format, handle dst_format,
                           handle n_threads) const {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      source(rows, "rows", false, 2, 1, kBytes);
    const Rows        from = rows_of(source, "rows");
    const Pair        pair = pair_of(src_format, dst_format, "", from.bytes, "rows");
    const nb::object  out = nb::module_::import_("numpy").attr("empty")(
        nb::make_tuple(from.n, pair.to->bytes(pair.n_elements)), "uint8");
    std::optional<BadRow> bad;
    {
        const Buffer       target(out, "out", true, 2, 1, kBytes);
        const TranscodeJob job{target.data(), from, nullptr, from.n, pair.from, pair.to, pair.n_elements};
        const nb::gil_scoped_release free;
        bad = transcode_checked(job, isa, threads);
    }
    if (bad) {
        refuse_row(*bad);
    }
    return out;
}

// The lines of cos or sin: float32[k, n_rot / 2], finite.
std::size_t table_lines(const Buffer & table, std::size_t n_rot, const std::string & name) {
    table.require_contiguous(name);
    if (table.shape(0) == 0 || table.shape(1) != n_rot / 2) {
        refuse(name, "expected shape (k, " + std::to_string(n_rot / 2) + "), k at least 1");
    }
    const auto * values = reinterpret_cast<const float *>(table.data());
    for (std::size_t i = 0; i < table.shape(0) * table.shape(1); ++i) {
        if (!std::isfinite(values[i])) {
            refuse(name, "line " + std::to_string(i / table.shape(1)) + " is not finite");
        }
    }
    return table.shape(0);
}

void check_row_table(const Buffer & table, std::size_t n_rows, std::size_t n_lines) {
    table.require_contiguous("row_table");
    if (table.shape(0) != n_rows) {
        refuse("row_table", "expected " + std::to_string(n_rows) + " entries");
    }
    const auto * lines = reinterpret_cast<const std::int32_t *>(table.data());
    for (std::size_t i = 0; i < n_rows; ++i) {
        if (lines[i] < -1 || (lines[i] >= 0 && static_cast<std::size_t>(lines[i]) >= n_lines)) {
            refuse("row_table",
                   "line " + std::to_string(lines[i]) + " is not in [-1, " + std::to_string(n_lines) + ")");
        }
    }
}

Heads heads_of(std::size_t n_elements, handle head_dim, handle n_rot, handle first, handle neox) {
    Heads      heads{};
    const auto most = static_cast<long long>(n_elements);
    heads.head_dim = count_of(head_dim, "head_dim", 2, most);
    if (n_elements % heads.head_dim != 0) {
        refuse("head_dim", "a row of " + std::to_string(n_elements) + " elements is not whole heads of " +
                               std::to_string(heads.head_dim));
    }
    heads.n = n_elements / heads.head_dim;
    heads.n_rot = count_of(n_rot, "n_rot", 2, static_cast<long long>(heads.head_dim));
    if (heads.n_rot % 2 != 0) {
        refuse("n_rot", "expected an even number");
    }
    heads.first = count_of(first, "first", 0, static_cast<long long>(heads.head_dim - heads.n_rot));
    heads.neox = flag_of(neox, "neox");
    return heads;
}

// 0, or a block that divides the head.
std::size_t rotation_block(handle value, std::size_t head_dim) {
    if (count_of(value, "hadamard_block", 0, 512) == 0) {
        return 0;
    }
    const std::size_t block = hadamard_block_of(value, "hadamard_block");
    if (head_dim % block != 0) {
        refuse("hadamard_block", std::to_string(block) + " does not divide head_dim");
    }
    return block;
}

// The arguments of `rope_shift`, checked; it must outlive the work.
struct ShiftArguments {
    std::size_t           threads;
    Buffer                from, to, cosines, sines;
    std::optional<Buffer> table;
    RopeShift             shift{};

    ShiftArguments(handle src, handle out, handle format, handle cos, handle sin, handle row_table, handle head_dim,
                   handle n_rot, handle first, handle neox, handle hadamard_block, handle n_threads)
        : threads(threads_of(n_threads)),
          from(src, "src", false, 2, 1, kBytes),
          to(out, "out", true, 2, 1, kBytes),
          cosines(cos, "cos", false, 2, sizeof(float), kFloat),
          sines(sin, "sin", false, 2, sizeof(float), kFloat) {
        shift.source = rows_of(from, "src");
        shift.target = rows_of(to, "out");
        shift.format = &format_of(format, "format");
        if (!shift.format->cache_type) {
            refuse("format", std::string(shift.format->name) + " is not a cache type");
        }
        shift.n_elements = elements_of(*shift.format, shift.source.bytes, "src");
        if (shift.target.n != shift.source.n || shift.target.bytes != shift.source.bytes) {
            refuse("out", "expected shape (" + std::to_string(shift.source.n) + ", " +
                              std::to_string(shift.source.bytes) + ")");
        }
        check_apart(shift.source, shift.target);
        shift.heads = heads_of(shift.n_elements, head_dim, n_rot, first, neox);
        shift.hadamard_block = rotation_block(hadamard_block, shift.heads.head_dim);
        const std::size_t n_lines = table_lines(cosines, shift.heads.n_rot, "cos");
        if (table_lines(sines, shift.heads.n_rot, "sin") != n_lines) {
            refuse("sin", "expected as many lines as cos");
        }
        shift.cos = reinterpret_cast<const float *>(cosines.data());
        shift.sin = reinterpret_cast<const float *>(sines.data());
        if (!row_table.is_none()) {
            table.emplace(row_table, "row_table", false, 1, sizeof(std::int32_t), kInt32);
            check_row_table(*table, shift.source.n, n_lines);
            shift.row_table = reinterpret_cast<const std::int32_t *>(table->data());
        }
    }

    // Does `work` without the GIL, unless a row that moves has a scale that is not finite.
    template <typename Work> void run(const Work & work) const {
        std::optional<std::size_t> bad;
        {
            const nb::gil_scoped_release free;
            bad = find_bad_row(shift, threads);
            if (!bad) {
                work();
            }
        }
        if (bad) {
            refuse("src", "row " + std::to_string(*bad) + " is not finite");
        }
    }
};

void Kernels::rope_shift(handle src, handle out, handle format, handle cos, handle sin, handle row_table,
                         handle head_dim, handle n_rot, handle first, handle neox, handle hadamard_block,
                         handle n_threads) const {
    const ShiftArguments checked(src, out, format, cos, sin, row_table, head_dim, n_rot, first, neox, hadamard_block,
                                 n_threads);
    checked.run([&] { towerd::rope_shift(checked.shift, isa, checked.threads); });
}

// Refuses what `rope_shift` refuses, for a kernel that is not C++.
void check_rope_shift(handle src, handle out, handle format, handle cos, handle sin, handle row_table, handle head_dim,
                      handle n_rot, handle first, handle neox, handle hadamard_block, handle n_threads) {
    const ShiftArguments checked(src, out, format, cos, sin, row_table, head_dim, n_rot, first, neox, hadamard_block,
                                 n_threads);
    checked.run([] {});
}

float scale_of(handle value) {
    const double scale = PyFloat_Check(value.ptr()) ? PyFloat_AsDouble(value.ptr()) : std::nan("");
    if (!(std::abs(scale) <= 3.4028234663852886e38)) {
        refuse("scale", "expected a finite float32");
    }
    return static_cast<float>(scale);
}

std::size_t heads_of(std::size_t n_elements, std::size_t head_dim, const std::string & name) {
    if (n_elements == 0 || n_elements % head_dim != 0) {
        refuse(name, "a row of " + std::to_string(n_elements) + " elements is not whole heads of " +
                         std::to_string(head_dim));
    }
    return n_elements / head_dim;
}

// A format of keys in a cache, of whose heads each is a whole number of blocks.
const Format & key_format(handle value, std::size_t head_dim) {
    const Format & format = format_of(value, "format");
    if (!format.cache_type || head_dim % format.block_elements != 0) {
        refuse("format", std::string(format.name) + " has no heads of " + std::to_string(head_dim) + " numbers");
    }
    return format;
}

void check_seen(const Buffer & seen, std::size_t n_queries, std::size_t n_keys) {
    seen.require_contiguous("n_seen");
    if (seen.shape(0) != n_queries) {
        refuse("n_seen", "expected " + std::to_string(n_queries) + " entries");
    }
    const auto * n = reinterpret_cast<const std::int64_t *>(seen.data());
    for (std::size_t i = 0; i < n_queries; ++i) {
        if (n[i] < 1 || static_cast<std::size_t>(n[i]) > n_keys) {
            refuse("n_seen", "a query sees other than 1 to " + std::to_string(n_keys) + " keys");
        }
    }
}

// The `n` finite numbers of an argument that may be None: then null.
const float * numbers_of(handle argument, const char * name, std::size_t n, std::optional<Buffer> & held) {
    if (argument.is_none()) {
        return nullptr;
    }
    held.emplace(argument, name, false, 1, sizeof(float), kFloat);
    held->require_contiguous(name);
    if (held->shape(0) != n) {
        refuse(name, "expected " + std::to_string(n) + " entries");
    }
    const auto * number = reinterpret_cast<const float *>(held->data());
    for (std::size_t i = 0; i < n; ++i) {
        if (!std::isfinite(number[i])) {
            refuse(name, "entry " + std::to_string(i) + " is not finite");
        }
    }
    return number;
}

[[noreturn]] void refuse_attention(const BadAttention & bad) {
    if (bad.what == BadAttention::What::kScore) {
        refuse("queries", "a score is beyond what float32 holds");
    }
    refuse(bad.what == BadAttention::What::kKey ? "keys" : "queries", "row " + std::to_string(bad.row) + " is not finite");
}

nb::object Kernels::attention_mass(handle queries, handle keys, handle format, handle n_seen, handle head_dim,
                                   handle scale, handle n_threads, handle sinks, handle weights) const {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      query_rows(queries, "queries", false, 2, sizeof(float), kFloat);
    const Buffer      key_rows(keys, "keys", false, 2, 1, kBytes);
    AttentionMass     job{};
    job.queries = rows_of(query_rows, "queries");
    query_rows.require_aligned("queries");
    job.keys = rows_of(key_rows, "keys");
    job.head_dim = count_of(head_dim, "head_dim", 1, kHeadDimMax);
    job.format = &key_format(format, job.head_dim);
    job.n_heads = heads_of(query_rows.shape(1), job.head_dim, "queries");
    job.n_kv_heads = heads_of(elements_of(*job.format, job.keys.bytes, "keys"), job.head_dim, "keys");
    if (job.n_heads % job.n_kv_heads != 0) {
        refuse("queries", std::to_string(job.n_heads) + " heads cannot share " + std::to_string(job.n_kv_heads) +
                              " KV heads");
    }
    job.scale = scale_of(scale);
    const Buffer seen(n_seen, "n_seen", false, 1, sizeof(std::int64_t), kInt64);
    check_seen(seen, job.queries.n, job.keys.n);
    job.n_seen = reinterpret_cast<const std::int64_t *>(seen.data());
    std::optional<Buffer> held_sinks, held_weights;
    job.sinks = numbers_of(sinks, "sinks", job.n_heads, held_sinks);
    job.weights = numbers_of(weights, "weights", job.queries.n, held_weights);
    const nb::object mass = nb::module_::import_("numpy").attr("empty")(nb::make_tuple(job.n_kv_heads, job.keys.n), "float32");
    std::optional<BadAttention> bad;
    {
        const Buffer out(mass, "mass", true, 2, sizeof(float), kFloat);
        job.mass = reinterpret_cast<float *>(out.data());
        const nb::gil_scoped_release free;
        bad = towerd::attention_mass(job, isa, threads);
    }
    if (bad) {
        refuse_attention(*bad);
    }
    return mass;
}

nb::list names() {
    nb::list found;
    for (const Isa * isa : towerd::available()) {
        found.append(nb::str(isa->name));
    }
    return found;
}

nb::list formats() {
    nb::list rows;
    for (const Format & row : kFormats) {
        rows.append(nb::make_tuple(row.name, row.type_id, row.block_elements, row.block_bytes, row.hadamard));
    }
    return rows;
}

}  // namespace

}  // namespace towerd

NB_MODULE(_native, m) {
    using namespace towerd;
    m.doc() = "C++ kernels of towerd; the contracts are in lab.reference.";
    m.def("available", &names, "Names of the instruction sets that this machine has, best first.");
    m.attr("STREAM_BYTES") = kStreamBytes;
    m.def("formats", &formats, "(name, type id, block elements, block bytes, rotated) of each format.");
    nb::class_<Kernels>(m, "Kernels", "All kernels for one instruction set. ValueError if it is not available.")
        .def(nb::init<const char *>(), "name"_a)
        .def_prop_ro("name", [](const Kernels & self) { return self.isa.name; })
        .def("copy_planes", &Kernels::copy_planes, "dst"_a.none(), "jobs"_a.none(), "n_threads"_a.none() = 1)
        .def("transpose", &Kernels::transpose, "src"_a.none(), "out"_a.none(), "element_bytes"_a.none(),
             "n_threads"_a.none() = 1)
        .def("transcode", &Kernels::transcode, "dst"_a.none(), "jobs"_a.none(), "n_threads"_a.none() = 1,
             "is_new"_a.none() = false)
        .def("transcoded", &Kernels::transcoded, "rows"_a.none(), "src_format"_a.none(), "dst_format"_a.none(),
             "n_threads"_a.none() = 1)
        .def("rope_shift", &Kernels::rope_shift, "src"_a.none(), "out"_a.none(), "format"_a.none(), "cos"_a.none(), "sin"_a.none(), "row_table"_a.none(),
             "head_dim"_a.none(), "n_rot"_a.none(), "first"_a.none(), "neox"_a.none(), "hadamard_block"_a.none(),
             "n_threads"_a.none() = 1)
        .def("attention_mass", &Kernels::attention_mass, "queries"_a.none(), "keys"_a.none(), "format"_a.none(),
             "n_seen"_a.none(), "head_dim"_a.none(), "scale"_a.none(), "n_threads"_a.none() = 1,
             "sinks"_a.none() = nb::none(), "weights"_a.none() = nb::none());
    m.def("check_rope_shift", &check_rope_shift, "src"_a.none(), "out"_a.none(), "format"_a.none(), "cos"_a.none(), "sin"_a.none(), "row_table"_a.none(),
          "head_dim"_a.none(), "n_rot"_a.none(), "first"_a.none(), "neox"_a.none(), "hadamard_block"_a.none(),
          "n_threads"_a.none() = 1);
    bind_dci(m);
    bind_gittins(m);
    bind_hazard(m);
    bind_lm(m);
    bind_mixer(m);
    bind_pages(m);
    bind_row_transform(m);
    bind_sealed_pages(m);
    bind_side_by_side(m);
    bind_taps(m);
    bind_token_index(m);
}
