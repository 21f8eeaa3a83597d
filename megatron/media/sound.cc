#include "megatron/media/sound.h"

#include "megatron/media/detail/media_library.h"

namespace megatron {

std::vector<float> decode_sound(const MediaSource& source, const MediaLimits& limits) {
  const SoundHeader header = read_sound_header(source, limits);
  if (header.rate != kSampleRate || header.channels != 1)
    throw_media_error(source, 0,
                      cat("the sound has ", header.rate, " samples a second and ", header.channels,
                          " channels; expected ", kSampleRate, " and 1: convert it first"));
  if (header.samples == 0) throw_media_error(source, 0, "the sound has no samples");
  std::vector<float> out(static_cast<size_t>(header.samples));
  const MegatronSoundRequest request = {.data = source.bytes.data(),
                                        .bytes = static_cast<int64_t>(source.bytes.size()),
                                        .samples = header.samples,
                                        .rate = static_cast<int32_t>(header.rate),
                                        .out = out.data()};
  MegatronMediaFault fault = {};
  if (!media::media_library().read_sound(&request, &fault))
    throw_media_error(source, fault.offset, cat("sound: ", fault.text));
  return out;
}

}  // namespace megatron
