// Encodes one block of 32 numbers as llama.cpp's cache does (ggml-cpu's from_float).

// The number with the largest magnitude, the first of equals.
template <typename From>
inline float leading(From x) {
    float peak = 0.0f;
    for (int i = 0; i < 32; ++i) {
        peak = metal::fabs(x[i]) > metal::fabs(peak) ? x[i] : peak;
    }
    return peak;
}

// Of two equally near values of the table, the higher one.
inline int nearest_code(float x) {
    int code = 0;
    for (int i = 1; i < 16; ++i) {
        code += x >= 0.5f * float(kTable[i - 1] + kTable[i]) ? 1 : 0;
    }
    return code;
}

// iq4_nl: the scale that minimises the error weighted by the square of each number.
template <typename From, typename To>
inline void encode_table(From x, To to, thread int * codes) {
    const float lead = leading(x);
    const bool is_usable = metal::fabs(lead) >= 1e-15f;
    const float inverse = is_usable ? 1.0f / (lead / float(kTable[0])) : 0.0f;
    float product = 0.0f;
    float square = 0.0f;
    for (int i = 0; i < 32; ++i) {
        codes[i] = nearest_code(inverse * x[i]);
        const float value = float(kTable[codes[i]]);
        const float weight = x[i] * x[i];
        product += weight * value * x[i];
        square += weight * value * value;
    }
    write_half(to, is_usable && square > 0.0f ? product / square : 0.0f);
}

// q4_1, q5_1: from the smallest number in steps.
template <int BITS, typename From, typename To>
inline void encode_asymmetric(From x, To to, thread int * codes) {
    float low = x[0];
    float high = x[0];
    for (int i = 1; i < 32; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const int most = (1 << BITS) - 1;
    const float step = (high - low) / float(most);
    const float inverse = step != 0.0f ? 1.0f / step : 0.0f;
    for (int i = 0; i < 32; ++i) {
        codes[i] = metal::min(most, int((x[i] - low) * inverse + 0.5f));
    }
    write_half(to, step);
    write_half(to + 2, low);
}

// q4_0, q5_0: the peak becomes the lowest code.
template <int BITS, typename From, typename To>
inline void encode_symmetric(From x, To to, thread int * codes) {
    const int zero = 1 << (BITS - 1);
    const float step = leading(x) / float(-zero);
    const float inverse = step != 0.0f ? 1.0f / step : 0.0f;
    for (int i = 0; i < 32; ++i) {
        codes[i] = metal::min(2 * zero - 1, int(x[i] * inverse + (float(zero) + 0.5f)));
    }
    write_half(to, step);
}

// q8_0: to the nearest of 255 steps.
template <typename From, typename To>
inline void encode_bytes(From x, To to, thread int * codes) {
    const float peak = metal::fabs(leading(x));
    const float inverse = peak != 0.0f ? 127.0f / peak : 0.0f;
    for (int i = 0; i < 32; ++i) {
        codes[i] = int(metal::rint(x[i] * inverse));
    }
    write_half(to, peak / 127.0f);
}

template <int BITS, typename To>
inline void write_codes(To to, const thread int * codes) {
    if (BITS == 8) {
        for (int i = 0; i < 32; ++i) {
            to[i] = uint8_t(codes[i]);
        }
        return;
    }
    const int high = BITS == 5 ? 4 : 0;
    for (int i = 0; i < high; ++i) {
        int bits = 0;
        for (int j = 0; j < 8; ++j) {
            bits |= (codes[8 * i + j] >> 4 & 1) << j;
        }
        to[i] = uint8_t(bits);
    }
    for (int i = 0; i < 16; ++i) {
        to[high + i] = uint8_t((codes[i] & 15) | (codes[i + 16] & 15) << 4);
    }
}

template <int BITS, bool ASYMMETRIC, bool TABLE, typename From, typename To>
inline void encode_block(From x, To to) {
    int codes[32];
    if (TABLE) {
        encode_table(x, to, codes);
    } else if (ASYMMETRIC) {
        encode_asymmetric<BITS>(x, to, codes);
    } else if (BITS == 8) {
        encode_bytes(x, to, codes);
    } else {
        encode_symmetric<BITS>(x, to, codes);
    }
    write_codes<BITS>(to + (ASYMMETRIC ? 4 : 2), codes);
}
