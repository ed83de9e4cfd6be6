// Drives every kernel of every instruction set with random sizes, formats and addresses, and compares what they
// write. Built with sanitizers (see Makefile); `fuzz SECONDS [SEED]`, `fuzz 0 SEED` runs one case again.

#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "attention.h"
#include "copy.h"
#include "dispatch.h"
#include "formats.h"
#include "memory.h"
#include "random.h"
#include "rope.h"
#include "row_transform.h"
#include "stream.h"
#include "token_index.h"
#include "transcode.h"
#include "transpose.h"

namespace {

using towerd::Format;
using towerd::Heads;
using towerd::Isa;
using towerd::Rows;

constexpr std::size_t kBlockMax = 64;  // Hadamard blocks of stored rows
constexpr float       kF16Max = 65504.0f;
constexpr float       kFloatMax = 3.4e38f;

std::uint64_t seed_in_work = 0;

void report_seed() { std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed_in_work)); }

void require(bool holds, const char * what, const char * where) {
    if (!holds) {
        std::fprintf(stderr, "%s: %s\n", where, what);
        report_seed();
        std::exit(1);
    }
}

const Format & any_format(Random & random, bool cache_type) {
    for (;;) {
        const Format & format = towerd::kFormats[random.between(0, 24)];
        if (format.cache_type || !cache_type) {
            return format;
        }
    }
}

// Random rows `stride` bytes apart, the last one ending where the memory ends.
struct Table {
    Table(std::size_t n, std::size_t bytes, std::size_t gap, std::size_t shift)
        : memory(n == 0 ? 0 : (n - 1) * (bytes + gap) + bytes, shift), rows{memory.data(), n, bytes, bytes + gap} {}

    std::uint8_t * at(std::size_t row) const { return rows.data + row * rows.stride; }

    Memory memory;
    Rows   rows;
};

std::size_t any_gap(Random & random) { return random.chance(2) ? 0 : random.between(1, 5); }

// Rows of any bits, or of numbers that `format` can hold.
Table any_rows(Random & random, const Format & format, std::size_t n, std::size_t n_elements, bool numbers) {
    Table table(n, format.bytes(n_elements), any_gap(random), random.between(0, 17));
    if (!numbers) {
        random.fill(table.memory.data(), table.memory.size());
        return table;
    }
    const Memory values(n_elements * sizeof(float));
    for (std::size_t row = 0; row < n; ++row) {
        random.fill_numbers(values.floats(), n_elements, random.chance(9) ? kF16Max : 60.0f);
        towerd::available().back()->codecs[format.codec].encode(values.floats(), table.at(row), n_elements);
    }
    return table;
}

std::vector<std::int64_t> any_index(Random & random, std::size_t n_rows) {
    std::vector<std::int64_t> index(n_rows == 0 ? 0 : random.between(0, 2 * n_rows));
    for (auto & row : index) {
        row = static_cast<std::int64_t>(random.between(0, n_rows - 1));
    }
    return index;
}

// All instruction sets decode any bits and encode any numbers alike; what is not finite must only stay defined.
void fuzz_codec(Random & random) {
    const Format &    format = any_format(random, false);
    const std::size_t n = random.between(0, 40) * (format.quantized() ? 32 : random.between(1, 9));
    const Memory      bytes(format.bytes(n), random.between(0, 17));
    const Memory      values(n * sizeof(float));
    const bool        finite = !random.chance(4);
    random.fill(bytes.data(), bytes.size());
    if (finite) {
        random.fill_numbers(values.floats(), n, random.chance(4) ? kFloatMax : kF16Max);
    } else {
        random.fill(values.data(), values.size());
    }
    std::vector<Memory> numbers;
    std::vector<Memory> blocks;
    for (const Isa * isa : towerd::available()) {
        numbers.emplace_back(n * sizeof(float));
        blocks.emplace_back(bytes.size(), random.between(0, 17));
        isa->codecs[format.codec].decode(bytes.data(), numbers.back().floats(), n);
        isa->codecs[format.codec].encode(values.floats(), blocks.back().data(), n);
        require(!finite || blocks.back().same(blocks.front()), "encoded differently", format.name);
        for (std::size_t i = 0; i < n; ++i) {
            const float a = numbers.back().floats()[i];
            const float b = numbers.front().floats()[i];
            require(std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b), "decoded differently", format.name);
        }
    }
}

