#include "row_transform.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "parallel.h"
#include "plain_floats.h"

namespace towerd {

namespace {

std::size_t up_to(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

std::size_t padded(std::size_t n) { return up_to(n, kLmRows); }

// A matrix of `rows` as panels of kLmRows rows, column by column; zeros behind the last row.
template <typename At>
std::vector<std::uint16_t> panels_of(std::size_t rows, std::size_t columns, const At & at) {
    std::vector<std::uint16_t> panels(padded(rows) * columns);
    std::uint16_t *            to = panels.data();
    for (std::size_t first = 0; first < rows; first += kLmRows) {
        const std::size_t n = std::min(kLmRows, rows - first);
        for (std::size_t column = 0; column < columns; ++column, to += kLmRows) {
            for (std::size_t i = 0; i < n; ++i) {
                to[i] = at(first + i, column);
            }
        }
    }
    return panels;
}

const std::uint8_t * bytes_of(const std::vector<std::uint16_t> & panels) {
    return reinterpret_cast<const std::uint8_t *>(panels.data());
}

std::size_t panel_bytes(std::size_t columns) { return columns * kLmRows * sizeof(std::uint16_t); }

// A thread's memory for the largest of the jobs.
struct Scratch {
    Floats                    x, components;
    std::vector<std::int16_t> values;

    Scratch(std::size_t n_x, std::size_t n_components) : x(n_x), components(n_components), values(n_components) {}
};

std::vector<Scratch> scratches(const std::vector<const PageJob *> & jobs, std::size_t n_threads) {
    std::size_t x = 0, components = 0;
    for (const PageJob * job : jobs) {
        const std::size_t n_rows = up_to(job->n_rows(), kTransformRows);
        x = std::max(x, n_rows * job->transform->x_stride());
        components = std::max(components, n_rows * job->transform->component_stride());
    }
    return std::vector<Scratch>(std::max<std::size_t>(1, std::min(n_threads, jobs.size())), Scratch(x, components));
}

// The rows of a job as floats, side by side; false if one is not finite.
bool load_rows(const PageJob & job, const Format & format, const Isa & isa, float * x) {
    const std::size_t stride = job.transform->x_stride();
    for (std::size_t row = 0; row < job.n_rows(); ++row) {
        std::size_t at = 0;
        for (const Rows & plane : job.planes) {
            const std::size_t n = plane.bytes / format.block_bytes;
            isa.codecs[format.codec].decode(plane.data + row * plane.stride, x + row * stride + at, n);
            at += n;
        }
        if (std::isinf(isa.peak(x + row * stride, at))) {
            return false;
        }
    }
    return true;
}

void store_rows(const PageJob & job, const Format & format, const Isa & isa, const float * x) {
    const std::size_t stride = job.transform->x_stride();
    for (std::size_t row = 0; row < job.n_rows(); ++row) {
        std::size_t at = 0;
        for (const Rows & plane : job.planes) {
            const std::size_t n = plane.bytes / format.block_bytes;
            isa.codecs[format.codec].encode(x + row * stride + at, plane.data + row * plane.stride, n);
            at += n;
        }
    }
}

std::int16_t quantized(float component, float inverse_step, float rounding) {
    constexpr float most = 32767.0f;
    const float     level = std::fabs(component * inverse_step) + rounding;  // not below 0, so that its integer part is its floor
    const auto      magnitude = static_cast<std::int32_t>(level < most ? level : most);
    return static_cast<std::int16_t>(component < 0.0f ? -magnitude : magnitude);
}

// components[row][component] to values[component][row].
void quantize(const PageJob & job, const float * components, std::int16_t * values) {
    const Quantizer & quantizer = *job.quantizer;
    const std::size_t stride = job.transform->component_stride(), n_rows = job.n_rows(), n = job.n_components();
    const float       inverse_step = 1.0f / quantizer.step, rounding = 0.5f - quantizer.dead_zone;
    for (std::size_t first = 0; first < n; first += kLmRows) {
        const std::size_t end = std::min(n, first + kLmRows);
        for (std::size_t row = 0; row < n_rows; ++row) {
            for (std::size_t i = first; i < end; ++i) {
                values[i * n_rows + row] = quantized(components[row * stride + i], inverse_step, rounding);
            }
        }
    }
}

// values[component][row] to components[component][n_padded]: zeros behind the last row.
void dequantize(const PageJob & job, const std::int16_t * values, std::size_t n_padded, float * components) {
    const Quantizer & quantizer = *job.quantizer;
    const std::size_t n_rows = job.n_rows();
    for (std::size_t i = 0; i < job.n_components(); ++i, values += n_rows, components += n_padded) {
        for (std::size_t row = 0; row < n_rows; ++row) {
            const auto value = static_cast<float>(values[row]);
            const auto sign = static_cast<float>((values[row] > 0) - (values[row] < 0));
            components[row] = (value - sign * quantizer.shrink) * quantizer.step;
        }
        std::fill(components + n_rows, components + n_padded, 0.0f);
    }
}

// Calls work(job, scratch) for each job that has rows.
template <typename Job, typename Of, typename Work>
void for_each_page(const std::vector<Job> & jobs, const Of & of, std::size_t n_threads, const Work & work) {
    std::vector<const PageJob *> pages;
    for (const Job & job : jobs) {
        pages.push_back(&of(job));
    }
    std::vector<Scratch> scratch = scratches(pages, n_threads);
    parallel_for(jobs.size(), scratch.size(), [&](std::size_t i, std::size_t worker) {
        const PlainFloats plain;
        try {
            work(i, scratch[worker]);
        } catch (const std::bad_alloc &) {
            // Without memory for its result a job has none.
        }
    });
}

const PageJob & itself(const PageJob & job) { return job; }

}  // namespace

RowTransform::RowTransform(const std::uint16_t * vectors, const float * mean, const float * weights,
                           std::size_t n_components, std::size_t n_elements)
    : n_components_(n_components),
      n_elements_(n_elements),
      inverse_panels_(panels_of(n_elements, n_components,
                                [=](std::size_t row, std::size_t column) { return vectors[column * n_elements + row]; })),
      mean_(mean, mean + n_elements),
      weights_(weights, weights + n_elements),
      inverse_weights_(n_elements) {
    std::transform(weights_.begin(), weights_.end(), inverse_weights_.begin(), [](float weight) { return 1.0f / weight; });
}

std::size_t RowTransform::x_stride() const { return padded(n_elements_); }

std::size_t RowTransform::component_stride() const { return padded(n_components_); }

void RowTransform::forward(const Isa & isa, float * x, std::size_t n_rows, std::size_t n, float * components) const {
    std::call_once(made_, [this] {
        forward_panels_ = panels_of(n_components_, n_elements_, [this](std::size_t row, std::size_t column) {
            return inverse_panels_[(column / kLmRows * n_components_ + row) * kLmRows + column % kLmRows];
        });
    });
    for (std::size_t row = 0; row < n_rows; ++row) {
        float * values = x + row * x_stride();
        for (std::size_t i = 0; i < n_elements_; ++i) {
            values[i] = (values[i] - mean_[i]) * weights_[i];
        }
    }
    isa.lm.products[kLmF16]({bytes_of(forward_panels_), panel_bytes(n_elements_), padded(n) / kLmRows, n_elements_, x,
                             x_stride(), n_rows, components, component_stride()});
}

void RowTransform::inverse(const Isa & isa, const float * components, std::size_t n_rows, std::size_t n, float * x) const {
    isa.transform_product({bytes_of(inverse_panels_), panel_bytes(n_components_), x_stride() / kLmRows, n, components,
                           n_rows, x, x_stride()});
    for (std::size_t row = 0; row < n_rows; ++row) {
        float * values = x + row * x_stride();
        for (std::size_t i = 0; i < n_elements_; ++i) {
            values[i] = values[i] * inverse_weights_[i] + mean_[i];
        }
    }
}

std::vector<std::vector<float>> components_of(const std::vector<PageJob> & jobs, const Format & format, const Isa & isa,
                                              std::size_t n_threads) {
    std::vector<std::vector<float>> found(jobs.size());
    for_each_page(jobs, itself, n_threads, [&](std::size_t i, Scratch & scratch) {
        const PageJob &   job = jobs[i];
        const std::size_t n = job.transform->n_components(), stride = job.transform->component_stride();
        if (!load_rows(job, format, isa, scratch.x.data())) {
            return;
        }
        job.transform->forward(isa, scratch.x.data(), job.n_rows(), n, scratch.components.data());
        for (std::size_t row = 0; row < job.n_rows(); ++row) {
            const float * from = scratch.components.data() + row * stride;
            found[i].insert(found[i].end(), from, from + n);
        }
    });
    return found;
}

std::vector<std::vector<std::uint8_t>> encode_pages(const std::vector<PageJob> & jobs, const Format & format,
                                                    const Isa & isa, std::size_t n_threads) {
    std::vector<std::vector<std::uint8_t>> pages(jobs.size());
    for_each_page(jobs, itself, n_threads, [&](std::size_t i, Scratch & scratch) {
        const PageJob & job = jobs[i];
        if (!load_rows(job, format, isa, scratch.x.data())) {
            return;
        }
        job.transform->forward(isa, scratch.x.data(), job.n_rows(), job.n_components(), scratch.components.data());
        quantize(job, scratch.components.data(), scratch.values.data());
        pages[i] = rans_encode(scratch.values.data(), job.n_rows(), job.quantizer->tables);
    });
    return pages;
}

std::vector<std::uint8_t> decode_pages(const std::vector<DecodeJob> & jobs, const Format & format, const Isa & isa,
                                       std::size_t n_threads) {
    std::vector<std::uint8_t> good(jobs.size());
    const auto                page_of = [](const DecodeJob & job) -> const PageJob & { return job.to; };
    for_each_page(jobs, page_of, n_threads, [&](std::size_t i, Scratch & scratch) {
        const PageJob & to = jobs[i].to;
        if (!rans_decode(jobs[i].page, jobs[i].n_bytes, to.n_rows(), to.quantizer->tables, scratch.values.data())) {
            return;
        }
        const std::size_t n_padded = up_to(to.n_rows(), kTransformRows);
        dequantize(to, scratch.values.data(), n_padded, scratch.components.data());
        to.transform->inverse(isa, scratch.components.data(), n_padded, to.n_components(), scratch.x.data());
        store_rows(to, format, isa, scratch.x.data());
        good[i] = 1;
    });
    return good;
}

}  // namespace towerd
