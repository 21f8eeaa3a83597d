// PNG by libpng.
#include <png.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "megatron/media/detail/pixel_math.h"
#include "megatron/media/library/media_api.h"

namespace {

using megatron::media::over_white;

struct PngReader {
  const MegatronImageRequest* request;
  MegatronMediaFault* fault;
  int64_t at = 0;
  png_structp png = nullptr;
  png_infop info = nullptr;
  uint8_t* rows = nullptr;  // one row, or all of an interlaced image

  // Of the colours.
  int channels = 0;
  bool is_palette = false;
  uint8_t palette[256][4] = {};
  int scale = 1;  // of samples of less than 8 bits of gray
  bool has_key = false;
  uint8_t key[3] = {};
};

[[noreturn]] void stop(png_structp png, png_const_charp text) {
  auto& reader = *static_cast<PngReader*>(png_get_error_ptr(png));
  reader.fault->offset = reader.at;
  std::snprintf(reader.fault->text, sizeof reader.fault->text, "%s", text);
  png_longjmp(png, 1);
}

void ignore_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep to, size_t count) {
  auto& reader = *static_cast<PngReader*>(png_get_io_ptr(png));
  if (static_cast<int64_t>(count) > reader.request->bytes - reader.at)
    stop(png, "the file is cut: it ends before its last chunk");
  std::memcpy(to, reader.request->data + reader.at, count);
  reader.at += static_cast<int64_t>(count);
}

// Colours of the palette, behind it opaque black; alpha of tRNS.
void read_palette(PngReader& reader) {
  png_colorp colours = nullptr;
  int count = 0;
  png_get_PLTE(reader.png, reader.info, &colours, &count);
  for (int i = 0; i < 256; ++i) reader.palette[i][3] = 255;
  for (int i = 0; i < count && i < 256; ++i) {
    reader.palette[i][0] = colours[i].red;
    reader.palette[i][1] = colours[i].green;
    reader.palette[i][2] = colours[i].blue;
  }
  png_bytep alpha = nullptr;
  if (!png_get_tRNS(reader.png, reader.info, &alpha, &count, nullptr)) return;
  for (int i = 0; i < count && i < 256; ++i) reader.palette[i][3] = alpha[i];
}

// The colour that is transparent. Pillow compares its low byte with what is kept of a sample: in
// 16-bit colour with the high byte, in 2- and 4-bit gray with the sample widened to 8 bits.
void read_key(PngReader& reader, int type, int bits) {
  png_color_16p colour = nullptr;
  if (!png_get_tRNS(reader.png, reader.info, nullptr, nullptr, &colour) || !colour) return;
  reader.has_key = true;
  const uint16_t gray = bits == 1 ? (colour->gray ? 255 : 0) : colour->gray;
  const bool colours = type == PNG_COLOR_TYPE_RGB;
  reader.key[0] = static_cast<uint8_t>(colours ? colour->red : gray);
  reader.key[1] = static_cast<uint8_t>(colours ? colour->green : gray);
  reader.key[2] = static_cast<uint8_t>(colours ? colour->blue : gray);
}

// Returns the bytes of a row as libpng will give it: 8-bit samples, gray and indices not widened.
size_t choose_transforms(PngReader& reader, int type, int bits) {
  png_set_packing(reader.png);
  if (bits == 16) {
    // The key of 16-bit gray is compared before the low byte is dropped.
    if (type == PNG_COLOR_TYPE_GRAY && png_get_valid(reader.png, reader.info, PNG_INFO_tRNS))
      png_set_tRNS_to_alpha(reader.png);
    png_set_strip_16(reader.png);
  }
  reader.is_palette = type == PNG_COLOR_TYPE_PALETTE;
  if (reader.is_palette) {
    read_palette(reader);
  } else if (type == PNG_COLOR_TYPE_RGB || (type == PNG_COLOR_TYPE_GRAY && bits < 16)) {
    read_key(reader, type, bits);
  }
  if (type == PNG_COLOR_TYPE_GRAY && bits < 8) reader.scale = 255 / ((1 << bits) - 1);
  png_set_interlace_handling(reader.png);
  png_read_update_info(reader.png, reader.info);
  reader.channels = png_get_channels(reader.png, reader.info);
  return png_get_rowbytes(reader.png, reader.info);
}

void set_pixel(const PngReader& reader, const uint8_t* colour, uint8_t alpha, uint8_t* out) {
  for (int i = 0; i < 3; ++i)
    out[i] = reader.request->over_white ? over_white(colour[i], alpha) : colour[i];
}

void convert_row(const PngReader& reader, const uint8_t* row, uint8_t* out) {
  for (int32_t x = 0; x < reader.request->width; ++x, row += reader.channels, out += 3) {
    if (reader.is_palette) {
      set_pixel(reader, reader.palette[*row], reader.palette[*row][3], out);
      continue;
    }
    uint8_t colour[3];
    for (int i = 0; i < 3; ++i)
      colour[i] = static_cast<uint8_t>(row[reader.channels >= 3 ? i : 0] * reader.scale);
    uint8_t alpha = 255;
    if (reader.channels == 2 || reader.channels == 4) alpha = row[reader.channels - 1];
    if (reader.has_key && std::memcmp(colour, reader.key, 3) == 0) alpha = 0;
    set_pixel(reader, colour, alpha, out);
  }
}

void read_image(PngReader& reader) {
  const MegatronImageRequest& request = *reader.request;
  png_structp png = reader.png;
  png_set_read_fn(png, &reader, read_bytes);
  png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
  // All but what the pixels need is skipped.
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_read_info(png, reader.info);
  png_uint_32 width = 0, height = 0;
  int bits = 0, type = 0, interlace = 0;
  png_get_IHDR(png, reader.info, &width, &height, &bits, &type, &interlace, nullptr, nullptr);
  if (width != static_cast<png_uint_32>(request.width) ||
      height != static_cast<png_uint_32>(request.height))
    stop(png, "another size than the header's");
  const size_t row_bytes = choose_transforms(reader, type, bits);
  const bool interlaced = interlace != PNG_INTERLACE_NONE;
  reader.rows = static_cast<uint8_t*>(std::malloc(row_bytes * (interlaced ? height : 1)));
  if (reader.rows == nullptr) stop(png, "no memory for its rows");
  if (interlaced)
    for (int pass = 0; pass < PNG_INTERLACE_ADAM7_PASSES; ++pass)
      for (png_uint_32 y = 0; y < height; ++y)
        png_read_row(png, reader.rows + y * row_bytes, nullptr);
  for (png_uint_32 y = 0; y < height; ++y) {
    if (!interlaced) png_read_row(png, reader.rows, nullptr);
    convert_row(reader, reader.rows + (interlaced ? y * row_bytes : 0),
                request.out + size_t{3} * width * y);
  }
  png_read_end(png, nullptr);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) bool megatron_media_read_png(
    const MegatronImageRequest* request, MegatronMediaFault* fault) {
  PngReader reader = {};
  reader.request = request;
  reader.fault = fault;
  reader.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &reader, stop, ignore_warning);
  if (reader.png != nullptr) reader.info = png_create_info_struct(reader.png);
  if (reader.info == nullptr) {
    std::snprintf(fault->text, sizeof fault->text, "no memory for the reader");
    png_destroy_read_struct(&reader.png, nullptr, nullptr);
    return false;
  }
  const bool failed = setjmp(png_jmpbuf(reader.png)) != 0;
  if (!failed) read_image(reader);
  png_destroy_read_struct(&reader.png, &reader.info, nullptr);
  std::free(reader.rows);
  return !failed;
}
