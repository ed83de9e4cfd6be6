// Pictures and sounds: llama.cpp's libmtmd, and the ids that stand for a medium among a prompt's tokens.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mtmd-helper.h"
#include "mtmd.h"
#include "server-common.h"

namespace towerd::wire {

class Head;

class Model;

// One picture, a tile of one, or a stretch of sound in a prompt.
struct Medium {
    std::shared_ptr<const mtmd_input_chunk> chunk;
    // The ids at its positions in the prompt. All are negative, so no token has them, and they are derived from the bytes
    // of the medium and of the projector. Bit 30 is clear only in the first, so the ids alone tell where media begin.
    // With M-RoPE, bit 29 of the first is set if all tokens are at one position; its lowest 16 bits are then how many
    // positions the next token is behind that.
    llama_tokens ids;
    // What it is made of, as the client sent it; null where that is not known.
    std::shared_ptr<const raw_buffer> file;
    // Which of the media of this file it is in its prompt.
    size_t ordinal = 0;
};

class Projector {
public:
    // `options` is the JSON of towerd.wire.ProjectorOptions. `model` outlives this object.
    // Throws std::runtime_error for a file that is not a projector of this model.
    Projector(const llama_model * model, const std::string & options);

    mtmd_context * context() const { return context_.get(); }
    bool           has_vision() const { return mtmd_support_vision(context()); }
    bool           has_audio() const { return mtmd_support_audio(context()); }
    bool           has_video() const { return mtmd_helper_support_video(context()); }
    // Whether positions have several components (M-RoPE).
    bool           uses_mrope() const { return mtmd_decode_use_mrope(context()); }

    // The medium that `chunk` is, the `ordinal`th of the same bytes in its prompt. Raises Refused.
    Medium medium_of(const mtmd_input_chunk * chunk, size_t ordinal) const;

    // Whether all of a medium must be in one micro-batch.
    bool is_whole(const Medium & medium) const { return mtmd_decode_use_non_causal(context(), medium.chunk.get()); }

    // The embeddings that the text model gets in place of the medium's tokens. Calls are serialized. Raises Refused.
    std::vector<float> encode(const Medium & medium) const;
    // Evaluates an encoded medium from position `pos` of a sequence on; `head`, if it is not null, reads it. Raises Refused,
    // possibly after evaluating a part.
    void decode(llama_context * ctx, const Medium & medium, const std::vector<float> & encoded, llama_pos pos,
                llama_seq_id seq, Head * head) const;

private:
    static int32_t show(const mtmd_helper_embd_batch * part, void * head);

    struct Free {
        void operator()(mtmd_context * context) const { mtmd_free(context); }
    };

    std::unique_ptr<mtmd_context, Free> context_;
    std::string                         digest_;
    size_t                              n_embd_;
    mutable std::mutex                  encoding_;
};

// A tokenized prompt with the ids of its media, which are made of `files`. Raises Refused. `projector` may be null if
// there are none.
struct Prompt {
    llama_tokens        ids;
    std::vector<Medium> media;
};
Prompt prompt_of_tokens(const server_tokens & tokens, const Projector * projector, const std::vector<raw_buffer> & files);

// The `ordinal`th medium of a file in a prompt that has the file often enough. Raises Refused.
Medium medium_at(const Model & model, const raw_buffer & file, size_t ordinal);

// Only the ids that are tokens.
llama_tokens text_of(const llama_tokens & ids);

// Raises Refused for media that would take too much memory once they are decoded.
void check_media(const Model & model, const std::vector<raw_buffer> & files);

// The same of one file, for a llama-server of its own. Raises Refused.
void check_medium(const raw_buffer & file);

// llama-server fetches what a chat links to; a daemon that any browser may reach does not. Raises Refused.
void refuse_remote_media(const json & body);

}  // namespace towerd::wire
