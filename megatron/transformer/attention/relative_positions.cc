#include "megatron/transformer/attention/relative_positions.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/attention_sublayer.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The bucket of each of the distances key - query from -(s - 1) to s - 1.
at::Tensor buckets_of(int64_t s, const RelativeBuckets& kind, const std::vector<int64_t>& starts,
                      const at::Device& device) {
  const at::Tensor ahead = at::arange(1 - s, s, at::dtype(at::kLong).device(device));
  const at::Tensor distance = kind.bidirectional ? ahead.abs() : ahead.neg().clamp_min_(0);
  at::Tensor bucket = at::zeros_like(ahead);
  for (size_t i = 1; i < starts.size(); ++i) bucket.add_(distance >= starts[i]);
  if (kind.bidirectional) bucket.add_(ahead > 0, static_cast<int64_t>(starts.size()));
  return bucket;
}

// table [buckets, n], ids [l] -> [l, n]. The gradient is a product, which sums in a fixed order.
struct LookUp : torch::autograd::Function<LookUp> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& ids) {
    context->save_for_backward({ids});
    context->saved_data["buckets"] = table.size(0);
    return table.index_select(0, ids);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::Tensor ids = context->get_saved_variables().front(), &grad = grads[0];
    const at::Tensor all = at::arange(context->saved_data["buckets"].toInt(), ids.options());
    return {at::matmul((all.unsqueeze(1) == ids).to(grad.scalar_type()), grad), at::Tensor()};
  }
};

}  // namespace

std::vector<int64_t> bucket_starts(const RelativeBuckets& kind) {
  const int64_t count = kind.bidirectional ? kind.buckets / 2 : kind.buckets, exact = count / 2;
  MEGATRON_CHECK(exact > 0 && kind.max_distance > exact, "relative positions of ", kind.buckets,
                 " buckets up to a distance of ", kind.max_distance);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i <= exact; ++i) starts.push_back(i);
  const auto first = static_cast<double>(exact);
  const double steps =
      static_cast<double>(count - exact) / std::log(static_cast<double>(kind.max_distance) / first);
  while (static_cast<int64_t>(starts.size()) < count) {
    // The formula grows with the distance; a power of the base may fall below itself by rounding.
    constexpr double kRounding = 1e-9;
    const auto wanted = static_cast<double>(static_cast<int64_t>(starts.size()) - exact);
    const auto reached = [&](int64_t distance) {
      return std::log(static_cast<double>(distance) / first) * steps + kRounding >= wanted;
    };
    int64_t below = starts.back() - 1, last = kind.max_distance;
    while (last - below > 1) {
      const int64_t middle = below + (last - below) / 2;
      (reached(middle) ? last : below) = middle;
    }
    starts.push_back(last);
  }
  return starts;
}

RelativePositions::RelativePositions(const TransformerConfig& config,
                                     const RelativeBuckets& buckets, const ParallelGroups& groups,
                                     Parameter* table)
    : buckets_(buckets),
      starts_(bucket_starts(buckets)),
      heads_(per_rank("--num-attention-heads", config.num_attention_heads, groups.tp.size())),
      first_head_(groups.tp.rank() * heads_) {
  if (table != nullptr) {
    table_ = table;
    return;
  }
  own_.local_shape = own_.global_shape = {buckets.buckets, config.num_attention_heads};
  own_.init = config.weight_init(buckets.buckets, config.num_attention_heads);
  own_.placement.partial_grad.insert(Axis::kTensor);
  add("relative_attention_bias.weight", &own_);
}

at::Tensor RelativePositions::bias(int64_t s) {
  const at::Tensor table = differentiable(*table_, accumulate_type(table_->value));
  const at::Tensor ids = buckets_of(s, buckets_, starts_, table.device());
  return LookUp::apply(table.narrow(1, first_head_, heads_), ids).t();
}

}  // namespace megatron
