// The table of layer kinds, and a kind of this test's own: a recurrent layer, mixed with attention,
// under recomputation, offloading, tensor parallelism and decoding.
#include "megatron/transformer/layer_kinds.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/transformer_layer.h"
#include "tests/unit/transformer/block_pass.h"

namespace megatron {
namespace {

// The sum so far of each row, [b, n/t]; padding counts for nothing.
class DecayingSum final : public LayerState {
 public:
  explicit DecayingSum(const DecodingShape& shape) : padding(at::tensor(shape.padding)) {}
  void clear() override { sum.reset(); }
  void reorder(const at::Tensor& rows) override {
    padding = padding.index_select(0, rows);
    if (sum.defined()) sum = sum.index_select(0, rows);
  }
  int64_t bytes() const override { return sum.defined() ? static_cast<int64_t>(sum.nbytes()) : 0; }
  at::Tensor padding;  // [b]
  at::Tensor sum;
};

// y_t = W_out s_t with s_t = s_{t-1} / 2 + W_in norm(x_t). Parameters: linear_in..., linear_out...
class Recurrence final : public Sublayer {
 public:
  static constexpr int64_t kWidth = 24;

  Recurrence(const TransformerConfig& config, bool sequence_parallel, const ParallelGroups& groups)
      : config_(config),
        linear_in_("linear_in", config.hidden_size, kWidth,
                   options(config, sequence_parallel, true), groups),
        linear_out_("linear_out", kWidth, config.hidden_size,
                    options(config, sequence_parallel, false), groups) {
    add("linear_in", &linear_in_);
    add("linear_out", &linear_out_);
  }

  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override {
    SublayerOutput result;
    {
      const OffloadScope scope(context.offload(), [&](const at::Tensor& saved) {
        return config_.offloads(saved.is_alias_of(x) ? "attn_norm" : "qkv_linear");
      });
      result = linear_in_.forward_with_residual(x);
    }
    const at::Tensor y = scan(result.output, context);
    if (add) return {linear_out_.forward(y, result.residual), {}};
    result.output = linear_out_.forward(y);
    return result;
  }

 private:
  static LinearOptions options(const TransformerConfig& config, bool sequence_parallel, bool norm) {
    LinearOptions options;
    options.init = config.weight_init(kWidth, config.hidden_size);
    options.sequence_parallel = sequence_parallel;
    options.input_norm = norm;
    return options;
  }

  static at::Tensor scan(const at::Tensor& u, const LayerContext& context) {
    auto* state = static_cast<DecayingSum*>(context.state);
    at::Tensor sum = state != nullptr && state->sum.defined() ? state->sum : at::zeros_like(u[0]);
    std::vector<at::Tensor> sums;
    for (int64_t t = 0; t < u.size(0); ++t) {
      sum = sum / 2 + u[t];
      if (state != nullptr) {
        const at::Tensor is_text = state->padding <= context.pass.decoding->length() + t;
        sum = at::where(is_text.unsqueeze(1), sum, 0.0);
      }
      sums.push_back(sum);
    }
    if (state != nullptr) state->sum = sum;
    return at::stack(sums);
  }

  const TransformerConfig& config_;
  ColumnParallelLinear linear_in_;
  RowParallelLinear linear_out_;
};

class RecurrentLayer final : public Layer {
 public:
  RecurrentLayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                 const ParallelGroups& groups)
      : Layer(layer_number),
        mixer_(config, sequence_parallel, groups),
        residual_(config, mixer_, random_key(config.seed, "mixer_output_dropout", layer_number),
                  sequence_parallel, {"mlp", "mlp_norm"}) {
    add("mixer", &mixer_);
  }
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override {
    return residual_.forward(x, context);
  }
  std::unique_ptr<LayerState> make_state(const DecodingShape& shape) const override {
    return std::make_unique<DecayingSum>(shape);
  }

