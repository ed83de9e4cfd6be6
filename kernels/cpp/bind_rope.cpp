#include <cmath>
#include <optional>
#include <string>

#include "bind.h"
#include "rope.h"

namespace towerd {

namespace {

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

Heads heads_of(std::size_t n_elements, nb::handle head_dim, nb::handle n_rot, nb::handle first, nb::handle neox) {
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
std::size_t rotation_block(nb::handle value, std::size_t head_dim) {
    if (count_of(value, "hadamard_block", 0, 512) == 0) {
        return 0;
    }
    const std::size_t block = hadamard_block_of(value, "hadamard_block");
    if (head_dim % block != 0) {
        refuse("hadamard_block", std::to_string(block) + " does not divide head_dim");
    }
    return block;
}

void check_out(const Rows & source, const Rows & target, std::size_t columns) {
    if (target.n != source.n || target.bytes != source.bytes) {
        refuse("out", "expected shape (" + std::to_string(source.n) + ", " + std::to_string(columns) + ")");
    }
    check_apart(source, target);
}

}  // namespace

void bind_rope_shift(const Isa & isa, nb::handle src, nb::handle out, nb::handle format, nb::handle cos, nb::handle sin,
                     nb::handle row_table, nb::handle head_dim, nb::handle n_rot, nb::handle first, nb::handle neox,
                     nb::handle hadamard_block, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      from(src, "src", false, 2, 1, kBytes);
    const Buffer      to(out, "out", true, 2, 1, kBytes);
    RopeShift         shift{};
    shift.source = rows_of(from, "src");
    shift.target = rows_of(to, "out");
    shift.format = &format_of(format, "format");
    if (!shift.format->cache_type) {
        refuse("format", std::string(shift.format->name) + " is not a cache type");
    }
    shift.n_elements = elements_of(*shift.format, shift.source.bytes, "src");
    check_out(shift.source, shift.target, shift.source.bytes);
    shift.heads = heads_of(shift.n_elements, head_dim, n_rot, first, neox);
    shift.hadamard_block = rotation_block(hadamard_block, shift.heads.head_dim);
    const Buffer      cosines(cos, "cos", false, 2, sizeof(float), kFloat);
    const Buffer      sines(sin, "sin", false, 2, sizeof(float), kFloat);
    const std::size_t n_lines = table_lines(cosines, shift.heads.n_rot, "cos");
    if (table_lines(sines, shift.heads.n_rot, "sin") != n_lines) {
        refuse("sin", "expected as many lines as cos");
    }
    shift.cos = reinterpret_cast<const float *>(cosines.data());
    shift.sin = reinterpret_cast<const float *>(sines.data());
    std::optional<Buffer> table;
    if (!row_table.is_none()) {
        table.emplace(row_table, "row_table", false, 1, sizeof(std::int32_t), kInt32);
        check_row_table(*table, shift.source.n, n_lines);
        shift.row_table = reinterpret_cast<const std::int32_t *>(table->data());
    }
    std::optional<std::size_t> bad;
    {
        const nb::gil_scoped_release free;
        bad = find_bad_row(shift, threads);
        if (!bad) {
            rope_shift(shift, isa, threads);
        }
    }
    if (bad) {
        refuse("src", "row " + std::to_string(*bad) + " is not finite");
    }
}

void bind_hadamard(const Isa & isa, nb::handle src, nb::handle out, nb::handle block, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      from(src, "src", false, 2, sizeof(float), kFloat);
    const Buffer      to(out, "out", true, 2, sizeof(float), kFloat);
    const Rows        source = rows_of(from, "src");
    const Rows        target = rows_of(to, "out");
    from.require_aligned("src");
    to.require_aligned("out");
    check_out(source, target, from.shape(1));
    const std::size_t size = hadamard_block_of(block, "block");
    if (from.shape(1) % size != 0) {
        refuse("block", std::to_string(size) + " does not divide rows of " + std::to_string(from.shape(1)));
    }
    const nb::gil_scoped_release free;
    hadamard_rows(source, target, size, isa, threads);
}

}  // namespace towerd
