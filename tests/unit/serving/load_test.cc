// Many streams and many idle connections over the fake engine. `make test` has a small form;
// MEGATRON_SERVING_LOAD=whole: 5,000 streams of 10 events a second, for two cores of their own.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "ask.h"
#include "megatron/base/check.h"
#include "tests/unit/slowness.h"

namespace megatron {
namespace {

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

bool is_whole() {
  const char* const size = std::getenv("MEGATRON_SERVING_LOAD");
  return size != nullptr && std::strcmp(size, "whole") == 0;
}

int connect_to(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  MEGATRON_CHECK(
      ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
      "cannot connect");
  return socket;
}

// Reads streams whose texts are the times of their events.
class StreamReader {
 public:
  explicit StreamReader(int port) : port_(port), poll_(::epoll_create1(EPOLL_CLOEXEC)) {}
  ~StreamReader() {
    for (const int socket : sockets_) ::close(socket);
    ::close(poll_);
  }
  void add(int64_t tokens) {
    const int socket = connect_to(port_);
    const std::string request = post_request(
        "/v1/completions", cat("{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":", tokens, "}"));
    MEGATRON_CHECK(::send(socket, request.data(), request.size(), MSG_NOSIGNAL) ==
                       static_cast<ssize_t>(request.size()),
                   "cannot send");
    epoll_event event{EPOLLIN, {.fd = socket}};
    ::epoll_ctl(poll_, EPOLL_CTL_ADD, socket, &event);
    sockets_.push_back(socket);
  }
  // Until `end`, or as many streams have ended as there are.
  void read(int64_t end) {
    std::vector<epoll_event> events(1024);
    while (now() < end && done_ < sockets_.size()) {
      const int count = ::epoll_wait(poll_, events.data(), static_cast<int>(events.size()), 100);
      for (int i = 0; i < count; ++i) read_one(events[static_cast<size_t>(i)].data.fd);
    }
  }
  size_t done() const { return done_; }
  int64_t quantile_ns(double q) {
    std::sort(delays_.begin(), delays_.end());
    return delays_.empty()
               ? INT64_MAX
               : delays_[static_cast<size_t>(q * static_cast<double>(delays_.size() - 1))];
  }
  size_t num_events() const { return delays_.size(); }

 private:
  void read_one(int socket) {
    char buffer[16384];
    const ssize_t bytes = ::recv(socket, buffer, sizeof buffer, MSG_DONTWAIT);
    if (bytes <= 0) {
      ::epoll_ctl(poll_, EPOLL_CTL_DEL, socket, nullptr);
      return;
    }
    const int64_t time = now();
    const std::string_view text(buffer, static_cast<size_t>(bytes));
    // A mark that is cut by the border of a read is not counted.
    constexpr std::string_view kMark = "\"text\": \"";
    for (size_t at = text.find(kMark); at != std::string_view::npos;
         at = text.find(kMark, at + 1)) {
      const char* const number = buffer + at + kMark.size();
      if (at + kMark.size() + 20 < text.size() && *number >= '0' && *number <= '9')
        delays_.push_back(time - std::strtoll(number, nullptr, 10));
    }
    if (text.find("[DONE]") != std::string_view::npos) ++done_;
  }

  int port_, poll_;
  std::vector<int> sockets_;
  std::vector<int64_t> delays_;
  size_t done_ = 0;
};

TEST(ServingLoad, StreamsAreOnTime) {
  const int64_t streams = is_whole() ? 5000 : 200, seconds = is_whole() ? 20 : 1;
  ServeLimits limits;
  limits.max_pending_requests = 10'000;
  FakeServer fake({}, limits,
                  {.step_ns = 10'000'000,
                   .max_running = 10'000,
                   .max_queued = 10'000,
                   .stop_early = false,
                   .phases = 10,
                   .stamp = true});
  StreamReader reader(fake.port());
  for (int64_t i = 0; i < streams; ++i) reader.add(10 * seconds);
  const int64_t begin = now();
  reader.read(begin + (3 * seconds + 20) * 1'000'000'000);
  const double p50 = static_cast<double>(reader.quantile_ns(0.5)) / 1e6,
               p99 = static_cast<double>(reader.quantile_ns(0.99)) / 1e6;
  std::printf("  %zu events of %ld streams in %.1f s: delay p50 %.2f ms, p99 %.2f ms\n",
              reader.num_events(), static_cast<long>(streams),
              static_cast<double>(now() - begin) / 1e9, p50, p99);
  EXPECT_EQ(reader.done(), static_cast<size_t>(streams));
  EXPECT_GE(reader.num_events(), static_cast<size_t>(streams * seconds * 8));
  // The small form runs next to other tests on a busy machine.
  EXPECT_LE(p99, is_whole() ? 50.0 : 500.0);
  EXPECT_EQ(fake.server->num_open(), 0u);
}

TEST(ServingLoad, IdleConnectionsAreSmall) {
  const int count = is_whole() ? 5000 : 500;
  FakeServer fake({}, {}, {.step_ns = 100'000});
  const auto use = [&](int socket) {
    const std::string request =
        post_request("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":1}");
    ::send(socket, request.data(), request.size(), MSG_NOSIGNAL);
    char buffer[4096];
    MEGATRON_CHECK(::recv(socket, buffer, sizeof buffer, 0) > 0, "no response");
  };
  std::vector<int> sockets;
  for (int i = 0; i < 20; ++i) {  // what the first requests take is not theirs
    sockets.push_back(connect_to(fake.port()));
    use(sockets.back());
  }
  const int64_t before = resident_bytes();
  for (int i = 0; i < count; ++i) {
    sockets.push_back(connect_to(fake.port()));
    use(sockets.back());
  }
  const int64_t each = (resident_bytes() - before) / count;
  std::printf("  %ld bytes for each of %d idle connections\n", static_cast<long>(each), count);
  EXPECT_EQ(fake.server->counts().open, count + 20);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LE(each, 32 << 10);
#endif
  for (const int socket : sockets) ::close(socket);
}

// Readers of 10 bytes a second: others do not notice, and the slow ones are cut off at the limit.
TEST(ServingLoad, SlowReadersHurtNobody) {
  ServeLimits limits;
  limits.max_unread_bytes = 16 << 10;
  FakeServer fake(
      {}, limits,
      {.step_ns = 200'000, .max_running = 1000, .max_queued = 1000, .stop_early = false});
  // Under a sanitizer the texts of more of them take all of the processor.
  const size_t count = is_whole() ? 100 : kSlowness > 1 ? 4 : 20;
  std::vector<std::unique_ptr<RawClient>> slow;
  for (size_t i = 0; i < count; ++i) {
    slow.push_back(std::make_unique<RawClient>(fake.port(), 2048));
    // Long texts with much to say about each token.
    slow.back()->send(post_request(
        "/v1/completions",
        "{\"prompt\":\"a\",\"stream\":true,\"max_tokens\":4000,\"logprobs\":20,\"n\":4}"));
  }
  const auto begin = now();
  for (int i = 0; i < 10; ++i)
    EXPECT_EQ(post(fake.port(), "/v1/completions", "{\"prompt\":\"b\",\"max_tokens\":20}").status,
              200);
  const double others = static_cast<double>(now() - begin) / 1e9;
  size_t cut = 0;
  for (int round = 0; round < 300 && cut < count; ++round) {
    for (const auto& client : slow) {
      std::string few;
      client->read_some(few, 0.0, 1);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    cut = fake.server->counts().slow_readers;
  }
  EXPECT_EQ(cut, count);
  EXPECT_LT(others, 5.0 * kSlowness);
  for (int i = 0; i < 1000 && fake.server->num_open() > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(fake.server->num_open(), 0u);
  EXPECT_EQ(fake.engine->stats().running, 0);
}

}  // namespace
}  // namespace megatron
