#include "devices.h"

#include "ggml-backend.h"

// Declared in llama.cpp's src/llama-ext.h, which is no part of its public sources.
LLAMA_API int32_t            llama_model_n_devices(const llama_model * model);
LLAMA_API ggml_backend_dev_t llama_model_get_device(const llama_model * model, int i);

namespace towerd::wire {

std::vector<std::pair<size_t, size_t>> device_bytes(const llama_model & model) {
    std::vector<std::pair<size_t, size_t>> found(llama_model_n_devices(&model));
    for (size_t i = 0; i < found.size(); ++i) {
        ggml_backend_dev_memory(llama_model_get_device(&model, int(i)), &found[i].first, &found[i].second);
    }
    return found;
}

}  // namespace towerd::wire
