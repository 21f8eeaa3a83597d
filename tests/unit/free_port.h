// Ports for tests that run side by side, as tests/cli/ports.py has them.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <random>
#include <stdexcept>
#include <string>

namespace megatron {

// A TCP port that no test of this machine gets a second time while this process lives, and that
// nobody listens on. It is claimed by an abstract Unix socket, which stays open until the process
// ends, and lies below the ports that outgoing connections take. Throws std::runtime_error.
inline int free_port() {
  constexpr int kFirst = 20000, kPorts = 12000;
  std::random_device random;
  const int start = static_cast<int>(random() % kPorts);
  for (int i = 0; i < kPorts; ++i) {
    const int port = kFirst + (start + i) % kPorts;
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string text = "megatron_test_port_" + std::to_string(port);
    text.copy(name.sun_path + 1, text.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    const int claim = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool free = bind(claim, reinterpret_cast<sockaddr*>(&name), size) == 0 &&
                      bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(listener);
    if (free) return port;
    close(claim);
  }
  throw std::runtime_error("no port from 20000 to 31999 is free");
}

}  // namespace megatron