 private:
  Recurrence mixer_;
  ResidualSublayer residual_;
};

// Layers 1 and 3 are recurrent.
std::unique_ptr<Layer> make_mixed(const TransformerConfig& config, int64_t layer_number,
                                  bool sequence_parallel, const ParallelGroups& groups) {
  if (layer_number % 2 == 0) return make_layer(config, layer_number, sequence_parallel, groups);
  return std::make_unique<RecurrentLayer>(config, layer_number, sequence_parallel, groups);
}

WholePass run_mixed(const TransformerConfig& config, ActivationOffload* offload = nullptr) {
  ForwardContext context = context_of(8, 2);
  context.training = true;
  return run(config, draw({8, 2, 32}, 1), draw({8, 2, 32}, 2), context, /*tape=*/true, offload,
             make_mixed);
}

TEST(LayerKinds, AreFoundByTheirLetters) {
  const LayerKind& kind = find_layer_kind("*-");
  EXPECT_EQ(kind.name, "attention and MLP");
  const TransformerConfig config = small_config();
  const ParallelGroups one;
  for (const auto& layer : {kind.make(config, 2, false, one), make_layer(config, 2, false, one)}) {
    EXPECT_NE(dynamic_cast<TransformerLayer*>(layer.get()), nullptr);
    EXPECT_EQ(layer->layer_number(), 2);
  }
  try {
    find_layer_kind("Q");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "a layer of kind Q is unknown\nhint: known kinds: *- (attention and MLP), *E "
                 "(attention and experts)");
  }
}

TEST(LayerKinds, ANewKindHasItsNamesAndMixes) {
  const WholePass mixed = run_mixed(small_config());
  EXPECT_TRUE(mixed.grads.contains("layers.0.mixer.linear_in.layer_norm_weight"));
  EXPECT_TRUE(mixed.grads.contains("layers.1.self_attention.linear_qkv.weight"));
  EXPECT_FALSE(mixed.grads.contains("layers.2.mlp.linear_fc1.weight"));
  for (const auto& [name, grad] : mixed.grads)
    EXPECT_GT(grad.abs().max().item<double>(), 0.0) << name;
}

TEST(LayerKinds, RecomputationOfANewKindChangesNoBit) {
  TransformerConfig config = small_config();
  config.hidden_dropout = config.attention_dropout = 0.1;
  const WholePass plain = run_mixed(config);
  config.recompute_granularity = RecomputeGranularity::kSelective;
  config.recompute_modules = {"core_attn", "mlp"};
  expect_identical(plain, run_mixed(config), "selective");
  config.recompute_granularity = RecomputeGranularity::kFull;
  for (const auto method : {RecomputeMethod::kUniform, RecomputeMethod::kBlock}) {
    for (const int64_t layers : {1, 2, 3}) {
      config.recompute_method = method;
      config.recompute_num_layers = layers;
      expect_identical(plain, run_mixed(config),
                       cat("method ", static_cast<int>(method), ", layers ", layers));
    }
  }
}

TEST(LayerKinds, OffloadingOfANewKindChangesNoBit) {
  const WholePass plain = run_mixed(small_config());
  TransformerConfig all = small_config(), fine = small_config();
  all.cpu_offloading_num_layers = 1;  // only the first layer, which is recurrent
  fine.fine_grained_activation_offloading = true;
  fine.activation_offload_fraction = 0.3;  // again the first of three
  fine.offload_modules = {"qkv_linear"};
  TransformerConfig recomputed = fine;
  recomputed.recompute_granularity = RecomputeGranularity::kSelective;
  recomputed.recompute_modules = {"mlp"};
  recomputed.offload_modules = {"mlp_norm"};
  for (const TransformerConfig& config : {all, fine, recomputed}) {
    ActivationOffload offload(c10::kCPU, {0, 1});
    expect_identical(plain, run_mixed(config, &offload), "offloaded");
    EXPECT_GE(offload.counts().tensors, 1);
    EXPECT_EQ(offload.counts().late_groups, 0);
    EXPECT_EQ(offload.counts().host_bytes, 0);
  }
}

