// An HTTP/1.1 client for many requests at a time on one thread, whose responses come in pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/serving/http/http_message.h"

namespace megatron {

struct HttpUrl {
  bool tls = false;
  std::string host;  // without brackets
  int port = 80;
  std::string path;  // without a slash at its end; "" for the root

  std::string host_header() const;
};

// "http://host:port/path" or "https://..."; a name alone means http. Throws Error.
HttpUrl parse_url(std::string_view text);

struct HttpCall {
  std::string method = "GET";
  std::string path = "/";
  std::vector<HttpHeader> headers;  // besides Host and Content-Length
  std::string body;
  int64_t timeout_ns = 0;  // for all of it; 0: none

  std::function<void(int status, const std::vector<HttpHeader>& headers)> on_head;
  std::function<void(std::string_view piece)> on_body;
  // Last, once; `problem` is empty for a response that came to its end.
  std::function<void(const std::string& problem)> on_done;
};

enum class HttpCallId : uint64_t {};

// Connections are kept for further calls. Everything runs on the thread that calls run().
class HttpClient {
 public:
  // `ca_file`: certificates of authorities, PEM; empty: the system's. Throws Error.
  explicit HttpClient(HttpUrl url, const std::string& ca_file = {});
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  HttpCallId start(HttpCall call);
  // Ends a call with the problem "cancelled".
  void cancel(HttpCallId id);
  void after(int64_t ns, std::function<void()> work);
  // Until there is no call and no work left, or stop(); at most so long, 0: any time.
  void run(int64_t most_ns = 0);
  // Any thread.
  void stop();
  // Runs `work` on the thread of run(). Any thread.
  void post(std::function<void()> work);

  const HttpUrl& url() const;
  int64_t num_open() const;  // calls that have not ended

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One request, for programs that have nothing else to do. Throws Error for a response that does
// not come to its end.
HttpResponse fetch(const HttpUrl& url, HttpCall call, const std::string& ca_file = {});

}  // namespace megatron
