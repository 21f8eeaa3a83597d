#include "megatron/nn/placement.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/random.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

// Note [Placement]
// A parameter says how it is laid out (shards, valid rows) and what its local gradient means
// (partial_grad, expert). Gradient reductions, norms, clipping, checkpoint boxes and initialisation
// are all derived from that description and from the groups; nothing else decides about reductions.

namespace megatron {
namespace {

// A range of one dimension that is contiguous in both the global and the local tensor.
struct Segment {
  int64_t global_offset, local_offset, length;
};

std::vector<Segment> segments_of(const Parameter& parameter, size_t dim,
                                 const ParallelGroups& groups) {
  const int64_t whole = parameter.global_shape[dim];
  for (const Shard& shard : parameter.placement.shards) {
    if (shard.dim != static_cast<int>(dim)) continue;
    const AxisPosition at = axis_position(groups, shard.axis);
    if (at.size == 1) break;
    const std::vector<int64_t> parts =
        shard.parts.empty() ? std::vector<int64_t>{whole} : shard.parts;
    std::vector<Segment> segments;
    int64_t global = 0, local = 0;
    for (int64_t part : parts) {
      const int64_t length = part / at.size;
      segments.push_back({global + at.rank * length, local, length});
      global += part;
      local += length;
    }
    return segments;
  }
  return {{0, 0, whole}};
}

// Rows from `first_row` on and columns from `column_offset` on of Init::sinusoids().
void write_sinusoids(const at::Tensor& view, int64_t first_row, int64_t columns,
                     int64_t column_offset) {
  const auto options = view.options().dtype(at::kDouble);
  const int64_t half = columns / 2;
  const at::Tensor rows = at::arange(first_row, first_row + view.size(0), options).unsqueeze(1),
                   column = at::arange(column_offset, column_offset + view.size(1), options),
                   place = at::remainder(column, static_cast<double>(half));
  const at::Tensor angles =
      rows * at::exp(place * (-std::log(10000.0) / static_cast<double>(half - 1)));
  view.copy_(at::where(column < half, at::sin(angles), at::cos(angles)));
}

// Draws a part [columns] or [rows, columns] of a tensor whose rows have `row_elements`. A part that
// is not contiguous is drawn into a temporary and copied.
void draw_rows(const Init& init, const at::Tensor& view, RandomKey key, int64_t first_row,
               int64_t row_elements, int64_t column_offset) {
  if (init.kind == Init::Kind::kFunction) {
    const at::Tensor drawn = at::empty(view.sizes(), view.options().dtype(at::kDouble));
    uniform_(drawn, init.least, init.std, key, first_row, row_elements, column_offset);
    view.copy_(init.function(drawn));
    return;
  }
  at::Tensor out = view.is_contiguous() ? view : at::empty(view.sizes(), view.options());
  if (init.kind == Init::Kind::kNormal)
    normal_(out, init.std, key, first_row, row_elements, column_offset);
  else
    uniform_(out, -init.std, init.std, key, first_row, row_elements, column_offset);
  if (!view.is_contiguous()) view.copy_(out);
}

// Draws one piece.
void draw_piece(const Parameter& parameter, const ShardPiece& piece, RandomKey key) {
  const std::vector<int64_t>&whole = parameter.global_shape, &offset = piece.global.offset;
  at::Tensor view = parameter.value;
  for (size_t d = 0; d < piece.local_offset.size(); ++d)
    view = view.narrow(static_cast<int64_t>(d), piece.local_offset[d], piece.global.shape[d]);
  MEGATRON_ASSERT(whole.size() <= 3, parameter.name, " has ", whole.size(), " dimensions");
  if (parameter.init.kind == Init::Kind::kSinusoids)
    return write_sinusoids(view, offset.at(0), whole.at(1), offset.at(1));
  if (whole.size() == 1) return draw_rows(parameter.init, view, key, offset[0], 1, 0);
  if (whole.size() == 2)
    return draw_rows(parameter.init, view, key, offset[0], whole[1], offset[1]);
  for (int64_t i = 0; i < view.size(0); ++i)
    draw_rows(parameter.init, view[i], key, (offset[0] + i) * whole[1] + offset[1], whole[2],
              offset[2]);
}

}  // namespace

std::vector<int64_t> logical_shape(const Parameter& parameter) {
  std::vector<int64_t> shape = parameter.global_shape;
  if (parameter.valid_rows >= 0) shape[0] = parameter.valid_rows;
  return shape;
}

AxisPosition axis_position(const ParallelGroups& groups, Axis axis) {
  const ProcessGroup& group = groups.group({axis});
  return {group.rank(), group.size()};
}

std::vector<ShardPiece> shard_pieces(const Parameter& parameter, const ParallelGroups& groups) {
  std::vector<ShardPiece> pieces = {{}};
  for (size_t dim = 0; dim < parameter.global_shape.size(); ++dim) {
    const int64_t limit = logical_shape(parameter)[dim];
    std::vector<ShardPiece> longer;
    for (const ShardPiece& piece : pieces) {
      for (const Segment& segment : segments_of(parameter, dim, groups)) {
        const int64_t length = std::min(segment.length, limit - segment.global_offset);
        if (length <= 0) continue;
        ShardPiece next = piece;
        next.global.offset.push_back(segment.global_offset);
        next.global.shape.push_back(length);
        next.local_offset.push_back(segment.local_offset);
        longer.push_back(std::move(next));
      }
    }
    pieces = std::move(longer);
  }
  return pieces;
}

std::vector<PlacedRun> placed_runs(const Parameter& parameter, const ParallelGroups& groups) {
  const std::vector<int64_t> whole = logical_shape(parameter);
  std::vector<PlacedRun> runs;
  for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
    const std::vector<int64_t>& shape = piece.global.shape;
    // Dimensions behind `outer` make up a run with that one, because the piece has all of them.
    size_t outer = shape.empty() ? 0 : shape.size() - 1;
    int64_t length = shape.empty() ? 1 : shape[outer];
    while (outer > 0 && shape[outer] == parameter.local_shape[outer] &&
           shape[outer] == whole[outer])
      length *= shape[--outer];
    const int64_t count = length == 0 ? 0 : piece.global.num_elements() / length;
    for (int64_t run = 0; run < count; ++run) {
      int64_t rest = run, local = 0, place = 0, local_stride = 1, stride = 1;
      for (size_t d = shape.size(); d-- > 0;) {
        const int64_t at = d < outer ? rest % shape[d] : 0;
        if (d < outer) rest /= shape[d];
        local += (piece.local_offset[d] + at) * local_stride;
        place += (piece.global.offset[d] + at) * stride;
        local_stride *= parameter.local_shape[d];
        stride *= whole[d];
      }
      runs.push_back({local, local + length, place});
    }
  }
  return runs;
}

