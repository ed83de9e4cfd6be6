// Copies tensors out of llama.cpp's compute graph while it is evaluated. The contract is in
// lab/reference/taps.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace towerd {

// ggml's functions; this module is not linked with ggml.
struct TensorFunctions {
    const char * (*name)(const void * tensor);
    std::size_t (*n_bytes)(const void * tensor);
    std::int64_t (*n_elements)(const void * tensor);
    void (*get)(const void * tensor, void * to, std::size_t offset, std::size_t n_bytes);
};

// Called by one thread at a time.
class NodeTap {
public:
    using Place = std::pair<std::string, int>;  // name, layer

    struct Values {
        std::array<std::size_t, 4> shape;    // in numpy's order, the reverse of ggml's
        std::array<std::size_t, 4> strides;  // bytes
        std::vector<std::uint8_t>  data;
    };

    explicit NodeTap(const TensorFunctions & functions) : functions_(functions) { error_.reserve(kErrorMax); }
    NodeTap(const NodeTap &) = delete;  // llama.cpp keeps its address
    NodeTap & operator=(const NodeTap &) = delete;

    void watch(std::vector<std::string> names);

    const std::map<Place, Values> & values() const { return values_; }
    const std::string &             error() const { return error_; }  // why a tensor was not read; empty if none failed

    // ggml_backend_sched_eval_callback; `tap` is a NodeTap.
    static bool on_node(void * tensor, bool ask, void * tap) noexcept;

private:
    static constexpr std::size_t kErrorMax = 100;

    // Allocates nothing, because memory may have run out; `why` is at most kErrorMax long.
    void fail(const char * why) { error_.assign(why); }
    bool see(const void * tensor, bool ask);
    void read(const void * tensor, const Place & place);

    TensorFunctions          functions_;
    std::vector<std::string> names_;
    std::map<Place, Values>  values_;
    std::string              error_;
};

}  // namespace towerd
