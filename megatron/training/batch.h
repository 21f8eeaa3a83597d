// Turns micro-batches of the data loader into tensors on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/datasets/data_config.h"
#include "megatron/datasets/data_loader.h"
#include "megatron/tensor/random.h"

namespace megatron {

// Tokens of this context-parallel rank: s is the length of its part, except where a field says
// whole sequence.
struct Batch {
  at::Tensor tokens;        // [b, s] int64
  at::Tensor labels;        // [b, s] int64
  at::Tensor loss_mask;     // [b, s] fp32
  at::Tensor position_ids;  // [b, s] int64, or undefined: 0, 1, 2, ...
  // [b, s] int64 of the whole sequence: tokens attend within their document only; undefined: no
  // boundaries
  at::Tensor document_ids;
  // [b] fp32 (fp64): output of the reference model, for tasks that have one, on the last stage; see
  // task.h
  at::Tensor reference;
  TokenPositions place;
  // context-parallel group of these sequences; null: that of the mesh
  const ProcessGroup* cp = nullptr;
};

// Copies a host tensor to a GPU asynchronously, through page-locked memory; on a CPU returns it.
at::Tensor to_device(const at::Tensor& host, c10::Device device);

// Whether the data has position ids other than 0, 1, 2, ...
bool own_positions(const DataConfig& data);

// Copies micro-batches to the device: of each sequence the tokens of this context-parallel rank.
// Host memory of copies to a GPU is held until take_held() returns it; the caller frees it when the
// copies have completed.
class BatchMaker {
 public:
  // `cp` must outlive it.
  BatchMaker(c10::Device device, bool own_positions, const ProcessGroup& cp)
      : device_(device), own_positions_(own_positions), cp_(cp) {}
  Batch make(const std::shared_ptr<const MicroBatch>& source);
  std::vector<std::shared_ptr<const MicroBatch>> take_held() { return std::exchange(held_, {}); }

 private:
  c10::Device device_;
  bool own_positions_;
  const ProcessGroup& cp_;
  int64_t length_ = 0;    // length of the whole sequences of the last batch
  at::Tensor positions_;  // [s]
  std::vector<std::shared_ptr<const MicroBatch>> held_;
};

// Page-locked memory for batches that go to a GPU; the heap otherwise.
HostAllocator host_allocator(const c10::Device& device);

}  // namespace megatron
