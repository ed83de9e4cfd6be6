// x86-64 with AVX2, F16C and FMA.
#define TOWERD_ISA_NAMESPACE avx2
#define TOWERD_LANES 8
#define TOWERD_STREAMS

#include <immintrin.h>

#include "vector-inl.h"

namespace towerd::avx2 {
namespace {

TOWERD_INLINE F load_f16(const std::uint8_t * from) {
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
TOWERD_INLINE void store_f16(std::uint8_t * to, F value) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}
TOWERD_INLINE float f16_to_f32(std::uint16_t value) { return _cvtsh_ss(value); }
TOWERD_INLINE std::uint16_t f32_to_f16(float value) {
    return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

TOWERD_INLINE I widen_i8(const std::uint8_t * from) {
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
TOWERD_INLINE I widen_u8(const std::uint8_t * from) {
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
TOWERD_INLINE void narrow_8(std::uint8_t * to, I value) {
    const __m128i first = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i low = _mm256_shuffle_epi8((__m256i)value, _mm256_broadcastsi128_si256(first));
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i *)to, both);
}
TOWERD_INLINE F to_float(I value) { return (F)_mm256_cvtepi32_ps((__m256i)value); }
TOWERD_INLINE F max(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
TOWERD_INLINE F min(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
TOWERD_INLINE F multiply_add(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
TOWERD_INLINE F abs(F value) { return (F)_mm256_andnot_ps(_mm256_set1_ps(-0.0f), (__m256)value); }

TOWERD_INLINE void stream_line(std::uint8_t * to, const std::uint8_t * from) {
    const __m256i front = _mm256_loadu_si256((const __m256i *)from);
    const __m256i back = _mm256_loadu_si256((const __m256i *)(from + 32));
    _mm256_stream_si256((__m256i *)to, front);
    _mm256_stream_si256((__m256i *)(to + 32), back);
}
void finish_stream() { _mm_sfence(); }

}  // namespace
}  // namespace towerd::avx2

#include "isa-inl.h"
