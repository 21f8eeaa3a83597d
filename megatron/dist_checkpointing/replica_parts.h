// Divides reading and writing among ranks that hold the same tensors, so that each byte is
// transferred once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace megatron {

struct TensorSize {
  int64_t elements = 0;
  int64_t element_bytes = 1;
};

// Elements [begin, end) of a tensor, assigned to one replica.
struct ReplicaPart {
  size_t tensor = 0;  // index in the list
  int replica = 0;
  int64_t begin = 0, end = 0;
  bool operator==(const ReplicaPart&) const = default;
};

// The concatenation of the tensors is cut into `replicas` ranges of equal bytes, rounded to
// elements: parts of a large tensor or many small ones. In the order of tensors and elements; every
// element is in one part, a tensor without elements in one empty part of replica 0.
std::vector<ReplicaPart> divide_among_replicas(std::span<const TensorSize> tensors, int replicas);

}  // namespace megatron
