#include "transpose.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace towerd {

namespace {

constexpr std::size_t kTile = 32;         // source rows: 32 x 64 elements of source and target stay in L1
constexpr std::size_t kTaskColumns = 64;  // target rows that one task writes
constexpr std::size_t kLine = 64;         // bytes that one prefetch brings

// memcpy of a constant size: rows have no alignment, and the compiler turns it into one move.
template <typename Element>
void transpose_elements(const Rows & source, const Rows & target, std::size_t row0, std::size_t row1,
                        std::size_t column0, std::size_t column1) {
    for (std::size_t column = column0; column < column1; ++column) {
        const std::uint8_t * from = source.data + row0 * source.stride + column * sizeof(Element);
        std::uint8_t *       to = target.data + column * target.stride + row0 * sizeof(Element);
        for (std::size_t row = row0; row < row1; ++row, from += source.stride, to += sizeof(Element)) {
            std::memcpy(to, from, sizeof(Element));
        }
    }
}

template <typename Element>
void transpose_tile(const Rows & source, const Rows & target, std::size_t row0, std::size_t row1,
                    std::size_t column0, std::size_t column1) {
    transpose_elements<Element>(source, target, row0, row1, column0, column1);
}

constexpr std::size_t kBlock = 8;  // 8 x 8 elements of 2 bytes: eight registers

// Every x86-64 and every arm64 has the instructions below, so nothing is chosen at run time.
#if defined(__SSE2__)
#define TOWERD_BLOCK_TRANSPOSE 1
void transpose_block(const std::uint8_t * from, std::size_t from_stride, std::uint8_t * to, std::size_t to_stride) {
    __m128i a[kBlock];
    __m128i b[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) {
        a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i * from_stride));
    }
    for (std::size_t i = 0; i < 4; ++i) {  // pairs of rows: elements of 2 bytes side by side
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    for (std::size_t i = 0; i < 2; ++i) {  // four rows
        for (std::size_t half = 0; half < 2; ++half) {
            a[4 * i + 2 * half] = _mm_unpacklo_epi32(b[4 * i + half], b[4 * i + 2 + half]);
            a[4 * i + 2 * half + 1] = _mm_unpackhi_epi32(b[4 * i + half], b[4 * i + 2 + half]);
        }
    }
    for (std::size_t i = 0; i < 4; ++i) {  // all eight
        b[2 * i] = _mm_unpacklo_epi64(a[i], a[4 + i]);
        b[2 * i + 1] = _mm_unpackhi_epi64(a[i], a[4 + i]);
    }
    for (std::size_t i = 0; i < kBlock; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i * to_stride), b[i]);
    }
}
#elif defined(__aarch64__)
#define TOWERD_BLOCK_TRANSPOSE 1
void transpose_block(const std::uint8_t * from, std::size_t from_stride, std::uint8_t * to, std::size_t to_stride) {
    uint16x8_t a[kBlock];
    uint16x8_t b[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) {
        a[i] = vreinterpretq_u16_u8(vld1q_u8(from + i * from_stride));
    }
    for (std::size_t i = 0; i < 4; ++i) {  // pairs of rows: elements of 2 bytes side by side
        b[2 * i] = vzip1q_u16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = vzip2q_u16(a[2 * i], a[2 * i + 1]);
    }
    for (std::size_t i = 0; i < 2; ++i) {  // four rows
        for (std::size_t half = 0; half < 2; ++half) {
            const uint32x4_t low = vreinterpretq_u32_u16(b[4 * i + half]);
            const uint32x4_t high = vreinterpretq_u32_u16(b[4 * i + 2 + half]);
            a[4 * i + 2 * half] = vreinterpretq_u16_u32(vzip1q_u32(low, high));
            a[4 * i + 2 * half + 1] = vreinterpretq_u16_u32(vzip2q_u32(low, high));
        }
    }
    for (std::size_t i = 0; i < 4; ++i) {  // all eight
        const uint64x2_t low = vreinterpretq_u64_u16(a[i]);
        const uint64x2_t high = vreinterpretq_u64_u16(a[4 + i]);
        b[2 * i] = vreinterpretq_u16_u64(vzip1q_u64(low, high));
        b[2 * i + 1] = vreinterpretq_u16_u64(vzip2q_u64(low, high));
    }
    for (std::size_t i = 0; i < kBlock; ++i) {
        vst1q_u8(to + i * to_stride, vreinterpretq_u8_u16(b[i]));
    }
}
#endif

