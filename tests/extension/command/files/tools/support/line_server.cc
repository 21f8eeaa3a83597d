#include "tools/support/line_server.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr size_t kLongestLine = size_t{1} << 20;
constexpr timeval kClientTimeout = {.tv_sec = 5, .tv_usec = 0};

}  // namespace

LineServer::LineServer(int port) : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int yes = 1;
  setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address{.sin_family = AF_INET,
                      .sin_port = htons(static_cast<uint16_t>(port)),
                      .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof(address);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_, SOMAXCONN) != 0) {
    const std::string reason = std::strerror(errno);
    close(listener_);
    throw_error(cat("cannot listen on port ", port, ": ", reason));
  }
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
  port_ = ntohs(address.sin_port);
}

LineServer::~LineServer() {
  if (client_ >= 0) close(client_);
  close(listener_);
}

std::optional<std::string> LineServer::next(int milliseconds) {
  pollfd ready{.fd = listener_, .events = POLLIN};
  if (poll(&ready, 1, milliseconds) <= 0) return std::nullopt;
  if (client_ >= 0) close(client_);
  client_ = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  setsockopt(client_, SOL_SOCKET, SO_RCVTIMEO, &kClientTimeout, sizeof(kClientTimeout));
  setsockopt(client_, SOL_SOCKET, SO_SNDTIMEO, &kClientTimeout, sizeof(kClientTimeout));
  std::string line;
  char bytes[4096];
  while (line.find('\n') == std::string::npos) {
    const ssize_t count = recv(client_, bytes, sizeof(bytes), 0);
    if (count <= 0 || line.size() > kLongestLine) return std::nullopt;
    line.append(bytes, static_cast<size_t>(count));
  }
  return line.substr(0, line.find('\n'));
}

void LineServer::answer(const std::string& line) {
  const std::string text = line + "\n";
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t count = send(client_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) break;
    sent += static_cast<size_t>(count);
  }
  close(client_);
  client_ = -1;
}

}  // namespace megatron
