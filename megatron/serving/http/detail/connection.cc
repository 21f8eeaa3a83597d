#include "megatron/serving/http/detail/connection.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "megatron/base/check.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

namespace asio = boost::asio;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kBodyGraceNs = 5 * kSecond;
constexpr int64_t kLingerNs = 2 * kSecond;
constexpr size_t kLingerBytes = 1 << 20;
constexpr size_t kSliceBytes = 64 << 10;
constexpr size_t kKeptBytes = 4 << 10;  // capacity that an idle connection keeps

// An idle connection keeps no memory for bytes.
void shrink(std::string& text) {
  if (text.empty() && text.capacity() > kKeptBytes) std::string().swap(text);
}

}  // namespace

int64_t monotonic_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void ConnectionContext::post(std::function<void()> work) {
  if (stopped) return;
  const std::lock_guard lock(mutex_);
  posted_.push_back(std::move(work));
  if (posted_.size() == 1) asio::post(io, [this] { run_posted(); });
}

void ConnectionContext::run_posted() {
  std::vector<std::function<void()>> works;
  {
    const std::lock_guard lock(mutex_);
    works.swap(posted_);
  }
  for (const auto& work : works) work();
}

class HttpConnection::Exchange final : public HttpExchange {
 public:
  Exchange(std::shared_ptr<HttpConnection> connection, HttpRequest request)
      : connection_(std::move(connection)), request_(std::move(request)) {}
  ~Exchange() override {
    if (finished_ || connection_->aborted_) return;
    post([connection = connection_] {
      if (!connection->ended_) connection->abort(HttpAbort::kServerStop);
    });
  }
  const HttpRequest& request() const override { return request_; }
  void respond(HttpResponse response) override {
    if (gone()) return;
    connection_->begin_response(response, /*whole=*/true);
    end();
  }
  void begin(HttpResponse head) override {
    if (gone()) return;
    connection_->begin_response(head, /*whole=*/false);
  }
  void write(std::string_view piece) override {
    if (!gone()) connection_->append_piece(piece);
  }
  void end() override {
    if (gone()) return;
    finished_ = true;
    connection_->end_response();
  }
  void on_abort(std::function<void(HttpAbort)> then) override {
    connection_->on_abort_ = std::move(then);
    if (connection_->aborted_) connection_->report_abort();
  }
  void post(std::function<void()> work) override { connection_->context_.post(std::move(work)); }
  int shard() const override { return connection_->context_.shard; }

 private:
  bool gone() const { return finished_ || connection_->aborted_; }

  std::shared_ptr<HttpConnection> connection_;
  HttpRequest request_;
  bool finished_ = false;
};

HttpConnection::HttpConnection(std::shared_ptr<ConnectionContext> context,
                               std::unique_ptr<ByteStream> stream, std::string peer, bool refused)
    : shared_context_(std::move(context)),
      context_(*shared_context_),
      stream_(std::move(stream)),
      peer_(std::move(peer)),
      refused_(refused),
      wake_(context_.io, std::chrono::steady_clock::time_point::max()) {}

HttpConnection::~HttpConnection() = default;

void HttpConnection::set_deadline(int64_t after_ns) { deadline_ = monotonic_now_ns() + after_ns; }

void HttpConnection::tick(int64_t now) {
  const bool idle_in_drain = phase_ == Phase::kIdle && context_.draining;
  if (now < deadline_ && !idle_in_drain) return;
  deadline_ = INT64_MAX;
  timed_out_ = true;
  if (phase_ == Phase::kResponding)
    abort(HttpAbort::kSlowReader);
  else
    stream_->cancel();
}

int HttpConnection::watched_socket() {
  return phase_ == Phase::kResponding && !aborted_ && stream_->socket().is_open()
             ? stream_->socket().native_handle()
             : -1;
}

void HttpConnection::abort(HttpAbort why) {
  if (phase_ != Phase::kResponding || aborted_) return;
  aborted_ = true;
  why_aborted_ = why;
  if (why == HttpAbort::kClientGone) ++context_.counters->client_gone;
  if (why == HttpAbort::kSlowReader) ++context_.counters->slow_readers;
  stream_->cancel();
  wake();
  report_abort();
}

// Later, since what is called may be what just wrote.
void HttpConnection::report_abort() {
  if (!on_abort_) return;
  asio::post(context_.io, [then = std::exchange(on_abort_, {}), why = why_aborted_] { then(why); });
}

void HttpConnection::close_now() {
  abort(HttpAbort::kServerStop);
  stream_->close_now();
  wake();
}

