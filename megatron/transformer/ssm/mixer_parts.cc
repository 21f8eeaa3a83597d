#include "megatron/transformer/ssm/mixer_parts.h"

#include <numeric>
#include <optional>

#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/ssm/causal_conv.h"

namespace megatron {
namespace {

bool is_replayed(const StateKeeping& keeping) {
  return keeping.replays_chunks || is_batch_invariant();
}

}  // namespace

void divide_over_heads(Parameter& parameter, int64_t t, std::vector<int64_t> global,
                       std::vector<int64_t> parts) {
  parameter.local_shape = global;
  parameter.local_shape[0] /= t;
  parameter.global_shape = std::move(global);
  parameter.placement.shards = {{0, Axis::kTensor, std::move(parts)}};
}

void add_gradient(Parameter& parameter, const at::Tensor& grad) {
  if (!parameter.trainable) return;
  const GradTarget target = parameter.store->grad_target(parameter);
  target.to_add_to().add_(grad.view(target.tensor.sizes()));
  parameter.store->grad_ready(parameter);
}

at::Tensor conv_over_segments(const Segments& segments, const at::Tensor& u,
                              const std::vector<at::Tensor>& before, const at::Tensor& weight,
                              const at::Tensor& bias) {
  std::vector<at::Tensor> parts;
  for (const Segments::Segment& segment : segments.own())
    parts.push_back(causal_conv(segment.rows_of(u), weight, bias,
                                {before[parts.size()], segment.runs, segment.runs_before}));
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

ConvParameterGrads conv_over_segments_backward(const Segments& segments, const at::Tensor& dy,
                                               const at::Tensor& u,
                                               const std::vector<at::Tensor>& before,
                                               const at::Tensor& weight, const at::Tensor& bias,
                                               const at::Tensor& du) {
  ConvParameterGrads sums;
  std::vector<at::Tensor> dbefore;
  for (const Segments::Segment& segment : segments.own()) {
    const CausalConvGrads grads = causal_conv_backward(
        segment.rows_of(dy), segment.rows_of(u), weight, bias,
        {before[dbefore.size()], segment.runs, segment.runs_before}, segment.rows_of(du));
    const bool first = dbefore.empty();
    sums.weight = first ? grads.weight : sums.weight + grads.weight;
    if (bias.defined()) sums.bias = first ? grads.bias : sums.bias + grads.bias;
    dbefore.push_back(grads.before);
  }
  segments.return_row_grads(dbefore, du);
  return sums;
}

LinearOptions in_proj_options(const TransformerConfig& config, int64_t layer_number,
                              bool sequence_parallel, std::vector<int64_t> parts) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init = config.weight_init(std::accumulate(parts.begin(), parts.end(), int64_t{0}),
                                    config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  options.parts = std::move(parts);
  options.input_norm = norms_inputs(config);
  options.norm = norm_options(config);
  options.recompute_norm = config.recomputes("layernorm");
  options.lora = lora_options(config, "in_proj");
  return options;
}

LinearOptions out_proj_options(const TransformerConfig& config, int64_t layer_number,
                               bool sequence_parallel, int64_t width) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init = config.weight_init(config.hidden_size, width, /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  options.lora = lora_options(config, "out_proj");
  return options;
}

LastChunk last_chunk_of(const ForwardContext& pass) {
  return pass.training && !is_batch_invariant() ? LastChunk::kShort : LastChunk::kFilled;
}

bool RecurrentState::replays_chunks() const { return is_replayed(keeping_); }

std::vector<SlotBuffer*> RecurrentState::slots() {
  if (replays_chunks()) return {&conv, &heads, &open_rows, &open_steps};
  return {&conv, &heads};
}

at::Tensor RecurrentState::conv_rows(int64_t slots, at::IntArrayRef shape,
                                     const at::TensorOptions& options) {
  return conv.rows(
      slots, shape,
      options.dtype(keeping_.conv.value_or(c10::typeMetaToScalarType(options.dtype()))));
}

at::Tensor RecurrentState::states(int64_t slots, at::IntArrayRef shape,
                                  const at::TensorOptions& options) {
  return heads.rows(
      slots, shape,
      options.dtype(keeping_.state.value_or(c10::typeMetaToScalarType(options.dtype()))));
}

int64_t RecurrentStateSizes::bytes(const LayerShape& shape) const {
  const auto size = [](const std::optional<at::ScalarType>& type, int64_t otherwise) {
    return type ? static_cast<int64_t>(c10::elementSize(*type)) : otherwise;
  };
  const StateKeeping& keeping = shape.keeping;
  const int64_t open =
      is_replayed(keeping) ? chunk * (open_channels * shape.element + open_steps * shape.sum) : 0;
  return conv * size(keeping.conv, shape.element) + state * size(keeping.state, shape.sum) + open;
}

void replay_chunks(const RaggedBatch& batch, int64_t chunk, const ChunkRows& rows,
                   RecurrentState& state, const at::Tensor& states, const ChunkScan& scan,
                   const at::Tensor& y) {
  const at::Tensor open = state.open_rows.rows(batch.num_slots, {chunk, rows.rows.size(2)},
                                               rows.rows.options()),
                   open_steps = state.open_steps.rows(batch.num_slots, {chunk, rows.steps.size(2)},
                                                      rows.steps.options());
  int64_t row = 0;
  for (size_t i = 0; i < batch.slots.size(); ++i) {
    const RaggedPart& part = batch.rows.parts()[i];
    const int64_t slot = batch.slots[i], before = part.first % chunk, count = before + part.count,
                  whole = count / chunk * chunk;
    const auto behind = [&](const at::Tensor& kept, const at::Tensor& added) {
      return at::cat(
          {kept[slot].narrow(0, 0, before).unsqueeze(1), added.narrow(0, row, part.count)});
    };
    const ChunkRows own{behind(open, rows.rows), behind(open_steps, rows.steps)};
    const auto piece = [&](int64_t first, int64_t length) -> ChunkRows {
      return {own.rows.narrow(0, first, length), own.steps.narrow(0, first, length)};
    };
    ScanState border;
    if (part.first >= chunk) border.state = states.narrow(0, slot, 1);
    std::vector<at::Tensor> outputs;
    if (whole > 0) {
      const ChunkResult result = scan(piece(0, whole), border);
      outputs.push_back(result.y);
      border.state = result.state;
      states[slot].copy_(result.state[0]);
    }
    if (whole < count) {
      const ChunkRows rest = piece(whole, count - whole);
      outputs.push_back(scan(rest, border).y);
      open[slot].narrow(0, 0, count - whole).copy_(rest.rows.squeeze(1));
      open_steps[slot].narrow(0, 0, count - whole).copy_(rest.steps.squeeze(1));
    }
    y.narrow(0, row, part.count).copy_(at::cat(outputs).narrow(0, before, part.count));
    row += part.count;
  }
}

DecodingSteps::DecodingSteps(const RaggedBatch& batch, at::Device device) {
  const std::vector<RaggedPart>& parts = batch.rows.parts();
  const int64_t single = batch.rows.single();
  const auto add = [&](size_t part, size_t num_parts, int64_t first, int64_t count) {
    std::vector<int64_t> slots, begins;
    for (size_t i = part; i < part + num_parts; ++i) {
      slots.push_back(batch.slots[i]);
      begins.push_back(parts[i].first == 0 ? 1 : 0);
    }
    steps_.push_back({first, count, static_cast<int64_t>(num_parts),
                      at::tensor(slots, at::kLong).to(device),
                      at::tensor(begins, at::kLong).to(device, at::kBool)});
  };
  if (single > 0) add(0, static_cast<size_t>(single), 0, 1);
  int64_t row = single;
  for (size_t i = static_cast<size_t>(single); i < parts.size(); ++i) {
    add(i, 1, row, parts[i].count);
    row += parts[i].count;
  }
}

at::Tensor DecodingSteps::Step::rows_of(const at::Tensor& x) const {
  return x.narrow(0, first, count * sequences).squeeze(1).unflatten(0, {count, sequences});
}

at::Tensor DecodingSteps::Step::states_of(const at::Tensor& kept, at::ScalarType type) const {
  const at::Tensor states = kept.index_select(0, slots).to(type);
  std::vector<int64_t> shape(static_cast<size_t>(states.dim()), 1);
  shape[0] = -1;
  return states.masked_fill(begins.view(shape), 0.0);
}

void DecodingSteps::Step::keep(const at::Tensor& states, const at::Tensor& kept) const {
  kept.index_copy_(0, slots, states.to(kept.scalar_type()));
}

void DecodingSteps::convolve(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                             const at::Tensor& kept, const at::Tensor& out) const {
  for (const Step& step : steps_) {
    const at::Tensor rows = step.rows_of(u),
                     before = step.states_of(kept, u.scalar_type()).transpose(0, 1);
    step.rows_of(out).copy_(causal_conv(rows, weight, bias, {.before = before}));
    step.keep(last_conv_rows(before, rows, weight.size(2)).transpose(0, 1), kept);
  }
}

}  // namespace megatron
