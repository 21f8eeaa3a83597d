#include "megatron/training/experts/upcycling.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr std::string_view kExperts = ".mlp.experts.", kRouter = ".mlp.router.",
                           kNorm = ".pre_mlp_layernorm.";

// The name with one part replaced; nothing if it does not have that part.
std::optional<std::string> with(const std::string& name, std::string_view part,
                                std::string_view replacement) {
  const size_t at = name.find(part);
  if (at == std::string::npos) return std::nullopt;
  return std::string(name).replace(at, part.size(), replacement);
}

bool is_of_fc1(std::string_view name) { return name.find(".linear_fc1.") != name.npos; }

}  // namespace

Upcycling::Upcycling(const TransformerConfig& config, int64_t granularity)
    : granularity_(granularity), experts_(upcycled_experts(config, granularity)) {}

// Experts and their rows become one dimension of the local tensor: each of its pieces is rows and
// columns of the dense matrix, or elements of its bias, which several experts may share.
ShardedTensor Upcycling::dense_part(const ShardedTensor& experts) const {
  ShardedTensor dense = experts;
  dense.key = *with(experts.key, kExperts, ".mlp.");
  const bool fc1 = is_of_fc1(experts.key), bias = dense.key.ends_with(".bias");
  const auto merge = [](std::vector<int64_t>& shape, int64_t rows) {
    shape.erase(shape.begin());
    shape[0] = rows;
  };
  dense.global_shape.erase(dense.global_shape.begin());
  if (fc1 || !bias) dense.global_shape[fc1 ? 0 : 1] *= granularity_;
  merge(dense.local_shape, experts.local_shape[0] * experts.local_shape[1]);
  std::vector<ShardPiece> whole(1);
  whole[0].global = {std::vector<int64_t>(experts.global_shape.size(), 0), experts.global_shape};
  whole[0].local_offset.assign(experts.global_shape.size(), 0);
  dense.pieces.clear();
  for (const ShardPiece& piece : experts.pieces.empty() ? whole : experts.pieces)
    for (int64_t i = 0; i < piece.global.shape[0]; ++i) {
      const int64_t part = (piece.global.offset[0] + i) % granularity_;
      const int64_t first = (piece.local_offset[0] + i) * experts.local_shape[1];
      ShardPiece of_expert = piece;
      for (std::vector<int64_t>* list :
           {&of_expert.global.offset, &of_expert.global.shape, &of_expert.local_offset})
        list->erase(list->begin());
      if (!fc1) {
        of_expert.local_offset[0] += first;
        if (!bias) of_expert.global.offset[1] += part * experts_.width;
        dense.pieces.push_back(std::move(of_expert));
        continue;
      }
      // Rows [gate | up] of an expert, which a piece may have some of each of.
      const int64_t begin = of_expert.global.offset[0], end = begin + of_expert.global.shape[0],
                    row = of_expert.local_offset[0];
      for (int64_t half = 0; half < (experts_.gated ? 2 : 1); ++half) {
        const int64_t from = std::max(begin, half * experts_.width),
                      to = std::min(end, (half + 1) * experts_.width);
        if (from >= to) continue;
        ShardPiece rows = of_expert;
        rows.global.offset[0] = from + (half * (granularity_ - 1) + part) * experts_.width;
        rows.global.shape[0] = to - from;
        rows.local_offset[0] = first + row + from - begin;
        dense.pieces.push_back(std::move(rows));
      }
    }
  return dense;
}

void Upcycling::redirect(std::vector<StateTensor>& tensors) const {
  std::erase_if(tensors, [](const StateTensor& tensor) {
    return tensor.description.key.find(kRouter) != std::string::npos;
  });
  for (StateTensor& tensor : tensors) {
    ShardedTensor& description = tensor.description;
    if (description.key.find(kExperts) != std::string::npos)
      description = dense_part(description);
    else if (auto norm = with(description.key, kNorm, ".mlp.linear_fc1.layer_norm_"))
      description.key = std::move(*norm);
  }
}

void Upcycling::complete(DistributedDataParallel& store) const {
  store.edit_values([&](Parameter& parameter) {
    const std::string& name = parameter.name;
    if (name.find(kRouter) != std::string::npos) {
      initialize_parameter(parameter, experts_.router_seed, store.groups());
      at::Tensor& rows = parameter.value;
      const at::Tensor run =
          at::arange(rows.size(0), rows.options().dtype(at::kLong)).floor_divide(granularity_);
      rows.copy_(rows.index_select(0, run));
      return;
    }
    const bool scaled =
        name.find(kExperts) != std::string::npos && (is_of_fc1(name) || name.ends_with(".weight"));
    if (scaled && experts_.scale != 1.0) parameter.value.mul_(experts_.scale);
  });
}

}  // namespace megatron