TEST(LayerKinds, TensorParallelRanksOfANewKindGiveTheSameResult) {
  const TransformerConfig config = small_config();
  const WholePass expected = run_mixed(config);
  run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(backend, "tp");
    TransformerBlock block(config, 0, 3, true, /*sequence_parallel=*/true, groups, make_mixed);
    PlainParameterStore store(block, at::kDouble, at::kCPU, true);
    initialize_parameters(block, 3, groups);
    const auto rows = [&](const at::Tensor& x) {
      return x.chunk(2, 0)[static_cast<size_t>(groups.tp.rank())].contiguous();
    };
    const at::Tensor x = rows(draw({8, 2, 32}, 1)).set_requires_grad(true);
    const at::Tensor y = block.forward(x, context_of(8, 2));
    torch::autograd::backward({y}, {rows(draw({8, 2, 32}, 2))});
    EXPECT_TRUE(at::allclose(y, rows(expected.y), 1e-10, 1e-12));
    EXPECT_TRUE(at::allclose(x.grad(), rows(expected.dx), 1e-10, 1e-12));
  });
}

// Rows of 8 and 5 positions, the second with padding on the left, in slices.
TEST(LayerKinds, MixedStatesDecodeLikeTheFullForward) {
  const at::NoGradGuard no_grad;
  const TransformerConfig config = small_config();
  const ParallelGroups one;
  TransformerBlock block(config, 0, 3, true, false, one, make_mixed);
  PlainParameterStore store(block, at::kDouble, at::kCPU, false);
  initialize_parameters(block, 3, one);
  const at::Tensor x = draw({8, 2, 32}, 1);
  const at::Tensor whole = block.forward(x, context_of(8, 2));
  const at::Tensor shorter = block.forward(x.narrow(0, 3, 5), context_of(5, 2)).select(1, 1);
  DecodingState state({8, {0, 3}});
  const auto decode = [&](const at::Tensor& rows) {
    for (const int64_t count : {4, 1, 2, 1}) {
      ForwardContext context = context_of(count, 2);
      context.place.position += state.length();
      context.decoding = &state;
      context.attention_mask = state.padding_mask(count, at::kCPU);
      const int64_t first = state.length();
      const at::Tensor y = block.forward(rows.narrow(0, first, count), context);
      state.advance(count);
      const int64_t padded = std::max<int64_t>(0, 3 - first);
      EXPECT_TRUE(
          at::allclose(y.select(1, 0), whole.select(1, 0).narrow(0, first, count), 1e-10, 1e-12))
          << first;
      EXPECT_TRUE(at::allclose(y.select(1, 1).narrow(0, padded, count - padded),
                               shorter.narrow(0, first + padded - 3, count - padded), 1e-10, 1e-12))
          << first;
    }
  };
  decode(x);
  // A recurrent layer keeps one sum per row, however many positions there were.
  EXPECT_EQ(state.bytes(), 2 * (2 * Recurrence::kWidth) * 8 + 2 * 8 * (2 * 32) * 8);
  state.clear();
  EXPECT_EQ(state.bytes(), 0);
  decode(x);
}

TEST(LayerKinds, MixedStatesFollowTheirRows) {
  const at::NoGradGuard no_grad;
  const TransformerConfig config = small_config();
  const ParallelGroups one;
  TransformerBlock block(config, 0, 3, true, false, one, make_mixed);
  PlainParameterStore store(block, at::kDouble, at::kCPU, false);
  initialize_parameters(block, 3, one);
  const at::Tensor x = draw({8, 3, 32}, 1), rows = at::tensor({2, 0, 2}, at::kLong);
  DecodingState kept({8, {0, 3, 1}}), moved({8, {0, 3, 1}});
  const auto step = [&](DecodingState& state, const at::Tensor& input) {
    ForwardContext context = context_of(4, 3);
    context.place.position += state.length();
    context.decoding = &state;
    context.attention_mask = state.padding_mask(4, at::kCPU);
    const at::Tensor y = block.forward(input, context);
    state.advance(4);
    return y;
  };
  step(kept, x.narrow(0, 0, 4));
  step(moved, x.narrow(0, 0, 4));
  moved.reorder(rows);
  const at::Tensor next = x.narrow(0, 4, 4);
  const at::Tensor expected = step(kept, next).index_select(1, rows);
  EXPECT_TRUE(at::allclose(step(moved, next.index_select(1, rows)), expected, 1e-12, 1e-13));
}

}  // namespace
}  // namespace megatron
