#include "megatron/media/image_header.h"

#include "megatron/base/format.h"
#include "megatron/media/detail/header_walk.h"

namespace megatron {
namespace {

using namespace std::string_view_literals;

// Formats that are known and not read: what a file begins with, from a byte on.
struct OtherFormat {
  int64_t offset;
  std::string_view bytes;
  const char* name;
};
constexpr OtherFormat kOthers[] = {
    {0, "GIF8"sv, "GIF"},           {0, "II*\0"sv, "TIFF"},
    {0, "MM\0*"sv, "TIFF"},         {0, "BM"sv, "BMP"},
    {4, "ftypavi"sv, "AVIF"},       {4, "ftyphei"sv, "HEIF"},
    {4, "ftyphev"sv, "HEIF"},       {4, "ftypmif1"sv, "HEIF"},
    {4, "jP  \r\n"sv, "JPEG 2000"}, {0, "\xff\x4f\xff\x51"sv, "JPEG 2000"},
    {0, "\xff\x0a"sv, "JPEG XL"},   {4, "JXL \r\n"sv, "JPEG XL"},
    {0, "<svg"sv, "SVG"},           {0, "<?xml"sv, "SVG or other XML"},
    {0, "8BPS"sv, "Photoshop"},     {0, "%PDF"sv, "PDF"},
    {0, "\0\0\1\0"sv, "ICO"},
};

ImageHeader read_header(const media::Bytes& file, const MediaLimits& limits) {
  if (file.has(0, "\xff\xd8\xff")) return media::read_jpeg_header(file, limits);
  if (file.has(0, "\x89PNG\r\n\x1a\n")) return media::read_png_header(file, limits);
  if (file.has(0, "RIFF") && file.has(8, "WEBP")) return media::read_webp_header(file, limits);
  for (const OtherFormat& other : kOthers)
    if (file.has(other.offset, other.bytes))
      file.fail(0, cat(other.name, " is not read; expected JPEG, PNG or WebP"));
  file.fail(0, "neither JPEG, PNG nor WebP");
}

}  // namespace

const char* name_of(ImageFormat format) {
  switch (format) {
    case ImageFormat::kJpeg:
      return "JPEG";
    case ImageFormat::kPng:
      return "PNG";
    case ImageFormat::kWebp:
      return "WebP";
  }
  return "";
}

ImageHeader read_image_header(const MediaSource& source, const MediaLimits& limits) {
  check_file_size(source, limits);
  const media::Bytes file(source);
  const ImageHeader header = read_header(file, limits);
  const auto [height, width] = header.stored;
  if (height == 0 || width == 0)
    file.fail(0, cat("the image is ", height, "x", width, "; expected a pixel at least"));
  if (height > limits.max_image_pixels / width)
    file.fail(0, cat("the image is ", height, "x", width, "; expected at most ",
                     format_count(static_cast<uint64_t>(limits.max_image_pixels)), " pixels"));
  return header;
}

}  // namespace megatron
