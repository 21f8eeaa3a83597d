#include "megatron/serving/http/sse.h"

#include <utility>

namespace megatron {

void SseReader::read_line(std::string_view line) {
  const size_t colon = line.find(':');
  const std::string_view field = line.substr(0, colon);
  std::string_view value =
      colon == std::string_view::npos ? std::string_view() : line.substr(colon + 1);
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (field == "event") {
    name_ = value;
  } else if (field == "data") {
    if (std::exchange(has_data_, true)) data_ += '\n';
    data_ += value;
  }
}

void SseReader::push(std::string_view piece,
                     const std::function<void(std::string_view, std::string_view)>& take) {
  for (const char c : piece) {
    // Lines end in LF, CR or both.
    const bool was_return = std::exchange(after_return_, c == '\r');
    if (c == '\n' && was_return) continue;
    if (c != '\n' && c != '\r') {
      line_ += c;
      continue;
    }
    if (!line_.empty()) {
      read_line(line_);
      line_.clear();
      continue;
    }
    if (has_data_) take(name_, data_);
    has_data_ = false;
    name_.clear();
    data_.clear();
  }
}

}  // namespace megatron
