// JPEG by libjpeg-turbo.
#include <csetjmp>
#include <cstdio>
#include <cstring>

// In this order: the first needs <cstdio>, the second the first.
// clang-format off
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include "megatron/media/detail/pixel_math.h"
#include "megatron/media/library/media_api.h"

namespace {

// What libjpeg calls back with; `manager` is first, so that its address is that of the whole.
struct JpegReader {
  jpeg_error_mgr manager;
  jpeg_source_mgr source;
  jpeg_progress_mgr progress;
  std::jmp_buf jump;
  const MegatronImageRequest* request;
  MegatronMediaFault* fault;
};

JpegReader& reader_of(j_common_ptr info) { return *reinterpret_cast<JpegReader*>(info->err); }

[[noreturn]] void stop(j_common_ptr info) {
  JpegReader& reader = reader_of(info);
  reader.fault->offset =
      reader.request->bytes - static_cast<int64_t>(reader.source.bytes_in_buffer);
  std::longjmp(reader.jump, 1);
}

[[noreturn]] void stop_with(j_common_ptr info, const char* text) {
  std::snprintf(reader_of(info).fault->text, sizeof(MegatronMediaFault::text), "%s", text);
  stop(info);
}

[[noreturn]] void stop_with_message(j_common_ptr info) {
  char text[JMSG_LENGTH_MAX];
  info->err->format_message(info, text);
  stop_with(info, text);
}

// Warnings of damaged data, behind which pixels are invented, are errors; the others are of no
// consequence.
void hear_message(j_common_ptr info, int level) {
  if (level >= 0) return;
  switch (info->err->msg_code) {
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_MUST_RESYNC:
    case JWRN_ARITH_BAD_CODE:
    case JWRN_JPEG_EOF:
      stop_with_message(info);
    default:
      return;
  }
}

void check_progress(j_common_ptr info) {
  const int scans = reinterpret_cast<j_decompress_ptr>(info)->input_scan_number;
  if (scans > reader_of(info).request->max_scans) stop_with(info, "too many scans");
}

void start_source(j_decompress_ptr) {}
void end_source(j_decompress_ptr) {}
boolean need_input(j_decompress_ptr info) {
  stop_with(reinterpret_cast<j_common_ptr>(info), "the file is cut: it ends before its end marker");
}
void skip_input(j_decompress_ptr info, long count) {
  if (count <= 0) return;
  if (static_cast<unsigned long>(count) > info->src->bytes_in_buffer) {
    info->src->bytes_in_buffer = 0;
    need_input(info);
  }
  info->src->next_input_byte += count;
  info->src->bytes_in_buffer -= static_cast<size_t>(count);
}

void set_up(jpeg_decompress_struct& info, JpegReader& reader) {
  info.err = jpeg_std_error(&reader.manager);
  reader.manager.error_exit = stop_with_message;
  reader.manager.emit_message = hear_message;
}

void set_up_input(jpeg_decompress_struct& info, JpegReader& reader) {
  reader.source = {reader.request->data,
                   static_cast<size_t>(reader.request->bytes),
                   start_source,
                   need_input,
                   skip_input,
                   jpeg_resync_to_restart,
                   end_source};
  info.src = &reader.source;
  reader.progress = {};
  reader.progress.progress_monitor = check_progress;
  info.progress = &reader.progress;
}

// Rows of inverted inks.
void read_cmyk(jpeg_decompress_struct& info, const MegatronImageRequest& request) {
  JSAMPARRAY line = info.mem->alloc_sarray(reinterpret_cast<j_common_ptr>(&info), JPOOL_IMAGE,
                                           4 * info.output_width, 1);
  uint8_t* out = request.out;
  while (info.output_scanline < info.output_height) {
    jpeg_read_scanlines(&info, line, 1);
    for (JDIMENSION x = 0; x < info.output_width; ++x, out += 3) {
      uint8_t inks[4];
      for (int i = 0; i < 4; ++i) inks[i] = static_cast<uint8_t>(255 - line[0][4 * x + i]);
      megatron::media::cmyk_to_rgb(inks, out);
    }
  }
}

void read_rgb(jpeg_decompress_struct& info, const MegatronImageRequest& request) {
  while (info.output_scanline < info.output_height) {
    JSAMPROW row = request.out + size_t{3} * info.output_width * info.output_scanline;
    jpeg_read_scanlines(&info, &row, 1);
  }
}

void read_image(jpeg_decompress_struct& info, JpegReader& reader) {
  const MegatronImageRequest& request = *reader.request;
  const auto common = reinterpret_cast<j_common_ptr>(&info);
  jpeg_create_decompress(&info);
  set_up_input(info, reader);
  jpeg_read_header(&info, TRUE);
  if (info.image_width != static_cast<JDIMENSION>(request.width) ||
      info.image_height != static_cast<JDIMENSION>(request.height))
    stop_with(common, "another size than the header's");
  const bool inks = info.num_components == 4;
  info.out_color_space = inks ? JCS_CMYK : JCS_RGB;
  info.dct_method = JDCT_ISLOW;
  jpeg_start_decompress(&info);
  if (inks) {
    read_cmyk(info, request);
  } else {
    read_rgb(info, request);
  }
  jpeg_finish_decompress(&info);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) bool megatron_media_read_jpeg(
    const MegatronImageRequest* request, MegatronMediaFault* fault) {
  JpegReader reader = {};
  reader.request = request;
  reader.fault = fault;
  jpeg_decompress_struct info = {};
  set_up(info, reader);
  if (setjmp(reader.jump)) {
    jpeg_destroy_decompress(&info);
    return false;
  }
  read_image(info, reader);
  jpeg_destroy_decompress(&info);
  return true;
}
