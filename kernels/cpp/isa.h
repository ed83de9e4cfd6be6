// What one instruction set offers, and the table of formats. Included by every translation unit
// that is compiled for an instruction set (generic.cpp, avx2.cpp, avx512.cpp, neon.cpp).
//
// Rules of those units, because the linker keeps one copy of an inline function and it must not
// be the one with AVX-512 in it:
// - everything lives in `namespace towerd::TOWERD_ISA_NAMESPACE` inside an anonymous namespace;
// - no C++ library header with templates or inline functions (<algorithm>, <cmath>, <vector>):
//   only <cstddef>, <cstdint>, <cstring>, <math.h> and compiler intrinsics;
// - no global that is initialised by code: nothing may run before the CPU has been asked.
//
// Each unit defines TOWERD_ISA_NAMESPACE and TOWERD_LANES, includes vector-inl.h (types, loads,
// stores), defines the primitives that its instructions do best (listed there), and includes isa-inl.h,
// which has the bodies. A unit that defines TOWERD_STREAMS has stores that bypass the caches:
//
//   void stream_line(uint8_t *, const uint8_t *)   one whole line, aligned where it is written
//   void finish_stream()                           streamed bytes become visible before all later stores
#pragma once

#include <cstddef>
#include <cstdint>

namespace towerd {

// One for each way to store numbers. A format with a Hadamard rotation uses the codec of its plain one.
enum CodecId : int {
    kF32,
    kF16,
    kBf16,
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ8_0,
    kIq4Nl,
    kQ8,  // stored formats: symmetric, then asymmetric
    kQ6,
    kQ5,
    kQ4,
    kQ8a,
    kQ6a,
    kQ5a,
    kQ4a,
    kCodecs  // how many
};

// `n` elements, a whole number of blocks. Bytes have no alignment, floats that of a float; the two
// never overlap. `encode` of a block codec returns the largest magnitude of the run, infinity if a number is
// not finite, because it reads the numbers anyway (others return 0). Its input is finite, and for block codecs within
// +-65504 (the range of f16); other input may give any bytes but must stay defined.
struct Codec {
    void (*decode)(const std::uint8_t * from, float * to, std::size_t n);
    float (*encode)(const float * from, std::uint8_t * to, std::size_t n);
};

// One row of the table in formats.cpp.
struct Format {
    const char * name;
    int          type_id;
    CodecId      codec;
    std::size_t  block_elements;
    std::size_t  block_bytes;
    std::size_t  scales;      // f16 numbers at the start of a block: none, scale, or scale and minimum
    bool         hadamard;    // rotated by blocks of gcd(elements of the row, 64) before `encode`
    bool         cache_type;  // ggml's, may be in a llama.cpp state

    bool        quantized() const { return block_elements > 1; }
    std::size_t bytes(std::size_t elements) const { return elements / block_elements * block_bytes; }
};

// The unit in which a core reads and writes memory.
constexpr std::size_t kLineBytes = 64;

// Keys that are scored at once.
constexpr std::size_t kPanel = 64;

// Where the rotated elements of a row lie: in each head of `head_dim` the `n_rot` from `first` on.
struct Heads {
    std::size_t n;
    std::size_t head_dim;
    std::size_t first;
    std::size_t n_rot;
    bool        neox;  // pair j is (j, j + n_rot/2), otherwise (2j, 2j + 1)
};

// How the numbers of a matrix of a language model are stored: panels of kLmRows rows, column by column, so that a
// vector holds one column of a panel. q8: for each 32 columns, kLmRows f32 scales and then 32 columns of bytes.
enum LmFormat : int { kLmF32, kLmF16, kLmQ8, kLmFormats };

constexpr std::size_t kLmRows = 16;

// out[x * out_stride + row] = sum over columns, in their order, of matrix[row][column] * x[x * x_stride + column]:
// one rounding for each product that is added. All panels are whole.
struct LmProduct {
    const std::uint8_t * panels;
    std::size_t          panel_bytes;  // from one panel to the next
    std::size_t          n_panels;
    std::size_t          n_columns;
    const float *        x;
    std::size_t          x_stride;
    std::size_t          n_x;
    float *              out;
    std::size_t          out_stride;
};

// Rows of a TransformProduct that are multiplied at once.
constexpr std::size_t kTransformRows = 8;

// out[x * out_stride + row] = the same sum, in the same order, of matrix[row][column] * x[column * n_x + x]; the matrix is
// of f16. `n_x` is a multiple of kTransformRows.
struct TransformProduct {
    const std::uint8_t * panels;
    std::size_t          panel_bytes;
    std::size_t          n_panels;
    std::size_t          n_columns;
    const float *        x;
    std::size_t          n_x;
    float *              out;
    std::size_t          out_stride;
};

// The operations of a language model, which give the same bits with all instruction sets. Sums are 16 partial sums of
// the numbers whose index is the same modulo 16, and then those at distance 8, 4, 2, 1.
struct LmIsa {
    void (*products[kLmFormats])(const LmProduct & job);

