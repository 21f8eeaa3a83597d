#include "megatron/inference/rank_sockets.h"

// clang-format off
#include <utility>  // Boost 1.74 does not include what it uses.
// clang-format on

#include <boost/asio/connect.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <iomanip>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "megatron/base/check.h"

namespace megatron {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using SocketError = boost::system::error_code;

constexpr uint64_t kMaxHelloBytes = 256, kMaxMessageBytes = uint64_t{1} << 31;
constexpr auto kFlush = std::chrono::seconds(1);

// One connection, whose messages are their length in 8 bytes and their bytes. Used by the thread of
// its context alone.
class MessageStream : public std::enable_shared_from_this<MessageStream> {
 public:
  using OnMessage = std::function<void(std::string)>;
  using OnEnd = std::function<void()>;

  MessageStream(tcp::socket socket, uint64_t longest)
      : socket_(std::move(socket)), longest_(longest) {
    SocketError ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
  }

  void start(OnMessage on_message, OnEnd on_end) {
    on_message_ = std::move(on_message);
    on_end_ = std::move(on_end);
    read();
  }
  void set_longest(uint64_t longest) { longest_ = longest; }
  void send(std::string bytes) {
    const uint64_t length = bytes.size();
    bytes.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
    outgoing_.push_back(std::move(bytes));
    if (outgoing_.size() == 1) write();
  }
  void close_when_sent() {
    closing_ = true;
    if (outgoing_.empty()) end();
  }
  void end() {
    SocketError ignored;
    socket_.close(ignored);
    if (const OnEnd on_end = std::exchange(on_end_, nullptr)) on_end();
  }

 private:
  void read() {
    asio::async_read(socket_, asio::buffer(&length_, sizeof length_),
                     [self = shared_from_this()](const SocketError& error, size_t) {
                       if (error || self->length_ > self->longest_) return self->end();
                       self->read_body();
                     });
  }
  void read_body() {
    incoming_.resize(length_);
    asio::async_read(socket_, asio::buffer(incoming_),
                     [self = shared_from_this()](const SocketError& error, size_t) {
                       if (error) return self->end();
                       self->on_message_(std::exchange(self->incoming_, {}));
                       if (self->socket_.is_open()) self->read();
                     });
  }
  void write() {
    asio::async_write(socket_, asio::buffer(outgoing_.front()),
                      [self = shared_from_this()](const SocketError& error, size_t) {
                        if (error) return self->end();
                        self->outgoing_.pop_front();
                        if (!self->outgoing_.empty()) return self->write();
                        if (self->closing_) self->end();
                      });
  }

  tcp::socket socket_;
  uint64_t longest_, length_ = 0;
  std::string incoming_;
  std::deque<std::string> outgoing_;  // the first is being written
  OnMessage on_message_;
  OnEnd on_end_;
  bool closing_ = false;
};

// What the connections' thread has received, for the one that asks.
template <class T>
class Mailbox {
 public:
  void put(T message) {
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
    changed_.notify_one();
  }
  std::optional<T> take(int64_t wait_ns) {
    std::unique_lock lock(mutex_);
    if (wait_ns > 0)
      changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns),
                        [&] { return !messages_.empty(); });
    if (messages_.empty()) return std::nullopt;
    T first = std::move(messages_.front());
    messages_.pop_front();
    return first;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> messages_;
};

// A thread that serves connections until all are closed.
class ConnectionThread {
 public:
  asio::io_context io{1};

  void start() {
    thread_ = std::thread([this] {
      io.run();
      ended_.set_value();
    });
  }
  // Call it after a function that closes all connections has been posted to `io`.
  void join() {
    work_.reset();
    if (ended_.get_future().wait_for(kFlush) == std::future_status::timeout) io.stop();
    thread_.join();
  }

 private:
  asio::executor_work_guard<asio::io_context::executor_type> work_ = asio::make_work_guard(io);
  std::promise<void> ended_;
  std::thread thread_;
};

std::string random_secret() {
  std::random_device random;
  std::ostringstream text;
  for (int i = 0; i < 4; ++i) text << std::hex << std::setw(8) << std::setfill('0') << random();
  return text.str();
}

std::string hello_text(const std::string& secret, int rank) { return cat(secret, " ", rank); }

}  // namespace

struct RankSockets::Impl {
  ConnectionThread thread;
  tcp::acceptor acceptor{thread.io};
  Mailbox<RankMessage> mail;
  std::string secret = random_secret(), address;
  // By rank, used by the thread of the connections: its stream, and what waits for it.
  struct Peer {
    std::shared_ptr<MessageStream> stream;
    std::vector<std::string> waiting;
    bool lost = false;
  };
  std::vector<Peer> peers;
  std::set<std::shared_ptr<MessageStream>> strangers;  // have not said who they are

  void accept() {
    acceptor.async_accept([this](const SocketError& error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (!error) welcome(std::make_shared<MessageStream>(std::move(socket), kMaxHelloBytes));
      accept();
    });
  }

