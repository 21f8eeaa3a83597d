#include "tools/support/local_ranks.h"

#include <arpa/inet.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "megatron/base/check.h"

namespace megatron {
namespace {

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof(address);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  close(fd);
  MEGATRON_CHECK(bound, "no port on the loopback address is free");
  return ntohs(address.sin_port);
}

pid_t start_rank(std::vector<char*>& arguments) {
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  pid_t process = 0;
  const int error =
      posix_spawn(&process, "/proc/self/exe", nullptr, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  MEGATRON_CHECK(error == 0, "a rank cannot be started: error ", error);
  return process;
}

}  // namespace

int run_local_ranks(int count, int argc, char** argv) {
  sigset_t waited;
  sigemptyset(&waited);
  for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&waited, number);
  sigprocmask(SIG_BLOCK, &waited, nullptr);

  char program[] = "megatron";
  std::vector<char*> arguments = {program};
  arguments.insert(arguments.end(), argv, argv + argc);
  arguments.push_back(nullptr);
  const auto set = [](const char* name, int value) {
    setenv(name, std::to_string(value).c_str(), /*overwrite=*/1);
  };
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  set("MASTER_PORT", free_port());
  set("WORLD_SIZE", count);
  set("LOCAL_WORLD_SIZE", count);
  std::set<pid_t> running;
  for (int rank = 0; rank < count; ++rank) {
    set("RANK", rank);
    set("LOCAL_RANK", rank);
    running.insert(start_rank(arguments));
  }

  int exit_code = 0;
  while (!running.empty()) {
    const int number = sigwaitinfo(&waited, nullptr);
    if (number == SIGTERM || number == SIGINT)
      for (const pid_t process : running) kill(process, number);
    int status = 0;
    for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
      running.erase(ended);
      const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (exit_code == 0) exit_code = code;
    }
  }
  return exit_code;
}

}  // namespace megatron
