#include <deque>
#include <string>
#include <vector>

#include "bind.h"
#include "copy.h"
#include "jobs.h"
#include "transpose.h"

namespace towerd {

void bind_copy_planes(nb::handle dst, nb::handle jobs, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      target(dst, "dst", true, 1, 1, kBytes);
    target.require_contiguous("dst");
    std::deque<Buffer>   held;
    std::vector<CopyJob> work;
    std::vector<Span>    spans;
    for (nb::handle item : checked_jobs(jobs)) {
        const std::string name = "jobs[" + std::to_string(work.size()) + "]";
        const JobRows     job = job_rows(item, 3, name, target, held);
        check_job(job, job.source.bytes, name, target);
        work.push_back({target.data() + job.offset, job.source.bytes, job.source, job.index, job.n_rows});
        spans.emplace_back(work.back().target, work.back().target_span());
    }
    check_spans(spans);
    const nb::gil_scoped_release free;
    run_copies(work, threads);
}

void bind_gather_rows(nb::handle src, nb::handle index, nb::handle out, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      from(src, "src", false, 2, 1, kBytes);
    const Buffer      at(index, "index", false, 1, sizeof(std::int64_t), kInt64);
    const Buffer      to(out, "out", true, 2, 1, kBytes);
    const Rows        source = rows_of(from, "src");
    const Rows        target = rows_of(to, "out");
    check_index(at, source.n, "index");
    if (target.n != at.shape(0) || target.bytes != source.bytes) {
        refuse("out", "expected shape (" + std::to_string(at.shape(0)) + ", " + std::to_string(source.bytes) + ")");
    }
    check_apart(source, target);
    const auto *               rows = reinterpret_cast<const std::int64_t *>(at.data());
    const std::vector<CopyJob> work{{target.data, target.stride, source, rows, target.n}};
    const nb::gil_scoped_release free;
    run_copies(work, threads);
}

void bind_transpose(nb::handle src, nb::handle out, nb::handle element_bytes, nb::handle n_threads) {
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
    transpose(source, target, element, threads);
}

}  // namespace towerd
