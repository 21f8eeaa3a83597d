#include "megatron/tensor_parallel/lora_adapter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

thread_local int adapters_off = 0;
thread_local const RowAdapters* row_adapters = nullptr;

at::Tensor as_matrix(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// Which rows of the whole tensor this rank holds, in local order.
std::vector<int64_t> rows_here(const Parameter& parameter, const ParallelGroups& groups) {
  std::vector<int64_t> rows(static_cast<size_t>(parameter.local_shape[0]), -1);
  for (const ShardPiece& piece : shard_pieces(parameter, groups))
    for (int64_t i = 0; i < piece.global.shape[0]; ++i)
      rows[static_cast<size_t>(piece.local_offset[0] + i)] = piece.global.offset[0] + i;
  return rows;
}

}  // namespace

AdaptersOff::AdaptersOff() {
  MEGATRON_ASSERT(!at::GradMode::is_enabled(), "adapters are off in a pass with a backward");
  ++adapters_off;
}
AdaptersOff::~AdaptersOff() { --adapters_off; }

LoraAdapter::LoraAdapter(const Parameter& weight, const LoraOptions& options,
                         const ParallelGroups& groups)
    : rank_(options.rank),
      adapters_(options.adapters),
      rows_(weight.local_shape[0]),
      scale_(options.scale) {
  const int64_t rows = weight.global_shape[0], k = weight.global_shape[1];
  const std::vector<int8_t>& adapter_of = options.adapter_of_row;
  MEGATRON_ASSERT(adapter_of.empty() || static_cast<int64_t>(adapter_of.size()) == rows);
  const auto adapted = [&](int64_t row) {
    return adapter_of.empty() || adapter_of[static_cast<size_t>(row)] >= 0;
  };
  // Initialised as by PEFT: A like torch's linears, B zero, so that the adapter starts as a no-op.
  a.init = Init::uniform(1.0 / std::sqrt(static_cast<double>(k)));
  a.global_shape = {adapters_ * rank_, k};
  a.local_shape = {adapters_ * rank_, weight.local_shape[1]};
  b.init = Init::zero();
  b.global_shape = b.local_shape = {0, rank_};

  if (!is_sharded_over(weight.placement, Axis::kTensor)) {
    MEGATRON_ASSERT(adapter_of.empty(), "parts of a linear that is not divided");
    a.placement = b.placement = weight.placement;
    b.global_shape[0] = b.local_shape[0] = rows;
    return;
  }
  const bool column = weight.placement.shards[0].dim == 0;
  (column ? a : b).placement.partial_grad.insert(Axis::kTensor);
  if (!column) {
    MEGATRON_ASSERT(adapter_of.empty(), "parts of a row-parallel linear");
    a.placement = weight.placement;
    b.global_shape[0] = b.local_shape[0] = rows;
    return;
  }
  // The number of rows of B in each part of the weight.
  Shard shard = weight.placement.shards[0];
  int64_t first = 0;
  std::vector<int64_t> parts;
  for (const int64_t part : shard.parts) {
    int64_t count = 0;
    for (int64_t row = first; row < first + part; ++row) count += adapted(row) ? 1 : 0;
    if (count > 0) parts.push_back(count);
    first += part;
  }
  for (const int64_t part : parts) {
    b.global_shape[0] += part;
    b.local_shape[0] += part / groups.tp.size();
  }
  shard.parts = parts;
  b.placement.shards = {shard};
  if (adapter_of.empty()) return;

  std::vector<int64_t> row_of;  // for each row of B, its row of the linear
  for (int64_t row = 0; row < rows; ++row)
    if (adapted(row)) row_of.push_back(row);
  const std::vector<int64_t> here = rows_here(weight, groups), held = rows_here(b, groups);
  std::vector<int64_t> slots;
  bool fits = b.local_shape[0] * groups.tp.size() == b.global_shape[0];
  for (size_t i = 0; i < here.size(); ++i) {
    if (!adapted(here[i])) continue;
    fits = fits && slots.size() < held.size() &&
           row_of[static_cast<size_t>(held[slots.size()])] == here[i];
    slots.push_back(static_cast<int64_t>(i) * adapters_ + adapter_of[static_cast<size_t>(here[i])]);
  }
  MEGATRON_CHECK(fits && slots.size() == held.size(),
                 "adapters of some of queries, keys and values with fewer --num-query-groups than "
                 "--tensor-model-parallel-size ",
                 groups.tp.size(),
                 " are not built\nhint: give all of them to --lora-targets: linear_q linear_k "
                 "linear_v");
  slots_ = at::tensor(slots, at::kLong);
}

