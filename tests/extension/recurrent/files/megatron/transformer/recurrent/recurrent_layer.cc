#include "megatron/transformer/recurrent/recurrent_layer.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/recurrent/gated_scan.h"

namespace megatron {
namespace {

class RecurrentState final : public LayerState {
 public:
  std::vector<SlotBuffer*> slots() override { return {&sums}; }

  SlotBuffer sums;  // [slots, n/t] after the last position of each sequence
};

// The scan of a ragged batch: each part goes on from the sum of its sequence.
at::Tensor scan_parts(const at::Tensor& gate, const at::Tensor& read, const RaggedBatch& batch,
                      SlotBuffer& sums) {
  const at::Tensor kept = sums.rows(batch.num_slots, {read.size(2)}, read.options());
  std::vector<at::Tensor> all;
  int64_t row = 0;
  for (size_t i = 0; i < batch.slots.size(); ++i) {
    const RaggedPart& part = batch.rows.parts()[i];
    const at::Tensor own = kept[batch.slots[i]];
    const at::Tensor first = (part.first == 0 ? at::zeros_like(own) : own).unsqueeze(0);
    all.push_back(
        gated_scan(gate.narrow(0, row, part.count), read.narrow(0, row, part.count), first));
    own.copy_(all.back()[-1][0]);
    row += part.count;
  }
  return at::cat(all);
}

LinearOptions in_options(const TransformerConfig& config, bool sequence_parallel) {
  LinearOptions options;
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(3 * config.hidden_size, config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  options.parts = {config.hidden_size, config.hidden_size, config.hidden_size};
  options.input_norm = config.has_pre_norm();
  options.norm = {config.normalization, config.layernorm_epsilon,
                  config.layernorm_zero_centered_gamma};
  options.recompute_norm = config.recomputes("layernorm");
  return options;
}

LinearOptions out_options(const TransformerConfig& config, bool sequence_parallel) {
  LinearOptions options;
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(config.hidden_size, config.hidden_size, /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  return options;
}

}  // namespace

Recurrence::Recurrence(const TransformerConfig& config, bool sequence_parallel,
                       const ParallelGroups& groups)
    : linear_in_("linear_in", config.hidden_size, 3 * config.hidden_size,
                 in_options(config, sequence_parallel), groups),
      linear_out_("linear_out", config.hidden_size, config.hidden_size,
                  out_options(config, sequence_parallel), groups) {
  MEGATRON_CHECK(groups.cp.size() == 1,
                 "recurrent layers need whole sequences, got --context-parallel-size ",
                 groups.cp.size());
  add("linear_in", &linear_in_);
  add("linear_out", &linear_out_);
}

SublayerOutput Recurrence::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  SublayerOutput result = linear_in_.forward_with_residual(x);
  const at::Tensor y = mix(result.output, context);
  if (add) return {linear_out_.forward(y, result.residual), {}};
  result.output = linear_out_.forward(y);
  return result;
}

at::Tensor Recurrence::mix(const at::Tensor& projected, const LayerContext& context) {
  const auto part = projected.chunk(3, -1);
  const at::Tensor gate = part[2].sigmoid();
  const at::Tensor sums = context.state == nullptr
                              ? gated_scan(gate, part[0])
                              : scan_parts(gate, part[0], context.pass.decoding->batch,
                                           static_cast<RecurrentState*>(context.state)->sums);
  return sums * at::silu(part[1]);
}

RecurrentLayer::RecurrentLayer(const TransformerConfig& config, int64_t layer_number,
                               bool sequence_parallel, const ParallelGroups& groups)
    : Layer(layer_number),
      recurrence_(config, sequence_parallel, groups),
      mlp_(config, layer_number, sequence_parallel, groups),
      recurrence_half_(config, recurrence_,
                       random_key(config.seed, "recurrence_output_dropout", layer_number),
                       sequence_parallel, /*names=*/{}),
      mlp_half_(config, mlp_, random_key(config.seed, "mlp_output_dropout", layer_number),
                sequence_parallel, {"mlp", "mlp_norm"}) {
  MEGATRON_CHECK(!config.parallel_residual,
                 "recurrent layers with --parallel-residual are not built");
  add("recurrence", &recurrence_);
  add("mlp", &mlp_);
  if (!config.has_post_norm()) return;
  add("post_recurrence_layernorm", recurrence_half_.post_norm());
  add("post_mlp_layernorm", mlp_half_.post_norm());
}

at::Tensor RecurrentLayer::forward(const at::Tensor& x, const LayerContext& context) {
  return mlp_half_.forward(recurrence_half_.forward(x, context), context);
}

std::unique_ptr<LayerState> RecurrentLayer::make_state() const {
  return std::make_unique<RecurrentState>();
}

std::unique_ptr<Layer> make_recurrent(const TransformerConfig& config, int64_t layer_number,
                                      bool sequence_parallel, const ParallelGroups& groups) {
  return std::make_unique<RecurrentLayer>(config, layer_number, sequence_parallel, groups);
}

}  // namespace megatron
