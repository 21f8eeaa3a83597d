#include "megatron/serving/http/http_server.h"

#include <poll.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_set>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/serving/http/detail/connection.h"

namespace megatron {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

constexpr std::chrono::milliseconds kTick(100);
constexpr int64_t kMaxRefusing = 256;  // connections that are being told that there is no room

asio::ip::address find_address(const std::string& host) {
  ErrorCode error;
  const asio::ip::address address = asio::ip::make_address(host, error);
  if (!error) return address;
  if (host == "localhost") return asio::ip::address_v4::loopback();
  asio::io_context io;
  tcp::resolver resolver(io);
  const auto found = resolver.resolve(host, "", error);
  MEGATRON_CHECK(!error && !found.empty(), "--host ", host, " has no address: ", error.message());
  return found.begin()->endpoint().address();
}

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[64];
  std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts);
  return text;
}

// The connections of one I/O thread.
struct Shard {
  explicit Shard(std::shared_ptr<ConnectionContext> given)
      : context(std::move(given)), io(context->io), work(asio::make_work_guard(io)), timer(io) {}

  std::shared_ptr<ConnectionContext> context;
  asio::io_context& io;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  asio::steady_timer timer;
  std::unordered_set<HttpConnection*> connections;
  std::vector<pollfd> sockets;
  std::vector<HttpConnection*> watched;
  std::thread thread;
  bool stopping = false;  // of its own thread

  void look_for_clients_that_left();
  void tick();
  asio::awaitable<void> keep_time();
};

void Shard::look_for_clients_that_left() {
  sockets.clear();
  watched.clear();
  for (HttpConnection* const connection : connections)
    if (const int socket = connection->watched_socket(); socket >= 0) {
      sockets.push_back({socket, POLLRDHUP, 0});
      watched.push_back(connection);
    }
  if (sockets.empty() || ::poll(sockets.data(), sockets.size(), 0) <= 0) return;
  for (size_t i = 0; i < sockets.size(); ++i)
    if ((sockets[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0)
      watched[i]->abort(HttpAbort::kClientGone);
}

void Shard::tick() {
  const int64_t now = monotonic_now_ns();
  for (HttpConnection* const connection : connections) connection->tick(now);
  look_for_clients_that_left();
}

asio::awaitable<void> Shard::keep_time() {
  ErrorCode error;
  // A timer that has just expired cannot be cancelled any more.
  for (int ticks = 0; !error && !stopping; ++ticks) {
    timer.expires_after(kTick);
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, error));
    if (ticks % 10 == 0) context->date = http_date();
    tick();
  }
}

}  // namespace

struct HttpServer::Impl {
  Impl(const HttpServerOptions& given, HttpHandler& handler);
  void listen();
  asio::awaitable<void> accept();
  void take(tcp::socket socket, Shard& shard);
  asio::awaitable<void> serve(std::shared_ptr<HttpConnection> connection, Shard& shard,
                              std::string peer, bool counted);
  bool has_room(const asio::ip::address& peer, bool& counted);
  void stop();

  HttpServerOptions options;
  std::shared_ptr<HttpCounters> counters = std::make_shared<HttpCounters>();
  bool started = false, stopped = false;
  int port = 0;
  std::shared_ptr<asio::ssl::context> tls;
  std::vector<std::unique_ptr<Shard>> shards;
  std::unique_ptr<tcp::acceptor> acceptor;
  std::atomic<int64_t> refusing{0};
  std::mutex mutex;  // of `addresses`
  std::map<std::string, int64_t> addresses;
};

HttpServer::Impl::Impl(const HttpServerOptions& given, HttpHandler& handler) : options(given) {
  if (!options.certificate_file.empty())
    tls = make_server_tls(options.certificate_file, options.key_file);
  for (int i = 0; i < std::max(1, options.threads); ++i) {
    auto context = std::make_shared<ConnectionContext>(options.limits, handler, i, counters);
    context->date = http_date();
    shards.push_back(std::make_unique<Shard>(std::move(context)));
  }
  listen();
}

void HttpServer::Impl::listen() {
  const tcp::endpoint endpoint(find_address(options.host), static_cast<uint16_t>(options.port));
  acceptor = std::make_unique<tcp::acceptor>(shards[0]->io);
  ErrorCode error;
  acceptor->open(endpoint.protocol(), error);
  // On Linux this takes no port from a listening server, only from connections that have ended.
  if (!error) acceptor->set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(tcp::acceptor::max_listen_connections, error);
  MEGATRON_CHECK(!error, "cannot listen on ", options.host, " port ", options.port, ": ",
                 error.message(),
                 error == asio::error::address_in_use
                     ? "\nhint: another program listens there; choose a free one with --port"
                     : "");
  port = acceptor->local_endpoint().port();
}

// Whether one more connection is taken; `counted`: it counts for its address.
bool HttpServer::Impl::has_room(const asio::ip::address& peer, bool& counted) {
  counted = false;
  if (counters->open >= options.limits.max_connections) return false;
  if (options.limits.max_connections_per_address <= 0 || peer.is_loopback()) return true;
  const std::lock_guard lock(mutex);
  int64_t& count = addresses[peer.to_string()];
  if (count >= options.limits.max_connections_per_address) return false;
  ++count;
  counted = true;
  return true;
}

