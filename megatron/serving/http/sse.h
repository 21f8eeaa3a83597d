// Reads server-sent events as they come.
// Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace megatron {

class SseReader {
 public:
  // Calls take(event name, data) for each event that `piece` completes; a comment is none.
  void push(std::string_view piece,
            const std::function<void(std::string_view name, std::string_view data)>& take);

 private:
  void read_line(std::string_view line);

  std::string line_;
  std::string name_, data_;
  bool has_data_ = false, after_return_ = false;
};

}  // namespace megatron