struct Transcoding {
    std::vector<Table>                     sources;
    std::vector<std::vector<std::int64_t>> indices;
    std::vector<towerd::TranscodeJob>      jobs;
    std::size_t                            size = 0;
    bool                                   exact = true;  // no NaN is written, which may have any bits
};

void add_job(Random & random, Transcoding & work, const Format & from, const Format & to) {
    const bool        whole_blocks = from.quantized() || to.quantized();
    const std::size_t n_elements = random.between(1, random.chance(8) ? 80 : 9) * (whole_blocks ? 32 : 7);
    const std::size_t n = random.between(0, random.chance(20) ? 900 : 6);
    const bool        numbers = !random.chance(5);
    work.exact = work.exact && (numbers || to.quantized() || &from == &to);
    work.sources.push_back(any_rows(random, from, n, n_elements, numbers));
    work.indices.push_back(any_index(random, n));
    const bool picked = random.chance(2);
    work.jobs.push_back({nullptr, work.sources.back().rows, picked ? work.indices.back().data() : nullptr,
                         picked ? work.indices.back().size() : n, &from, &to, n_elements});
    work.size += work.jobs.back().target_span();
}

// Several jobs, none of which can fail.
void fuzz_transcode(Random & random) {
    Transcoding work;
    const auto  n_jobs = random.between(1, 4);
    work.sources.reserve(n_jobs);
    work.indices.reserve(n_jobs);
    while (work.jobs.size() < n_jobs) {
        const Format & from = any_format(random, false);
        const Format & to = any_format(random, false);
        if (!towerd::can_fail(from, to)) {
            add_job(random, work, from, to);
        }
    }
    std::vector<Memory> written;
    for (const Isa * isa : towerd::available()) {
        written.emplace_back(work.size, random.between(0, 17));
        std::size_t at = 0;
        for (auto & job : work.jobs) {
            job.target = written.back().data() + at;
            at += job.target_span();
        }
        towerd::transcode(work.jobs, *isa, random.between(1, 3));
        require(!work.exact || written.back().same(written.front()), "written differently", "transcode");
    }
}

// One job between any formats: all instruction sets refuse the same row or write the same bytes.
void fuzz_transcode_checked(Random & random) {
    Transcoding work;
    add_job(random, work, any_format(random, false), any_format(random, false));
    towerd::TranscodeJob & job = work.jobs.front();
    std::vector<Memory>    written;
    std::size_t            first_bad = 0;
    for (const Isa * isa : towerd::available()) {
        written.emplace_back(work.size, random.between(0, 17));
        job.target = written.back().data();
        const auto        bad = towerd::transcode_checked(job, *isa, random.between(1, 3));
        const std::size_t row = bad ? bad->row + 1 : 0;
        require(written.size() == 1 || row == first_bad, "another row refused", job.to->name);
        first_bad = row;
        require(bad || !work.exact || written.back().same(written.front()), "written differently", job.to->name);
    }
}

towerd::RopeShift any_shift(Random & random) {
    towerd::RopeShift shift{};
    shift.format = &any_format(random, true);
    const std::size_t unit = shift.format->quantized() ? 32 : 2;
    shift.heads.head_dim = unit * random.between(1, random.chance(2) ? 4 : 12);
    shift.heads.n = random.between(1, 5);
    shift.heads.n_rot = 2 * random.between(1, shift.heads.head_dim / 2);
    shift.heads.first = random.between(0, shift.heads.head_dim - shift.heads.n_rot);
    shift.heads.neox = random.chance(2);
    shift.n_elements = shift.heads.n * shift.heads.head_dim;
    shift.hadamard_block = random.one_of({0, 32, 64, 128});
    if (shift.hadamard_block != 0 && shift.heads.head_dim % shift.hadamard_block != 0) {
        shift.hadamard_block = 0;
    }
    return shift;
}

