// The block of layers: recomputation, documents, tensor and sequence parallelism, in fp64.
#include "megatron/transformer/transformer_block.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "tests/unit/transformer/block_pass.h"

namespace megatron {
namespace {

TEST(TransformerBlock, RecomputationChangesNoBit) {
  for (TransformerConfig config : {small_config(), llama_config(), latent_config()}) {
    config.hidden_dropout = config.attention_dropout = 0.1;
    const at::Tensor x = draw({8, 2, 32}, 1), dy = draw({8, 2, 32}, 2);
    ForwardContext context = context_of(8, 2);
    context.training = true;
    const WholePass plain = run(config, x, dy, context);
    config.recompute_granularity = RecomputeGranularity::kFull;
    for (const auto method : {RecomputeMethod::kUniform, RecomputeMethod::kBlock}) {
      for (const int64_t layers : {1, 2, 3}) {
        config.recompute_method = method;
        config.recompute_num_layers = layers;
        expect_identical(plain, run(config, x, dy, context),
                         cat("method ", static_cast<int>(method), ", layers ", layers));
      }
    }
    expect_identical(plain, run(config, x, dy, context, /*tape=*/false), "without a tape");
    config.recompute_granularity = RecomputeGranularity::kSelective;
    for (const std::vector<std::string>& modules :
         {std::vector<std::string>{"core_attn", "layernorm"},
          {"mlp"},
          {"mlp_act"},
          {"core_attn", "layernorm", "mlp"},
          {"core_attn", "layernorm", "mlp_act"}}) {
      config.recompute_modules = modules;
      for (const bool tape : {true, false})
        expect_identical(plain, run(config, x, dy, context, tape),
                         cat("selective, with ", modules.back(), ", tape ", tape));
    }
  }
}

TEST(TransformerBlock, OffloadingChangesNoBit) {
  using Names = std::vector<std::string>;
  struct Case {
    const char* name;
    Names modules, recomputed;
    bool full = false;
  };
  const Case cases[] = {
      {"attn_norm", {"attn_norm"}, {}},
      {"qkv_linear", {"qkv_linear"}, {}},
      {"core_attn", {"core_attn"}, {}},
      {"attn_proj", {"attn_proj"}, {}},
      {"mlp_norm", {"mlp_norm"}, {}},
      {"mlp_fc1", {"mlp_fc1"}, {}},
      {"mlp_act", {"mlp_act"}, {}},
      {"mlp_fc2", {"mlp_fc2"}, {}},
      {"all",
       {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act",
        "mlp_fc2"},
       {}},
      {"with parts recomputed",
       {"attn_norm", "core_attn", "attn_proj", "mlp_norm", "mlp_act"},
       {"core_attn", "layernorm", "mlp_act"}},
      {"with the MLP recomputed", {"core_attn", "attn_proj", "mlp_norm"}, {"mlp"}},
      {"inputs of recomputed layers", {"attn_norm"}, {}, true},
  };
  for (TransformerConfig config : {small_config(), llama_config(), latent_config()}) {
    for (const double dropout : {0.0, 0.1}) {  // attention has another path with dropout
      config.hidden_dropout = config.attention_dropout = dropout;
      config.qk_layernorm = dropout == 0.0;
      const at::Tensor x = draw({8, 2, 32}, 1), dy = draw({8, 2, 32}, 2);
      ForwardContext context = context_of(8, 2);
      context.training = true;
      const WholePass plain = run(config, x, dy, context);
      for (const Case& c : cases) {
        TransformerConfig other = config;
        other.fine_grained_activation_offloading = true;
        other.offload_modules = c.modules;
        other.min_offloaded_tensor_size = 0;
        if (!c.recomputed.empty()) other.recompute_granularity = RecomputeGranularity::kSelective;
        if (c.full) other.recompute_granularity = RecomputeGranularity::kFull;
        other.recompute_modules = c.recomputed;
        ActivationOffload offload(c10::kCPU, {0, 1});
        expect_identical(plain, run(other, x, dy, context, true, &offload), c.name);
        EXPECT_GT(offload.counts().bytes_to_host, 0) << c.name;
        EXPECT_EQ(offload.counts().late_groups, 0) << c.name;
        EXPECT_EQ(offload.counts().host_bytes, 0) << c.name;
      }
      TransformerConfig layers = config;
      layers.cpu_offloading_num_layers = 2;
      ActivationOffload offload(c10::kCPU, {0, 1});
      expect_identical(plain, run(layers, x, dy, context, true, &offload), "all of two layers");
      EXPECT_GT(offload.counts().bytes_from_host, 0);
    }
  }
}

TEST(TransformerBlock, NamesLayersGlobally) {
  const TransformerConfig config = small_config();
  TransformerBlock last(config, 2, 1, /*final_norm=*/true, false, {}),
      first(config, 0, 2, /*final_norm=*/false, false, {});
  std::vector<std::string> names;
  last.visit([&](const std::string& name, Parameter&) { names.push_back(name); });
  EXPECT_EQ(names.front(), "layers.2.self_attention.linear_qkv.layer_norm_weight");
  EXPECT_EQ(names.back(), "final_layernorm.bias");
  names.clear();
  first.visit([&](const std::string& name, Parameter&) { names.push_back(name); });
  EXPECT_EQ(names.size(), 24u);
  EXPECT_EQ(names.back(), "layers.1.mlp.linear_fc2.bias");
}

TEST(TransformerBlock, MaskAndResetPositionsSeparateDocuments) {
  for (TransformerConfig config : {small_config(), llama_config(), latent_config()}) {
    const int64_t first = 5, second = 7, s = first + second;
    const at::Tensor x = draw({s, 2, 32}, 1), dy = draw({s, 2, 32}, 2);
    ForwardContext packed = context_of(s, 2);
    packed.position_ids =
        at::cat({at::arange(first, at::kLong), at::arange(second, at::kLong)}).expand({2, s});
    packed.attention_mask = at::zeros({2, 1, s, s}, at::kBool);
    packed.attention_mask.slice(2, first).slice(3, 0, first).fill_(true);
    const WholePass together = run(config, x, dy, packed);
    const WholePass a =
        run(config, x.narrow(0, 0, first), dy.narrow(0, 0, first), context_of(first, 2));
    const WholePass b =
        run(config, x.narrow(0, first, second), dy.narrow(0, first, second), context_of(second, 2));
    EXPECT_TRUE(at::allclose(together.y, at::cat({a.y, b.y}), 1e-10, 1e-12));
    EXPECT_TRUE(at::allclose(together.dx, at::cat({a.dx, b.dx}), 1e-10, 1e-12));
    for (const auto& [name, grad] : together.grads)
      EXPECT_TRUE(at::allclose(grad, a.grads.at(name) + b.grads.at(name), 1e-9, 1e-11)) << name;
    packed.attention_mask = at::Tensor();
    EXPECT_FALSE(at::allclose(run(config, x, dy, packed).y, together.y, 1e-6, 1e-6))
        << "the mask had no effect";
  }
}

TEST(TransformerBlock, WindowHidesWhatIsFurtherLeft) {
  TransformerConfig config = small_config();
  config.num_layers = 1;
  config.window_size = {2, 0};
  const at::Tensor x = draw({8, 1, 32}, 1), dy = draw({8, 1, 32}, 2);
  at::Tensor other = x.clone();
  other[3].normal_();
  const WholePass a = run(config, x, dy, context_of(8, 1)),
                  b = run(config, other, dy, context_of(8, 1));
  const at::Tensor changed = (a.y != b.y).any(-1).any(-1);  // [s]
  EXPECT_TRUE(at::equal(changed, at::tensor({0, 0, 0, 1, 1, 1, 0, 0}).to(at::kBool))) << changed;
}

TEST(TransformerBlock, ResidualStreamInFp32) {
  TransformerConfig config = small_config();
  config.fp32_residual_connection = true;
  const ParallelGroups one;
  TransformerBlock block(config, 0, 3, true, false, one);
  PlainParameterStore store(block, at::kBFloat16, at::kCPU, true);
  initialize_parameters(block, 3, one);
  const at::Tensor x = draw({8, 2, 32}, 1).to(at::kFloat).set_requires_grad(true);
  const at::Tensor y = block.forward(x, context_of(8, 2));
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  torch::autograd::backward({y.sum()}, {});
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::isfinite(x.grad()).all().item<bool>());
  const WholePass exact = run(small_config(), x.detach().to(at::kDouble),
                              at::ones({8, 2, 32}, at::kDouble), context_of(8, 2));
  EXPECT_LT((y.to(at::kDouble) - exact.y).abs().max().item<double>(), 0.15);
}

// The same block over 2 and 4 tensor-parallel ranks, with and without sequence parallelism.
TEST(TransformerBlock, TensorParallelRanksGiveTheSameResult) {
  for (TransformerConfig config : {small_config(), llama_config(), latent_config()}) {
    if (config.group_query_attention) config.num_query_groups = 4;
    const at::Tensor x = draw({8, 2, 32}, 1), dy = draw({8, 2, 32}, 2);
    config.hidden_dropout = 0.2;
    ForwardContext context = context_of(8, 2);
    context.training = true;
    config.attention_dropout = 0.2;
    const WholePass expected = run(config, x, dy, context);
    for (const int ranks : {2, 4}) {
      for (const bool sequence_parallel : {false, true}) {
        // With sequence parallelism each rank's dropout needs the positions of its own rows;
        // without dropout here.
        if (sequence_parallel) config.hidden_dropout = config.attention_dropout = 0.0;
        const WholePass reference = sequence_parallel ? run(config, x, dy, context) : expected;
        run_ranks(ranks, [&](const std::shared_ptr<Backend>& backend) {
          ParallelGroups groups;
          groups.tp = ProcessGroup(backend, "tp");
          const auto rows = [&](const at::Tensor& t) {
            return sequence_parallel
                       ? t.chunk(ranks, 0)[static_cast<size_t>(groups.tp.rank())].contiguous()
                       : t;
          };
          const std::string what = cat(ranks, " ranks, sequence ", sequence_parallel);
          TransformerBlock block(config, 0, 3, true, sequence_parallel, groups);
          PlainParameterStore store(block, at::kDouble, at::kCPU, true);
          initialize_parameters(block, 3, groups);
          const at::Tensor input = rows(x).clone().set_requires_grad(true);
          const at::Tensor y = block.forward(input, context);
          torch::autograd::backward({y}, {rows(dy)});
          EXPECT_TRUE(at::allclose(y, rows(reference.y), 1e-10, 1e-12)) << what;
          EXPECT_TRUE(at::allclose(input.grad(), rows(reference.dx), 1e-10, 1e-12)) << what;
          block.visit([&](const std::string& name, Parameter& parameter) {
            at::Tensor grad = store.grad(parameter).clone();
            if (parameter.placement.partial_grad.contains(Axis::kTensor))
              groups.tp.all_reduce(grad)->wait();
            for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
              at::Tensor whole = reference.grads.at(name), part = grad;
              for (size_t d = 0; d < piece.local_offset.size(); ++d) {
                const auto dim = static_cast<int64_t>(d);
                whole = whole.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
                part = part.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
              }
              EXPECT_TRUE(at::allclose(part, whole, 1e-9, 1e-11)) << what << ": " << name;
            }
          });
        });
        config.hidden_dropout = config.attention_dropout = 0.2;
      }
    }
  }
}

TEST(SelfAttention, RefusesHeadsThatDoNotDivide) {
  run_ranks(4, [](const std::shared_ptr<Backend>& backend) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(backend, "tp");
    TransformerConfig config = llama_config();
    config.num_attention_heads = 12;
    config.num_query_groups = 3;
    try {
      TransformerBlock block(config, 0, 1, true, false, groups);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(),
                   "4 tensor-parallel ranks are not divisible by --num-query-groups 3");
    }
    config = small_config();
    config.num_attention_heads = 6;
    try {
      TransformerBlock block(config, 0, 1, true, false, groups);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(),
                   "--num-attention-heads 6 is not divisible by 4 tensor-parallel ranks");
    }
  });
}

}  // namespace
}  // namespace megatron
