// Tells a listener where a rank waits for its peers.
#pragma once

#include <memory>

#include "megatron/comm/process_group.h"

namespace megatron {

// Called on the thread that makes the calls of a group.
class WaitListener {
 public:
  virtual ~WaitListener() = default;
  virtual void begin_wait() = 0;
  virtual void end_wait() = 0;
};

// `world` with a listener: between begin_wait() and end_wait() lie the waits for the calls of this
// group and of every group made from it, barriers, and, for tensors on a CPU, the calls themselves,
// which may block. On a GPU the current stream waits in between, not the thread.
std::shared_ptr<Backend> watch_waits(std::shared_ptr<Backend> world,
                                     std::shared_ptr<WaitListener> listener);

}  // namespace megatron
