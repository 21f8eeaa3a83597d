#include "megatron/base/process.h"

#include <signal.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "megatron/base/check.h"

namespace megatron {

std::string machine_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && *name != '\0' ? name : "localhost";
}

std::string host_name() {
  std::string host = machine_name();
  for (char& c : host)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.') c = '_';
  return host;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

uint64_t process_start(int64_t pid) {
  std::ifstream in(cat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t close = text.rfind(')');  // the command's name may contain any character
  if (close == std::string::npos) return 0;
  std::istringstream fields(text.substr(close + 1));
  std::string word;
  for (int field = 3; field <= 22; ++field)
    if (!(fields >> word)) return 0;
  return std::strtoull(word.c_str(), nullptr, 10);
}

bool process_is_alive(int64_t pid, uint64_t start) {
  if (pid <= 0) return false;
  const bool exists = ::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM;
  return exists && process_start(pid) == start;
}

}  // namespace megatron
