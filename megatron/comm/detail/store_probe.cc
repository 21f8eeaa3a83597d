#include "megatron/comm/detail/store_probe.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>

#include "megatron/base/failure_class.h"

namespace megatron {
namespace {

using Clock = std::chrono::steady_clock;

// For the answer to one attempt, of a store that may be busy with thousands of ranks
constexpr auto kPatience = std::chrono::seconds(30);

constexpr std::string_view kHint =
    "\nhint: MASTER_ADDR and MASTER_PORT must name the machine of rank 0 and a free port that "
    "every rank can reach; see the "
    "output of rank 0";

// A non-blocking connection; every call ends at the deadline.
class Socket {
 public:
  Socket(const addrinfo& address, Clock::time_point deadline)
      : fd_(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
        deadline_(deadline) {
    if (fd_ < 0) {
      problem_ = std::strerror(errno);
    } else if (connect(fd_, address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS) {
      problem_ = std::strerror(errno);
    } else if (!wait_until(POLLOUT)) {
      problem_ = "no answer to the attempt to connect";
    } else {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) problem_ = std::strerror(error);
    }
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  const std::string& problem() const { return problem_; }  // empty: connected
  bool send_all(const std::string& bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == ssize_t(bytes.size());
  }
  // Bytes of an answer: fewer if the other side closed; nullopt at the deadline.
  std::optional<std::string> receive(size_t wanted) {
    std::string bytes;
    while (bytes.size() < wanted) {
      if (!wait_until(POLLIN)) return std::nullopt;
      char buffer[64];
      const ssize_t got = recv(fd_, buffer, std::min(sizeof buffer, wanted - bytes.size()), 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) return bytes;
      bytes.append(buffer, static_cast<size_t>(got));
    }
    return bytes;
  }

 private:
  bool wait_until(short events) {
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
      if (left <= 0) return false;
      pollfd entry = {fd_, events, 0};
      const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
  }

  int fd_;
  Clock::time_point deadline_;
  std::string problem_;
};

template <class T>
std::string bytes_of(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

// One attempt; returns the problem, empty: a store answered. `final_answer`: do not retry.
std::string attempt(const addrinfo& address, Clock::time_point deadline, bool& final_answer) {
  using c10d::detail::QueryType;
  // A connection that is never served must not use up the whole time: after it another is tried.
  Socket socket(address, std::min(deadline, Clock::now() + kPatience));
  if (!socket.problem().empty()) return cat("cannot be reached: ", socket.problem());
  // First message of a c10d client; a store echoes the number.
  const std::string number = "mega";
  if (!socket.send_all(bytes_of(QueryType::VALIDATE) +
                       bytes_of(c10d::detail::validationMagicNumber) + bytes_of(QueryType::PING) +
                       number))
    return "cannot be reached: the connection broke";
  const std::optional<std::string> answer = socket.receive(number.size());
  if (!answer) return "is held by something that says nothing, which is not the store of this job";
  if (*answer == number) return "";
  if (answer->empty()) return "cannot be reached: what listens there closes the connection";
  final_answer = true;
  return "is held by another program, whose answer is not that of a store";
}

// One attempt at each address of the name.
std::string attempt(const std::string& host, int port, Clock::time_point deadline,
                    bool& final_answer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int failed = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
      failed != 0)
    return cat("cannot be reached: the name is not known: ", gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> guard(found, freeaddrinfo);
  std::string problem;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    problem = attempt(*address, deadline, final_answer);
    if (problem.empty() || final_answer) return problem;
  }
  return problem;
}

}  // namespace

void wait_for_store(const std::string& host, int port, double timeout_seconds) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_seconds));
  for (auto pause = std::chrono::milliseconds(20);;
       pause = std::min(pause * 3 / 2, std::chrono::milliseconds(1000))) {
    bool final_answer = false;
    const std::string problem = attempt(host, port, deadline, final_answer);
    if (problem.empty()) return;
    if (final_answer)
      throw RetryError(cat("the store's address ", host, ":", port, " ", problem, kHint));
    if (Clock::now() + pause >= deadline)
      throw RetryError(cat("the store's address ", host, ":", port, " ", problem, " (tried for ",
                           timeout_seconds, " s)", kHint));
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace megatron
