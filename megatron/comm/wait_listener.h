// Tells a listener when a rank waits for its peers.
#pragma once

#include <memory>

#include "megatron/comm/process_group.h"

namespace megatron {

// Called on the thread that issues the group's calls.
class WaitListener {
 public:
  virtual ~WaitListener() = default;
  virtual void begin_wait() = 0;
  virtual void end_wait() = 0;
};

// Wraps `world` so that begin_wait() and end_wait() bracket the waits for calls of this group and
// of every group made from it, barriers, and, for CPU tensors, the calls themselves, which may
// block. On a GPU they bracket waits of the current stream, not of the thread.
std::shared_ptr<Backend> watch_waits(std::shared_ptr<Backend> world,
                                     std::shared_ptr<WaitListener> listener);

}  // namespace megatron
