// The engine as the server sees it: a queue of requests on one side, events on the other.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "megatron/scheduling/commands.h"
#include "megatron/scheduling/request.h"

namespace megatron {

class EngineService {
 public:
  virtual ~EngineService() = default;

  // Any thread. Never waits for a step. Events of the request may come before it returns.
  virtual Admission submit(RequestSpec spec) = 0;
  // Any thread. The request ends with kCancelled unless it has ended already.
  virtual void cancel(RequestId request) = 0;
  // Any thread. `deadline_ns`: from now.
  virtual Ticket command(EngineCommand command, int64_t deadline_ns) = 0;
  // Any thread.
  virtual EngineStats stats() const = 0;

  // Called by the engine's thread with what happened since the last call, about once a step; it
  // must not block. Set once, before the first request.
  using Listener = std::function<void(std::vector<Event>)>;
  virtual void set_listener(Listener listener) = 0;
};

}  // namespace megatron
