// Hashes of the bytes of tensors where they lie; see kernels/hash.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megatron {

// Hashes the same tensors again and again, all of them in one launch. Keeps them.
class TensorHashes {
 public:
  // Contiguous tensors on one device, of any types and sizes.
  explicit TensorHashes(std::vector<at::Tensor> tensors);

  int64_t size() const { return static_cast<int64_t>(tensors_.size()); }
  // hashes [size()] int64 on that device: the hash of each tensor as it is now, whose bits are
  // those of the unsigned number. On the current stream.
  void compute(at::Tensor hashes) const;

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor pieces_;  // bytes of HashPiece, where the tensors lie
  int64_t num_blocks_ = 0;
};

}  // namespace megatron
