// The thread that owns an engine, as the server sees it.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

#include "megatron/inference/engine.h"
#include "megatron/serving/service.h"

namespace megatron {

class EngineThread final : public EngineService {
 public:
  // The engine must outlive it, and no other thread may call its step().
  explicit EngineThread(Engine& engine) : engine_(engine) {}
  ~EngineThread() override;  // stop()

  // Begins to step; after set_listener(). An engine that has failed or stopped still answers.
  void start();
  // Ends the thread; requests in flight get no more events.
  void stop();
  // The job of the ranks has failed; from now on stats() says so, though the thread may be stuck in
  // a step. Any thread.
  void fail(const std::string& message);

  Admission submit(RequestSpec spec) override { return engine_.submit(std::move(spec)); }
  void cancel(RequestId request) override { engine_.cancel(request); }
  Ticket command(EngineCommand command, int64_t deadline_ns) override {
    return engine_.command(std::move(command), deadline_ns);
  }
  EngineStats stats() const override;
  void set_listener(Listener listener) override { listener_ = std::move(listener); }

 private:
  void run();
  void tell();

  Engine& engine_;
  Listener listener_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::string failure_;  // of fail()
};

}  // namespace megatron
