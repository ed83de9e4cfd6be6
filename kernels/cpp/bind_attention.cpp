#include <cmath>
#include <optional>
#include <string>

#include "attention.h"
#include "bind.h"

namespace towerd {

namespace {

float scale_of(nb::handle value) {
    const double scale = PyFloat_Check(value.ptr()) ? PyFloat_AS_DOUBLE(value.ptr()) : std::nan("");
    if (!(std::abs(scale) <= 3.4028234663852886e38)) {
        refuse("scale", "expected a finite float32");
    }
    return static_cast<float>(scale);
}

std::size_t heads_of(std::size_t n_elements, std::size_t head_dim, const std::string & name) {
    if (n_elements == 0 || n_elements % head_dim != 0) {
        refuse(name, "a row of " + std::to_string(n_elements) + " elements is not whole heads of " +
                         std::to_string(head_dim));
    }
    return n_elements / head_dim;
}

const Format & key_format(nb::handle value) {
    const Format & format = format_of(value, "format");
    if (format.quantized()) {
        refuse("format", std::string(format.name) + " is quantized");
    }
    return format;
}

void check_seen(const Buffer & seen, std::size_t n_queries, std::size_t n_keys) {
    seen.require_contiguous("n_seen");
    if (seen.shape(0) != n_queries) {
        refuse("n_seen", "expected " + std::to_string(n_queries) + " entries");
    }
    const auto * n = reinterpret_cast<const std::int64_t *>(seen.data());
    for (std::size_t i = 0; i < n_queries; ++i) {
        if (n[i] < 1 || static_cast<std::size_t>(n[i]) > n_keys) {
            refuse("n_seen", "a query sees other than 1 to " + std::to_string(n_keys) + " keys");
        }
    }
}

[[noreturn]] void refuse_attention(const BadAttention & bad) {
    if (bad.what == BadAttention::What::kScore) {
        refuse("queries", "a score is beyond what float32 holds");
    }
    refuse(bad.what == BadAttention::What::kKey ? "keys" : "queries", "row " + std::to_string(bad.row) + " is not finite");
}

}  // namespace

nb::object bind_attention_mass(const Isa & isa, nb::handle queries, nb::handle keys, nb::handle format,
                               nb::handle n_seen, nb::handle head_dim, nb::handle scale, nb::handle n_threads) {
    const std::size_t threads = threads_of(n_threads);
    const Buffer      query_rows(queries, "queries", false, 2, sizeof(float), kFloat);
    const Buffer      key_rows(keys, "keys", false, 2, 1, kBytes);
    AttentionMass     job{};
    job.queries = rows_of(query_rows, "queries");
    query_rows.require_aligned("queries");
    job.keys = rows_of(key_rows, "keys");
    job.format = &key_format(format);
    job.head_dim = count_of(head_dim, "head_dim", 1, kHeadDimMax);
    job.n_heads = heads_of(query_rows.shape(1), job.head_dim, "queries");
    job.n_kv_heads = heads_of(elements_of(*job.format, job.keys.bytes, "keys"), job.head_dim, "keys");
    if (job.n_heads % job.n_kv_heads != 0) {
        refuse("queries", std::to_string(job.n_heads) + " heads cannot share " + std::to_string(job.n_kv_heads) +
                              " KV heads");
    }
    job.scale = scale_of(scale);
    const Buffer seen(n_seen, "n_seen", false, 1, sizeof(std::int64_t), kInt64);
    check_seen(seen, job.queries.n, job.keys.n);
    job.n_seen = reinterpret_cast<const std::int64_t *>(seen.data());
    const nb::object mass = nb::module_::import_("numpy").attr("empty")(job.keys.n, "float32");
    std::optional<BadAttention> bad;
    {
        const Buffer out(mass, "mass", true, 1, sizeof(float), kFloat);
        job.mass = reinterpret_cast<float *>(out.data());
        const nb::gil_scoped_release free;
        bad = attention_mass(job, isa, threads);
    }
    if (bad) {
        refuse_attention(*bad);
    }
    return mass;
}

}  // namespace towerd
