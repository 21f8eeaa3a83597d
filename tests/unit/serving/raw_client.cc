#include "raw_client.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/serving/http/http_parser.h"

namespace megatron {

RawClient::RawClient(int port, int receive_buffer) {
  socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (receive_buffer > 0)
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
  const int on = 1;
  ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  MEGATRON_CHECK(
      ::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0,
      "cannot connect to port ", port);
}

RawClient::~RawClient() { close(); }

bool RawClient::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool RawClient::read_some(std::string& out, double seconds, size_t most) {
  pollfd waiting{socket_, POLLIN, 0};
  if (::poll(&waiting, 1, static_cast<int>(std::ceil(seconds * 1e3))) <= 0) return true;
  std::string buffer(most, '\0');
  const ssize_t bytes = ::recv(socket_, buffer.data(), buffer.size(), 0);
  if (bytes <= 0) return false;
  out.append(buffer, 0, static_cast<size_t>(bytes));
  return true;
}

RawResponse RawClient::response(double seconds) {
  RawResponse response;
  HttpResponseParser parser([&](std::string_view piece) { response.body += piece; });
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!parser.done()) {
    parser.advance(pending_);
    if (parser.done()) break;
    const double left =
        std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count();
    if (left <= 0) break;
    if (read_some(pending_, left)) continue;
    if (parser.header_done()) {
      try {
        parser.finish();
      } catch (const Error&) {
      }
    }
    break;
  }
  if (!parser.header_done()) return response;
  response.status = parser.status();
  response.headers = parser.headers();
  response.complete = parser.done();
  return response;
}

bool RawClient::closed_within(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const double left =
        std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count();
    if (left <= 0) return false;
    std::string dropped;
    if (!read_some(dropped, left)) return true;
  }
}

void RawClient::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

void RawClient::reset() {
  const linger at_once{1, 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  close();
}

void RawClient::half_close() { ::shutdown(socket_, SHUT_WR); }

std::string post_request(std::string_view path, std::string_view body, std::string_view more) {
  return cat("POST ", path, " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n",
             "Content-Length: ", body.size(), "\r\n", more, "\r\n", body);
}

std::string get_request(std::string_view path, std::string_view more) {
  return cat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n", more, "\r\n");
}

}  // namespace megatron
