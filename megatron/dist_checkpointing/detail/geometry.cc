#include "megatron/dist_checkpointing/detail/geometry.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {
namespace {

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

}  // namespace

std::string shape_string(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t d = 0; d < shape.size(); ++d) out += (d ? ", " : "") + std::to_string(shape[d]);
  return out + "]";
}

int64_t checked_num_elements(const std::vector<int64_t>& shape, const std::string& what) {
  constexpr int64_t kLimit = int64_t{1} << 59;
  int64_t count = 1;
  bool zero = false;
  for (int64_t extent : shape) {
    MEGATRON_CHECK(extent >= 0, what, " has shape ", shape_string(shape),
                   "; extents are at least 0");
    zero = zero || extent == 0;
    if (extent == 0) continue;
    MEGATRON_CHECK(count <= kLimit / extent, what, " has shape ", shape_string(shape),
                   ", which is too large");
    count *= extent;
  }
  return zero ? 0 : count;
}

bool is_inside(const Box& box, const std::vector<int64_t>& shape) {
  if (box.offset.size() != shape.size() || box.shape.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d)
    if (box.offset[d] < 0 || box.shape[d] < 0 || box.shape[d] > shape[d] ||
        box.offset[d] > shape[d] - box.shape[d])
      return false;
  return true;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common;
  for (size_t d = 0; d < a.shape.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    if (begin >= end) return std::nullopt;
    common.offset.push_back(begin);
    common.shape.push_back(end - begin);
  }
  return common;
}

int64_t count_before(const std::vector<int64_t>& local_shape,
                     const std::vector<int64_t>& local_offset,
                     const std::vector<int64_t>& box_shape, int64_t position) {
  const std::vector<int64_t> local = strides_of(local_shape), inner = strides_of(box_shape);
  int64_t total = 1;
  for (int64_t extent : box_shape) total *= extent;
  if (total == 0 || position <= 0) return 0;
  int64_t count = 0;
  for (size_t d = 0; d < local_shape.size(); ++d) {
    // Counts rows of this dimension that lie wholly before the position, then continues inside the
    // row that contains it.
    const int64_t coordinate = position / local[d] - local_offset[d];
    position %= local[d];
    if (coordinate < 0) return count;
    if (coordinate >= box_shape[d]) return count + box_shape[d] * inner[d];
    count += coordinate * inner[d];
  }
  return local_shape.empty() ? total : count;
}

Overlap::Overlap(const Box& box, int64_t flat_begin, int64_t flat_end,
                 const std::vector<int64_t>& local_shape, const ShardPiece& piece,
                 int64_t local_begin, int64_t local_end)
    : flat_begin_(flat_begin),
      flat_end_(flat_end),
      local_begin_(local_begin),
      local_end_(local_end) {
  const std::optional<Box> common = intersect(box, piece.global);
  if (!common || flat_begin >= flat_end || local_begin >= local_end) return;
  const std::vector<int64_t> box_strides = strides_of(box.shape),
                             local_strides = strides_of(local_shape);
  const size_t dims = box.shape.size();
  for (size_t d = 0; d < dims; ++d) {
    box_base_ += (common->offset[d] - box.offset[d]) * box_strides[d];
    local_base_ +=
        (common->offset[d] - piece.global.offset[d] + piece.local_offset[d]) * local_strides[d];
  }
  // Inner dimensions that are complete in both tensors extend the run.
  size_t outer = dims;
  bool whole = true;
  while (outer > 0 && whole) {
    --outer;
    run_length_ *= common->shape[outer];
    whole = common->shape[outer] == box.shape[outer] && common->shape[outer] == local_shape[outer];
  }
  num_runs_ = 1;
  for (size_t d = 0; d < outer; ++d) {
    extents_.push_back(common->shape[d]);
    box_strides_.push_back(box_strides[d]);
    local_strides_.push_back(local_strides[d]);
    num_runs_ *= common->shape[d];
  }
  if (first() >= last()) num_runs_ = 0;
}

