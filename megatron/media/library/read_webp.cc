// WebP by libwebp.
#include <webp/decode.h>

#include <cstdio>
#include <cstdlib>

#include "megatron/media/detail/pixel_math.h"
#include "megatron/media/library/media_api.h"

namespace {

const char* text_of(VP8StatusCode status) {
  switch (status) {
    case VP8_STATUS_OUT_OF_MEMORY:
      return "no memory";
    case VP8_STATUS_UNSUPPORTED_FEATURE:
      return "an unknown feature";
    case VP8_STATUS_NOT_ENOUGH_DATA:
      return "the file is cut";
    default:
      return "the data are damaged";
  }
}

bool fail(MegatronMediaFault* fault, const char* text) {
  std::snprintf(fault->text, sizeof fault->text, "%s", text);
  return false;
}

// With alpha: by way of four channels.
VP8StatusCode read_with_alpha(const MegatronImageRequest& request, WebPDecoderConfig& config) {
  config.output.colorspace = MODE_RGBA;
  const VP8StatusCode status =
      WebPDecode(request.data, static_cast<size_t>(request.bytes), &config);
  if (status == VP8_STATUS_OK) {
    const WebPRGBABuffer& pixels = config.output.u.RGBA;
    uint8_t* out = request.out;
    for (int32_t y = 0; y < request.height; ++y) {
      const uint8_t* from = pixels.rgba + static_cast<int64_t>(y) * pixels.stride;
      for (int32_t x = 0; x < request.width; ++x, from += 4, out += 3)
        for (int i = 0; i < 3; ++i)
          out[i] = request.over_white ? megatron::media::over_white(from[i], from[3]) : from[i];
    }
  }
  WebPFreeDecBuffer(&config.output);
  return status;
}

VP8StatusCode read_opaque(const MegatronImageRequest& request, WebPDecoderConfig& config) {
  config.output.colorspace = MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = request.out;
  config.output.u.RGBA.stride = 3 * request.width;
  config.output.u.RGBA.size =
      size_t{3} * static_cast<size_t>(request.width) * static_cast<size_t>(request.height);
  return WebPDecode(request.data, static_cast<size_t>(request.bytes), &config);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) bool megatron_media_read_webp(
    const MegatronImageRequest* request, MegatronMediaFault* fault) {
  WebPDecoderConfig config;
  if (!WebPInitDecoderConfig(&config)) return fail(fault, "the library has another version");
  VP8StatusCode status =
      WebPGetFeatures(request->data, static_cast<size_t>(request->bytes), &config.input);
  if (status != VP8_STATUS_OK) return fail(fault, text_of(status));
  if (config.input.width != request->width || config.input.height != request->height)
    return fail(fault, "another size than the header's");
  status =
      config.input.has_alpha ? read_with_alpha(*request, config) : read_opaque(*request, config);
  return status == VP8_STATUS_OK || fail(fault, text_of(status));
}
