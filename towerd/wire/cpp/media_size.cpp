// The size of media once they are decoded. A few bytes may declare gigabytes, which libmtmd allocates at once, so its
// decoders are asked for the size first.

#include <algorithm>
#include <cstdint>

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

constexpr uint64_t kChannels = 3;

uint64_t bytes_of_picture(const raw_buffer & file) {
    int width = 0, height = 0, channels = 0;
    if (stbi_info_from_memory(file.data(), static_cast<int>(file.size()), &width, &height, &channels) == 0) {
        return 0;
    }
    return static_cast<uint64_t>(width) * static_cast<uint64_t>(height) * kChannels;
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

void check_media(const Model & model, const std::vector<raw_buffer> & files) {
    const int rate    = model.mtmd() == nullptr ? -1 : mtmd_get_audio_sample_rate(model.mtmd());
    uint64_t  n_bytes = 0;
    for (const auto & file : files) {
        n_bytes += bytes_of_picture(file) + (rate > 0 ? bytes_of_sound(file, rate) : 0);
        if (n_bytes > bounds::kMediaBytesMax) {
            refuse("The media of a prompt take more than " + std::to_string(bounds::kMediaBytesMax >> 20) +
                   " MiB when they are decoded");
        }
    }
}

}  // namespace towerd::wire