at::Tensor LoraAdapter::inner(const at::Tensor& x) {
  const AcquiredValue weight(&a);
  return as_matrix(linear_forward(x, weight.value(), at::Tensor())).mul_(scale_);
}

at::Tensor LoraAdapter::spread(const at::Tensor& values) {
  if (!slots_.defined()) return values;
  if (slots_.device() != values.device()) slots_ = slots_.to(values.device());
  return at::zeros({rows_ * adapters_, rank_}, values.options())
      .index_copy_(0, slots_, values)
      .view({rows_, adapters_ * rank_});
}

void LoraAdapter::add_output(const at::Tensor& x, const at::Tensor& y) {
  if (adapters_off > 0) return;
  const AcquiredValue weight(&b);
  at::Tensor rows = y.view({-1, rows_});
  if (is_batch_invariant())
    rows.add_(linear_forward(inner(x), spread(weight.value()), {}));
  else
    rows.addmm_(inner(x), spread(weight.value()).t());
}

void LoraAdapter::add_output(const at::Tensor& x, const at::Tensor& y, const at::Tensor& rows) {
  const AcquiredValue weight(&b);
  const at::Tensor some = inner(as_matrix(x).index_select(0, rows));
  const at::Tensor outer = spread(weight.value());
  y.view({-1, rows_})
      .index_add_(
          0, rows,
          is_batch_invariant() ? linear_forward(some, outer, {}) : at::matmul(some, outer.t()));
}

at::Tensor LoraAdapter::added_to(const at::Tensor& w) {
  if (adapters_off > 0) return w;
  const AcquiredValue outer(&b), inner(&a);
  return at::addmm(w, spread(outer.value()), inner.value(), 1.0, scale_);
}

at::Tensor LoraAdapter::add_input_grad(const at::Tensor& dy, const at::Tensor& dx) {
  at::Tensor dz;
  {
    const AcquiredValue weight(&b);
    dz = linear_input_grad(as_matrix(dy), spread(weight.value())).mul_(scale_);
  }
  const AcquiredValue weight(&a);
  at::Tensor rows = dx.view({-1, dx.size(-1)});
  rows.addmm_(dz, weight.value());
  return dz;
}

void LoraAdapter::accumulate_grads(const at::Tensor& dy, const at::Tensor& dz,
                                   std::function<at::Tensor()> x) {
  if (!a.trainable && !b.trainable) return;
  const auto compute = [this, dy, dz, x = std::move(x)] { accumulate(dy, dz, x()); };
  if (!a.store->defer(compute)) compute();
}

void LoraAdapter::accumulate(const at::Tensor& dy, const at::Tensor& dz, const at::Tensor& x) {
  if (b.trainable) {
    const GradTarget target = b.store->grad_target(b);
    const at::Tensor z = inner(x);
    if (!slots_.defined()) {
      linear_weight_grad(dy, z, target.tensor, target.beta);
    } else {
      const at::Tensor all = at::empty({rows_, adapters_ * rank_}, target.tensor.options());
      linear_weight_grad(dy, z, all, 0.0);
      target.to_add_to().add_(all.view({rows_ * adapters_, rank_}).index_select(0, slots_));
    }
    b.store->grad_ready(b);
  }
  if (a.trainable) {
    const GradTarget target = a.store->grad_target(a);
    linear_weight_grad(dz, x, target.tensor, target.beta);
    a.store->grad_ready(a);
  }
}

RowAdapters::RowAdapters(std::vector<Group> groups)
    : groups_(std::move(groups)), outer_(row_adapters) {
  MEGATRON_ASSERT(!at::GradMode::is_enabled(), "adapters of rows in a pass with a backward");
  row_adapters = this;
}
RowAdapters::~RowAdapters() { row_adapters = outer_; }

const RowAdapters* RowAdapters::current() { return row_adapters; }

bool RowAdapters::adapts(const Parameter& weight) const {
  return std::ranges::any_of(groups_,
                             [&](const Group& group) { return group.linears->contains(&weight); });
}

void RowAdapters::add_output(const Parameter& weight, const at::Tensor& x,
                             const at::Tensor& y) const {
  for (const Group& group : groups_)
    if (const auto found = group.linears->find(&weight); found != group.linears->end())
      found->second->add_output(x, y, group.rows);
}

}  // namespace megatron
