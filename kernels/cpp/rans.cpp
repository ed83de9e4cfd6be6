#include "rans.h"

#include <algorithm>
#include <cstring>

namespace towerd {

namespace {

constexpr std::uint64_t kLow = std::uint64_t{1} << 31;  // states are in [kLow, kLow << 32)
constexpr std::uint64_t kMask = (std::uint64_t{1} << kRansBits) - 1;
constexpr std::size_t   kHeaderBytes = 8 + kRansLanes * sizeof(std::uint64_t);

struct Encoder {
    std::array<std::uint64_t, kRansLanes> states;
    std::vector<std::uint32_t>            words;  // the last one is read first

    void make_room(std::uint64_t & state, std::uint64_t limit) {
        if (state >= limit) {
            words.push_back(static_cast<std::uint32_t>(state));
            state >>= 32;
        }
    }

    void put(std::uint64_t & state, std::uint64_t start, std::uint64_t frequency) {
        make_room(state, (kLow >> kRansBits << 32) * frequency);
        state = (state / frequency << kRansBits) + state % frequency + start;
    }

    void put_bits(std::uint64_t & state, std::uint64_t bits, int n) {
        make_room(state, kLow << 32 >> n);
        state = state << n | bits;
    }
};

// The symbol of a value, the escape if the table has none.
std::size_t symbol_of(const SymbolClass & symbols, int value) {
    const int upper = value >> symbols.shift;
    if (upper < -kRansHalf || upper > kRansHalf) {
        return kRansEscape;
    }
    const auto symbol = static_cast<std::size_t>(upper + kRansHalf);
    return symbols.frequency[symbol] == 0 ? kRansEscape : symbol;
}

struct Decoder {
    const std::uint8_t * word;
    const std::uint8_t * words_end;
    const std::uint8_t * escaped;
    const std::uint8_t * escaped_end;

    bool refill(std::uint64_t & state) {
        if (state < kLow) {
            if (word == words_end) {
                return false;
            }
            std::uint32_t next = 0;
            std::memcpy(&next, word, sizeof next);
            word += sizeof next;
            state = state << 32 | next;
        }
        return true;
    }

    bool take(const SymbolClass & symbols, std::uint64_t & state, std::int16_t & value) {
        const std::uint64_t slot = state & kMask;
        const std::size_t   symbol = symbols.symbol[slot];
        state = symbols.frequency[symbol] * (state >> kRansBits) + slot - symbols.start[symbol];
        if (!refill(state)) {
            return false;
        }
        if (symbol == kRansEscape) {
            if (escaped == escaped_end) {
                return false;
            }
            std::memcpy(&value, escaped, sizeof value);
            escaped += sizeof value;
            return true;
        }
        const int upper = static_cast<int>(symbol) - kRansHalf;
        if (symbols.shift == 0) {
            value = static_cast<std::int16_t>(upper);
            return true;
        }
        const auto lower = static_cast<int>(state & ((std::uint64_t{1} << symbols.shift) - 1));
        state >>= symbols.shift;
        value = static_cast<std::int16_t>(upper * (1 << symbols.shift) + lower);
        return refill(state);
    }

    bool at_end() const { return word == words_end && escaped == escaped_end; }
};

}  // namespace

SymbolClass symbol_class(int shift, const std::uint16_t * frequency) {
    SymbolClass symbols{};
    symbols.shift = shift;
    std::size_t slot = 0;
    for (std::size_t s = 0; s < kRansSymbols; ++s) {
        symbols.frequency[s] = frequency[s];
        symbols.start[s] = static_cast<std::uint16_t>(slot);
        std::fill_n(symbols.symbol.begin() + static_cast<std::ptrdiff_t>(slot), frequency[s],
                    static_cast<std::uint8_t>(s));
        slot += frequency[s];
    }
    return symbols;
}

std::vector<std::uint8_t> rans_encode(const std::int16_t * values, std::size_t n_rows, const SymbolTables & tables) {
    Encoder encoder{};
    encoder.states.fill(kLow);
    std::vector<std::int16_t> escaped;
    for (std::size_t component = tables.class_of.size(); component-- > 0;) {
        const SymbolClass & symbols = tables.of(component);
        for (std::size_t row = n_rows; row-- > 0;) {
            const int         value = values[component * n_rows + row];
            const std::size_t symbol = symbol_of(symbols, value);
            std::uint64_t &   state = encoder.states[row % kRansLanes];
            if (symbol == kRansEscape) {
                escaped.push_back(static_cast<std::int16_t>(value));
            } else if (symbols.shift != 0) {
                encoder.put_bits(state, static_cast<std::uint64_t>(value) & ((1u << symbols.shift) - 1), symbols.shift);
            }
            encoder.put(state, symbols.start[symbol], symbols.frequency[symbol]);
        }
    }
    std::reverse(encoder.words.begin(), encoder.words.end());
    std::reverse(escaped.begin(), escaped.end());
    const std::uint32_t       counts[2] = {static_cast<std::uint32_t>(encoder.words.size()),
                                           static_cast<std::uint32_t>(escaped.size())};
    std::vector<std::uint8_t> page(kHeaderBytes + 4 * encoder.words.size() + 2 * escaped.size());
    std::uint8_t *            to = page.data();
    const auto append = [&to](const void * from, std::size_t n) {
        if (n != 0) {
            std::memcpy(to, from, n);
            to += n;
        }
    };
    append(counts, sizeof counts);
    append(encoder.states.data(), sizeof encoder.states);
    append(encoder.words.data(), 4 * encoder.words.size());
    append(escaped.data(), 2 * escaped.size());
    return page;
}

bool rans_decode(const std::uint8_t * page, std::size_t n_bytes, std::size_t n_rows, const SymbolTables & tables,
                 std::int16_t * values) {
    if (n_bytes < kHeaderBytes) {
        return false;
    }
    std::uint32_t counts[2];
    std::memcpy(counts, page, sizeof counts);
    const std::size_t words_bytes = 4 * std::size_t{counts[0]}, escaped_bytes = 2 * std::size_t{counts[1]};
    if (n_bytes - kHeaderBytes != words_bytes + escaped_bytes) {
        return false;
    }
    const std::uint8_t * words = page + kHeaderBytes;
    Decoder decoder{words, words + words_bytes, words + words_bytes, words + words_bytes + escaped_bytes};
    std::array<std::uint64_t, kRansLanes> states;
    std::memcpy(states.data(), page + sizeof counts, sizeof states);
    for (const std::uint64_t state : states) {
        if (state < kLow || state >= kLow << 32) {
            return false;
        }
    }
    for (std::size_t component = 0; component < tables.class_of.size(); ++component) {
        const SymbolClass & symbols = tables.of(component);
        std::int16_t *      to = values + component * n_rows;
        std::size_t         row = 0;
        for (; row + kRansLanes <= n_rows; row += kRansLanes) {
            bool good = true;
            for (std::size_t lane = 0; lane < kRansLanes; ++lane) {
                good &= decoder.take(symbols, states[lane], to[row + lane]);
            }
            if (!good) {
                return false;
            }
        }
        for (; row < n_rows; ++row) {
            if (!decoder.take(symbols, states[row % kRansLanes], to[row])) {
                return false;
            }
        }
    }
    const bool whole = std::all_of(states.begin(), states.end(), [](std::uint64_t state) { return state == kLow; });
    return whole && decoder.at_end();
}

}  // namespace towerd
