// Code that the kernels of this folder share. C++14, as in Metal before version 4; a test compiles
// the same text for the CPU. Pointers are template parameters, because MLX passes small arrays
// as `constant` and larger ones as `device`.
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

// Threads of a threadgroup (mlx/metal.py).
constexpr constant int kThreads = 256;

// The values of iq4_nl's codes.
constant int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float half_bits(uint16_t raw) { return float(as_type<half>(raw)); }

template <typename From>
inline float read_half(From from) {
    return half_bits(uint16_t(from[0] | from[1] << 8));
}

template <typename To>
inline void write_half(To to, float value) {
    const uint16_t raw = as_type<uint16_t>(half(value));
    to[0] = uint8_t(raw);
    to[1] = uint8_t(raw >> 8);
}

// 1 / sqrt(block), rounded as numpy rounds it.
inline float hadamard_scale(int block) {
    return block == 32    ? 0.17677669f
           : block == 64  ? 0.125f
           : block == 128 ? 0.088388346f
           : block == 256 ? 0.0625f
                          : 0.044194173f;
}

// Walsh-Hadamard transform of each run of BLOCK numbers of the tile: sums and differences at
// distance 1, 2, 4 ... The caller has multiplied by hadamard_scale, the order that all of towerd's
// kernels round in. Waits before the first and after the last step, also when there is none.
template <int BLOCK, typename Tile>
inline void hadamard_tile(Tile tile, int n, int thread_index) {
    for (int distance = 1; distance < BLOCK; distance *= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int pair = thread_index; pair < n / 2; pair += kThreads) {
            const int i = 2 * pair - (pair & (distance - 1));
            const float a = tile[i];
            const float b = tile[i + distance];
            tile[i] = a + b;
            tile[i + distance] = a - b;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The code of element i of a block, BITS bits: low nibbles of elements 0 to 15 and 16 to 31 share
// the last 16 bytes, the bits above them come before.
template <int BITS, typename From>
inline int code_at(From codes, int i) {
    if (BITS == 8) {
        return codes[i];
    }
    const int low = codes[(BITS - 4) * 4 + i % 16] >> (i / 16 * 4) & 15;
    if (BITS == 5) {
        return low | (codes[i / 8] >> (i % 8) & 1) << 4;
    }
    return low;
}

// Element i of a block of 32. Exact products of 11 and 8 bits, so that one rounding remains.
template <int BITS, bool ASYMMETRIC, bool TABLE, typename From>
inline float decode_element(From block, int i) {
    const float scale = read_half(block);
    const int code = code_at<BITS>(block + (ASYMMETRIC ? 4 : 2), i);
    if (TABLE) {
        return scale * float(kTable[code]);
    }
    if (ASYMMETRIC) {
        return scale * float(code) + read_half(block + 2);
    }
    return scale * float(BITS == 8 ? int(int8_t(code)) : code - (1 << (BITS - 1)));
}
