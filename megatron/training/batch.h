// From micro-batches of the data loader to tensors on the device.
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

// Tokens of this context-parallel rank: s is the length of its part. The tensors of a whole
// sequence say so.
struct Batch {
  at::Tensor tokens;        // [b, s] int64
  at::Tensor labels;        // [b, s] int64
  at::Tensor loss_mask;     // [b, s] fp32
  at::Tensor position_ids;  // [b, s] int64, or undefined: 0, 1, 2, ...
  // [b, s] int64 of the whole sequences: tokens attend within their document; undefined: to all
  at::Tensor document_ids;
  // [b] fp32 (fp64), of a task with a reference model, on the last stage: see task.h
  at::Tensor reference;
  TokenPositions place;
  const ProcessGroup* cp = nullptr;  // the ranks that hold these sequences; null: those of the mesh
};

// A tensor of the host on the device, without waiting for it, which a copy from ordinary memory
// does.
at::Tensor to_device(const at::Tensor& host, c10::Device device);

// Whether the data carries position ids that do not simply count up.
bool own_positions(const DataConfig& data);

// Copies micro-batches to the device: of each sequence the tokens of this context-parallel rank.
// The host memory of what was copied to a GPU is held until take_held() hands it out; drop it when
// the copies have ended.
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
  int64_t length_ = 0;    // of the whole sequences of the last batch
  at::Tensor positions_;  // [s]
  std::vector<std::shared_ptr<const MicroBatch>> held_;
};

// Page-locked memory for batches that go to a GPU; the heap otherwise.
HostAllocator host_allocator(const c10::Device& device);

}  // namespace megatron
