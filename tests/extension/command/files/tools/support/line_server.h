// A socket at which a request is a line of text and its answer is a line of text.
#pragma once

#include <optional>
#include <string>

namespace megatron {

// Listens on the loopback address. One connection at a time, one request each. Not thread safe.
class LineServer {
 public:
  // `port` 0: one that is free. Throws Error if the port is taken.
  explicit LineServer(int port);
  ~LineServer();
  LineServer(const LineServer&) = delete;
  LineServer& operator=(const LineServer&) = delete;

  int port() const { return port_; }
  // The line of the next client; nothing if none has come within `milliseconds` or a signal has.
  std::optional<std::string> next(int milliseconds);
  // Answers the client of the last request, which may be gone.
  void answer(const std::string& line);

 private:
  int listener_ = -1, client_ = -1, port_ = 0;
};

}  // namespace megatron
