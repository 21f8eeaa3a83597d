// Ranks as threads of one process, for tests and for `prove` without GPUs. CPU tensors only.
#pragma once

#include <functional>
#include <memory>

#include "megatron/comm/process_group.h"

namespace megatron {

// Runs body(world) on `size` threads; rethrows the first error. If a rank throws, the waits of all
// others end with an error, and each wait has a deadline, so that a lost rank never hangs the
// process.
void run_ranks(int size, const std::function<void(const std::shared_ptr<Backend>&)>& body,
               double timeout_seconds = 60.0);

}  // namespace megatron