void fuzz_rope_shift(Random & random) {
    towerd::RopeShift shift = any_shift(random);
    const std::size_t n = random.between(0, random.chance(20) ? 300 : 7);
    const std::size_t n_lines = random.between(1, 3);
    const bool        numbers = !random.chance(5);
    const Table       source = any_rows(random, *shift.format, n, shift.n_elements, numbers);
    const Memory      cos(n_lines * shift.heads.n_rot / 2 * sizeof(float));
    const Memory      sin(cos.size());
    random.fill_numbers(cos.floats(), cos.size() / sizeof(float), 1.0f);
    random.fill_numbers(sin.floats(), sin.size() / sizeof(float), 1.0f);
    std::vector<std::int32_t> lines(n);
    for (auto & line : lines) {
        line = static_cast<std::int32_t>(random.between(0, n_lines)) - 1;
    }
    shift.source = source.rows;
    shift.cos = cos.floats();
    shift.sin = sin.floats();
    shift.row_table = random.chance(3) ? nullptr : lines.data();
    if (towerd::find_bad_row(shift, random.between(1, 3))) {
        return;
    }
    std::vector<Table> targets;
    for (const Isa * isa : towerd::available()) {
        targets.emplace_back(n, source.rows.bytes, any_gap(random), random.between(0, 17));
        shift.target = targets.back().rows;
        towerd::rope_shift(shift, *isa, random.between(1, 3));
        for (std::size_t row = 0; numbers && row < n; ++row) {
            const bool same = std::memcmp(targets.back().at(row), targets.front().at(row), source.rows.bytes) == 0;
            require(same, "rotated differently", shift.format->name);
        }
    }
}

// All instruction sets refuse the same input, or give masses that add up and differ by roundings only.
void fuzz_attention(Random & random) {
    const bool               numbers = !random.chance(5);
    towerd::AttentionMass    job{};
    const std::size_t        group = random.between(1, 4);
    const std::size_t        m = random.between(0, random.chance(9) ? 40 : 5);
    const std::size_t        n = random.between(1, random.chance(9) ? 700 : 80);
    static const char *      names[] = {"f32", "f16", "bf16"};
    job.format = towerd::format_named(names[random.between(0, 2)]);
    job.n_kv_heads = random.between(1, 3);
    job.n_heads = job.n_kv_heads * group;
    job.head_dim = random.between(1, random.chance(3) ? 140 : 20);
    job.scale = random.fraction();
    const std::size_t         width = job.n_heads * job.head_dim;
    const Table               queries(m, width * sizeof(float), sizeof(float) * any_gap(random), 4 * random.between(0, 15));
    const Table               keys = any_rows(random, *job.format, n, job.n_kv_heads * job.head_dim, numbers);
    std::vector<std::int64_t> seen(m);
    for (std::size_t i = 0; i < m; ++i) {
        seen[i] = static_cast<std::int64_t>(random.between(1, n));
        random.fill_numbers(reinterpret_cast<float *>(queries.at(i)), width, numbers ? 8.0f : kFloatMax);
    }
    job.queries = queries.rows;
    job.keys = keys.rows;
    job.n_seen = seen.data();
    std::vector<float> sinks(job.n_heads);
    random.fill_numbers(sinks.data(), sinks.size(), 8.0f);
    job.sinks = random.chance(3) ? sinks.data() : nullptr;
    std::vector<float> weights(m);
    for (float & weight : weights) {
        weight = std::abs(random.fraction());
    }
    job.weights = random.chance(3) ? weights.data() : nullptr;
    double of_queries = static_cast<double>(m);
    if (job.weights != nullptr) {
        of_queries = std::accumulate(weights.begin(), weights.end(), 0.0);
    }
    std::vector<Memory> masses;
    std::vector<bool>   refused;
    for (const Isa * isa : towerd::available()) {
        masses.emplace_back(job.n_kv_heads * n * sizeof(float), 4 * random.between(0, 15));
        job.mass = masses.back().floats();
        refused.push_back(towerd::attention_mass(job, *isa, random.between(1, 3)).has_value());
        const double spread = of_queries * static_cast<double>(group);
        for (std::size_t kv = 0; kv < job.n_kv_heads && !refused.back(); ++kv) {
            double total = 0;
            for (std::size_t j = 0; j < n; ++j) {
                total += static_cast<double>(masses.back().floats()[kv * n + j]);
            }
            const double less = job.sinks == nullptr ? spread - total : 0.0;
            const double error = total > spread ? total - spread : less;
            require(error <= 1e-4 * spread, "masses do not add up", "attention_mass");
        }
        require(!numbers || refused.back() == refused.front(), "refused by some only", "attention_mass");
    }
}

