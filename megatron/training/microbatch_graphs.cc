#include "megatron/training/microbatch_graphs.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// The tensors of a batch (const or not).
template <class B>
auto tensors_of(B& batch) {
  std::vector<decltype(&batch.document_ids)> all = {
      &batch.document_ids,  &batch.place.sample, &batch.place.position, &batch.totals.loss_weight,
      &batch.totals.tokens, &batch.padding,      &batch.encoded_media};
  for (auto& [name, tensor] : batch.columns()) all.push_back(&tensor);
  for (auto& [name, rows] : batch.unpadded)
    for (at::Tensor* tensor : rows->tensors()) all.push_back(tensor);
  if (batch.document_rows != nullptr) {
    all.push_back(&batch.document_rows->offsets);
    all.push_back(&batch.document_rows->counts);
  }
  return all;
}

bool same_kind(const at::Tensor& x, const at::Tensor& y) {
  if (!x.defined() || !y.defined()) return x.defined() == y.defined();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type();
}

// The longest document decides on a kernel's grid.
bool same_kind(const UnpaddedRows* x, const UnpaddedRows* y) {
  if (x == nullptr || y == nullptr) return x == y;
  return x->length == y->length;
}

bool same_kind(const Batch& x, const Batch& y) {
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (!std::ranges::equal(x.columns(), y.columns(), same_name)) return false;
  // Samples with holes take another kernel.
  const auto same_rows = [&](const auto& a, const auto& b) {
    return same_name(a, b) && a.second->has_holes() == b.second->has_holes();
  };
  if (!std::ranges::equal(x.unpadded, y.unpadded, same_rows)) return false;
  if (!same_kind(x.document_rows.get(), y.document_rows.get())) return false;
  return std::ranges::equal(tensors_of(x), tensors_of(y),
                            [](const auto* a, const auto* b) { return same_kind(*a, *b); });
}

}  // namespace

MicrobatchGraphs::MicrobatchGraphs(c10::Device device, int64_t warmup_steps)
    : pool_(device), steps_left_(warmup_steps) {}

bool MicrobatchGraphs::begin_step() {
  if (steps_left_ == 0) return true;
  --steps_left_;
  return false;
}

std::shared_ptr<MicrobatchGraphs::Inputs> MicrobatchGraphs::inputs_of(
    const Batch& batch, const at::Tensor& loss_scale) const {
  for (const std::shared_ptr<Inputs>& one : inputs_)
    if (same_kind(one->batch, batch) && same_kind(one->loss_scale, loss_scale)) return one;
  return nullptr;
}

bool MicrobatchGraphs::is_new(const Batch& batch, const at::Tensor& loss_scale) {
  if (inputs_of(batch, loss_scale) != nullptr) return false;
  auto inputs = std::make_shared<Inputs>();
  inputs->batch = batch;
  for (auto& [name, rows] : inputs->batch.unpadded) rows = std::make_shared<UnpaddedRows>(*rows);
  if (auto& rows = inputs->batch.document_rows; rows != nullptr)
    rows = std::make_shared<UnpaddedRows>(*rows);
  for (at::Tensor* tensor : tensors_of(inputs->batch))
    if (tensor->defined())
      *tensor = at::empty_like(*tensor, {}, at::MemoryFormat::Contiguous)
                    .set_requires_grad(tensor->requires_grad());
  inputs->loss_scale = at::empty_like(loss_scale);
  inputs_.push_back(std::move(inputs));
  return true;
}

MicrobatchGraphs::Recorded& MicrobatchGraphs::find(const Batch& batch, const at::Tensor& loss_scale,
                                                   bool first) {
  std::shared_ptr<Inputs> inputs = inputs_of(batch, loss_scale);
  MEGATRON_ASSERT(inputs != nullptr, "a graph of shapes that have not run eagerly");
  for (Recorded& one : recorded_)
    if (one.inputs == inputs && one.first == first) return one;
  recorded_.push_back({first, std::move(inputs), {}, {}, nullptr});
  return recorded_.back();
}

const MicrobatchGraphs::Result& MicrobatchGraphs::run(const Batch& batch,
                                                      const at::Tensor& loss_scale, bool first,
                                                      DistributedDataParallel& store,
                                                      const Pass& pass) {
  Recorded& one = find(batch, loss_scale, first);
  {
    const at::NoGradGuard no_grad;
    const auto from = tensors_of(batch);
    const auto to = tensors_of(one.inputs->batch);
    for (size_t i = 0; i < to.size(); ++i)
      if (to[i]->defined()) to[i]->copy_(*from[i]);
    one.inputs->loss_scale.copy_(loss_scale);
  }
  store.finish_param_sync();
  if (!one.graph) {
    one.gradients = store.record_gradients([&] {
      one.graph = std::make_unique<DeviceGraph>(
          pool_, [&] { one.result = pass(one.inputs->batch, one.inputs->loss_scale); });
    });
  }
  one.graph->launch();
  for (Parameter* parameter : one.gradients) {
    store.grad_target(*parameter);
    store.grad_ready(*parameter);
  }
  return one.result;
}

}  // namespace megatron
