#include "megatron/training/benchmarking/measured_attention.h"

#include <algorithm>
#include <cmath>

#include "megatron/models/model_table.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Sequences of a length, or the texts of one.
std::vector<int64_t> first_dimensions(const UnpaddedRows* texts, int64_t length,
                                      int64_t sequences) {
  if (texts != nullptr) return {texts->rows, 1};
  return {length, sequences};
}

PackedHeads packed_heads(const AttentionSize& size) {
  return {size.groups, size.heads / size.groups, size.key_size};
}

}  // namespace

StackTexts::StackTexts(const Batch& batch, int64_t first) : first_(first) {
  for (const auto& [column, rows] : batch.unpadded) texts_.push_back(rows);
}

std::shared_ptr<const UnpaddedRows> StackTexts::of(int64_t layer) const {
  if (texts_.empty()) return nullptr;
  return layer > first_ ? texts_.back() : texts_.front();
}

double StackTexts::share(int64_t layer) const {
  const std::shared_ptr<const UnpaddedRows> rows = of(layer);
  if (rows == nullptr) return 1.0;
  return static_cast<double>(rows->rows) / static_cast<double>(rows->samples * rows->length);
}

AttendedRows StackTexts::attended(int64_t layer, const AttentionSize& size) const {
  return {of(layer), size.crosses ? of(1) : nullptr};
}

std::vector<AttendedLayers> attended_layers(const ModelConfig& model, int64_t num_layers,
                                            const LayerShape& shape, const StackTexts& texts) {
  std::vector<AttendedLayers> all;
  for (int64_t layer = 1; layer <= num_layers; ++layer)
    for (const AttentionSize& size :
         model_layer_cost(model, layer, shape, /*offloaded=*/false).first.attentions) {
      const AttendedRows rows = texts.attended(layer, size);
      const auto same = std::ranges::find_if(all, [&](const AttendedLayers& one) {
        return one.size == size && one.rows.queries == rows.queries && one.rows.keys == rows.keys;
      });
      if (same == all.end())
        all.push_back({size, rows});
      else
        ++same->layers;
    }
  return all;
}

MeasuredAttention::MeasuredAttention(const AttentionSize& size, const AttendedRows& rows,
                                     at::ScalarType type, c10::Device device)
    : size_(size), rows_(rows) {
  const auto normal = [&](std::vector<int64_t> shape, at::IntArrayRef of_token) {
    shape.insert(shape.end(), of_token.begin(), of_token.end());
    return at::randn(shape, at::dtype(type).device(device));
  };
  const auto queries = first_dimensions(rows.queries.get(), size.queries, size.sequences),
             keys = rows.queries == nullptr
                        ? first_dimensions(nullptr, size.keys, size.sequences)
                        : first_dimensions(&rows.of_keys(), size.keys, size.sequences);
  if (size.packed) {
    inputs_ = {normal(queries, {(size.heads + 2 * size.groups) * size.key_size})};
    dy_ = normal(queries, {size.heads * size.value_size});
  } else {
    inputs_ = {normal(queries, {size.heads, size.key_size}),
               normal(keys, {size.groups, size.key_size}),
               normal(keys, {size.groups, size.value_size})};
    dy_ = normal(queries, {size.heads, size.value_size});
  }
  options_.causal = size.causal;
  options_.scale = 1.0 / std::sqrt(static_cast<double>(size.key_size));
  options_.softcap = size.softcap;
  options_.window_left = size.window_left;
  options_.window_right = size.window_right;
  options_.backend = size.backend;
  options_.deterministic = size.deterministic;
  const at::TensorOptions sums =
      at::dtype(type == at::kDouble ? at::kDouble : at::kFloat).device(device);
  if (size.by_distance)
    options_.distance_bias = at::randn({size.heads, size.queries + size.keys - 1}, sums);
  if (size.sinks) options_.sinks = at::randn({size.heads}, sums);
}

at::Tensor MeasuredAttention::computed(const std::vector<at::Tensor>& inputs,
                                       const AttentionOptions& options) const {
  if (size_.packed)
    return rows_.queries != nullptr
               ? unpadded_packed_attention(inputs[0], packed_heads(size_), {}, rows_, options)
               : packed_attention(inputs[0], packed_heads(size_), {}, options);
  return rows_.queries != nullptr
             ? unpadded_attention(inputs[0], inputs[1], inputs[2], rows_, options)
             : core_attention(inputs[0], inputs[1], inputs[2], options);
}

at::Tensor MeasuredAttention::forward() const {
  const at::NoGradGuard no_grad;
  const at::Tensor y = computed(inputs_, options_);
  return size_.packed ? y : y.flatten(2);
}

void MeasuredAttention::both() const {
  const c10::AutoGradMode grad_mode(true);
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(); };
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs_) leaves.push_back(leaf(input));
  AttentionOptions options = options_;
  if (options.distance_bias.defined()) options.distance_bias = leaf(options.distance_bias);
  if (options.sinks.defined()) options.sinks = leaf(options.sinks);
  computed(leaves, options).backward(dy_);
}

double MeasuredAttention::forward_flops() const {
  const auto pairs = [&](int64_t queries, int64_t keys) {
    double seen = (size_.causal ? 0.5 : 1.0) * static_cast<double>(keys);
    if (size_.window_left >= 0)
      seen = std::min(seen, static_cast<double>(size_.window_left + 1 +
                                                std::max<int64_t>(0, size_.window_right)));
    return static_cast<double>(queries) * seen;
  };
  double all = 0.0;
  if (rows_.queries != nullptr) {
    const std::vector<int64_t>&queries = rows_.queries->lengths, &keys = rows_.of_keys().lengths;
    for (size_t i = 0; i < queries.size(); ++i) all += pairs(queries[i], keys[i]);
  } else {
    all = static_cast<double>(size_.sequences) * pairs(size_.queries, size_.keys);
  }
  return 2.0 * all * static_cast<double>(size_.heads * (size_.key_size + size_.value_size));
}

MeasuredAttention::Operands MeasuredAttention::operands() const {
  if (!size_.packed) return {inputs_[0], inputs_[1], inputs_[2]};
  const PackedHeads heads = packed_heads(size_);
  const at::Tensor groups =
      inputs_[0].unflatten(2, {heads.groups, heads.heads_per_group + 2, heads.head_size});
  return {groups.narrow(3, 0, heads.heads_per_group).flatten(2, 3),
          groups.select(3, heads.heads_per_group), groups.select(3, heads.heads_per_group + 1)};
}

}  // namespace megatron