void fuzz_copy(Random & random) {
    const std::size_t n = random.between(0, random.chance(20) ? 2000 : 9);
    const std::size_t bytes = random.between(0, random.chance(20) ? 3000 : 70);
    const Table       source(n, bytes, any_gap(random), random.between(0, 17));
    random.fill(source.memory.data(), source.memory.size());
    const auto  index = any_index(random, n);
    const bool  picked = random.chance(2);
    const auto  n_rows = picked ? index.size() : n;
    const Table target(n_rows, bytes, 0, random.between(0, 17));
    towerd::run_copies({{target.rows.data, source.rows, picked ? index.data() : nullptr, n_rows}}, random.between(1, 3));
    for (std::size_t row = 0; bytes != 0 && row < n_rows; ++row) {
        const auto * from = source.at(picked ? static_cast<std::size_t>(index[row]) : row);
        require(std::memcmp(target.at(row), from, bytes) == 0, "row is wrong", "copy");
    }
}

void fuzz_transpose(Random & random) {
    const std::size_t element = random.one_of({1, 2, 4});
    const std::size_t n = random.between(0, random.chance(9) ? 700 : 40);
    const std::size_t columns = random.between(0, random.chance(9) ? 700 : 40);
    const Table       source(n, columns * element, any_gap(random), random.between(0, 17));
    const Table       target(columns, n * element, any_gap(random), random.between(0, 17));
    random.fill(source.memory.data(), source.memory.size());
    towerd::transpose(source.rows, target.rows, element, random.between(1, 3));
    for (std::size_t row = 0; row < n; ++row) {
        for (std::size_t column = 0; column < columns; ++column) {
            const auto * moved = target.at(column) + row * element;
            const auto * from = source.at(row) + column * element;
            require(std::memcmp(from, moved, element) == 0, "element is wrong", "transpose");
        }
    }
}

// Runs of bytes one after the other, apart, and longer than a stage: all are where they belong, nothing beside them.
void fuzz_stage(Random & random) {
    const std::size_t size = random.between(0, 40000);
    const Memory      source(size, random.between(0, 70));
    random.fill(source.data(), size);
    for (const Isa * isa : towerd::available()) {
        const Memory target(size, random.between(0, 70));
        const Memory expected(size);
        {
            towerd::Stage stage(*isa, isa->stream != nullptr && !random.chance(4));
            std::size_t   n = 0;
            for (std::size_t at = 0; at < size; at += n) {
                const std::size_t left = size - at;
                n = std::min(left, random.between(1, random.chance(9) ? 12000 : 300));
                if (random.chance(9)) {  // left out
                    continue;
                }
                std::memcpy(expected.data() + at, source.data() + at, n);
                std::memcpy(stage.place(target.data() + at, n), source.data() + at, n);
            }
        }
        require(target.same(expected), "bytes are wrong", "stage");
    }
}

// Tokens of few words, some of them repeated, some none, in memory of their size.
Memory any_tokens(Random & random, std::size_t n) {
    Memory     tokens(n * sizeof(std::int32_t));
    auto *     ids = reinterpret_cast<std::int32_t *>(tokens.data());
    const auto words = random.one_of({1, 3, 50, 30000});
    const auto period = random.chance(3) ? random.between(1, 40) : n;
    for (std::size_t i = 0; i < n; ++i) {
        ids[i] = i >= period ? ids[i - period] : static_cast<std::int32_t>(random.between(0, words));
        ids[i] = random.chance(300) ? -1 : ids[i];
    }
    return tokens;
}

const std::int32_t * ids_of(const Memory & tokens, std::size_t at) {
    return reinterpret_cast<const std::int32_t *>(tokens.data()) + at;
}

