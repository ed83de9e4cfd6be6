/* Included ahead of every source when `make setup` compiles llama.cpp (-include).
 *
 * GCC before 13 declares only the first 8 of the 64 bytes that _tile_loadconfig reads as its input,
 * so at -O2 it drops the stores of the rest of the tile configuration. On a CPU with AMX every
 * quantized matrix product of llama.cpp then dies with SIGILL or SIGSEGV. This gives the same
 * instruction with its true operand. Only ggml's CPU backend is compiled with AMX on, so nothing
 * else sees more than an empty file.
 */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AMX_TILE__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])(config)))
#endif
