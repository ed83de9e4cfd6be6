// x, y: float[n]; n: whole blocks. BLOCK: 32 to 512. One threadgroup per kTile numbers.
threadgroup float tile[kTile];
const int thread_index = int(thread_position_in_threadgroup.x);
const uint64_t start = uint64_t(threadgroup_position_in_grid.x) * kTile;
for (int i = thread_index; i < kTile; i += kThreads) {
    tile[i] = start + i < n ? x[start + i] * hadamard_scale(BLOCK) : 0.0f;
}
hadamard_tile<BLOCK>(tile, kTile, thread_index);
for (int i = thread_index; i < kTile; i += kThreads) {
    if (start + i < n) {
        y[start + i] = tile[i];
    }
}