asio::awaitable<void> HttpConnection::run() {
  const auto self = shared_from_this();
  set_deadline(context_.limits.header_timeout_ns);
  const ErrorCode error = co_await stream_->handshake();
  if (error) co_return;
  if (refused_) {
    HttpResponse response =
        context_.handler.fault_response(503, "the server has as many connections as it takes");
    response.headers.push_back({"Retry-After", "1"});
    co_await send_alone(std::move(response));
    co_return;
  }
  for (bool more = true; more;) more = co_await serve_request();
}

asio::awaitable<bool> HttpConnection::read_more() {
  const size_t before = pending_.size();
  const ErrorCode error = co_await stream_->read(pending_);
  context_.counters->bytes_received += pending_.size() - before;
  co_return !error;
}

// True: another request may follow.
asio::awaitable<bool> HttpConnection::serve_request() {
  shrink(pending_);
  shrink(out_);
  shrink(sending_);
  if (pending_.empty()) {
    phase_ = Phase::kIdle;
    set_deadline(context_.limits.idle_timeout_ns);
    const bool arrived = co_await read_more();
    if (!arrived) co_return false;
  }
  phase_ = Phase::kReading;
  HttpRequestParser parser(context_.limits.parser);
  bool good = co_await read_header(parser);
  if (!good) co_return false;
  ++context_.counters->requests;
  HttpRequest& request = parser.request();
  request.peer = peer_;
  http10_ = request.version == 10;
  head_only_ = request.method == "HEAD";
  if (std::optional<HttpResponse> refusal = context_.handler.refuse(request)) {
    // Without a body the connection can go on.
    if (parser.done() && parser.keep_alive() && !http10_) {
      keep_alive_ = true;
      phase_ = Phase::kResponding;
      reset_response();
      begin_response(*refusal, /*whole=*/true);
      ended_ = true;
      good = co_await write_response();
      if (good) good = co_await stays_open();
      co_return good;
    }
    co_await send_alone(std::move(*refusal));
    co_return false;
  }
  good = co_await read_body(parser);
  if (!good) co_return false;
  co_return co_await answer(parser);
}

asio::awaitable<bool> HttpConnection::read_header(HttpRequestParser& parser) {
  set_deadline(context_.limits.header_timeout_ns);
  for (;;) {
    parser.advance(pending_);
    if (parser.header_done()) co_return true;
    if (parser.fault()) {
      ++context_.counters->faults;
      co_await send_alone(
          context_.handler.fault_response(parser.fault()->status, parser.fault()->message));
      co_return false;
    }
    const bool arrived = co_await read_more();
    if (arrived) continue;
    if (!timed_out_) co_return false;
    ++context_.counters->faults;
    co_await send_alone(context_.handler.fault_response(408, "the header came too slowly"));
    co_return false;
  }
}

asio::awaitable<bool> HttpConnection::read_body(HttpRequestParser& parser) {
  const HttpServerLimits& limits = context_.limits;
  const int64_t began = monotonic_now_ns();
  if (parser.expects_continue() && pending_.empty()) {
    set_deadline(limits.body_timeout_ns);
    const ErrorCode error = co_await stream_->write("HTTP/1.1 100 Continue\r\n\r\n");
    if (error) co_return false;
  }
  for (;;) {
    parser.advance(pending_);
    if (parser.done()) co_return true;
    if (parser.fault()) {
      ++context_.counters->faults;
      co_await send_alone(
          context_.handler.fault_response(parser.fault()->status, parser.fault()->message));
      co_return false;
    }
    deadline_ = began + limits.body_timeout_ns;
    if (limits.min_body_bytes_per_second > 0)
      deadline_ = std::min(deadline_, began + kBodyGraceNs +
                                          static_cast<int64_t>(parser.body_received()) * kSecond /
                                              limits.min_body_bytes_per_second);
    const bool arrived = co_await read_more();
    if (arrived) continue;
    if (!timed_out_) co_return false;
    ++context_.counters->faults;
    co_await send_alone(context_.handler.fault_response(408, "the body came too slowly"));
    co_return false;
  }
}

void HttpConnection::reset_response() {
  begun_ = chunked_ = ended_ = false;
  aborted_ = false;
  on_abort_ = nullptr;
}

