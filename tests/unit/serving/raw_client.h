// A client for tests that sends any bytes, and reads responses as they come.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "megatron/serving/http/http_message.h"
#include "tests/unit/slowness.h"

namespace megatron {

struct RawResponse {
  int status = 0;  // 0: the connection was closed, or nothing came in time
  std::vector<HttpHeader> headers;
  std::string body;
  bool complete = false;
};

class RawClient {
 public:
  // Connects to 127.0.0.1; `receive_buffer`: of the socket, 0: the system's.
  explicit RawClient(int port, int receive_buffer = 0);
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  // False: the connection is closed.
  bool send(std::string_view bytes);
  // One response; what arrives beyond it is kept for the next. Waits at most so long.
  RawResponse response(double seconds = 10 * kSlowness);
  // Appends what arrives within so long, at most `most` bytes, to `out`; false: the server closed
  // the connection.
  bool read_some(std::string& out, double seconds, size_t most = 1 << 16);
  // What came after the last response.
  const std::string& unread() const { return pending_; }
  // Whether the server closes the connection within so long; what arrives before is dropped.
  bool closed_within(double seconds);
  void close();  // as programs do
  void reset();  // so that the other side sees an error
  void half_close();

 private:
  int socket_ = -1;
  std::string pending_;
};

// "POST path HTTP/1.1" with Host, Content-Length and more header lines ("A: b\r\n...").
std::string post_request(std::string_view path, std::string_view body, std::string_view more = {});
std::string get_request(std::string_view path, std::string_view more = {});

}  // namespace megatron