  void welcome(const std::shared_ptr<MessageStream>& stream) {
    strangers.insert(stream);
    const std::weak_ptr<MessageStream> weak = stream;
    const auto rank = std::make_shared<int>(-1);
    stream->start(
        [this, weak, rank](std::string bytes) {
          if (*rank >= 0) return mail.put({*rank, std::move(bytes), false});
          const std::shared_ptr<MessageStream> from = weak.lock();
          *rank = rank_of(bytes);
          if (*rank < 0) return from->end();
          strangers.erase(from);
          from->set_longest(kMaxMessageBytes);
          Peer& peer = peers[static_cast<size_t>(*rank)];
          peer.stream = from;
          for (std::string& message : std::exchange(peer.waiting, {}))
            from->send(std::move(message));
        },
        [this, weak, rank] {
          if (const auto from = weak.lock()) strangers.erase(from);
          if (*rank < 0) return;
          peers[static_cast<size_t>(*rank)].lost = true;
          mail.put({*rank, "", true});
        });
  }

  // The rank that says hello; -1: nobody who is expected.
  int rank_of(const std::string& hello) const {
    for (size_t rank = 1; rank < peers.size(); ++rank)
      if (!peers[rank].stream && hello == hello_text(secret, static_cast<int>(rank)))
        return static_cast<int>(rank);
    return -1;
  }

  void deliver(size_t rank, std::string bytes) {
    Peer& peer = peers[rank];
    if (peer.lost) return;
    if (peer.stream)
      peer.stream->send(std::move(bytes));
    else
      peer.waiting.push_back(std::move(bytes));
  }

  void close() {
    SocketError ignored;
    acceptor.close(ignored);
    for (const auto& stranger : std::exchange(strangers, {})) stranger->end();
    for (const Peer& peer : peers)
      if (peer.stream) peer.stream->close_when_sent();
  }
};

RankSockets::RankSockets(const std::string& host, int ranks) : impl_(std::make_unique<Impl>()) {
  impl_->peers.resize(static_cast<size_t>(ranks));
  try {
    const tcp::endpoint endpoint = tcp::resolver(impl_->thread.io).resolve(host, "0")->endpoint();
    impl_->acceptor.open(endpoint.protocol());
    impl_->acceptor.bind(endpoint);
    impl_->acceptor.listen();
  } catch (const boost::system::system_error& error) {
    throw_error(cat("rank 0 cannot listen on ", host, ": ", error.code().message()));
  }
  impl_->address = cat(host, " ", impl_->acceptor.local_endpoint().port(), " ", impl_->secret);
  impl_->accept();
  impl_->thread.start();
}

RankSockets::~RankSockets() {
  asio::post(impl_->thread.io, [impl = impl_.get()] { impl->close(); });
  impl_->thread.join();
}

const std::string& RankSockets::address() const { return impl_->address; }

int RankSockets::num_ranks() const { return static_cast<int>(impl_->peers.size()); }

void RankSockets::send(int rank, std::string_view bytes) {
  asio::post(impl_->thread.io, [impl = impl_.get(), rank = static_cast<size_t>(rank),
                                text = std::string(bytes)] { impl->deliver(rank, text); });
}

std::optional<RankMessage> RankSockets::receive(int64_t wait_ns) {
  return impl_->mail.take(wait_ns);
}

struct RankSocket::Impl {
  ConnectionThread thread;
  std::shared_ptr<MessageStream> stream;
  Mailbox<std::optional<std::string>> mail;  // null: the connection has ended
  int rank = 0;
  bool lost = false;
};

RankSocket::RankSocket(const std::string& address, int rank) : impl_(std::make_unique<Impl>()) {
  std::istringstream words(address);
  std::string host, port, secret;
  words >> host >> port >> secret;
  impl_->rank = rank;
  tcp::socket socket(impl_->thread.io);
  try {
    asio::connect(socket, tcp::resolver(impl_->thread.io).resolve(host, port));
  } catch (const boost::system::system_error& error) {
    throw_error(cat("rank 0 cannot be reached at ", host, ":", port, ": ", error.code().message()));
  }
  impl_->stream = std::make_shared<MessageStream>(std::move(socket), kMaxMessageBytes);
  impl_->stream->start(
      [impl = impl_.get()](std::string bytes) { impl->mail.put(std::move(bytes)); },
      [impl = impl_.get()] { impl->mail.put(std::nullopt); });
  impl_->stream->send(hello_text(secret, rank));
  impl_->thread.start();
}

RankSocket::~RankSocket() {
  asio::post(impl_->thread.io, [impl = impl_.get()] { impl->stream->close_when_sent(); });
  impl_->thread.join();
}

int RankSocket::rank() const { return impl_->rank; }

void RankSocket::send(std::string_view bytes) {
  asio::post(impl_->thread.io,
             [impl = impl_.get(), text = std::string(bytes)] { impl->stream->send(text); });
}

std::optional<std::string> RankSocket::receive(int64_t wait_ns) {
  std::optional<std::optional<std::string>> message = impl_->mail.take(impl_->lost ? 0 : wait_ns);
  impl_->lost = impl_->lost || (message && !*message);
  MEGATRON_CHECK(!impl_->lost, "the connection to rank 0 has ended");
  return message ? std::move(*message) : std::nullopt;
}

}  // namespace megatron
