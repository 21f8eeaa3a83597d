#include "tools/support/api_key.h"

#include <algorithm>
#include <cstdlib>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {

std::string read_api_key(const std::string& path) {
  if (path.empty()) {
    const char* const key = std::getenv("OPENAI_API_KEY");
    return key != nullptr ? key : "";
  }
  const std::string text = read_file(path, 1 << 20);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (line.empty() || line.starts_with('#')) continue;
    if (line.ends_with(":admin")) line.resize(line.size() - 6);
    const size_t colon = line.find(':');
    return colon == std::string::npos ? line : line.substr(colon + 1);
  }
  throw_error(cat(path, " holds no key"));
}

}  // namespace megatron
