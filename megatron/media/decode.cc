#include "megatron/media/decode.h"

#include "megatron/media/detail/media_library.h"
#include "megatron/media/orientation.h"

namespace megatron {

Image decode_image(const MediaSource& source, const DecodeOptions& options) {
  const ImageHeader header = read_image_header(source, options.limits);
  const media::MediaLibrary& library = media::media_library();
  Image image(header.stored);
  const MegatronImageRequest request = {.data = source.bytes.data(),
                                        .bytes = static_cast<int64_t>(source.bytes.size()),
                                        .height = static_cast<int32_t>(header.stored.height),
                                        .width = static_cast<int32_t>(header.stored.width),
                                        .over_white = options.transparency == Transparency::kWhite,
                                        .max_scans = options.limits.max_jpeg_scans,
                                        .out = image.bytes().data()};
  MegatronMediaFault fault = {};
  const auto read = header.format == ImageFormat::kJpeg  ? library.read_jpeg
                    : header.format == ImageFormat::kPng ? library.read_png
                                                         : library.read_webp;
  if (!read(&request, &fault))
    throw_media_error(source, fault.offset, cat(name_of(header.format), ": ", fault.text));
  return oriented(std::move(image), header.orientation);
}

}  // namespace megatron
