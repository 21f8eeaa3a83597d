// Optimizer states in host memory, and their update there.
//
// A run is a range of elements whose master weights and moments lie in pinned host memory. In a
// step its gradients are copied down, the CPU updates master weights and moments, and the new
// values are copied up; chunks of these three follow each other like stages of a pipeline, so the
// step takes about as long as the slowest of them.
//
// Why the update is computed on the host, and states are not streamed through the device: over the
// bus it moves a quarter of the bytes (per parameter in bf16 with fp32 states 4 down and 2 up
// instead of 12 each way), it needs no device memory, and its kernel is the one that the CPU
// backend is tested with. Either way host memory is the limit, with some 36 bytes per parameter
// here and 24 there, so it wants cores enough to reach its bandwidth.
//
// Not thread safe.
#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/optimizer_ops.h"

namespace megatron {

class HostStates {
 public:
  // The types of the states in host memory. Without masters the master weights have the type of the
  // values.
  struct Types {
    at::ScalarType master, exp_avg;
    std::optional<at::ScalarType> exp_avg_sq;  // none: SGD
  };

  // Pieces have about that many elements: 64 MiB of gradients.
  explicit HostStates(c10::Device device, int64_t piece_elements = int64_t{1} << 24)
      : piece_elements_(piece_elements), copies_(device) {}

  // Adds the run of these values and gradients, [n] on the device, views that stay. Blocks index
  // the run. Moments are zero. Elements between blocks (padding) keep what they were when values
  // were loaded.
  void add(const at::Tensor& values, const at::Tensor& grads, const Types& types,
           std::vector<UpdateBlock> blocks);

  size_t size() const { return runs_.size(); }
  // master, exp_avg, exp_avg_sq of a run, [n] in host memory.
  const FlatUpdate& states(size_t run) const { return runs_[run].states; }

  // Of the master weights of a run, as blocks count them: [1] fp64 in host memory.
  at::Tensor sum_of_squared_masters(size_t run) const;

  // The gradients are final: copies begin.
  void begin();
  // Updates by `update`, which is called with pieces in host memory and with the record of the
  // step, read from the device. Waits for the device. Afterwards the computing stream finds the new
  // values.
  void step(const at::Tensor& state,
            const std::function<void(FlatUpdate& piece, const at::Tensor& state)>& update);

  // Host copies from the values, after these were loaded: those that are copied up, and master
  // weights if these are the values or with `masters_too`.
  void load_values(bool masters_too);
  // Values from the master weights.
  void store_values();

 private:
  struct Piece {
    FlatUpdate update;       // in host memory; the gradient is set when it has been copied
    at::Tensor grads;        // on the device
    at::Tensor values;       // on the device
    at::Tensor host_values;  // what is copied up: update.value, or update.master
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
  std::vector<at::Tensor> buffers_;        // gradients on their way, used in turn
  std::vector<HostCopies::Mark> arrived_;  // by buffer
  HostCopies::Mark values_stored_;         // of the step before
  at::Tensor host_state_;
};

}  // namespace megatron
