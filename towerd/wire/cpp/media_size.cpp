// The size of media once they are decoded. A few bytes may declare gigabytes, which libmtmd allocates at once, so its
// decoders are asked for the size first.

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "bounds.h"
#include "media.h"
#include "model.h"
#include "refused.h"

#define MINIAUDIO_IMPLEMENTATION
#define MA_NO_ENCODING
#define MA_NO_DEVICE_IO
#define MA_NO_RESOURCE_MANAGER
#define MA_NO_NODE_GRAPH
#define MA_NO_ENGINE
#define MA_NO_GENERATION
#define MA_API static
#include "miniaudio/miniaudio.h"

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#include "stb/stb_image.h"

namespace towerd::wire {

namespace {

constexpr uint64_t kChannels  = 3;
constexpr int      kSoundRate = 16'000;  // of most models

[[noreturn]] void refuse_media(size_t n_bytes_max) {
    refuse("The media of a prompt take more than " + std::to_string(n_bytes_max >> 20) + " MiB when they are decoded");
}

bool begins(const raw_buffer & file, std::string_view signature) {
    return file.size() >= signature.size() && std::equal(signature.begin(), signature.end(), file.begin(), [](char a, uint8_t b) {
               return static_cast<uint8_t>(a) == b;
           });
}

// What stb_image would take for one of the formats that nobody sends. It dereferences null for a cut Softimage
// picture, and takes many bytes for a Targa.
bool is_rare(const raw_buffer & file) {
    stbi__context bytes;
    stbi__start_mem(&bytes, file.data(), static_cast<int>(file.size()));
    return stbi__psd_test(&bytes) != 0 || stbi__pic_test(&bytes) != 0 || stbi__pnm_test(&bytes) != 0 ||
           stbi__hdr_test(&bytes) != 0 || stbi__tga_test(&bytes) != 0;
}

// Those that people do send, and sounds, which are no business of stb_image.
bool is_common(const raw_buffer & file) {
    const bool is_mpeg = file.size() > 1 && file[0] == 0xFF && (file[1] & 0xE0) == 0xE0;
    const auto known   = {"\x89PNG\r\n\x1a\n", "\xFF\xD8\xFF", "GIF8", "BM", "RIFF", "ID3", "fLaC", "OggS"};
    return is_mpeg || std::any_of(known.begin(), known.end(), [&](const char * each) { return begins(file, each); });
}

uint64_t bytes_of_picture(const raw_buffer & file) {
    if (!is_common(file) && is_rare(file)) {
        refuse("A picture of this format is not taken: send PNG, JPEG, GIF or BMP");
    }
    int width = 0, height = 0, channels = 0;
    if (stbi_info_from_memory(file.data(), static_cast<int>(file.size()), &width, &height, &channels) == 0) {
        return 0;
    }
    const uint64_t n_bytes = static_cast<uint64_t>(width) * static_cast<uint64_t>(height) * kChannels;
    const auto     said    = "A picture of " + std::to_string(width) + " x " + std::to_string(height) + " pixels ";
    if (n_bytes > bounds::kPictureBytesMax) {
        refuse(said + "takes more than " + std::to_string(bounds::kPictureBytesMax >> 20) + " MiB when it is decoded");
    }
    if (n_bytes > bounds::kPictureBytesFree + bounds::kPictureBytesPerByte * file.size()) {
        refuse(said + "has only " + std::to_string(file.size()) + " bytes: its file was cut off");
    }
    return n_bytes;
}

uint64_t bytes_of_sound(const raw_buffer & file, int rate) {
    const ma_decoder_config config = ma_decoder_config_init(ma_format_f32, 1, static_cast<ma_uint32>(rate));
    ma_decoder              decoder;
    if (ma_decoder_init_memory(file.data(), file.size(), &config, &decoder) != MA_SUCCESS) {
        return 0;
    }
    ma_uint64 n_frames = 0;
    ma_decoder_get_length_in_pcm_frames(&decoder, &n_frames);
    ma_decoder_uninit(&decoder);
    return std::min<uint64_t>(n_frames, bounds::kMediaBytesMax) * sizeof(float);
}

}  // namespace

void check_medium(const raw_buffer & file) {
    bytes_of_picture(file);
    if (bytes_of_sound(file, kSoundRate) > bounds::kMediaBytesMax) {
        refuse_media(bounds::kMediaBytesMax);
    }
}

void check_media(const Model & model, const std::vector<raw_buffer> & files) {
    const int rate    = model.mtmd() == nullptr ? -1 : mtmd_get_audio_sample_rate(model.mtmd());
    uint64_t  n_bytes = 0;
    const size_t n_bytes_max =
        model.media_bytes_max() == 0 ? bounds::kMediaBytesMax : std::min(bounds::kMediaBytesMax, model.media_bytes_max());
    for (const auto & file : files) {
        n_bytes += bytes_of_picture(file) + (rate > 0 ? bytes_of_sound(file, rate) : 0);
        if (n_bytes > n_bytes_max) {
            refuse_media(n_bytes_max);
        }
    }
}

}  // namespace towerd::wire