asio::awaitable<bool> HttpConnection::answer(HttpRequestParser& parser) {
  phase_ = Phase::kResponding;
  deadline_ = INT64_MAX;
  keep_alive_ = parser.keep_alive() && !http10_;
  reset_response();
  ++context_.counters->responding;
  auto exchange = std::make_shared<Exchange>(shared_from_this(), std::move(parser.request()));
  try {
    context_.handler.handle(exchange);
  } catch (const std::exception& error) {
    log_error(cat("a request failed: ", error.what()));
    exchange->respond(context_.handler.fault_response(500, "internal error"));
  }
  exchange.reset();
  const bool good = co_await write_response();
  on_abort_ = nullptr;
  --context_.counters->responding;
  if (!good) co_return false;
  co_return co_await stays_open();
}

// After a response: true if another request may come, otherwise the connection is closed politely.
asio::awaitable<bool> HttpConnection::stays_open() {
  if (keep_alive_ && !context_.draining) co_return true;
  co_await linger();
  co_return false;
}

// True: all of it was written.
asio::awaitable<bool> HttpConnection::write_response() {
  ErrorCode error;
  while (!aborted_) {
    if (out_.empty()) {
      if (ended_) break;
      deadline_ = INT64_MAX;
      co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    sending_.swap(out_);
    out_.clear();
    for (size_t at = 0; at < sending_.size() && !aborted_; at += kSliceBytes) {
      const std::string_view slice = std::string_view(sending_).substr(at, kSliceBytes);
      set_deadline(context_.limits.send_timeout_ns);
      error = co_await stream_->write(slice);
      if (error) {
        abort(HttpAbort::kClientGone);
        break;
      }
      context_.counters->bytes_sent += slice.size();
    }
    sending_.clear();
  }
  deadline_ = INT64_MAX;
  co_return !aborted_ && stream_->socket().is_open();
}

// A response to a request that was not read to its end; the connection closes.
asio::awaitable<void> HttpConnection::send_alone(HttpResponse response) {
  phase_ = Phase::kClosing;
  keep_alive_ = false;
  begun_ = false;
  timed_out_ = false;
  begin_response(response, /*whole=*/true);
  set_deadline(kLingerNs);
  const ErrorCode error = co_await stream_->write(out_);
  if (error) co_return;
  context_.counters->bytes_sent += out_.size();
  co_await linger();
}

// Reads on for a while after the last response: closing a socket with unread bytes would take the
// response away from the client.
asio::awaitable<void> HttpConnection::linger() {
  phase_ = Phase::kClosing;
  set_deadline(kLingerNs);
  co_await stream_->finish_writing();
  for (size_t bytes = 0; bytes < kLingerBytes && !timed_out_;) {
    pending_.clear();
    const bool arrived = co_await read_more();
    if (!arrived) co_return;
    bytes += pending_.size();
  }
}

void HttpConnection::begin_response(const HttpResponse& head, bool whole) {
  MEGATRON_ASSERT(!begun_, "a response has begun twice");
  begun_ = true;
  chunked_ = !whole && !http10_;
  const bool bodiless = head.status == 204 || head.status == 304;
  if (context_.draining || (!whole && http10_)) keep_alive_ = false;
  out_ += cat("HTTP/1.1 ", head.status, " ", reason_phrase(head.status),
              "\r\nServer: megatron\r\nDate: ", context_.date, "\r\n");
  if (!head.content_type.empty() && !bodiless)
    out_ += cat("Content-Type: ", head.content_type, "\r\n");
  for (const HttpHeader& header : head.headers)
    out_ += cat(header.name, ": ", header.value, "\r\n");
  if (whole && !bodiless) out_ += cat("Content-Length: ", head.body.size(), "\r\n");
  if (chunked_) out_ += "Transfer-Encoding: chunked\r\n";
  if (!keep_alive_) out_ += "Connection: close\r\n";
  out_ += "\r\n";
  if (bodiless) return;
  if (whole && !head_only_)
    out_ += head.body;
  else if (!whole && !head.body.empty())
    append_piece(head.body);
  wake();
}

void HttpConnection::append_piece(std::string_view piece) {
  MEGATRON_ASSERT(begun_ && !ended_, "a piece before the beginning or after the end");
  if (piece.empty() || head_only_) return;
  if (out_.size() + sending_.size() + piece.size() > context_.limits.max_unread_bytes)
    return abort(HttpAbort::kSlowReader);
  if (chunked_) {
    char size[24];
    std::snprintf(size, sizeof size, "%zx\r\n", piece.size());
    out_ += size;
  }
  out_ += piece;
  if (chunked_) out_ += "\r\n";
  wake();
}

void HttpConnection::end_response() {
  MEGATRON_ASSERT(begun_ && !ended_, "a response ends that has not begun, or twice");
  if (chunked_ && !head_only_) out_ += "0\r\n\r\n";
  ended_ = true;
  on_abort_ = nullptr;
  wake();
}

}  // namespace megatron
