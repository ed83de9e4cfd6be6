// Rotates the RoPE pairs of rows of a quantized cache type. src, out: uint8_t[n_rows, row bytes],
// blocks of BLOCK_BYTES that hold 32 elements in the block code BITS, ASYMMETRIC, TABLE; cos, sin,
// row_table, HEAD_DIM, FIRST, N_ROT, NEOX: as in rope_elements.metal. HADAMARD: the run of elements
// that rows are rotated by, 0 for none. One threadgroup per TILE elements of a row, which are whole
// heads, whole blocks and whole runs.
threadgroup float tile[TILE];
const int thread_index = int(thread_position_in_threadgroup.x);
const uint64_t row = threadgroup_position_in_grid.y;
const uint64_t part = row * PARTS + threadgroup_position_in_grid.x;
const int tile_bytes = TILE / 32 * BLOCK_BYTES;
const int line = row_table[row];
if (line < 0) {
    for (int i = thread_index; i < tile_bytes; i += kThreads) {
        out[part * tile_bytes + i] = src[part * tile_bytes + i];
    }
    return;  // all threads of the group: they share the row
}
for (int i = thread_index; i < TILE; i += kThreads) {
    const uint64_t block = part * tile_bytes + i / 32 * BLOCK_BYTES;
    const float value = decode_element<BITS, ASYMMETRIC, TABLE>(src + block, i % 32);
    tile[i] = HADAMARD == 0 ? value : value * hadamard_scale(HADAMARD);
}
hadamard_tile<HADAMARD>(tile, TILE, thread_index);

const int half_rot = N_ROT / 2;
for (int i = thread_index; i < TILE / HEAD_DIM * half_rot; i += kThreads) {
    const int pair = i % half_rot;
    const int a_at = i / half_rot * HEAD_DIM + FIRST + (NEOX ? pair : 2 * pair);
    const int b_at = a_at + (NEOX ? half_rot : 1);
    const uint64_t angle = uint64_t(line) * half_rot + pair;
    const float a = tile[a_at];
    const float b = tile[b_at];
    tile[a_at] = a * cos[angle] - b * sin[angle];
    tile[b_at] = b * cos[angle] + a * sin[angle];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (HADAMARD != 0) {
    for (int i = thread_index; i < TILE; i += kThreads) {
        tile[i] *= hadamard_scale(HADAMARD);
    }
    hadamard_tile<HADAMARD>(tile, TILE, thread_index);
}

// Only blocks that hold, or share a Hadamard run with, a rotated element have changed.
const int unit = HADAMARD > 32 ? HADAMARD : 32;
for (int block = thread_index; block < TILE / 32; block += kThreads) {
    const int begin = block * 32 / unit * unit;
    bool is_touched = false;
    for (int head = begin / HEAD_DIM; head <= (begin + unit - 1) / HEAD_DIM; ++head) {
        const int first = head * HEAD_DIM + FIRST;
        is_touched = is_touched || (first < begin + unit && first + N_ROT > begin);
    }
    const uint64_t at = part * tile_bytes + block * BLOCK_BYTES;
    if (is_touched) {
        encode_block<BITS, ASYMMETRIC, TABLE>(tile + block * 32, out + at);
    } else {
        for (int i = 0; i < BLOCK_BYTES; ++i) {
            out[at + i] = src[at + i];
        }
    }
}
