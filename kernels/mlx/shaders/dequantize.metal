// src: uint8_t, blocks of BLOCK_BYTES that hold 32 elements; out: T[n]. BITS, ASYMMETRIC, TABLE:
// the block code. HADAMARD: the run of elements that was rotated, 32 or 64, or 0. One threadgroup
// per kTile elements.
threadgroup float tile[kTile];
const int thread_index = int(thread_position_in_threadgroup.x);
const uint64_t start = uint64_t(threadgroup_position_in_grid.x) * kTile;
for (int i = thread_index; i < kTile; i += kThreads) {
    const uint64_t at = start + i;
    tile[i] = 0.0f;
    if (at < n) {
        const float value = decode_element<BITS, ASYMMETRIC, TABLE>(src + at / 32 * BLOCK_BYTES, int(at % 32));
        tile[i] = HADAMARD == 0 ? value : value * hadamard_scale(HADAMARD);
    }
}
if (HADAMARD != 0) {
    hadamard_tile<HADAMARD>(tile, kTile, thread_index);
}
for (int i = thread_index; i < kTile; i += kThreads) {
    if (start + i < n) {
        out[start + i] = T(tile[i]);
    }
}
