// An HTTP/1.1 server: sockets, deadlines, limits. What is answered is a handler's business.
//
// Each I/O thread has connections of its own, so that what belongs to one needs no locks. Ten times
// a second a thread looks for passed deadlines and for clients that left during a response.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "megatron/serving/http/http_exchange.h"
#include "megatron/serving/http/http_parser.h"

namespace megatron {

struct HttpServerLimits {
  HttpParserLimits parser;
  int64_t max_connections = 8192;
  int64_t max_connections_per_address = 64;    // loopback not counted; 0: no limit
  int64_t header_timeout_ns = 10'000'000'000;  // from a request's first byte; also of a handshake
  int64_t body_timeout_ns = 60'000'000'000;
  int64_t min_body_bytes_per_second = 1024;  // after the first 5 seconds; 0: no minimum
  int64_t idle_timeout_ns = 75'000'000'000;  // without a request
  int64_t send_timeout_ns = 60'000'000'000;  // for each 64 KiB of a response
  uint64_t max_unread_bytes = 1 << 20;       // of one response's pieces
};

struct HttpServerOptions {
  std::string host = "127.0.0.1";  // an address, or a name that has one
  int port = 8000;                 // 0: any free one
  int threads = 1;
  std::string certificate_file, key_file;  // PEM; both or neither: TLS or not
  HttpServerLimits limits;
};

// Since the start, all threads together; `open` and `responding` are of now.
struct HttpCounts {
  int64_t open = 0;        // connections
  int64_t responding = 0;  // of those, between the end of a request and the end of its response
  uint64_t accepted = 0, refused = 0;          // connections; refused: one too many
  uint64_t requests = 0;                       // whose header was read
  uint64_t faults = 0;                         // what was no HTTP, too long or too late
  uint64_t client_gone = 0, slow_readers = 0;  // responses that were cut off
  uint64_t bytes_received = 0, bytes_sent = 0;
};

class HttpServer {
 public:
  // Listens at once, so that a port in use is an error here; requests are taken from start() on.
  // `handler` must outlive the server. Throws Error.
  HttpServer(const HttpServerOptions& options, HttpHandler& handler);
  ~HttpServer();  // stop()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  void start();
  // From now on connections close after their response, and at once where there is none.
  void drain();
  // Closes all connections, cuts off responses, ends the threads.
  void stop();

  int port() const;
  int num_shards() const;
  // Runs `work` on an I/O thread, in the order of the calls. Any thread; a no-op after stop().
  void post(int shard, std::function<void()> work);
  // The same after so long.
  void post_after(int shard, int64_t ns, std::function<void()> work);
  HttpCounts counts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether a server at `host` can be reached from this machine alone. Throws Error for a name
// without an address.
bool is_loopback_host(const std::string& host);

}  // namespace megatron
