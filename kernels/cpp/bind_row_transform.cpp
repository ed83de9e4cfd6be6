// towerd.kernels._native: transform coding of rows. Every argument is checked with the GIL held; the work is done
// without it.

#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "row_transform.h"

namespace nb = nanobind;
using namespace nb::literals;
using nb::handle;

namespace towerd {

namespace {

template <typename T> using Array  = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T> using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kElementsMax = std::size_t{1} << 16;

// The numbers are finite; all are above 0 if they must be.
void check_numbers(const Array<float> & numbers, std::size_t n, bool positive, const std::string & name) {
    if (numbers.shape(0) != n) {
        refuse(name, "expected " + std::to_string(n) + " numbers");
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (!std::isfinite(numbers.data()[i]) || (positive && !(numbers.data()[i] > 1e-20f))) {
            refuse(name, "number " + std::to_string(i) + " is not finite" + (positive ? " and positive" : ""));
        }
    }
}

void make_transform(RowTransform * self, const Array2<std::uint16_t> & vectors, const Array<float> & mean,
                    const Array<float> & weights) {
    const std::size_t n_components = vectors.shape(0), n_elements = vectors.shape(1);
    if (n_elements == 0 || n_elements > kElementsMax || n_components == 0 || n_components > n_elements) {
        refuse("vectors", "expected 1 to 65536 elements, and no more components than elements");
    }
    for (std::size_t i = 0; i < n_components * n_elements; ++i) {
        if ((vectors.data()[i] & 0x7c00u) == 0x7c00u) {
            refuse("vectors", "vector " + std::to_string(i / n_elements) + " is not finite");
        }
    }
    check_numbers(mean, n_elements, false, "mean");
    check_numbers(weights, n_elements, true, "weights");
    new (self) RowTransform(vectors.data(), mean.data(), weights.data(), n_components, n_elements);
}

SymbolTables checked_tables(const Array<std::uint8_t> & classes, const Array<std::uint8_t> & shifts,
                            const Array2<std::uint16_t> & frequencies) {
    const std::size_t n = shifts.shape(0);
    if (n == 0 || n > kRansClassesMax || frequencies.shape(0) != n || frequencies.shape(1) != kRansSymbols) {
        refuse("frequencies", "expected 64 numbers for each of 1 to 64 classes");
    }
    SymbolTables tables;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint16_t * row = frequencies.data() + i * kRansSymbols;
        std::size_t           sum = 0;
        for (std::size_t s = 0; s < kRansSymbols; ++s) {
            sum += row[s];
        }
        if (sum != std::size_t{1} << kRansBits || row[kRansEscape] == 0) {
            refuse("frequencies", "those of class " + std::to_string(i) + " are not 16384 with an escape");
        }
        if (shifts.data()[i] > kRansShiftMax) {
            refuse("shifts", "expected 0 to 10");
        }
        tables.classes.push_back(symbol_class(shifts.data()[i], row));
    }
    for (std::size_t i = 0; i < classes.shape(0); ++i) {
        if (classes.data()[i] >= n) {
            refuse("classes", "component " + std::to_string(i) + " has none");
        }
        tables.class_of.push_back(classes.data()[i]);
    }
    return tables;
}

void make_quantizer(Quantizer * self, float step, float dead_zone, float shrink, const Array<std::uint8_t> & classes,
                    const Array<std::uint8_t> & shifts, const Array2<std::uint16_t> & frequencies) {
    if (!(step >= 1e-20f && step <= 1e20f)) {
        refuse("step", "expected a positive number");
    }
    if (!(dead_zone >= 0.0f && dead_zone < 0.5f)) {
        refuse("dead_zone", "expected 0 to 0.5");
    }
    if (!(shrink >= 0.0f && shrink < 0.5f)) {
        refuse("shrink", "expected 0 to 0.5");
    }
    new (self) Quantizer{step, dead_zone, shrink, checked_tables(classes, shifts, frequencies)};
}

const Format & element_format(handle value) {
    const Format & format = format_of(value, "format");
    if (format.quantized()) {
        refuse("format", std::string(format.name) + " is quantized");
    }
    return format;
}

// Holds the arguments of one call, which the jobs point into.
struct PageArguments {
    std::size_t            threads;
    const Format &         format;
    bool                   writes;
    std::deque<Buffer>     held;
    std::deque<nb::object> objects;

    PageArguments(handle format_name, handle n_threads, bool decodes)
        : threads(threads_of(n_threads)), format(element_format(format_name)), writes(decodes) {}

    nb::tuple tuple_of(handle item, std::size_t length, const std::string & name) {
        if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != length) {
            refuse(name, "expected a tuple of " + std::to_string(length));
        }
        return nb::borrow<nb::tuple>(item);
    }

    template <typename T> const T * bound(handle value, const std::string & name, const char * what) {
        const T * found = nullptr;
        if (!nb::try_cast<const T *>(value, found) || found == nullptr) {
            refuse(name, std::string("expected a ") + what);
        }
        objects.push_back(nb::borrow(value));
        return found;
    }

    const Buffer & buffer(handle value, const std::string & name, bool writable, int ndim) {
        return held.emplace_back(value, name, writable, ndim, 1, kBytes);
    }

