// One request and the writing of its response.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "megatron/serving/http/http_message.h"

namespace megatron {

// Why a response could not be written to its end.
enum class HttpAbort {
  kClientGone,  // the client closed the connection
  kSlowReader,  // too much output waited for the client, or none of it was read for too long
  kServerStop,  // the server's deadline to finish passed
};

// The response is written either at once, by respond(), or in pieces: begin(), write() any number
// of times, end(). All calls come on the I/O thread of the request, to which post() leads; each is
// a no-op once the connection is gone. An exchange that is destroyed without an end closes its
// connection.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;

  virtual const HttpRequest& request() const = 0;

  virtual void respond(HttpResponse response) = 0;
  // The body of `head` is the first piece.
  virtual void begin(HttpResponse head) = 0;
  virtual void write(std::string_view piece) = 0;
  virtual void end() = 0;

  // Calls `then` once on the I/O thread if the connection is lost before end(); at once if it
  // already is.
  virtual void on_abort(std::function<void(HttpAbort)> then) = 0;

  // Runs `work` on the I/O thread. Any thread.
  virtual void post(std::function<void()> work) = 0;
  // Which I/O thread: an index for HttpServer::post().
  virtual int shard() const = 0;
};

// What answers requests. All calls come on I/O threads and must not block.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // A response that refuses a request for what its header says, before the body is read; nothing:
  // go on.
  virtual std::optional<HttpResponse> refuse(const HttpRequest& head) = 0;
  virtual void handle(std::shared_ptr<HttpExchange> exchange) = 0;
  // The response to what is no HTTP, too long or too late.
  virtual HttpResponse fault_response(int status, std::string_view message) = 0;
};

}  // namespace megatron
