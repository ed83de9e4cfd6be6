// aarch64: NEON is always there, and so are its f16 conversions.
#define TOWERD_ISA_NAMESPACE neon
#define TOWERD_LANES 4

#include <arm_neon.h>

#include "portable-inl.h"

namespace towerd::neon {
namespace {

TOWERD_INLINE F load_f16(const std::uint8_t * from) {
    return (F)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
}
TOWERD_INLINE void store_f16(std::uint8_t * to, F value) {
    vst1_u8(to, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)value)));
}
TOWERD_INLINE float f16_to_f32(std::uint16_t value) {
    return static_cast<float>(bits<__fp16>(value));
}
TOWERD_INLINE std::uint16_t f32_to_f16(float value) {
    return bits<std::uint16_t>(static_cast<__fp16>(value));
}
TOWERD_INLINE F multiply_add(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

}  // namespace
}  // namespace towerd::neon

#include "isa-inl.h"
