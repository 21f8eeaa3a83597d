#include "megatron/transformer/ssm/mixer_parts.h"

#include <numeric>
#include <optional>

#include "megatron/base/check.h"
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

// Rows whose operands are kept.
int64_t open_capacity(const StateKeeping& keeping, int64_t chunk) {
  return (is_replayed(keeping) ? chunk : 0) + keeping.drafts;
}

PartDrafts drafts_of(const RaggedBatch& batch, size_t part) {
  return batch.drafts.empty() ? PartDrafts{} : batch.drafts[part];
}

// The first `count` open rows of a slot, then others.
RowOperands behind(const RowOperands& open, int64_t slot, int64_t count, const RowOperands& added) {
  if (count == 0) return added;
  const auto both = [&](const at::Tensor& kept, const at::Tensor& more) {
    return at::cat({kept[slot].narrow(0, 0, count).unsqueeze(1), more});
  };
  return {both(open.rows, added.rows), both(open.steps, added.steps)};
}

void keep_open(const RowOperands& rest, const RowOperands& open, int64_t slot) {
  const int64_t count = rest.rows.size(0);
  MEGATRON_ASSERT(count <= open.rows.size(1), count, " open rows of ", open.rows.size(1));
  open.rows[slot].narrow(0, 0, count).copy_(rest.rows.squeeze(1));
  open.steps[slot].narrow(0, 0, count).copy_(rest.steps.squeeze(1));
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

RowOperands RowOperands::narrow(int64_t first, int64_t count) const {
  return {rows.narrow(0, first, count), steps.narrow(0, first, count)};
}

bool RecurrentState::replays_chunks() const { return is_replayed(keeping_); }

std::vector<SlotBuffer*> RecurrentState::slots() {
  if (open_capacity(keeping_, /*chunk=*/1) > 0)
    return {&conv_, &states_, &open_rows_, &open_steps_};
  return {&conv_, &states_};
}

at::Tensor RecurrentState::conv_rows(int64_t slots, int64_t back, int64_t channels,
                                     const at::TensorOptions& options) {
  return conv_.rows(
      slots, {back + keeping_.drafts, channels},
      options.dtype(keeping_.conv.value_or(c10::typeMetaToScalarType(options.dtype()))));
}

at::Tensor RecurrentState::states(int64_t slots, at::IntArrayRef shape,
                                  const at::TensorOptions& options) {
  return states_.rows(
      slots, shape,
      options.dtype(keeping_.state.value_or(c10::typeMetaToScalarType(options.dtype()))));
}

RowOperands RecurrentState::open_rows(int64_t slots, int64_t chunk, const RowOperands& like) {
  const int64_t most = open_capacity(keeping_, chunk);
  if (most == 0) return {};
  return {open_rows_.rows(slots, {most, like.rows.size(2)}, like.rows.options()),
          open_steps_.rows(slots, {most, like.steps.size(2)}, like.steps.options())};
}

int64_t RecurrentStateSizes::bytes(const LayerShape& shape) const {
  const auto size = [](const std::optional<at::ScalarType>& type, int64_t otherwise) {
    return type ? static_cast<int64_t>(c10::elementSize(*type)) : otherwise;
  };
  const StateKeeping& keeping = shape.keeping;
  return (conv_rows + keeping.drafts) * conv_channels * size(keeping.conv, shape.element) +
         state * size(keeping.state, shape.sum) +
         open_capacity(keeping, chunk) * (open_channels * shape.element + open_steps * shape.sum);
}

void replay_chunks(const RaggedBatch& batch, int64_t chunk, const RowOperands& rows,
                   const RowOperands& open, const at::Tensor& states, const RowScan& scan,
                   const at::Tensor& y) {
  int64_t row = 0;
  for (size_t i = 0; i < batch.slots.size(); ++i) {
    const RaggedPart& part = batch.rows.parts()[i];
    const PartDrafts drafts = drafts_of(batch, i);
    const int64_t slot = batch.slots[i], counted = part.first - drafts.stood,
                  border = counted / chunk * chunk, before = part.first - border,
                  count = before + part.count, whole = (count - drafts.drafts) / chunk * chunk;
    const RowOperands own = behind(open, slot, before, rows.narrow(row, part.count));
    ScanState initial;
    if (border > 0) initial.state = states.narrow(0, slot, 1);
    std::vector<at::Tensor> outputs;
    if (whole > 0) {
      const ScanOutput result = scan(own.narrow(0, whole), initial);
      outputs.push_back(result.y);
      initial.state = result.state;
      states[slot].copy_(result.state[0]);
    }
    if (whole < count) {
      const RowOperands rest = own.narrow(whole, count - whole);
      outputs.push_back(scan(rest, initial).y);
      keep_open(rest, open, slot);
    }
    y.narrow(0, row, part.count).copy_(at::cat(outputs).narrow(0, before, part.count));
    row += part.count;
  }
}

void scan_drafts(const DecodingSteps::Step& step, const RowOperands& rows, const RowOperands& open,
                 const at::Tensor& states, const RowScan& scan, const at::Tensor& y) {
  const auto [drafts, stood] = step.drafts;
  const int64_t certain = step.count - drafts;
  const RowOperands own = behind(open, step.slot, stood, rows);
  const ScanOutput result =
      scan(own.narrow(0, stood + certain), {step.states_of(states, rows.steps.scalar_type())});
  step.keep(result.state, states);
  y.narrow(0, 0, certain).copy_(result.y.narrow(0, stood, certain));
  if (drafts == 0) return;
  const RowOperands rest = own.narrow(stood + certain, drafts);
  y.narrow(0, certain, drafts).copy_(scan(rest, {result.state}).y);
  keep_open(rest, open, step.slot);
}

DecodingSteps::DecodingSteps(const RaggedBatch& batch, at::Device device) {
  const std::vector<RaggedPart>& parts = batch.rows.parts();
  int64_t row = 0;
  for (size_t i = 0, end; i < parts.size(); i = end) {
    const auto joins = [&](size_t part) {
      return parts[part].count == 1 && drafts_of(batch, part).stood == 0;
    };
    for (end = i + 1; joins(i) && end < parts.size() && joins(end);) ++end;
    std::vector<int64_t> slots, begins;
    for (size_t part = i; part < end; ++part) {
      slots.push_back(batch.slots[part]);
      begins.push_back(parts[part].first == 0 ? 1 : 0);
    }
    const auto sequences = static_cast<int64_t>(end - i);
    steps_.push_back({row, parts[i].count, sequences, slots.front(),
                      at::tensor(slots, at::kLong).to(device),
                      at::tensor(begins, at::kLong).to(device, at::kBool), drafts_of(batch, i)});
    row += parts[i].count * sequences;
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
  const int64_t back = weight.size(2) - 1;
  for (const Step& step : steps_) {
    const auto [drafts, stood] = step.drafts;
    const at::Tensor rows = step.rows_of(u),
                     before = step.states_of(kept.narrow(1, stood, back), u.scalar_type())
                                  .transpose(0, 1);
    step.rows_of(out).copy_(causal_conv(rows, weight, bias, {.before = before}));
    const int64_t certain = step.count - drafts;
    at::Tensor last = last_conv_rows(before, rows.narrow(0, 0, certain), weight.size(2));
    if (drafts > 0) last = at::cat({last, rows.narrow(0, certain, drafts)});
    step.keep(last.transpose(0, 1), kept.narrow(1, 0, back + drafts));
  }
}

}  // namespace megatron
