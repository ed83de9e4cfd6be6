#include "head_check.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "ggml-cpp.h"
#include "gguf.h"
#include "speculative.h"

// Declared in llama.cpp's src/llama-ext.h, which is no part of its public sources.
LLAMA_API const int32_t * llama_model_target_layer_ids(const struct llama_model * model);
LLAMA_API uint32_t        llama_model_target_layer_ids_n(const struct llama_model * model);

namespace towerd::wire {

namespace {

// What a file says of its model.
class Keys {
public:
    explicit Keys(const std::string & path) : file_(nullptr), tensors_(nullptr) {
        ggml_context * tensors = nullptr;
        file_.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, &tensors}));
        tensors_.reset(tensors);
        if (!file_ || !tensors_) {
            throw std::runtime_error(path + " cannot be read");
        }
    }

    std::string arch() const {
        const int64_t at = gguf_find_key(file_.get(), "general.architecture");
        return at < 0 || gguf_get_kv_type(file_.get(), at) != GGUF_TYPE_STRING ? "" : gguf_get_val_str(file_.get(), at);
    }

    // A whole number or truth value below the architecture's name, of one layer where they are listed; -1: it is missing.
    int64_t number(const std::string & key, size_t layer = 0) const {
        const int64_t at = gguf_find_key(file_.get(), (arch() + "." + key).c_str());
        if (at < 0) {
            return -1;
        }
        const gguf_type type = gguf_get_kv_type(file_.get(), at);
        if (type == GGUF_TYPE_STRING) {
            return -1;
        }
        if (type != GGUF_TYPE_ARRAY) {
            return number_at(type, gguf_get_val_data(file_.get(), at), 0);
        }
        const gguf_type item = gguf_get_arr_type(file_.get(), at);
        return layer >= gguf_get_arr_n(file_.get(), at) || item == GGUF_TYPE_STRING || item == GGUF_TYPE_ARRAY
                   ? -1
                   : number_at(item, gguf_get_arr_data(file_.get(), at), layer);
    }

    int64_t n_head_kv(size_t layer) const {
        const int64_t found = number("attention.head_count_kv", layer);
        return found < 0 ? number("attention.head_count", layer) : found;
    }

    const ggml_tensor * tensor(const char * name) const { return ggml_get_tensor(tensors_.get(), name); }

    // Where the values of a tensor begin in the file.
    size_t offset(const char * name) const {
        const int64_t at = gguf_find_tensor(file_.get(), name);
        return gguf_get_data_offset(file_.get()) + gguf_get_tensor_offset(file_.get(), at);
    }

private:
    static int64_t number_at(gguf_type type, const void * data, size_t i) {
        switch (type) {
            case GGUF_TYPE_BOOL:
            case GGUF_TYPE_INT8:
            case GGUF_TYPE_UINT8: return static_cast<const uint8_t *>(data)[i];
            case GGUF_TYPE_INT16:
            case GGUF_TYPE_UINT16: return static_cast<const uint16_t *>(data)[i];
            case GGUF_TYPE_INT32:
            case GGUF_TYPE_UINT32: return static_cast<const int32_t *>(data)[i];
            case GGUF_TYPE_INT64:
            case GGUF_TYPE_UINT64: return static_cast<const int64_t *>(data)[i];
            default: return -1;
        }
    }

    gguf_context_ptr file_;
    ggml_context_ptr tensors_;
};

class Check {
public:
    Check(const llama_model * head, const llama_model * model, common_speculative_type type, const std::string & path) :
        head_(head), model_(model), path_(path), named_(common_speculative_type_to_str(type)), keys_(path) {}

    const Keys & keys() const { return keys_; }

    void vocabulary() const {
        const int n_head  = llama_vocab_n_tokens(llama_model_get_vocab(head_));
        const int n_model = llama_vocab_n_tokens(llama_model_get_vocab(model_));
        if (n_head != n_model) {
            fail("has " + std::to_string(n_head) + " tokens, the model " + std::to_string(n_model));
        }
    }

    void width(int64_t n_head, int n_model) const {
        if (n_head != n_model) {
            fail("reads hidden states of " + std::to_string(n_head) + " numbers, the model's have " + std::to_string(n_model));
        }
    }

    // EAGLE-3 and DFlash read the model's states before these layers.
    void layers(uint32_t n_min, uint32_t n_max) const {
        const uint32_t  n       = llama_model_target_layer_ids_n(head_);
        const int32_t * ids     = llama_model_target_layer_ids(head_);
        const int32_t   n_layer = llama_model_n_layer(model_);
        if (n < n_min || n > n_max) {
            fail("reads the states of " + std::to_string(n) + " layers: it is of another kind");
        }
        const auto * odd = std::find_if(ids, ids + n, [&](int32_t id) { return id < 0 || id > n_layer; });
        if (odd != ids + n) {
            fail("reads the state before layer " + std::to_string(*odd) + ", the model has " + std::to_string(n_layer));
        }
    }

