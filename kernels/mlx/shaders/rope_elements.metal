// Rotates the RoPE pairs of rows of f32, f16 or bf16, given and returned as the integers of their
// bits. src, out: Raw[n_rows, ROW]; cos, sin: float[lines, N_ROT / 2]; row_table: int[n_rows], the
// line of each row, -1 for a row that does not move. One thread per element.
const int element = int(thread_position_in_grid.x);
const uint64_t row = thread_position_in_grid.y;
const uint64_t at = row * ROW + element;
const int line = row_table[row];
const int i = element % HEAD_DIM - FIRST;
if (line < 0 || i < 0 || i >= N_ROT) {
    out[at] = src[at];
    return;
}
const int half_rot = N_ROT / 2;
const bool is_second = NEOX ? i >= half_rot : i % 2 == 1;
const int pair = NEOX ? i % half_rot : i / 2;
const int distance = NEOX ? half_rot : 1;
const uint64_t angle = uint64_t(line) * half_rot + pair;
const float mine = read_element<KIND>(src[at]);
const float other = read_element<KIND>(src[is_second ? at - distance : at + distance]);
const float turned = other * sin[angle];
out[at] = Raw(write_element<KIND>(mine * cos[angle] + (is_second ? turned : -turned)));
