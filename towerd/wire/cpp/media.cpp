#include "media.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "fields.h"
#include "hash/hash.h"
#include "head.h"
#include "prompts.h"
#include "refused.h"

namespace towerd::wire {

namespace {

constexpr uint32_t kSign       = 1u << 31;
constexpr uint32_t kNotFirst   = 1u << 30;
constexpr uint32_t kAtOnePlace = 1u << 29;
constexpr uint32_t kPlaces     = (1u << 16) - 1;
constexpr size_t   kHexOfAnId  = 8;
constexpr size_t   kHexOfAHash = 64;

llama_tokens ids_from(const std::string & said, size_t n) {
    llama_tokens ids;
    std::string  hex;
    for (size_t i = 0; i < n; ++i) {
        const size_t at = i * kHexOfAnId % kHexOfAHash;
        if (at == 0) {
            const std::string block = said + std::to_string(i);
            hex                     = hash_sha256_hex(block.data(), block.size());
        }
        uint32_t id = static_cast<uint32_t>(std::stoul(hex.substr(at, kHexOfAnId), nullptr, 16)) | kSign;
        id          = i == 0 ? id & ~kNotFirst : id | kNotFirst;
        const auto value = static_cast<llama_token>(id);
        ids.push_back(value == LLAMA_TOKEN_NULL ? value - 1 : value);
    }
    return ids;
}

// Whether all tokens of a medium are at the position of its first one, in the order of rows and columns. Raises Refused
// for positions of any other form than this and one a token.
bool is_at_one_place(const mtmd_input_chunk * chunk) {
    const size_t n    = mtmd_input_chunk_get_n_tokens(chunk);
    const auto * grid = mtmd_input_chunk_get_tokens_image(chunk);
    if (grid == nullptr || n < 2) {
        return false;
    }
    mtmd_decoder_pos before = mtmd_image_tokens_get_decoder_pos(grid, 0, 0);
    const bool       is_one = mtmd_image_tokens_get_decoder_pos(grid, 0, 1).t == 0;
    for (size_t i = 1; i < n; ++i) {
        const mtmd_decoder_pos pos = mtmd_image_tokens_get_decoder_pos(grid, 0, i);
        const bool is_behind       = pos.y > before.y || (pos.y == before.y && pos.x > before.x);
        if (is_one ? pos.t != 0 || !is_behind : pos.t != static_cast<llama_pos>(i)) {
            throw Refused("Media with positions of this form are not supported", ERROR_TYPE_NOT_SUPPORTED);
        }
        before = pos;
    }
    return is_one;
}

std::string url_of(const json & part) {
    for (const char * name : {"image_url", "input_audio", "input_video", "video_url"}) {
        const json holder = json_value(part, name, json::object());
        for (const char * key : {"url", "data"}) {
            const std::string url = holder.is_object() ? json_value(holder, key, std::string()) : "";
            if (string_starts_with(url, "http")) {
                return url;
            }
        }
    }
    return "";
}

}  // namespace

Projector::Projector(const llama_model * model, const std::string & options) {
    const AbortGuard guard;
    const json       values = json::parse(options);
    ggml_log_callback log   = nullptr;
    void *            user  = nullptr;
    llama_log_get(&log, &user);
    mtmd_helper_log_set(log, user);

    const std::string   path   = values.at("path").get<std::string>();
    mtmd_context_params params = mtmd_context_params_default();
    params.use_gpu             = values.at("use_gpu").get<bool>();
    params.print_timings       = false;
    params.n_threads           = values.at("n_threads").get<int>();
    params.image_min_tokens    = values.at("image_min_tokens").get<int>();
    params.image_max_tokens    = values.at("image_max_tokens").get<int>();
    params.warmup              = values.at("warmup").get<bool>();
    params.media_marker        = get_media_marker();
    context_.reset(mtmd_init_from_file(path.c_str(), model, params));
    if (context_ == nullptr) {
        throw std::runtime_error("llama.cpp cannot load the projector " + path);
    }
    digest_ = values.at("digest").get<std::string>();
    n_embd_ = static_cast<size_t>(llama_model_n_embd_inp(model));
}

Medium Projector::medium_of(const mtmd_input_chunk * chunk, size_t ordinal) const {
    const size_t n            = mtmd_input_chunk_get_n_tokens(chunk);
    const auto   n_places     = static_cast<uint32_t>(mtmd_input_chunk_get_n_pos(chunk));
    const bool   is_one_place = uses_mrope() && is_at_one_place(chunk);
    if (n == 0 || (is_one_place ? n_places > kPlaces : n_places != n)) {
        throw Refused("Media with so many positions are not supported", ERROR_TYPE_NOT_SUPPORTED);
    }
    const char *      id   = mtmd_input_chunk_get_id(chunk);
    const std::string said = digest_ + "\n" + (id == nullptr ? "" : id) + "\n" + std::to_string(ordinal) + "\n" +
                             std::to_string(n) + "\n";
    llama_tokens ids = ids_from(said, n);
    if (uses_mrope()) {
        auto first = static_cast<uint32_t>(ids.front()) & ~kAtOnePlace;
        if (is_one_place) {
            first = (first & ~kPlaces) | kAtOnePlace | n_places;
        }
        ids.front() = static_cast<llama_token>(first);
    }
    return {{mtmd_input_chunk_copy(chunk), mtmd_input_chunk_free}, ids, nullptr, ordinal};
}

std::vector<float> Projector::encode(const Medium & medium) const {
    return answering(ERROR_TYPE_SERVER, [&] {
        const std::lock_guard<std::mutex> lock(encoding_);
        if (mtmd_encode_chunk(context(), medium.chunk.get()) != 0) {
            throw std::runtime_error("failed to process mtmd chunk");
        }
        const float * made = mtmd_get_output_embd(context());
        return std::vector<float>(made, made + medium.ids.size() * n_embd_);
    });
}

void Projector::decode(llama_context * ctx, const Medium & medium, const std::vector<float> & encoded, llama_pos pos,
                       llama_seq_id seq, Head * head) const {
    answering(ERROR_TYPE_SERVER, [&] {
        if (encoded.size() != medium.ids.size() * n_embd_) {
            throw std::invalid_argument("what was encoded is another medium");
        }
        llama_pos next = 0;
        // libmtmd only reads them.
        auto * embd = const_cast<float *>(encoded.data());  // NOLINT
        if (mtmd_helper_decode_image_chunk(context(), ctx, medium.chunk.get(), embd, pos, seq,
                                           static_cast<int32_t>(llama_n_batch(ctx)), &next, &show, head) != 0) {
            throw std::runtime_error("failed to process mtmd chunk");
        }
    });
}

// A head that fails drafts worse, and the medium is evaluated nevertheless.
int32_t Projector::show(const mtmd_helper_embd_batch * part, void * head) {
    try {
        if (head != nullptr) {
            static_cast<Head *>(head)->follow_medium(*part);
        }
    } catch (const std::exception &) {  // NOLINT: said above
    }
    return 0;
}

namespace {

// Gives each medium its file. libmtmd names media by the bytes of their file, so that the names (`of_name` has the media of
// each) and the files come in the same order; frames of a video have names of their own, and then no file is given.
void give_files(std::vector<Medium> & media, const std::vector<std::vector<size_t>> & of_name,
                const std::vector<raw_buffer> & files) {
    std::vector<const raw_buffer *> distinct;
    for (const auto & file : files) {
        if (std::none_of(distinct.begin(), distinct.end(), [&](const raw_buffer * one) { return *one == file; })) {
            distinct.push_back(&file);
        }
    }
    if (distinct.size() != of_name.size()) {
        return;
    }
    for (size_t i = 0; i < of_name.size(); ++i) {
        const auto file = std::make_shared<const raw_buffer>(*distinct[i]);
        for (const size_t at : of_name[i]) {
            media.at(at).file = file;
        }
    }
}

}  // namespace

Prompt prompt_of_tokens(const server_tokens & tokens, const Projector * projector, const std::vector<raw_buffer> & files) {
    Prompt                           out;
    std::map<std::string, size_t>    names;
    // The media of each name.
    std::vector<std::vector<size_t>> of_name;
    while (out.ids.size() < tokens.size()) {
        const llama_token token = tokens[out.ids.size()];
        if (token != LLAMA_TOKEN_NULL || projector == nullptr) {
            if (token < 0) {
                refuse("Prompt contains invalid tokens");
            }
            out.ids.push_back(token);
            continue;
        }
        const auto & chunk = tokens.find_chunk(out.ids.size());
        const char * id    = mtmd_input_chunk_get_id(chunk.get());
        const size_t name  = names.try_emplace(id == nullptr ? "" : id, of_name.size()).first->second;
        if (name == of_name.size()) {
            of_name.emplace_back();
        }
        out.media.push_back(projector->medium_of(chunk.get(), of_name[name].size()));
        of_name[name].push_back(out.media.size() - 1);
        const auto & ids = out.media.back().ids;
        out.ids.insert(out.ids.end(), ids.begin(), ids.end());
    }
    if (!out.media.empty() && out.ids.back() < 0) {
        refuse("The prompt ends with a medium: text has to follow it");
    }
    give_files(out.media, of_name, files);
    return out;
}

Medium medium_at(const Model & model, const raw_buffer & file, size_t ordinal) {
    const auto inputs = tokenized(model, std::string(get_media_marker()) + "\n", {file});
    const auto media  = prompt_of_tokens(inputs.at(0), model.projector().get(), {file}).media;
    if (media.empty()) {
        refuse("Media of this kind are not supported");
    }
    return model.projector()->medium_of(media.at(ordinal % media.size()).chunk.get(), ordinal);
}

llama_tokens text_of(const llama_tokens & ids) {
    llama_tokens out;
    std::copy_if(ids.begin(), ids.end(), std::back_inserter(out), [](llama_token id) { return id >= 0; });
    return out;
}

void refuse_remote_media(const json & body) {
    const json messages = body.is_object() ? json_value(body, "messages", json::array()) : json::array();
    for (const auto & message : messages) {
        if (!has_array(message, "content")) {
            continue;
        }
        for (const auto & part : message.at("content")) {
            if (part.is_object() && !url_of(part).empty()) {
                refuse("Media are not fetched from elsewhere: send the bytes in a data: URI");
            }
        }
    }
}

}  // namespace towerd::wire
