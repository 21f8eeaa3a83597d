#include "megatron/comm/detail/machine_id.h"

#include <unistd.h>

#include <fstream>

#include "megatron/base/check.h"
#include "megatron/base/process.h"

namespace megatron {

std::string machine_id() {
  char ns[64] = "";
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const ssize_t length = readlink("/proc/self/ns/pid", ns, sizeof ns - 1);
  return cat(boot, "/", std::string(ns, length > 0 ? static_cast<size_t>(length) : 0), "/",
             machine_name());
}

}  // namespace megatron