ShardedTensor sharded_tensor(const Parameter& parameter, const ParallelGroups& groups,
                             std::string key, const at::Tensor& local) {
  ShardedTensor result;
  result.key = std::move(key);
  result.dtype = to_dtype(local.scalar_type());
  result.global_shape = logical_shape(parameter);
  result.local_shape = parameter.local_shape;
  result.pieces = shard_pieces(parameter, groups);
  if (result.pieces.empty()) {  // only vocabulary padding; no pieces would mean the whole tensor
    const std::vector<int64_t> zeros(result.global_shape.size(), 0);
    result.pieces = {{{zeros, zeros}, zeros}};
  }
  result.data = local.data_ptr();
  result.replica_id = replica_id(parameter, groups, gradient_group(parameter.placement, groups));
  return result;
}

ShardedTensor sharded_state(const at::Tensor& state, const ParallelGroups& groups,
                            std::string key) {
  Parameter whole;
  whole.local_shape = whole.global_shape = state.sizes().vec();
  return sharded_tensor(whole, groups, std::move(key), state);
}

bool is_sharded_over(const Placement& placement, Axis axis) {
  return std::any_of(placement.shards.begin(), placement.shards.end(),
                     [&](const Shard& shard) { return AxisSet{shard.axis}.contains(axis); });
}

namespace {

void initialize(Parameter& parameter, const std::string& name, int64_t seed,
                const ParallelGroups& groups) {
  const at::NoGradGuard no_grad;
  MEGATRON_ASSERT(parameter.value.sizes() == at::IntArrayRef(parameter.local_shape), name,
                  " has no memory");
  parameter.value.zero_();
  if (parameter.init.kind == Init::Kind::kZero) return;
  if (parameter.init.kind == Init::Kind::kOne) {
    parameter.value.fill_(1.0);
    return;
  }
  const RandomKey key = random_key(seed, "init " + name);
  for (const ShardPiece& piece : shard_pieces(parameter, groups)) draw_piece(parameter, piece, key);
}

}  // namespace

void initialize_parameter(Parameter& parameter, int64_t seed, const ParallelGroups& groups) {
  MEGATRON_ASSERT(!parameter.name.empty(), "a parameter is initialised by its name");
  initialize(parameter, parameter.name, seed, groups);
}

void initialize_parameters(Module& module, int64_t seed, const ParallelGroups& groups) {
  module.visit([&](const std::string& name, Parameter& parameter) {
    initialize(parameter, name, seed, groups);
  });
}

}  // namespace megatron
