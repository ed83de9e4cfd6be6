// x86-64 with AVX-512 F, BW, VL and DQ.
#define TOWERD_ISA_NAMESPACE avx512
#define TOWERD_LANES 16
#define TOWERD_STREAMS

#include <immintrin.h>

#include "vector-inl.h"

namespace towerd::avx512 {
namespace {

TOWERD_INLINE F load_f16(const std::uint8_t * from) {
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
TOWERD_INLINE __m256 load_eight_f16(const std::uint8_t * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
TOWERD_INLINE void store_f16(std::uint8_t * to, F value) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TOWERD_INLINE float f16_to_f32(std::uint16_t value) { return _cvtsh_ss(value); }
TOWERD_INLINE std::uint16_t f32_to_f16(float value) {
    return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

TOWERD_INLINE I widen_i8(const std::uint8_t * from) {
    return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
}
TOWERD_INLINE I widen_u8(const std::uint8_t * from) {
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}
TOWERD_INLINE void narrow_8(std::uint8_t * to, I value) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
}
TOWERD_INLINE F to_float(I value) { return (F)_mm512_cvtepi32_ps((__m512i)value); }
TOWERD_INLINE F max(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
TOWERD_INLINE F min(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
TOWERD_INLINE F multiply_add(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
TOWERD_INLINE F abs(F value) { return (F)_mm512_abs_ps((__m512)value); }

TOWERD_INLINE void stream_line(std::uint8_t * to, const std::uint8_t * from) {
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}
void finish_stream() { _mm_sfence(); }

}  // namespace
}  // namespace towerd::avx512

#include "isa-inl.h"
