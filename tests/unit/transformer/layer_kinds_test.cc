// The table of layer kinds, and a kind of this test's own: a recurrent layer, mixed with attention,
// under recomputation, offloading, tensor parallelism and decoding.
#include "megatron/transformer/layer_kinds.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/transformer_layer.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ragged_steps.h"

namespace megatron {
namespace {

// The sum so far of each sequence, [slots, n/t].
class DecayingSum final : public LayerState {
 public:
  std::vector<SlotBuffer*> slots() override { return {&sums}; }
  SlotBuffer sums;
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

  // [s, b, n/t]: sums of u from `sum` on, which becomes the last of them.
  static at::Tensor scan_from(at::Tensor& sum, const at::Tensor& u) {
    std::vector<at::Tensor> sums;
    for (int64_t t = 0; t < u.size(0); ++t) sums.push_back(sum = sum / 2 + u[t]);
    return at::stack(sums);
  }
  static at::Tensor scan(const at::Tensor& u, const LayerContext& context) {
    if (context.state == nullptr) {
      at::Tensor sum = at::zeros_like(u[0]);
      return scan_from(sum, u);
    }
    const RaggedBatch& batch = context.pass.decoding->batch;
    const at::Tensor sums = static_cast<DecayingSum*>(context.state)
                                ->sums.rows(batch.num_slots, {u.size(2)}, u.options());
    std::vector<at::Tensor> all;
    for (size_t i = 0, row = 0; i < batch.slots.size(); ++i) {
      const RaggedPart& part = batch.rows.parts()[i];
      at::Tensor sum = sums[batch.slots[i]].unsqueeze(0);
      if (part.first == 0) sum = at::zeros_like(sum);
      all.push_back(scan_from(sum, u.narrow(0, static_cast<int64_t>(row), part.count)));
      sums[batch.slots[i]].copy_(sum[0]);
      row += static_cast<size_t>(part.count);
    }
    return at::cat(all);
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
  std::unique_ptr<LayerState> make_state() const override {
    return std::make_unique<DecayingSum>();
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
    EXPECT_STREQ(
        error.what(),
        "a layer of kind Q is unknown\nhint: known kinds: *- (attention and MLP), *x- "
        "(attention, cross attention and MLP), *r- (attention, chunked cross attention and MLP), "
        "*E "
        "(attention and experts), * (attention), + (latent attention), G (gated delta net), M "
        "(Mamba-2), - (MLP), E (experts)");
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

// Sequences of 8 and 5 positions, in chunks and single tokens; then another one in the first slot.
TEST(LayerKinds, MixedStatesDecodeLikeTheFullForward) {
  const at::NoGradGuard no_grad;
  const TransformerConfig config = small_config();
  const ParallelGroups one;
  TransformerBlock block(config, 0, 3, true, false, one, make_mixed);
  PlainParameterStore store(block, at::kDouble, at::kCPU, false);
  initialize_parameters(block, 3, one);
  const at::Tensor x = draw({8, 2, 32}, 1);
  const at::Tensor whole = block.forward(x, context_of(8, 2));
  RaggedSteps steps(2, 8, /*block_size=*/3);
  const auto decode = [&] {
    for (const std::vector<StepPart>& parts :
         std::vector<std::vector<StepPart>>{{{0, 0, 4}},
                                            {{0, 4, 1}, {1, 0, 3}},
                                            {{0, 5, 2}},
                                            {{1, 3, 1}, {0, 7, 1}},
                                            {{1, 4, 1}}}) {
      const std::vector<at::Tensor> y = steps.forward(block, x, parts);
      for (size_t i = 0; i < parts.size(); ++i)
        EXPECT_TRUE(at::allclose(
            y[i], whole.select(1, parts[i].sequence).narrow(0, parts[i].first, parts[i].count),
            1e-10, 1e-12))
            << parts[i].sequence << " at " << parts[i].first;
    }
  };
  decode();
  // A recurrent layer keeps one sum per sequence, however many positions there were.
  EXPECT_EQ(steps.state.bytes(),
            2 * (2 * Recurrence::kWidth) * 8 + steps.pool_positions() * (2 * 32) * 8);
  decode();  // from position 0: nothing of before is left
  steps.state.clear();
  EXPECT_EQ(steps.state.bytes(), 0);
  decode();
}

}  // namespace
}  // namespace megatron