    // The planes of a job, which together are a row of the transform.
    std::vector<Rows> planes(handle value, const RowTransform & transform, const std::string & name) {
        std::vector<Rows> planes;
        std::size_t       n_elements = 0;
        for (handle item : sequence_of(value, name)) {
            const Rows rows = rows_of(buffer(item, name, writes, 2), name);
            if (rows.n != (planes.empty() ? rows.n : planes.front().n)) {
                refuse(name, "planes have different numbers of rows");
            }
            n_elements += elements_of(format, rows.bytes, name);
            planes.push_back(rows);
        }
        if (planes.empty() || planes.front().n < 1 || planes.front().n > kPageRowsMax) {
            refuse(name, "expected planes of 1 to 1024 rows");
        }
        if (n_elements != transform.n_elements()) {
            refuse(name, "a row has " + std::to_string(n_elements) + " elements, the transform " +
                             std::to_string(transform.n_elements()));
        }
        return planes;
    }

    PageJob job(handle transform, handle quantizer, handle rows, const std::string & name) {
        PageJob job{};
        job.transform = bound<RowTransform>(transform, name, "RowTransform");
        if (quantizer.is_valid()) {
            job.quantizer = bound<Quantizer>(quantizer, name, "Quantizer");
            const std::size_t n = job.n_components();
            if (n == 0 || n > job.transform->n_components()) {
                refuse(name, "the quantizer is of no or too many components");
            }
        }
        job.planes = planes(rows, *job.transform, name);
        return job;
    }
};

std::string job_name(std::size_t i) { return "jobs[" + std::to_string(i) + "]"; }

[[noreturn]] void refuse_rows(std::size_t i) { refuse(job_name(i), "a row is not finite"); }

nb::object components(handle transform, handle planes, handle format, handle n_threads, const std::string & isa) {
    PageArguments                   arguments(format, n_threads, false);
    const std::vector<PageJob>      jobs{arguments.job(transform, handle(), planes, "planes")};
    const Isa &                     with = checked_isa(isa);
    std::vector<std::vector<float>> found;
    {
        const nb::gil_scoped_release free;
        found = components_of(jobs, arguments.format, with, arguments.threads);
    }
    if (found.front().empty()) {
        refuse("planes", "a row is not finite");
    }
    auto *      values = new std::vector<float>(std::move(found.front()));
    nb::capsule owner(values, [](void * p) noexcept { delete static_cast<std::vector<float> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
        values->data(), {jobs.front().n_rows(), jobs.front().transform->n_components()}, owner));
}

nb::list encode(handle jobs, handle format, handle n_threads, const std::string & isa) {
    PageArguments        arguments(format, n_threads, false);
    const Isa &          with = checked_isa(isa);
    std::vector<PageJob> work;
    for (handle item : sequence_of(jobs, "jobs")) {
        const std::string name = job_name(work.size());
        const nb::tuple   job = arguments.tuple_of(item, 3, name);
        work.push_back(arguments.job(job[0], job[1], job[2], name));
    }
    std::vector<std::vector<std::uint8_t>> pages;
    {
        const nb::gil_scoped_release free;
        pages = encode_pages(work, arguments.format, with, arguments.threads);
    }
    nb::list found;
    for (std::size_t i = 0; i < pages.size(); ++i) {
        if (pages[i].empty()) {
            refuse_rows(i);
        }
        found.append(nb::bytes(pages[i].data(), pages[i].size()));
    }
    return found;
}

nb::list decode(handle jobs, handle format, handle n_threads, const std::string & isa) {
    PageArguments          arguments(format, n_threads, true);
    const Isa &            with = checked_isa(isa);
    std::vector<DecodeJob> work;
    std::vector<Span>      spans;
    for (handle item : sequence_of(jobs, "jobs")) {
        const std::string name = job_name(work.size());
        const nb::tuple   job = arguments.tuple_of(item, 4, name);
        const Buffer &    page = arguments.buffer(job[2], name, false, 1);
        page.require_contiguous(name);
        work.push_back({arguments.job(job[0], job[1], job[3], name), page.data(), page.shape(0)});
        for (const Rows & plane : work.back().to.planes) {
            spans.emplace_back(plane.data, plane.span());
        }
    }
    check_spans(std::move(spans));
    std::vector<std::uint8_t> good;
    {
        const nb::gil_scoped_release free;
        good = decode_pages(work, arguments.format, with, arguments.threads);
    }
    nb::list found;
    for (const std::uint8_t each : good) {
        found.append(nb::bool_(each != 0));
    }
    return found;
}

}  // namespace

void bind_row_transform(nb::module_ & m) {
    nb::class_<RowTransform>(m, "RowTransform", "A learned linear transform of rows; see lab.reference.row_transform.")
        .def("__init__", &make_transform, "vectors"_a, "mean"_a, "weights"_a)
        .def_prop_ro("n_components", &RowTransform::n_components)
        .def_prop_ro("n_elements", &RowTransform::n_elements);
    nb::class_<Quantizer>(m, "Quantizer", "How components are rounded and written; see lab.reference.row_transform.")
        .def("__init__", &make_quantizer, "step"_a, "dead_zone"_a, "shrink"_a, "classes"_a, "shifts"_a, "frequencies"_a);
    m.attr("PAGE_ROWS_MAX") = kPageRowsMax;
    m.def("row_components", &components, "transform"_a.none(), "planes"_a.none(), "format"_a.none(), "n_threads"_a.none(),
          "isa"_a, "The components of rows, float32[n, n_components].");
    m.def("encode_row_pages", &encode, "jobs"_a.none(), "format"_a.none(), "n_threads"_a.none(), "isa"_a,
          "The page of each (transform, quantizer, planes).");
    m.def("decode_row_pages", &decode, "jobs"_a.none(), "format"_a.none(), "n_threads"_a.none(), "isa"_a,
          "Whether each (transform, quantizer, page, planes) could be read into its planes.");
}

}  // namespace towerd
