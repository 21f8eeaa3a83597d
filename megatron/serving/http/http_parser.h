// Parses HTTP/1.1 messages from bytes as they arrive, over Boost.Beast's parser. Stricter than the
// grammar where servers and proxies are known to read a message differently: exactly one Host, at
// most one Content-Length, Transfer-Encoding only as "chunked" and never with a length, no folded
// header lines, no bare line feeds.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "megatron/serving/http/http_message.h"

namespace megatron {

struct HttpParserLimits {
  uint64_t max_header_bytes = 16 << 10;  // request line included; trailers of a body likewise
  int64_t max_header_fields = 100;
  uint64_t max_body_bytes = 8 << 20;
};

// Why a message is refused; the bytes after it cannot be read any more.
struct HttpFault {
  int status = 400;
  std::string message;
};

// One request. Not thread safe.
class HttpRequestParser {
 public:
  explicit HttpRequestParser(const HttpParserLimits& limits);
  ~HttpRequestParser();
  HttpRequestParser(HttpRequestParser&&) noexcept;
  HttpRequestParser& operator=(HttpRequestParser&&) noexcept;

  // Takes bytes from the front of `pending` and removes them: until the header is complete; in
  // later calls until the body is. What remains belongs to the next request, or is the beginning
  // of something that more bytes complete.
  void advance(std::string& pending);

  bool header_done() const;
  bool done() const;
  const std::optional<HttpFault>& fault() const;

  HttpRequest& request();          // after header_done(); complete after done()
  bool expects_continue() const;   // "Expect: 100-continue", and a body follows
  bool keep_alive() const;         // the client wants to send more requests
  uint64_t body_received() const;  // bytes so far

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One response, for clients. The body is passed on in pieces.
class HttpResponseParser {
 public:
  explicit HttpResponseParser(std::function<void(std::string_view)> on_body);
  ~HttpResponseParser();
  HttpResponseParser(HttpResponseParser&&) noexcept;
  HttpResponseParser& operator=(HttpResponseParser&&) noexcept;

  // As above, for all of the response; interim responses (100) are skipped. Throws Error for
  // bytes that are no HTTP.
  void advance(std::string& pending);
  // The connection was closed: the end of a body without a length. Throws Error if the response is
  // not complete.
  void finish();

  bool header_done() const;
  bool done() const;
  int status() const;
  const std::vector<HttpHeader>& headers() const;
  bool keep_alive() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
