#include "megatron/transformer/recurrent/recurrent_layer.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/recurrent/gated_scan.h"

namespace megatron {
namespace {

class RecurrentState final : public LayerState {
 public:
  explicit RecurrentState(const DecodingShape& shape) : padding(at::tensor(shape.padding)) {}
  void clear() override { sum.reset(); }
  void reorder(const at::Tensor& rows) override {
    padding = padding.index_select(0, rows);
    if (sum.defined()) sum = sum.index_select(0, rows);
  }
  int64_t bytes() const override { return sum.defined() ? static_cast<int64_t>(sum.nbytes()) : 0; }

  at::Tensor padding;  // [b] positions at the start of a row that are no text
  at::Tensor sum;      // [b, n/t] after the last position; undefined: none yet
};

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
  at::Tensor gate = part[2].sigmoid(), read = part[0];
  auto* const state = static_cast<RecurrentState*>(context.state);
  at::Tensor first;
  if (state != nullptr) {
    // Padding reads zeros and keeps nothing, so that the text after it starts from zeros.
    const at::Tensor position =
        at::arange(read.size(0), at::kLong) + context.pass.decoding->length();
    const at::Tensor text =
        (position.unsqueeze(1) >= state->padding).to(read.device()).unsqueeze(2);  // [s, b, 1]
    gate = gate * text;
    read = read * text;
    first = state->sum.defined() ? state->sum : at::zeros_like(read[0]);
  }
  const at::Tensor sums = gated_scan(gate, read, first);
  if (state != nullptr) state->sum = sums[-1].clone();
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

std::unique_ptr<LayerState> RecurrentLayer::make_state(const DecodingShape& shape) const {
  return std::make_unique<RecurrentState>(shape);
}

std::unique_ptr<Layer> make_recurrent(const TransformerConfig& config, int64_t layer_number,
                                      bool sequence_parallel, const ParallelGroups& groups) {
  return std::make_unique<RecurrentLayer>(config, layer_number, sequence_parallel, groups);
}

}  // namespace megatron
