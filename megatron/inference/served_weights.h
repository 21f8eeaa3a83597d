// The weights of a model that is served: exchanged in place for others, and held in host memory or
// nowhere while the engine is suspended.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "megatron/nn/forward_parameter_store.h"
#include "megatron/scheduling/commands.h"

namespace megatron {

// Reads the weights of a source for the model's own segment, into host memory and in the model's
// types: parameters in the order of Module::visit, then state in that of visit_state. Called on
// any thread. Throws Error if the source does not fit the model.
using WeightReader = std::function<std::vector<at::Tensor>(const std::string& source)>;

// No forward may run during a call, but of a thread that hold()s them. Otherwise not thread safe.
class ServedWeights {
 public:
  // `store` holds the weights on their device and outlives the object. `source`: where they came
  // from, for suspensions that drop them; empty: dropping is refused.
  ServedWeights(ForwardParameterStore& store, WeightReader read, std::string source,
                int64_t version = 0);

  int64_t version() const { return version_; }
  at::Device device() const { return store_.device(); }

  // Any thread: while it has the lock, weights stay what and where they are. A lock that is not
  // owned: they are not on the device.
  std::unique_lock<std::mutex> hold();

  // Called from now on before they may move on the device, while no thread holds them.
  void before_moves(std::function<void()> call);

  // Starts to read other weights next to the current ones.
  void stage(const std::string& source);
  // Why staging failed, or ""; null: not known after `wait_ns`. A stage that fails leaves nothing.
  std::optional<std::string> staged(int64_t wait_ns);
  // The staged weights become the current ones, wherever those are. Throws Error without.
  void commit(int64_t version);
  void discard();

  // Frees the device's memory, but for kKeep. Throws Error, and changes nothing, if weights cannot
  // be dropped.
  void suspend(MemoryLevel level);
  // Back on the device; reads dropped weights again. Nothing to do unless suspended.
  void resume();

 private:
  ForwardParameterStore& store_;
  const WeightReader read_;
  std::string source_;
  int64_t version_;
  MemoryLevel level_ = MemoryLevel::kKeep;
  std::vector<at::Tensor> parked_;  // kOffload: what the store gave
  std::future<std::vector<at::Tensor>> reading_;
  std::string staged_source_;
  std::vector<at::Tensor> staged_;
  std::mutex held_;
  std::function<void()> before_moves_;
  bool is_committed_ = false;  // while suspended: the staged ones are the current ones
};

}  // namespace megatron
