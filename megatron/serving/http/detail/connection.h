// One connection of the server: reads requests, writes responses, keeps deadlines.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "megatron/serving/http/detail/byte_stream.h"
#include "megatron/serving/http/http_server.h"

namespace megatron {

int64_t monotonic_now_ns();

struct HttpCounters {
  std::atomic<int64_t> open{0}, responding{0};
  std::atomic<uint64_t> accepted{0}, refused{0}, requests{0}, faults{0}, client_gone{0},
      slow_readers{0}, bytes_received{0}, bytes_sent{0};
};

// What the connections of one I/O thread share. Outlives the server where an exchange does.
struct ConnectionContext {
  ConnectionContext(const HttpServerLimits& given, HttpHandler& handles, int index,
                    std::shared_ptr<HttpCounters> counts)
      : limits(given), handler(handles), shard(index), counters(std::move(counts)) {}

  const HttpServerLimits limits;
  HttpHandler& handler;
  const int shard;
  boost::asio::io_context io{1};
  std::shared_ptr<HttpCounters> counters;
  std::atomic<bool> draining{false}, stopped{false};
  std::string date;  // of the Date header

  // Runs `work` on the thread of these connections. Any thread; works run in the order of the
  // calls, also those of different threads: asio::post keeps what a thread posts to itself back
  // until its handler ends, behind what others post meanwhile.
  void post(std::function<void()> work);

 private:
  void run_posted();

  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  // `refused`: the server has no room: the client is told so and the connection closes.
  HttpConnection(std::shared_ptr<ConnectionContext> context, std::unique_ptr<ByteStream> stream,
                 std::string peer, bool refused);
  ~HttpConnection();

  // Serves the connection until it ends.
  boost::asio::awaitable<void> run();

  // Acts on a passed deadline, and closes an idle connection of a draining server.
  void tick(int64_t now);
  // The socket to look at for a client that left; -1: no response is in flight.
  int watched_socket();
  // Ends a response in flight, and the connection with it.
  void abort(HttpAbort why);
  void close_now();
  // After run(): an exchange may keep the connection, but no descriptor.
  void close_socket() { stream_->close_now(); }
  bool is_refused() const { return refused_; }

 private:
  class Exchange;
  enum class Phase { kReading, kIdle, kResponding, kClosing };

  boost::asio::awaitable<bool> serve_request();
  boost::asio::awaitable<bool> read_header(HttpRequestParser& parser);
  boost::asio::awaitable<bool> read_body(HttpRequestParser& parser);
  boost::asio::awaitable<bool> read_more();
  boost::asio::awaitable<bool> answer(HttpRequestParser& parser);
  boost::asio::awaitable<bool> write_response();
  boost::asio::awaitable<bool> stays_open();
  boost::asio::awaitable<void> send_alone(HttpResponse response);
  boost::asio::awaitable<void> linger();

  void reset_response();
  void report_abort();
  void begin_response(const HttpResponse& head, bool whole);
  void append_piece(std::string_view piece);
  void end_response();
  void set_deadline(int64_t after_ns);
  void wake() { wake_.cancel(); }

  const std::shared_ptr<ConnectionContext> shared_context_;
  ConnectionContext& context_;
  std::unique_ptr<ByteStream> stream_;
  std::string peer_;
  bool refused_;

  Phase phase_ = Phase::kReading;
  int64_t deadline_ = INT64_MAX;
  bool timed_out_ = false;
  std::string pending_;  // bytes that were read and not yet parsed

  // The response in flight.
  bool keep_alive_ = false, http10_ = false, head_only_ = false;
  bool begun_ = false, chunked_ = false, ended_ = false;
  std::atomic<bool> aborted_{false};  // written by the I/O thread
  std::string out_, sending_;
  std::function<void(HttpAbort)> on_abort_;
  HttpAbort why_aborted_{};
  boost::asio::steady_timer wake_;
};

}  // namespace megatron
