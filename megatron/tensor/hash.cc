#include "megatron/tensor/hash.h"

#include <cstring>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/kernels/hash.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/torch.h"

namespace megatron {

TensorHashes::TensorHashes(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) return;
  std::vector<HashPiece> pieces;
  for (const at::Tensor& tensor : tensors_) {
    MEGATRON_ASSERT(tensor.is_contiguous() && tensor.device() == tensors_.front().device(),
                    "hashes are of contiguous tensors on one device");
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    pieces.push_back({tensor.const_data_ptr(), bytes, num_blocks_});
    num_blocks_ += (bytes + kHashBlockBytes - 1) / kHashBlockBytes;
  }
  at::Tensor host = at::empty({static_cast<int64_t>(pieces.size() * sizeof(HashPiece))}, at::kByte);
  std::memcpy(host.data_ptr(), pieces.data(), host.nbytes());
  pieces_ = host.to(tensors_.front().device());
}

void TensorHashes::compute(at::Tensor hashes) const {
  MEGATRON_ASSERT(
      hashes.scalar_type() == at::kLong && hashes.is_contiguous() && hashes.numel() == size(),
      "hashes of ", size(), " tensors into ", hashes.toString());
  hashes.zero_();
  if (size() == 0) return;
  HashPieces work;
  work.pieces = static_cast<const HashPiece*>(pieces_.const_data_ptr());
  work.num_pieces = size();
  work.num_blocks = num_blocks_;
  work.hashes = reinterpret_cast<uint64_t*>(hashes.data_ptr<int64_t>());
  launch(
      tensors_.front(), num_blocks_, kHashBlockBytes,
      [&](int64_t begin, int64_t end) { hash_pieces_cpu(work, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(hash_pieces_cuda(work, stream)); });
}

}  // namespace megatron
