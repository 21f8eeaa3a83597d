#include "megatron/optimizer/whole_matrices.h"

#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

bool is_gathered(const Parameter& parameter, const ParallelGroups& groups) {
  return groups.tp.size() > 1 && is_sharded_over(parameter.placement, Axis::kTensor);
}

at::Tensor box(at::Tensor matrix, const std::vector<int64_t>& offset,
               const std::vector<int64_t>& shape) {
  for (size_t dim = 0; dim < shape.size(); ++dim)
    matrix = matrix.narrow(static_cast<int64_t>(dim), offset[dim], shape[dim]);
  return matrix;
}

void place_part(const at::Tensor& local, const at::Tensor& whole, const Parameter& parameter,
                const ParallelGroups& groups) {
  for (const ShardPiece& piece : shard_pieces(parameter, groups))
    box(whole, piece.global.offset, piece.global.shape)
        .copy_(box(local, piece.local_offset, piece.global.shape));
}

// The parts of all tensor ranks: each adds its own to zeros, and keeps the bits of its own.
at::Tensor gathered(const at::Tensor& local, const Parameter& parameter,
                    const ParallelGroups& groups) {
  at::Tensor whole = at::zeros(parameter.global_shape, local.options());
  place_part(local, whole, parameter, groups);
  groups.tp.all_reduce(whole)->wait();
  place_part(local, whole, parameter, groups);  // a sum loses the sign of a zero
  return whole;
}

void store_part(const at::Tensor& whole, const at::Tensor& local, const Parameter& parameter,
                const ParallelGroups& groups) {
  for (const ShardPiece& piece : shard_pieces(parameter, groups))
    box(local, piece.local_offset, piece.global.shape)
        .copy_(box(whole, piece.global.offset, piece.global.shape));
}

}  // namespace

MatrixUpdate whole_matrix(const FlatUpdate& flat, const Parameter& parameter,
                          const ParallelGroups& groups) {
  const bool gather = is_gathered(parameter, groups);
  const auto whole = [&](const at::Tensor& tensor) {
    const at::Tensor local = tensor.view(parameter.local_shape);
    return gather ? gathered(local, parameter, groups) : local;
  };
  MatrixUpdate matrix;
  matrix.grad = whole(flat.grad);
  matrix.master = whole(flat.master);
  for (const at::Tensor& state : flat.states) matrix.states.push_back(whole(state));
  return matrix;
}

void store_matrix(const MatrixUpdate& matrix, FlatUpdate& flat, const Parameter& parameter,
                  const ParallelGroups& groups) {
  if (is_gathered(parameter, groups)) {
    const auto store = [&](const at::Tensor& whole, const at::Tensor& local) {
      store_part(whole, local.view(parameter.local_shape), parameter, groups);
    };
    store(matrix.master, flat.master);
    for (size_t i = 0; i < flat.states.size(); ++i) store(matrix.states[i], flat.states[i]);
  }
  if (flat.value.defined()) flat.value.copy_(flat.master);
}

}  // namespace megatron