// Paths of two nodes each, and a prompt with a part of one: what is found is there, and that part is found.
void fuzz_token_index(Random & random) {
    const std::size_t   n_paths = random.between(1, 6), n_live = random.between(0, n_paths);
    towerd::TokenIndex  index(random.between(0, 1u << 30));
    std::vector<Memory> paths;
    std::vector<std::int64_t> live;
    for (std::uint64_t owner = 1; owner <= n_paths; ++owner) {
        const std::size_t n = random.between(1, random.chance(9) ? 3000 : 300), cut = random.between(0, n - 1);
        paths.push_back(any_tokens(random, n));
        const Memory & path = paths.back();
        index.add({owner % 2, 0, owner, 0, 0, nullptr, 0, ids_of(path, 0), cut});
        const std::size_t before = random.between(0, cut);
        index.add({owner % 2, owner, owner, owner - 1, cut, ids_of(path, cut - before), before, ids_of(path, cut), n - cut});
        if (owner <= n_live) {
            live.push_back(static_cast<std::int64_t>(owner));
        }
    }
    const bool compacted = random.chance(3);
    for (std::size_t shard = 0; compacted && shard < towerd::TokenIndex::kShards; ++shard) {
        index.compact(shard, live.data(), live.size());
    }
    if (compacted && n_live > 0) {  // again, into what is left
        index.add({1, 0, 1, 0, 0, nullptr, 0, ids_of(paths[0], 0), paths[0].size() / sizeof(std::int32_t)});
    }
    Memory            prompt = any_tokens(random, random.between(0, 400));
    const Memory &    path = paths[random.between(0, n_paths - 1)];
    const std::size_t n = std::min(prompt.size(), path.size()) / sizeof(std::int32_t) / 2;
    const std::size_t at = random.between(0, n);
    std::memcpy(prompt.data() + at * sizeof(std::int32_t), ids_of(path, at), n * sizeof(std::int32_t));
    const std::size_t stop = prompt.size() / sizeof(std::int32_t), start = random.between(0, stop);
    for (const towerd::TokenHit & hit : index.find({0, 1}, ids_of(prompt, 0), start, stop)) {
        const std::uint64_t owner = hit.place.owner;
        require(owner >= 1 && owner <= (compacted ? n_live : n_paths), "owner is wrong", "token_index");
        const Memory & of = paths[owner - 1];
        require(hit.place.end * sizeof(std::int32_t) <= of.size() && hit.at >= start + towerd::kWindow, "place is wrong",
                "token_index");
        const std::size_t same = towerd::common_before(ids_of(prompt, hit.at), ids_of(of, hit.place.end), towerd::kWindow);
        require(same == towerd::kWindow, "window is wrong", "token_index");
    }
}

// Tables whose symbols need not occur, but the escape.
towerd::SymbolTables any_tables(Random & random, std::size_t n_components) {
    towerd::SymbolTables tables;
    const std::size_t    n_classes = random.between(1, 4);
    for (std::size_t i = 0; i < n_classes; ++i) {
        std::uint16_t frequency[towerd::kRansSymbols] = {};
        std::size_t   rest = (std::size_t{1} << towerd::kRansBits) - 1;
        for (std::size_t s = 0; s < towerd::kRansEscape && rest != 0; ++s) {
            const std::size_t some = random.chance(3) ? 0 : random.between(0, random.chance(9) ? rest : rest / 8);
            frequency[s] = static_cast<std::uint16_t>(some);
            rest -= some;
        }
        frequency[towerd::kRansEscape] = static_cast<std::uint16_t>(rest + 1);
        const std::size_t shift = random.chance(2) ? 0 : random.between(0, towerd::kRansShiftMax);
        tables.classes.push_back(towerd::symbol_class(static_cast<int>(shift), frequency));
    }
    for (std::size_t i = 0; i < n_components; ++i) {
        tables.class_of.push_back(static_cast<std::uint8_t>(random.between(0, n_classes - 1)));
    }
    return tables;
}

std::vector<std::int16_t> any_values(Random & random, std::size_t n) {
    std::vector<std::int16_t> values(n);
    for (auto & value : values) {
        const std::size_t size = random.one_of({2, 40, 3000, 65535});
        value = static_cast<std::int16_t>(static_cast<int>(random.between(0, size)) - static_cast<int>(size / 2));
    }
    return values;
}

// Every page is read as it was written; any other bytes are read without a bad access.
void fuzz_rans(Random & random) {
    const std::size_t n_components = random.between(0, 40), n_rows = random.between(1, 70);
    const towerd::SymbolTables tables = any_tables(random, n_components);
    const auto                 values = any_values(random, n_components * n_rows);
    const auto                 page = towerd::rans_encode(values.data(), n_rows, tables);
    std::vector<std::int16_t>  found(values.size());
    const Memory               exact(page.size());
    std::memcpy(exact.data(), page.data(), page.size());
    require(towerd::rans_decode(exact.data(), exact.size(), n_rows, tables, found.data()), "is not read", "rans");
    require(found == values, "values differ", "rans");
    const Memory hostile(random.chance(2) ? page.size() : random.between(0, page.size() + 40));
    random.fill(hostile.data(), hostile.size());
    const std::size_t kept = std::min({hostile.size(), page.size(), random.between(0, page.size())});
    std::memcpy(hostile.data(), page.data(), kept);
    for (std::size_t i = random.between(0, 4); i > 0 && hostile.size() != 0; --i) {
        hostile.data()[random.between(0, hostile.size() - 1)] ^= static_cast<std::uint8_t>(1u << random.between(0, 7));
    }
    towerd::rans_decode(hostile.data(), hostile.size(), n_rows, tables, found.data());
}

