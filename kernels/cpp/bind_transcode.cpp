#include <cstdio>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "jobs.h"
#include "transcode.h"

namespace towerd {

namespace {

struct Pair {
    const Format * from;
    const Format * to;
    std::size_t    n_elements;  // of a row
};

// `prefix` goes before the names of the formats, `name` is that of the rows.
Pair pair_of(nb::handle src_format, nb::handle dst_format, const std::string & prefix, std::size_t row_bytes,
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

TranscodeJob transcode_job(nb::handle item, const std::string & name, const Buffer & dst, std::deque<Buffer> & held) {
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

}  // namespace

void bind_transcode(const Isa & isa, nb::handle dst, nb::handle jobs, nb::handle n_threads, nb::handle is_new) {
    const std::size_t threads = threads_of(n_threads);
    const bool        untouched = flag_of(is_new, "is_new");
    const Buffer      target(dst, "dst", true, 1, 1, kBytes);
    target.require_contiguous("dst");
    std::deque<Buffer>        held;
    std::vector<TranscodeJob> work;
    std::vector<Span>         spans;
    for (nb::handle item : checked_jobs(jobs)) {
        work.push_back(transcode_job(item, "jobs[" + std::to_string(work.size()) + "]", target, held));
        spans.emplace_back(work.back().target, work.back().target_span());
    }
    check_spans(spans);
    const nb::gil_scoped_release free;
    transcode(work, isa, threads, untouched);
}

nb::object bind_transcoded(const Isa & isa, nb::handle rows, nb::handle src_format, nb::handle dst_format,
                           nb::handle n_threads) {
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

}  // namespace towerd