    void eagle3() const {
        layers(3, 3);
        width(keys_.number("target_hidden_size"), llama_model_n_embd(model_));
        const int32_t * ids = llama_model_target_layer_ids(head_);
        if (std::find(ids, ids + 3, llama_model_n_layer(model_)) != ids + 3) {
            width(llama_model_n_embd(model_), llama_model_n_embd_out(model_));
        }
        tensors();
    }

    void dflash(bool is_dspark) const {
        layers(1, UINT32_MAX);
        width(llama_model_n_embd(head_), llama_model_n_embd(model_));
        tensors();
        const int     n_least = is_dspark ? 1 : 2;
        const int64_t n_block = keys_.number("block_size");
        if (n_block >= 0 && n_block < n_least) {
            fail("drafts blocks of less than " + std::to_string(n_least) + " tokens");
        }
        const llama_vocab * vocab = llama_model_get_vocab(head_);
        const llama_token   mask  = llama_vocab_mask(vocab);
        if (mask < 0 || mask >= llama_vocab_n_tokens(vocab)) {
            fail("names no mask token of its vocabulary");
        }
    }

    // The assistant of Gemma 4 reads the rows of the model's last two layers as if they were its own.
    void gemma4(const Keys & model) const {
        const int n_layer = llama_model_n_layer(model_);
        if (model.arch() != "gemma4" || n_layer < 2) {
            fail("is made for Gemma 4");
        }
        width(llama_model_n_embd_out(head_), llama_model_n_embd(model_));
        if (model.number("attention.sliding_window_pattern", n_layer - 2) != 1 ||
            model.number("attention.sliding_window_pattern", n_layer - 1) != 0) {
            fail("wants a sliding window in the model's last layer but one, and none in the last");
        }
        for (int il = 0; il < llama_model_n_layer_nextn(head_); ++il) {
            const bool        is_window = keys_.number("attention.sliding_window_pattern", il) == 1;
            const std::string suffix    = is_window ? "_swa" : "";
            const size_t      layer     = n_layer - (is_window ? 2 : 1);
            for (const auto & key : {"attention.key_length" + suffix, "attention.value_length" + suffix}) {
                same(key, keys_.number(key, il), model.number(key, layer));
            }
            same("attention.head_count_kv", keys_.n_head_kv(il), model.n_head_kv(layer));
        }
    }

private:
    [[noreturn]] void fail(const std::string & reason) const {
        throw std::runtime_error("--spec-type " + named_ + ": the head " + path_ + " " + reason);
    }

    void same(const std::string & key, int64_t n_head, int64_t n_model) const {
        if (n_head != n_model) {
            fail("has another " + key + " than the model, whose rows it reads");
        }
    }

    // Numbers in tensors that llama.cpp uses as indices as they are.
    void tensors() const {
        const int           n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
        const ggml_tensor * rows    = keys_.tensor("token_embd.weight");
        if (rows != nullptr && rows->ne[1] < n_vocab) {
            fail("has embeddings of " + std::to_string(rows->ne[1]) + " tokens, the model has " + std::to_string(n_vocab));
        }
        const ggml_tensor * named = keys_.tensor("d2t");
        if (named == nullptr) {
            return;
        }
        std::vector<int64_t> ids(named->type == GGML_TYPE_I64 ? static_cast<size_t>(ggml_nelements(named)) : 0);
        std::ifstream        in(path_, std::ios::binary);
        in.seekg(static_cast<std::streamoff>(keys_.offset("d2t")));
        in.read(reinterpret_cast<char *>(ids.data()), static_cast<std::streamsize>(ids.size() * sizeof(int64_t)));
        const auto is_odd = [n_vocab](int64_t id) { return id < 0 || id >= n_vocab; };
        if (!in || ids.empty() || std::any_of(ids.begin(), ids.end(), is_odd)) {
            fail("drafts tokens that the model does not have");
        }
    }

    const llama_model * head_;
    const llama_model * model_;
    const std::string & path_;
    const std::string   named_;
    const Keys          keys_;
};

}  // namespace

void check_head(const llama_model * head, const std::string & path, const llama_model * model, const std::string & model_path,
                common_speculative_type type) {
    const Check check(head, model, type, path);
    check.vocabulary();
    if (type == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) {
        check.eagle3();
    } else if (type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP) {
        if (check.keys().arch() == "gemma4-assistant") {
            check.gemma4(Keys(model_path));
        }
        check.width(llama_model_n_embd_out(head), llama_model_n_embd_out(model));
    } else {
        check.dflash(type == COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK);
    }
}

common_speculative_type head_type_of(const std::string & path) {
    const Keys        keys(path);
    const std::string arch = keys.arch();
    if (arch == "dflash") {
        return keys.tensor("markov_w1.weight") != nullptr ? COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK
                                                          : COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH;
    }
    return arch == "eagle3"             ? COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
           : arch == "gemma4-assistant" ? COMMON_SPECULATIVE_TYPE_DRAFT_MTP
                                        : COMMON_SPECULATIVE_TYPE_NONE;
}

}  // namespace towerd::wire
