#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include "bind.h"
#include "jobs.h"
#include "transcode.h"

namespace towerd {

namespace {

TranscodeJob transcode_job(nb::handle item, const std::string & name, const Buffer & dst, std::deque<Buffer> & held) {
    const JobRows   rows = job_rows(item, 5, name, dst, held);
    const nb::tuple tuple = nb::borrow<nb::tuple>(item);
    const Format &  from = format_of(tuple[3], name + ".src_format");
    const Format &  to = format_of(tuple[4], name + ".dst_format");
    const std::size_t n_elements = elements_of(from, rows.source.bytes, name + ".rows");
    if (n_elements % to.block_elements != 0) {
        refuse(name + ".dst_format",
               std::string(to.name) + " holds no rows of " + std::to_string(n_elements) + " elements");
    }
    check_job(rows, to.bytes(n_elements), name, dst);
    return {dst.data() + rows.offset, rows.source, rows.index, rows.n_rows, &from, &to, n_elements};
}

[[noreturn]] void refuse_row(const BadRow & bad) {
    const std::string name = "jobs[" + std::to_string(bad.job) + "].rows";
    const std::string row = "row " + std::to_string(bad.row);
    if (!(bad.peak <= 3.4028235e38f)) {
        refuse(name, row + " is not finite");
    }
    char limit[32];
    std::snprintf(limit, sizeof limit, "%.0f", static_cast<double>(bad.limit));
    refuse(name, row + " has a number beyond +-" + limit);
}

}  // namespace

void bind_transcode(const Isa & isa, nb::handle dst, nb::handle jobs, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
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
    std::optional<BadRow> bad;
    {
        const nb::gil_scoped_release free;
        bad = find_bad_row(work, isa, threads);
        if (!bad) {
            transcode(work, isa, threads);
        }
    }
    if (bad) {
        refuse_row(*bad);
    }
}

}  // namespace towerd