    // out = x / sqrt(mean(x^2) + eps) * weights. All have room for a multiple of 16 numbers, zeros behind the `n`.
    void (*norm)(const float * x, const float * weights, std::size_t n, float eps, float * out);

    // Turns finite x[n] into e^(x - max), with zeros up to a multiple of 16; returns their sum.
    float (*exponentials)(float * x, std::size_t n);

    // gate = gate / (1 + e^-gate) * up, a multiple of 16 finite numbers.
    void (*gated)(float * gate, const float * up, std::size_t n);

    // counts = 1 + 2^24 * e^(logit - max), rounded down, of finite logits.
    void (*counts)(const float * logits, std::size_t n, std::uint32_t * counts);
};

struct Isa {
    const char * name;
    Codec        codecs[kCodecs];

    // In place: each run of `block` (a power of two, 32 to 512) of the `n` elements times the
    // Walsh-Hadamard matrix / sqrt(block). Scaled first, then sums at distance 1, 2, 4 ...
    // as in ggml's CPU operation, so that all instruction sets and ggml round alike.
    void (*hadamard)(float * x, std::size_t n, std::size_t block);

    // One row of f32, f16 or bf16 (indexed by codec): pairs (a, b) become (a*c - b*s, b*c + a*s),
    // every other element is copied as bytes. `cos` and `sin` have n_rot floats: as the table if neox, else
    // line[j / 2] (sin negated where j is even). `to` may be `from`. No alignment.
    void (*rotate[3])(const std::uint8_t * from, std::uint8_t * to, const Heads & heads, const float * cos,
                      const float * sin);

    // to[r * stride + j] = scale * (query r . key j) for `n` queries, [n][head_dim], and the kPanel keys of a panel,
    // [head_dim][kPanel] on 64 bytes.
    void (*scores)(const float * queries, std::size_t n, const float * panel, std::size_t head_dim, float scale,
                   float * to, std::size_t stride);

    // Adds `weight` times the softmax of `n` finite scores, at least one, to `mass`. Both have room for a multiple of 16
    // numbers; the contents of the scores are undefined afterwards.
    void (*add_softmax)(float * scores, std::size_t n, float weight, float * mass);

    // to[i] = query . rows[i], rows of f32, f16 or bf16 (indexed by codec) of `width` numbers, a multiple of 8. The same
    // bits everywhere. No alignment.
    void (*dots[3])(const float * query, const std::uint8_t * const * rows, std::size_t n, std::size_t width, float * to);

    // The largest magnitude of a run; infinity if a number is not finite.
    float (*peak)(const float * from, std::size_t n);

    // Copies bytes; whole lines bypass the caches. Other threads see them before anything that this thread writes
    // after `finish_stream`. Both nullptr if the instructions have no such stores.
    void (*stream)(const std::uint8_t * from, std::uint8_t * to, std::size_t n);
    void (*finish_stream)();

    LmIsa lm;

    void (*transform_product)(const TransformProduct & job);
};

}  // namespace towerd
