// The plan of a Mamba-2 sublayer: bytes that it saves and sends, operations.
#include "megatron/transformer/ssm/mamba_mixer_cost.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>

#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/ssm/mamba_mixer.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/forwarding_backend.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ssm/mixer_config.h"

namespace megatron {
namespace {

LayerShape shape_of(int64_t s, int64_t tensor, int64_t context) {
  LayerShape shape;
  shape.samples = 2;
  shape.tokens = 2 * s / context;
  shape.rows = shape.tokens;
  shape.element = shape.residual = shape.sum = 8;
  shape.tensor = tensor;
  shape.context = context;
  shape.on_gpu = false;
  return shape;
}

// Counts the bytes that a ring sends.
class RingBytesBackend : public ForwardingBackend {
 public:
  RingBytesBackend(std::shared_ptr<Backend> inner, double* bytes)
      : ForwardingBackend(std::move(inner)), bytes_(bytes) {}
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    *bytes_ += 2 * scatter_bytes(size(), static_cast<double>(tensor.nbytes()));
    return ForwardingBackend::all_reduce(tensor, op);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    *bytes_ += scatter_bytes(size(), static_cast<double>(output.nbytes()));
    return ForwardingBackend::all_gather(output, input);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    *bytes_ += scatter_bytes(size(), static_cast<double>(input.nbytes()));
    return ForwardingBackend::reduce_scatter(output, input, op);
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<RingBytesBackend>(ForwardingBackend::subgroup(ranks, name, use),
                                              bytes_);
  }

 private:
  double* bytes_;
};

struct Measured {
  int64_t saved = 0;  // allocated by the forward and kept, with the output
  double forward = 0, backward = 0;
};

Measured measure(const TransformerConfig& config, const ParallelGroups& groups,
                 const LayerShape& shape, const double& bytes) {
  MambaMixer mixer(config, 1, /*sequence_parallel=*/false, groups);
  PlainParameterStore store(mixer, at::kDouble, at::kCPU, true);
  initialize_parameters(mixer, 3, groups);
  const at::Tensor x = draw({shape.rows / shape.samples, shape.samples, config.hidden_size}, 1)
                           .set_requires_grad(true);
  const ForwardContext pass = context_of(shape.tokens / shape.samples * shape.context, 2);
  Measured measured;
  const double before = bytes;
  const auto meter = std::make_shared<Meter>();
  at::Tensor y;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    y = mixer.forward(x, LayerContext{pass, {}}, /*add=*/false).output;
  }
  measured.saved = meter->live;
  measured.forward = bytes - before;
  y.backward(at::ones_like(y));
  measured.backward = bytes - before - measured.forward;
  return measured;
}

TEST(MambaMixerCost, SavesWhatThePlanSays) {
  for (const bool recomputed : {false, true}) {
    TransformerConfig config = mixer_config(8, 2);
    if (recomputed) {
      config.recompute_granularity = RecomputeGranularity::kSelective;
      config.recompute_modules = {"mamba_norm", "layernorm"};
    }
    const LayerShape shape = shape_of(32, 1, 1);
    const SublayerCost cost = mamba_mixer_cost(config, 1, shape, false);
    const Measured measured = measure(config, ParallelGroups(), shape, 0.0);
    // The input is not counted; the output is as large. A few bytes: scalars, an anchor.
    EXPECT_NEAR(static_cast<double>(measured.saved), static_cast<double>(cost.saved.total()), 64)
        << recomputed;
    EXPECT_EQ(cost.forward_end, cost.saved.total());
  }
}

TEST(MambaMixerCost, SendsWhatThePlanSays) {
  for (const int64_t groups : {1, 2, 8})
    for (const auto& [tensor, context] : {std::pair{4, 1}, {1, 2}, {2, 2}}) {
      TransformerConfig config = mixer_config(8, groups);
      config.norm_placement = NormPlacement::kPost;
      const LayerShape shape = shape_of(32, tensor, context);
      const SublayerCost cost = mamba_mixer_cost(config, 1, shape, false);
      ParallelConfig parallel;
      parallel.tensor_model_parallel_size = tensor;
      parallel.context_parallel_size = context;
      run_ranks(tensor * context, [&](const std::shared_ptr<Backend>& world) {
        double bytes = 0;
        const ParallelGroups ranks =
            make_parallel_groups(parallel, std::make_shared<RingBytesBackend>(world, &bytes));
        const Measured measured = measure(config, ranks, shape, bytes);
        EXPECT_DOUBLE_EQ(measured.forward, cost.tensor.forward + cost.context.forward)
            << groups << " groups, " << tensor << " x " << context;
        EXPECT_DOUBLE_EQ(measured.backward, cost.tensor.backward + cost.context.backward)
            << groups << " groups, " << tensor << " x " << context;
      });
    }
}

// 8192 tokens of one layer: 2 T h (2 d + 2 G N + H) + 7 T d N + 2 T d h
TEST(MambaMixerCost, Operations) {
  TransformerConfig config = mixer_config(64, 8);
  config.hidden_size = 2688;
  config.mamba_head_dim = 64;
  config.mamba_state_dim = 128;
  const SublayerCost cost = mamba_mixer_cost(config, 1, shape_of(8192, 1, 1), false);
  constexpr double T = 8192, h = 2688, d = 4096, GN = 1024, H = 64, N = 128;
  EXPECT_EQ(2 * T * (cost.weight_products() + cost.score_products),
            2 * T * h * (2 * d + 2 * GN + H) + 7 * T * d * N + 2 * T * d * h);
}

}  // namespace
}  // namespace megatron
