// Element formats as the integers of their bits. KIND: 0 f32, 1 f16, 2 bf16.
template <int KIND>
inline float read_element(uint32_t raw) {
    return KIND == 1 ? half_bits(uint16_t(raw)) : as_type<float>(KIND == 2 ? raw << 16 : raw);
}

// Rounded to nearest even. bf16: NaN stays NaN, which rounding its bits could make an infinity.
template <int KIND>
inline uint32_t write_element(float value) {
    const uint32_t raw = as_type<uint32_t>(value);
    if (KIND == 0) {
        return raw;
    }
    if (KIND == 1) {
        return as_type<uint16_t>(half(value));
    }
    return (raw & 0x7fffffffu) > 0x7f800000u ? (raw >> 16) | 64u : (raw + 0x7fffu + (raw >> 16 & 1u)) >> 16;
}
