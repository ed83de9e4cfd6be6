// Range ANS (Duda, "Asymmetric numeral systems", 2009) over pages of integers: four interleaved states of 64 bits, words of
// 32, static tables of 14 bits by class of component. Integer arithmetic alone: the same bytes on every CPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace towerd {

constexpr int         kRansBits = 14;
constexpr std::size_t kRansSymbols = 64;  // the values -31 to 31, and the escape
constexpr int         kRansHalf = 31;
constexpr std::size_t kRansEscape = kRansSymbols - 1;
constexpr std::size_t kRansLanes = 4;
constexpr int         kRansShiftMax = 10;
constexpr std::size_t kRansClassesMax = 64;

// How the components of one class are written: the upper bits of a value as a symbol, `shift` lower bits as they are. A
// value whose symbol is not in the table is written after the escape, whole.
struct SymbolClass {
    int                                      shift;
    std::array<std::uint16_t, kRansSymbols>  frequency;  // sum 1 << kRansBits; the escape has at least 1
    std::array<std::uint16_t, kRansSymbols>  start;
    std::array<std::uint8_t, 1 << kRansBits> symbol;  // by slot
};

// `frequency` must be as above.
SymbolClass symbol_class(int shift, const std::uint16_t * frequency);

// The classes, and the class of each component.
struct SymbolTables {
    std::vector<SymbolClass>  classes;
    std::vector<std::uint8_t> class_of;

    const SymbolClass & of(std::size_t component) const { return classes[class_of[component]]; }
};

// A page, from values[component][row]:
//
//   u32  number of words
//   u32  number of escaped values
//   u64  states[4], what a decoder starts with
//   u32  words
//   i16  escaped values, in the order in which they are read
//
// Values are read component by component, row by row; row r is in state r % 4.
std::vector<std::uint8_t> rans_encode(const std::int16_t * values, std::size_t n_rows, const SymbolTables & tables);

// The values of a page into values[component][row]; false for bytes that `rans_encode` does not write. Reads nothing
// beyond the page whatever it holds.
bool rans_decode(const std::uint8_t * page, std::size_t n_bytes, std::size_t n_rows, const SymbolTables & tables,
                 std::int16_t * values);

}  // namespace towerd