// All instruction sets write the same page and read the same rows, whatever it holds.
void fuzz_row_transform(Random & random) {
    const Format &    format = towerd::kFormats[random.one_of({0, 1, 8})];  // f32, f16, bf16
    const std::size_t widths[2] = {random.between(1, 40), random.between(1, 40)};
    const std::size_t n_elements = widths[0] + widths[1], n_rows = random.between(1, 9);
    const std::size_t n_components = random.between(1, n_elements);
    std::vector<std::uint16_t> vectors(n_components * n_elements);
    for (auto & each : vectors) {
        each = static_cast<std::uint16_t>(random.bits() & 0xb7ff);  // at most 0.5
    }
    std::vector<float> mean(n_elements), weights(n_elements, 0.5f);
    random.fill_numbers(mean.data(), n_elements, 100.0f);
    const towerd::RowTransform transform(vectors.data(), mean.data(), weights.data(), n_components, n_elements);
    const towerd::Quantizer    quantizer{0.25f, 0.125f, 0.0625f, any_tables(random, n_components)};
    const Table first = any_rows(random, format, n_rows, widths[0], true);
    const Table second = any_rows(random, format, n_rows, widths[1], true);
    const towerd::PageJob            job{&transform, &quantizer, {first.rows, second.rows}};
    std::vector<std::uint8_t>        page;
    std::vector<Table>               tables;
    for (const Isa * isa : towerd::available()) {
        const auto pages = towerd::encode_pages({job}, format, *isa, 2);
        require(page.empty() || page == pages.front(), "pages differ", "row_transform");
        page = pages.front();
        require(!page.empty(), "rows are refused", "row_transform");
        tables.push_back(any_rows(random, format, n_rows, widths[0], false));
        tables.push_back(any_rows(random, format, n_rows, widths[1], false));
        const auto * to = &tables[tables.size() - 2];
        const towerd::DecodeJob read{{&transform, &quantizer, {to[0].rows, to[1].rows}}, page.data(), page.size()};
        require(towerd::decode_pages({read}, format, *isa, 1).front() != 0, "is not read", "row_transform");
        for (std::size_t row = 0; row < n_rows; ++row) {
            for (std::size_t i = 0; i < 2; ++i) {
                require(std::memcmp(tables[i].at(row), to[i].at(row), to[i].rows.bytes) == 0, "rows differ",
                        "row_transform");
            }
        }
    }
}

struct Kernel {
    const char * name;
    void (*fuzz)(Random &);
    unsigned long long cases;
};

constexpr std::size_t kKernels = 11;

void run_case(std::uint64_t seed, Kernel (&kernels)[kKernels]) {
    seed_in_work = seed;
    Random   random(seed);
    Kernel & kernel = kernels[random.between(0, kKernels - 1)];
    kernel.fuzz(random);
    ++kernel.cases;
}

}  // namespace

int main(int n_arguments, char ** arguments) {
    const double        seconds = n_arguments > 1 ? std::atof(arguments[1]) : 10.0;
    const std::uint64_t first = n_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    Kernel              kernels[kKernels] = {{"codec", fuzz_codec, 0},
                                {"transcode", fuzz_transcode, 0},
                                {"transcode_checked", fuzz_transcode_checked, 0},
                                {"rope_shift", fuzz_rope_shift, 0},
                                {"attention_mass", fuzz_attention, 0},
                                {"copy", fuzz_copy, 0},
                                {"transpose", fuzz_transpose, 0},
                                {"stage", fuzz_stage, 0},
                                {"token_index", fuzz_token_index, 0},
                                {"rans", fuzz_rans, 0},
                                {"row_transform", fuzz_row_transform, 0}};
    __sanitizer_set_death_callback(report_seed);
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    for (std::uint64_t seed = first; seed == first || Clock::now() < end; ++seed) {
        run_case(seed, kernels);
    }
    for (const Isa * isa : towerd::available()) {
        std::printf("%s ", isa->name);
    }
    for (const Kernel & kernel : kernels) {
        std::printf(" %s %llu", kernel.name, kernel.cases);
    }
    std::printf("\n");
}
