// A llama-server command line, read by llama.cpp's own handlers.

#pragma once

#include <string>
#include <vector>

#include "common.h"

namespace towerd::wire {

// Applies `words`, flags and their values, to `params`, as common_params_parse does, which would print errors and may end
// the process. Call it once: it replaces escapes such as \n in stop words. Throws std::runtime_error that names the flag.
void take_flags(common_params & params, const std::vector<std::string> & words);

// One of llama-server's flags: a spelling or several that mean the same, and how many values follow it.
struct ServerFlag {
    std::vector<std::string> names;
    int                      n_values;
};

// All of llama-server's flags; one that switches off what another one switches on is a flag of its own.
std::vector<ServerFlag> server_flags();

// What llama.cpp reads the flag's value as: "int", "float", or "" where it is no number. Throws std::runtime_error for a name
// that it does not know.
std::string number_of(const std::string & name);

// What flags say about how a model and its context are made.
class LoadFlags {
public:
    // Throws std::runtime_error: a flag that llama.cpp does not know, or a value that it does not take.
    explicit LoadFlags(const std::vector<std::string> & words);

    // Sets the fields that belong to the flags. They point into this object, which must live while a model loads.
    void apply(llama_model_params & params) const;
    void apply(llama_context_params & params) const;

    // A ggml_numa_strategy.
    int numa() const { return params_.numa; }

private:
    common_params params_;
};

}  // namespace towerd::wire
