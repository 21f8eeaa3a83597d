// Optimizer states in host memory, and their update there.
//
// A run is a range of elements whose master weights and moments are in pinned host memory. In a
// step its gradients are copied to the host, the CPU updates master weights and moments, and the
// new values are copied to the device. These three are pipelined over pieces of the run, so the
// step takes about as long as the slowest of them.
//
// Why the update runs on the host instead of streaming states through the device: it moves a
// quarter of the bytes over the bus (per bf16 parameter with fp32 states 4 down and 2 up, instead
// of 12 each way), it needs no device memory, and its kernel is the one that the CPU backend is
// tested with. Either way host memory bandwidth is the limit, with some 36 bytes per parameter here
// and 24 there, so it needs enough cores to reach it.
//
// Not thread safe.
#pragma once

#include <functional>
#include <vector>

#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/optimizer_ops.h"

namespace megatron {

class HostStates {
 public:
  // Types of the states in host memory. If the optimizer keeps no separate master weights, `master`
  // is the type of the values.
  struct Types {
    at::ScalarType master;
    std::vector<at::ScalarType> states;  // of the update rule, in its order
  };

  // `piece_elements`: approximate size of a piece; by default 64 MiB of gradients.
  explicit HostStates(c10::Device device, int64_t piece_elements = int64_t{1} << 24)
      : piece_elements_(piece_elements), copies_(device) {}

  // Adds a run for these values and gradients, [n] on the device, views that must stay valid.
  // Blocks index into the run. Moments start at zero. Elements between blocks (padding) keep the
  // values that they had when values were loaded.
  void add(const at::Tensor& values, const at::Tensor& grads, const Types& types,
           std::vector<UpdateBlock> blocks);

  size_t size() const { return runs_.size(); }
  // Master weights and states of a run, [n] in host memory.
  const FlatUpdate& states(size_t run) const { return runs_[run].states; }

  // Squared norm of a run's master weights, over its blocks: [1] fp64 in host memory.
  at::Tensor sum_of_squared_masters(size_t run) const;

  // Call when the gradients are final: starts to copy them.
  void begin();
  // Runs `update` on each piece in host memory, with the record of the step read from the device.
  // Synchronises with the device. Afterwards the new values are available to the compute stream.
  void step(const at::Tensor& state,
            const std::function<void(FlatUpdate& piece, const at::Tensor& state)>& update);

  // Call after values were loaded: renews their host copies, and the master weights if these are
  // the values or with `masters_too`.
  void load_values(bool masters_too);

 private:
  struct Piece {
    FlatUpdate update;       // in host memory; grad is set once it has been copied
    at::Tensor grads;        // on the device
    at::Tensor values;       // on the device
    at::Tensor host_values;  // what is copied to the device: update.value, or update.master
  };
  struct Run {
    FlatUpdate states;
    at::Tensor values;
    size_t first_piece = 0, last_piece = 0;
  };
  void copy_grads(size_t piece);

  const int64_t piece_elements_;
  HostCopies copies_;
  std::vector<Run> runs_;
  std::vector<Piece> pieces_;
  std::vector<at::Tensor> buffers_;        // gradients in transfer, used in turn
  std::vector<HostCopies::Mark> arrived_;  // by buffer
  HostCopies::Mark values_stored_;         // of the previous step
  at::Tensor host_state_;
};

}  // namespace megatron
