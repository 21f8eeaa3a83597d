#include "megatron/datasets/multimodal/medium_facts.h"

#include "megatron/media/image_header.h"
#include "megatron/media/sound.h"

namespace megatron {

MediumFacts read_medium_facts(MediaKind kind, std::span<const uint8_t> bytes,
                              const std::string& name, const MediaLimits& limits) {
  const MediaSource source = {bytes, name};
  check_file_size(source, limits);
  if (kind == MediaKind::kImage) {
    const ImageHeader header = read_image_header(source, limits);
    return {kind, header.size(), 0, header.bad_orientation};
  }
  const SoundHeader header = read_sound_header(source, limits);
  if (header.rate != kSampleRate || header.channels != 1)
    throw_media_error(
        source, 0,
        cat(header.channels, header.channels == 1 ? " channel" : " channels", " at ", header.rate,
            " Hz, expected 1 channel at ", kSampleRate, " Hz: convert the sound first"));
  return {kind, {}, header.samples};
}

}  // namespace megatron