void Overlap::position(int64_t run, int64_t& box_flat, int64_t& local_flat) const {
  box_flat = box_base_;
  local_flat = local_base_;
  for (size_t d = extents_.size(); d-- > 0;) {
    const int64_t coordinate = run % extents_[d];
    run /= extents_[d];
    box_flat += coordinate * box_strides_[d];
    local_flat += coordinate * local_strides_[d];
  }
}

void Overlap::for_each_run(int64_t begin, int64_t end, const Visit& visit) const {
  begin = std::max(begin, flat_begin_);
  end = std::min(end, flat_end_);
  int64_t low = 0, high = num_runs_;
  int64_t box_flat = 0, local_flat = 0;
  while (low < high) {  // the first run that ends after both begins; positions rise with the run
    const int64_t middle = low + (high - low) / 2;
    position(middle, box_flat, local_flat);
    const bool before = box_flat + run_length_ <= begin || local_flat + run_length_ <= local_begin_;
    if (before)
      low = middle + 1;
    else
      high = middle;
  }
  for (int64_t run = low; run < num_runs_; ++run) {
    position(run, box_flat, local_flat);
    if (box_flat >= end || local_flat >= local_end_) return;
    const int64_t skip = std::max({int64_t{0}, begin - box_flat, local_begin_ - local_flat});
    const int64_t stop = std::min({run_length_, end - box_flat, local_end_ - local_flat});
    if (skip < stop) visit(box_flat + skip, local_flat + skip, stop - skip);
  }
}

int64_t Overlap::first() const { return std::max(box_base_, flat_begin_); }

int64_t Overlap::last() const {
  if (num_runs_ == 0) return 0;
  int64_t box_flat = 0, local_flat = 0;
  position(num_runs_ - 1, box_flat, local_flat);
  return std::min(box_flat + run_length_, flat_end_);
}

int64_t Overlap::count() const {
  int64_t total = 0;
  for_each_run(flat_begin_, flat_end_, [&](int64_t, int64_t, int64_t count) { total += count; });
  return total;
}

ShardedTensor normalized(const ShardedTensor& tensor, bool needs_memory) {
  ShardedTensor out = tensor;
  MEGATRON_CHECK(!out.key.empty(), "a tensor of shape ", shape_string(out.global_shape),
                 " has no name");
  checked_num_elements(out.global_shape, out.key);
  if (out.pieces.empty()) {
    if (out.local_shape.empty()) out.local_shape = out.global_shape;
    MEGATRON_CHECK(out.local_shape == out.global_shape, out.key, " has local shape ",
                   shape_string(out.local_shape), " and global shape ",
                   shape_string(out.global_shape), ", and no pieces say how they relate");
    const std::vector<int64_t> origin(out.global_shape.size(), 0);
    out.pieces = {{{origin, out.global_shape}, origin}};
  }
  const int64_t local_elements = checked_num_elements(out.local_shape, out.key);
  for (const ShardPiece& piece : out.pieces) {
    MEGATRON_CHECK(is_inside(piece.global, out.global_shape), out.key, ": the piece at ",
                   shape_string(piece.global.offset), " of shape ",
                   shape_string(piece.global.shape), " lies outside the global shape ",
                   shape_string(out.global_shape));
    MEGATRON_CHECK(is_inside({piece.local_offset, piece.global.shape}, out.local_shape), out.key,
                   ": the piece of shape ", shape_string(piece.global.shape), " at ",
                   shape_string(piece.local_offset), " lies outside the local shape ",
                   shape_string(out.local_shape));
  }
  if (out.flat_end < 0) out.flat_end = local_elements;
  MEGATRON_CHECK(
      out.flat_begin >= 0 && out.flat_begin <= out.flat_end && out.flat_end <= local_elements,
      out.key, ": the flat range ", out.flat_begin, " to ", out.flat_end, " lies outside the ",
      local_elements, " elements of the local tensor");
  MEGATRON_CHECK(out.data != nullptr || out.flat_begin == out.flat_end || !needs_memory, out.key,
                 " has no memory");
  return out;
}

}  // namespace megatron
