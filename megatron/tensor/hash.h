// Hashes of tensors' bytes, computed on their device; see kernels/hash.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megatron {

// Hashes a fixed set of tensors repeatedly, all in one launch. Keeps them alive.
class TensorHashes {
 public:
  // Contiguous tensors on one device, of any types and sizes.
  explicit TensorHashes(std::vector<at::Tensor> tensors);

  int64_t size() const { return static_cast<int64_t>(tensors_.size()); }
  // hashes [size()] int64 on that device: the current hash of each tensor, as the bits of an
  // unsigned number. On the current stream.
  void compute(at::Tensor hashes) const;

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor pieces_;  // bytes of HashPiece, on the tensors' device
  int64_t num_blocks_ = 0;
};

}  // namespace megatron
