#include "megatron/transformer/moe/routing_replay.h"

#include <algorithm>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

std::vector<int64_t> on_host(const at::Tensor& numbers) {
  const at::Tensor host = numbers.to(at::kCPU, at::kLong).contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

}  // namespace

void RoutingTable::record(int64_t layer_number, const TokenPositions& rows,
                          const at::Tensor& choices, int64_t use) {
  const int64_t b = rows.sample.numel(), s = rows.position.numel();
  check_shape("choices to record", choices, {s * b, -1});
  const int64_t k = choices.size(1);
  const at::Tensor host = choices.to(at::kCPU).view({s, b, k});
  const at::Tensor positions = rows.position.to(at::kCPU);
  const int64_t length = s == 0 ? 0 : positions.max().item<int64_t>() + 1;
  const std::vector<int64_t> samples = on_host(rows.sample);
  const std::lock_guard lock(mutex_);
  for (int64_t i = 0; i < b; ++i) {
    at::Tensor& kept = samples_[{layer_number, use, samples[static_cast<size_t>(i)]}].choices;
    if (!kept.defined()) kept = at::full({0, k}, -1, at::kInt);
    if (kept.size(0) < length)
      kept = at::cat({kept, at::full({length - kept.size(0), k}, -1, at::kInt)});
    kept.index_copy_(0, positions, host.select(1, i));
  }
}

at::Tensor RoutingTable::find(int64_t layer_number, const TokenPositions& rows, int64_t use) const {
  const at::Tensor positions = rows.position.to(at::kCPU);
  const int64_t length = positions.numel() == 0 ? 0 : positions.max().item<int64_t>() + 1;
  std::vector<at::Tensor> found;
  const std::lock_guard lock(mutex_);
  for (const int64_t sample : on_host(rows.sample)) {
    const auto entry = samples_.find({layer_number, use, sample});
    MEGATRON_CHECK(entry != samples_.end(), "no choices of layer ", layer_number,
                   " are recorded for sample ", sample);
    const at::Tensor& kept = entry->second.choices;
    MEGATRON_CHECK(length <= kept.size(0), "no choices of layer ", layer_number,
                   " are recorded for sample ", sample, " at position ", kept.size(0));
    const at::Tensor own = kept.index_select(0, positions);
    const at::Tensor missing = (own.select(1, 0) < 0).nonzero();
    MEGATRON_CHECK(missing.numel() == 0, "no choices of layer ", layer_number,
                   " are recorded for sample ", sample, " at position ",
                   positions[missing[0].item<int64_t>()].item<int64_t>());
    found.push_back(own);
  }
  const at::Tensor whole = at::stack(found, 1);
  return whole.view({-1, whole.size(2)}).to(rows.sample.device());
}

}  // namespace megatron
