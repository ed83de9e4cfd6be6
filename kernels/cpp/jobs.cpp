#include "jobs.h"

namespace towerd {

nb::sequence checked_jobs(nb::handle jobs) {
    if (!PyList_Check(jobs.ptr()) && !PyTuple_Check(jobs.ptr())) {
        refuse("jobs", "expected a list or tuple");
    }
    return nb::borrow<nb::sequence>(jobs);
}

JobRows job_rows(nb::handle item, std::size_t length, const std::string & name, const Buffer & dst,
                 std::deque<Buffer> & held) {
    if (!PyTuple_Check(item.ptr()) || static_cast<std::size_t>(PyTuple_Size(item.ptr())) != length) {
        refuse(name, length == 3 ? "expected a tuple (offset, rows, index)"
                                 : "expected a tuple (offset, rows, index, src_format, dst_format)");
    }
    const nb::tuple job = nb::borrow<nb::tuple>(item);
    JobRows         rows{};
    rows.offset = count_of(job[0], name + ".offset", 0, static_cast<long long>(dst.shape(0)));
    held.emplace_back(job[1], name + ".rows", false, 2, 1, kBytes);
    rows.source = rows_of(held.back(), name + ".rows");
    rows.n_rows = rows.source.n;
    const nb::object picked = job[2];
    if (!picked.is_none()) {
        held.emplace_back(picked, name + ".index", false, 1, sizeof(std::int64_t), kInt64);
        check_index(held.back(), rows.source.n, name + ".index");
        rows.index = reinterpret_cast<const std::int64_t *>(held.back().data());
        rows.n_rows = held.back().shape(0);
    }
    return rows;
}

void check_job(const JobRows & job, std::size_t row_bytes, const std::string & name, const Buffer & dst) {
    const std::size_t room = dst.shape(0) - job.offset;
    if (row_bytes != 0 && job.n_rows > room / row_bytes) {
        refuse(name, std::to_string(job.n_rows) + " rows of " + std::to_string(row_bytes) +
                         " bytes do not fit into the " + std::to_string(room) + " bytes of dst from offset " +
                         std::to_string(job.offset));
    }
    if (overlap(dst.data(), dst.shape(0), job.source.data, job.source.span())) {
        refuse("jobs", "a source lies in dst");
    }
}

}  // namespace towerd
