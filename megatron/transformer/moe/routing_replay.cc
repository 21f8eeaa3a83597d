#include "megatron/transformer/moe/routing_replay.h"

#include <algorithm>
#include <cmath>
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

// Puts the rows of sample `i` of `values` [s, b, columns] at their positions of `known` [positions,
// columns], which grows to `length` and has `unknown` elsewhere.
void put_rows(at::Tensor& known, const at::Tensor& values, int64_t i, const at::Tensor& positions,
              int64_t length, double unknown) {
  const auto missing = [&](int64_t rows) {
    return at::full({rows, values.size(2)}, unknown, values.options());
  };
  if (!known.defined()) known = missing(0);
  if (known.size(0) < length) known = at::cat({known, missing(length - known.size(0))});
  known.index_copy_(0, positions, values.select(1, i));
}

// One more than the last position.
int64_t length_of(const at::Tensor& positions) {
  return positions.numel() == 0 ? 0 : positions.max().item<int64_t>() + 1;
}

}  // namespace

void RoutingTable::record(int64_t layer_number, const TokenPositions& rows,
                          const at::Tensor& decisions, int64_t use, RowDecision kind) {
  const int64_t b = rows.sample.numel(), s = rows.position.numel();
  check_shape("decisions to record", decisions, {s * b, -1});
  const at::Tensor host = decisions.to(at::kCPU).view({s, b, decisions.size(1)});
  const at::Tensor positions = rows.position.to(at::kCPU);
  const int64_t length = length_of(positions);
  const std::vector<int64_t> samples = on_host(rows.sample);
  const std::lock_guard lock(mutex_);
  for (int64_t i = 0; i < b; ++i)
    put_rows(decisions_[{{layer_number, use, samples[static_cast<size_t>(i)]}, kind}], host, i,
             positions, length, /*unknown=*/-1);
}

at::Tensor RoutingTable::find(int64_t layer_number, const TokenPositions& rows, int64_t use,
                              RowDecision kind) const {
  const at::Tensor positions = rows.position.to(at::kCPU);
  const int64_t length = length_of(positions);
  std::vector<at::Tensor> found;
  const std::lock_guard lock(mutex_);
  for (const int64_t sample : on_host(rows.sample)) {
    const auto entry = decisions_.find({{layer_number, use, sample}, kind});
    MEGATRON_CHECK(entry != decisions_.end(), "no choices of layer ", layer_number,
                   " are recorded for sample ", sample);
    const at::Tensor& known = entry->second;
    MEGATRON_CHECK(length <= known.size(0), "no choices of layer ", layer_number,
                   " are recorded for sample ", sample, " at position ", known.size(0));
    const at::Tensor own = known.index_select(0, positions);
    const at::Tensor missing = (own.select(1, 0) < 0).nonzero();
    MEGATRON_CHECK(missing.numel() == 0, "no choices of layer ", layer_number,
                   " are recorded for sample ", sample, " at position ",
                   positions[missing[0].item<int64_t>()].item<int64_t>());
    found.push_back(own);
  }
  const at::Tensor whole = at::stack(found, 1);
  return whole.view({-1, whole.size(2)}).to(rows.sample.device());
}

std::vector<RoutingTable::Choices> RoutingTable::choices() const {
  const std::lock_guard lock(mutex_);
  std::map<std::pair<int64_t, int64_t>, std::map<int64_t, at::Tensor>> layers;
  for (const auto& [key, decisions] : decisions_)
    if (key.second == RowDecision::kExpert) {
      const auto& [layer, use, sample] = key.first;
      layers[{layer, use}][sample] = decisions;
    }
  std::vector<Choices> all;
  for (const auto& [place, of_samples] : layers) {
    Choices one{place.first, place.second, {}, {}};
    int64_t positions = 0;
    for (const auto& [sample, decisions] : of_samples)
      positions = std::max(positions, decisions.size(0));
    std::vector<at::Tensor> rows;
    for (const auto& [sample, decisions] : of_samples) {
      one.samples.push_back(sample);
      rows.push_back(at::full({positions, decisions.size(1)}, -1, at::kInt));
      rows.back().narrow(0, 0, decisions.size(0)).copy_(decisions);
    }
    one.experts = at::stack(rows);
    all.push_back(std::move(one));
  }
  return all;
}

void RoutingTable::record_counts(int64_t layer_number, const at::Tensor& samples,
                                 const at::Tensor& counts, int64_t use) {
  check_shape("counts to record", counts, {samples.numel(), -1});
  const std::vector<int64_t> numbers = on_host(samples);
  const at::Tensor host = counts.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < numbers.size(); ++i)
    counts_[{layer_number, use, numbers[i]}] = host[static_cast<int64_t>(i)];
}

at::Tensor RoutingTable::find_counts(int64_t layer_number, const at::Tensor& samples,
                                     int64_t use) const {
  std::vector<at::Tensor> found;
  const std::lock_guard lock(mutex_);
  for (const int64_t sample : on_host(samples)) {
    const auto entry = counts_.find({layer_number, use, sample});
    MEGATRON_CHECK(entry != counts_.end(), "no counts of layer ", layer_number,
                   " are recorded for sample ", sample);
    found.push_back(entry->second);
  }
  return at::stack(found).to(samples.device());
}

void RouterLog::record(int64_t layer_number, const TokenPositions& rows, int64_t use,
                       const at::Tensor& logits, const at::Tensor& choices,
                       const at::Tensor& bias) {
  const int64_t b = rows.sample.numel(), s = rows.position.numel();
  check_shape("logits to record", logits, {s * b, -1});
  check_shape("choices to record", choices, {s * b, -1});
  const auto by_sample = [&](const at::Tensor& values) {
    return values.detach().to(at::kCPU, at::kDouble).view({s, b, values.size(1)});
  };
  const at::Tensor all = by_sample(logits), chosen = by_sample(choices);
  const at::Tensor positions = rows.position.to(at::kCPU);
  const int64_t length = length_of(positions);
  const std::vector<int64_t> samples = on_host(rows.sample);
  for (int64_t i = 0; i < b; ++i) {
    Rows& known = rows_[{layer_number, use, samples[static_cast<size_t>(i)]}];
    put_rows(known.logits, all, i, positions, length, std::nan(""));
    put_rows(known.choices, chosen, i, positions, length, std::nan(""));
    if (bias.defined()) known.bias = bias.to(at::kCPU, at::kDouble, false, /*copy=*/true);
  }
}

}  // namespace megatron
