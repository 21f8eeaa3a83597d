#include "megatron/media/media_source.h"

#include "megatron/base/format.h"

namespace megatron {

void throw_media_error(const MediaSource& source, int64_t offset, const std::string& text) {
  throw MediaError(cat(source.name, ": byte ", offset, ": ", text));
}

void check_file_size(const MediaSource& source, const MediaLimits& limits) {
  if (source.bytes.empty()) throw_media_error(source, 0, "the file is empty");
  if (static_cast<int64_t>(source.bytes.size()) > limits.max_file_bytes)
    throw_media_error(
        source, 0,
        cat("the file has ", format_count(source.bytes.size()), " bytes; expected at most ",
            format_count(static_cast<uint64_t>(limits.max_file_bytes))));
}

}  // namespace megatron