#if defined(TOWERD_BLOCK_TRANSPOSE)
// Whole blocks by registers, the rest at the right and at the bottom element by element.
template <>
void transpose_tile<std::uint16_t>(const Rows & source, const Rows & target, std::size_t row0, std::size_t row1,
                                   std::size_t column0, std::size_t column1) {
    const std::size_t rows = row0 + (row1 - row0) / kBlock * kBlock;
    const std::size_t columns = column0 + (column1 - column0) / kBlock * kBlock;
    for (std::size_t column = column0; column < columns; column += kBlock) {
        for (std::size_t row = row0; row < rows; row += kBlock) {
            transpose_block(source.data + row * source.stride + column * 2, source.stride,
                            target.data + column * target.stride + row * 2, target.stride);
        }
    }
    transpose_elements<std::uint16_t>(source, target, row0, rows, columns, column1);
    transpose_elements<std::uint16_t>(source, target, rows, row1, column0, column1);
}
#endif

// Both sides are walked in strides that no hardware prefetcher predicts: without this, most of the time is spent
// waiting. Prefetches the next `kTile` rows of source columns [column0, column1), and the lines of the target that they
// will be written to.
// Inline by force: GCC takes a function that only prefetches for one without effect, and drops its calls.
inline __attribute__((always_inline)) void prefetch_tile(const Rows & source, const Rows & target, std::size_t row,
                                                         std::size_t column0, std::size_t column1,
                                                         std::size_t element_bytes) {
    const std::size_t end = std::min(source.n, row + kTile);
    for (std::size_t i = row; i < end; ++i) {
        const std::uint8_t * from = source.data + i * source.stride;
        for (std::size_t at = column0 * element_bytes; at < column1 * element_bytes; at += kLine) {
            __builtin_prefetch(from + at, 0, 2);
        }
    }
    for (std::size_t column = column0; column < column1; ++column) {
        const std::uint8_t * to = target.data + column * target.stride;
        for (std::size_t at = row * element_bytes; at < end * element_bytes; at += kLine) {
            __builtin_prefetch(to + at, 1, 2);
        }
    }
}

template <typename Element>
void transpose_all(const Rows & source, const Rows & target, std::size_t n_threads) {
    const std::size_t n_rows = source.n;
    const std::size_t n_columns = target.n;
    const std::size_t n_tasks = (n_columns + kTaskColumns - 1) / kTaskColumns;
    const auto        task = [&](std::size_t i, std::size_t) {
        const std::size_t end = std::min(n_columns, (i + 1) * kTaskColumns);
        const std::size_t begin = i * kTaskColumns;
        prefetch_tile(source, target, 0, begin, end, sizeof(Element));
        for (std::size_t row = 0; row < n_rows; row += kTile) {
            prefetch_tile(source, target, row + kTile, begin, end, sizeof(Element));
            transpose_tile<Element>(source, target, row, std::min(n_rows, row + kTile), begin, end);
        }
    };
    parallel_for(n_tasks, useful_threads(n_threads, n_rows * source.bytes), task);
}

}  // namespace

void transpose(const Rows & source, const Rows & target, std::size_t element_bytes, std::size_t n_threads) {
    switch (element_bytes) {
        case 1: transpose_all<std::uint8_t>(source, target, n_threads); break;
        case 2: transpose_all<std::uint16_t>(source, target, n_threads); break;
        default: transpose_all<std::uint32_t>(source, target, n_threads); break;
    }
}

}  // namespace towerd
