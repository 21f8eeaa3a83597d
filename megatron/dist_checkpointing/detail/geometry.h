// Intersections of boxes of global tensors with boxes of local ones, as contiguous runs of
// elements.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

std::string shape_string(const std::vector<int64_t>& shape);  // "[4096, 1024]"

// Number of elements; throws Error when an extent is negative or the product does not fit. `what`
// names the tensor.
int64_t checked_num_elements(const std::vector<int64_t>& shape, const std::string& what);

// Whether the box lies inside a tensor of this shape.
bool is_inside(const Box& box, const std::vector<int64_t>& shape);

// The common part of two boxes of the same tensor; nothing when it is empty.
std::optional<Box> intersect(const Box& a, const Box& b);

// Number of elements of the box at local_offset in a local tensor whose flat index is below
// `position`. Flat indices increase with the box's own row-major order, so a flat range of the
// local tensor is one flat range of the box.
int64_t count_before(const std::vector<int64_t>& local_shape,
                     const std::vector<int64_t>& local_offset,
                     const std::vector<int64_t>& box_shape, int64_t position);

// The elements shared by a flat range of a row-major box and a flat range of a local tensor that
// holds a piece of the same global tensor, as runs that are contiguous in both.
class Overlap {
 public:
  using Visit = std::function<void(int64_t box_flat, int64_t local_flat, int64_t count)>;

  // An empty overlap if nothing is shared.
  Overlap(const Box& box, int64_t flat_begin, int64_t flat_end,
          const std::vector<int64_t>& local_shape, const ShardPiece& piece, int64_t local_begin,
          int64_t local_end);

  bool empty() const { return num_runs_ == 0; }
  // Bounds of the shared elements in the box's flat order; the range between may have gaps.
  int64_t first() const;
  int64_t last() const;  // past the end
  // Visits the runs inside [begin, end) of the box's flat order, in increasing order.
  void for_each_run(int64_t begin, int64_t end, const Visit& visit) const;
  int64_t count() const;

 private:
  void position(int64_t run, int64_t& box_flat, int64_t& local_flat) const;
  std::vector<int64_t> extents_, box_strides_, local_strides_;  // for the dimensions outside a run
  int64_t run_length_ = 1, num_runs_ = 0;
  int64_t box_base_ = 0, local_base_ = 0;
  int64_t flat_begin_ = 0, flat_end_ = 0, local_begin_ = 0, local_end_ = 0;
};

// The tensor with defaults filled in for pieces, local shape and flat range. Throws Error that
// names the key if they contradict each other, or if it has elements but lacks required memory.
ShardedTensor normalized(const ShardedTensor& tensor, bool needs_memory = true);

}  // namespace megatron
