#include "megatron/dist_checkpointing/replica_parts.h"

#include <algorithm>

namespace megatron {

std::vector<ReplicaPart> divide_among_replicas(std::span<const TensorSize> tensors, int replicas) {
  int64_t total = 0;
  for (const TensorSize& tensor : tensors) total += tensor.elements * tensor.element_bytes;
  // Where a replica's part begins, computed without the product of bytes and ranks, which may
  // overflow.
  const auto cut = [&](int replica) {
    return total / replicas * replica + total % replicas * replica / replicas;
  };
  std::vector<ReplicaPart> parts;
  int replica = 0;
  int64_t start = 0;  // start of the tensor, in bytes
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [elements, bytes] = tensors[i];
    if (elements == 0) parts.push_back({i, 0, 0, 0});
    for (int64_t begin = 0; begin < elements;) {
      // The first element that begins at or after the next cut belongs to the next replica.
      while (replica + 1 < replicas && start + begin * bytes >= cut(replica + 1)) ++replica;
      int64_t end = elements;
      if (replica + 1 < replicas)
        end = std::min(elements, (cut(replica + 1) - start + bytes - 1) / bytes);
      parts.push_back({i, replica, begin, end});
      begin = end;
    }
    start += elements * bytes;
  }
  return parts;
}

}  // namespace megatron
