// Rows of several planes as quantized components of a linear transform, and back. The transform is learned
// elsewhere; here it is a matrix. The order of every sum is fixed: the same bytes on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "isa.h"
#include "rans.h"
#include "rows.h"

namespace towerd {

constexpr std::size_t kPageRowsMax = 1024;

// components = vectors * ((row - mean) * weights). All its vectors are orthonormal, so that
// row = mean + (vectors^T * components) / weights, less what further vectors would add.
class RowTransform {
public:
    // vectors: [n_components][n_elements] halves; mean, weights: [n_elements], finite, weights above 0.
    RowTransform(const std::uint16_t * vectors, const float * mean, const float * weights, std::size_t n_components,
                 std::size_t n_elements);

    std::size_t n_components() const { return n_components_; }
    std::size_t n_elements() const { return n_elements_; }

    // The floats of one row in `x` and `components` below: multiples of kLmRows.
    std::size_t x_stride() const;
    std::size_t component_stride() const;

    // The first `n` components, components[n_rows][component_stride]; x[n_rows][x_stride] is used up.
    void forward(const Isa & isa, float * x, std::size_t n_rows, std::size_t n, float * components) const;

    // Rows of the first `n` components, components[n][n_rows]; `n_rows` is a multiple of kTransformRows.
    void inverse(const Isa & isa, const float * components, std::size_t n_rows, std::size_t n, float * x) const;

private:
    std::size_t                        n_components_, n_elements_;
    std::vector<std::uint16_t>         inverse_panels_;  // rows are elements
    mutable std::vector<std::uint16_t> forward_panels_;  // rows are components; made by the first `forward`
    mutable std::once_flag             made_;
    std::vector<float>                 mean_, weights_, inverse_weights_;
};

// Components as integers: sign(c) * floor(|c| / step + 0.5 - dead_zone), and back: step * (q - sign(q) * shrink).
struct Quantizer {
    float        step;
    float        dead_zone;
    float        shrink;
    SymbolTables tables;
};

// A page: all rows of `planes`, which lie side by side in the transform's elements.
struct PageJob {
    const RowTransform * transform;
    const Quantizer *    quantizer;  // of the first components, or of all of them
    std::vector<Rows>    planes;     // same number of rows, at most kPageRowsMax

    std::size_t n_rows() const { return planes.front().n; }
    std::size_t n_components() const { return quantizer->tables.class_of.size(); }
};

struct DecodeJob {
    PageJob              to;
    const std::uint8_t * page;
    std::size_t          n_bytes;
};

// components[row][component] of each job; empty where a row is not finite. `format` is an element format.
std::vector<std::vector<float>> components_of(const std::vector<PageJob> & jobs, const Format & format, const Isa & isa,
                                              std::size_t n_threads);

// The page of each job; empty where a row is not finite.
std::vector<std::vector<std::uint8_t>> encode_pages(const std::vector<PageJob> & jobs, const Format & format,
                                                    const Isa & isa, std::size_t n_threads);

// Whether each page could be read. Rows of other pages are undefined.
std::vector<std::uint8_t> decode_pages(const std::vector<DecodeJob> & jobs, const Format & format, const Isa & isa,
                                       std::size_t n_threads);

}  // namespace towerd