void HttpServer::Impl::take(tcp::socket socket, Shard& shard) {
  ErrorCode error;
  const tcp::endpoint peer = socket.remote_endpoint(error);
  if (error) return;  // it has left again
  socket.set_option(tcp::no_delay(true), error);
  ++counters->accepted;
  bool counted = false;
  const bool room = has_room(peer.address(), counted);
  if (!room) {
    ++counters->refused;
    if (refusing >= kMaxRefusing) return;
    ++refusing;
  } else {
    ++counters->open;
  }
  auto stream = tls ? make_tls_stream(std::move(socket), *tls, nullptr)
                    : make_plain_stream(std::move(socket));
  auto connection = std::make_shared<HttpConnection>(shard.context, std::move(stream),
                                                     peer.address().to_string(), !room);
  asio::co_spawn(shard.io, serve(std::move(connection), shard, peer.address().to_string(), counted),
                 [](std::exception_ptr problem) {
                   if (!problem) return;
                   try {
                     std::rethrow_exception(problem);
                   } catch (const std::exception& error) {
                     log_error(cat("a connection failed: ", error.what()));
                   }
                 });
}

asio::awaitable<void> HttpServer::Impl::serve(std::shared_ptr<HttpConnection> connection,
                                              Shard& shard, std::string peer, bool counted) {
  // Undone however the connection ends.
  struct Entry {
    Impl& server;
    Shard& shard;
    HttpConnection* connection;
    const std::string& peer;
    bool counted, refused;
    ~Entry() {
      shard.connections.erase(connection);
      connection->close_socket();
      --(refused ? server.refusing : server.counters->open);
      if (!counted) return;
      const std::lock_guard lock(server.mutex);
      const auto found = server.addresses.find(peer);
      if (--found->second == 0) server.addresses.erase(found);
    }
  };
  shard.connections.insert(connection.get());
  const Entry entry{*this, shard, connection.get(), peer, counted, connection->is_refused()};
  if (!shard.stopping) co_await connection->run();
}

asio::awaitable<void> HttpServer::Impl::accept() {
  asio::steady_timer pause(shards[0]->io);
  for (size_t next = 0;; next = (next + 1) % shards.size()) {
    ErrorCode error;
    Shard& shard = *shards[next];
    tcp::socket socket =
        co_await acceptor->async_accept(shard.io, asio::redirect_error(asio::use_awaitable, error));
    if (error == asio::error::operation_aborted || !acceptor->is_open()) co_return;
    if (error) {
      // Out of descriptors, most likely: those of connections that end become free.
      log_warning(cat("cannot accept a connection: ", error.message()));
      pause.expires_after(std::chrono::milliseconds(200));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
      continue;
    }
    if (next == 0) {
      take(std::move(socket), shard);
    } else {
      asio::post(shard.io,
                 [this, &shard, moved = std::make_shared<tcp::socket>(std::move(socket))] {
                   take(std::move(*moved), shard);
                 });
    }
  }
}

void HttpServer::Impl::stop() {
  if (std::exchange(stopped, true)) return;
  for (const auto& shard : shards) {
    asio::post(shard->io, [this, shard = shard.get()] {
      if (shard->context->shard == 0) {
        ErrorCode ignored;
        acceptor->close(ignored);
      }
      shard->stopping = true;
      shard->timer.cancel();
      const std::vector<HttpConnection*> all(shard->connections.begin(), shard->connections.end());
      for (HttpConnection* const connection : all) connection->close_now();
      shard->work.reset();
    });
  }
  for (const auto& shard : shards) {
    if (shard->thread.joinable())
      shard->thread.join();
    else
      shard->io.run();
    shard->context->stopped = true;
  }
}

HttpServer::HttpServer(const HttpServerOptions& options, HttpHandler& handler)
    : impl_(std::make_unique<Impl>(options, handler)) {}

HttpServer::~HttpServer() { stop(); }

void HttpServer::start() {
  MEGATRON_ASSERT(!std::exchange(impl_->started, true), "a server is started twice");
  asio::co_spawn(impl_->shards[0]->io, impl_->accept(), asio::detached);
  for (const auto& shard : impl_->shards) {
    asio::co_spawn(shard->io, shard->keep_time(), asio::detached);
    shard->thread = std::thread([io = &shard->io] { io->run(); });
  }
}

void HttpServer::drain() {
  for (const auto& shard : impl_->shards) shard->context->draining = true;
}
void HttpServer::stop() { impl_->stop(); }
int HttpServer::port() const { return impl_->port; }
int HttpServer::num_shards() const { return static_cast<int>(impl_->shards.size()); }

void HttpServer::post(int shard, std::function<void()> work) {
  impl_->shards[static_cast<size_t>(shard)]->context->post(std::move(work));
}

void HttpServer::post_after(int shard, int64_t ns, std::function<void()> work) {
  Shard& to = *impl_->shards[static_cast<size_t>(shard)];
  post(shard, [&to, ns, work = std::move(work)] {
    auto timer = std::make_shared<asio::steady_timer>(to.io, std::chrono::nanoseconds(ns));
    timer->async_wait([timer, work](const ErrorCode& error) {
      if (!error) work();
    });
  });
}

HttpCounts HttpServer::counts() const {
  const HttpCounters& c = *impl_->counters;
  return {c.open,   c.responding,  c.accepted,     c.refused,        c.requests,
          c.faults, c.client_gone, c.slow_readers, c.bytes_received, c.bytes_sent};
}

bool is_loopback_host(const std::string& host) { return find_address(host).is_loopback(); }

}  // namespace megatron
