// What one pass of a stage holds by the CPU's allocator, next to what its plan says.
#pragma once

#include <ATen/Context.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <mutex>
#include <optional>

#include "megatron/comm/thread_backend.h"
#include "megatron/nn/recompute.h"
#include "megatron/training/arguments/encoder_offload_rules.h"
#include "megatron/training/planning/activation_estimate.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "megatron/transformer/moe/routing_replay.h"
#include "tests/unit/training/measured_step.h"

namespace megatron {

// Products in bf16 without oneDNN while this object lives: its workspace, up to 2 MiB a product,
// depends on the processor, and the plan does not count it.
class WithoutOneDnn {
 public:
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(before_); }
  WithoutOneDnn(const WithoutOneDnn&) = delete;
  WithoutOneDnn& operator=(const WithoutOneDnn&) = delete;

 private:
  const bool before_ = at::globalContext().userEnabledMkldnn();
};

struct Measured {
  int64_t saved = 0;      // held after the forward pass
  int64_t forward = 0;    // most during the forward pass
  int64_t backward = 0;   // most during the backward pass
  int64_t pending = 0;    // held for deferred weight gradients
  int64_t offloaded = 0;  // in host memory after the forward pass
};

// One pass of the only chunk of a stage, with choices of routers that are imposed if there are any.
inline Measured measure(const Arguments& a, int64_t padded_vocab, const StageSlice& slice,
                        const ParallelGroups& groups, const RoutingTable* choices = nullptr) {
  const PretrainTask task = find_task(a);
  const std::unique_ptr<Model> module =
      task.model_provider(a, {500, padded_vocab}, groups, slice, {});
  freeze_parameters(a.training, *module);
  const at::ScalarType dtype = model_dtype(a.optimizer);
  DistributedDataParallel store(*module, groups, dtype, c10::kCPU);
  store.initialize(1);
  const Batch batch = random_batch(a, groups);
  const int64_t rows =
      batch.place.position.size(0) / (a.parallel.sequence_parallel ? groups.tp.size() : 1);
  const at::ScalarType stream = a.transformer.fp32_residual_connection ? at::kFloat : dtype;
  TensorFormat format{{rows, batch.place.sample.size(0), a.transformer.hidden_size}, stream};
  if (slice.layers_before() < 0)
    format = module->border(slice.layers_before(), batch, dtype).front();
  std::unique_ptr<ActivationOffload> offload;
  const TransformerConfig& c = a.transformer;
  if (offloads_activations(a))
    offload = std::make_unique<ActivationOffload>(c10::kCPU, c.transfers());
  Measured measured;
  const at::AutoGradMode grad_mode(true);
  // Returns what is left when the backward is over.
  const auto pass = [&](Measured& out) {
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    RecomputeTape tape;
    ForwardContext context;
    context.training = true;
    context.place = batch.place;
    context.tape = &tape;
    context.loss_grad = at::ones({});
    context.tokens.of_sequence = at::ones({batch.place.sample.size(0)}, at::kDouble);
    const RoutingReplay routing{.imposed = choices, .only_experts = true};
    if (choices != nullptr) context.routing = &routing;
    std::optional<AuxiliaryLosses> losses;
    if (const std::vector<std::string> names = module->auxiliary_losses(); !names.empty()) {
      const auto count = static_cast<int64_t>(names.size());
      losses.emplace(
          AuxiliaryLosses::Options{
              .names = names,
              .totals = at::zeros({count, 2}, at::kDouble),
              .gradient = [](const at::Tensor& sum, const at::Tensor&, LossRows,
                             std::string_view) { return at::ones_like(sum); }},
          tape);
      context.auxiliary_losses = &*losses;
    }
    OffloadedPass in_host_memory;
    if (offload) in_host_memory = OffloadedPass(*offload);
    if (offload) context.offload = &in_host_memory;
    at::Tensor input;
    BackwardEnd end_of_input;
    if (!slice.starts()) {
      input = at::randn(format.shape, at::dtype(format.dtype));
      if (format.has_gradient()) end_of_input = BackwardEnd(input);
    }
    BackwardRoot root;
    at::Tensor grad;
    {
      const StageOutput output = task.forward_step(
          *module, batch, input.defined() ? StageTensors{input} : StageTensors(), context);
      const at::Tensor& end =
          output.loss.sum.defined() ? output.loss.sum : output.activation.front();
      root = BackwardRoot(end);
      out.forward = meter->most;
      grad = at::ones_like(end);
      input.reset();
    }
    const int64_t arrived = static_cast<int64_t>(grad.nbytes());
    // What is on its way to the host has left when another pass begins.
    for (int64_t i = 0; offload && i <= c.fine_grained_offloading_max_inflight_offloads; ++i)
      in_host_memory.begin_group();
    out.saved = meter->live - arrived;
    if (offload) out.offloaded = offload->counts().host_bytes;
    meter->most = 0;
    in_host_memory.begin_backward();
    tape.backward(std::move(root), grad);
    out.backward = meter->most - arrived;
    if (end_of_input.defined()) end_of_input.take_grad();
    return meter->live - arrived;
  };
  pass(measured);
  std::vector<std::function<void()>> weight_gradients;
  store.defer_weight_gradients_to(&weight_gradients);
  Measured deferred;
  measured.pending = pass(deferred);
  store.defer_weight_gradients_to(nullptr);
  return measured;
}

struct ActivationCase {
  const char* name;
  const char* flags;
  int64_t world_size = 1;
  // Off where the CPU takes more than a GPU for the same work: fp32 copies of bf16 tensors for
  // weight gradients, blocks of attention without a flash kernel.
  bool backward_peak = true;
  // Of the peaks. More where the plan counts temporaries of attention or conversions roughly.
  double tolerance = 0.01;
  double forward_tolerance = tolerance;
};

constexpr const char* kMeasuredModel =
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 --attention-dropout "
    "0 ";

inline void expect_planned(const ActivationCase& c, const std::string& model = kMeasuredModel,
                           const RoutingTable* choices = nullptr) {
  const Arguments a = parse(model + kRun + c.flags, c.world_size);
  const LayoutPlan plan =
      make_layout_plan(a, {500, 1024}, /*on_gpu=*/false, find_task(a).model_provider);
  std::mutex mutex;
  const WithoutOneDnn same_on_every_processor;
  run_ranks(static_cast<int>(c.world_size), [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(a.parallel, world);
    const int stage = groups.pp.rank();
    const Measured real = measure(a, 1024, plan.stages.slice(stage, 0), groups, choices);
    const PassBytes pass = pass_bytes(plan, stage, 0);
    const std::lock_guard lock(mutex);
    const double saved = static_cast<double>(pass.saved.total());
    EXPECT_NEAR(saved, static_cast<double>(real.saved), 0.01 * saved) << "stage " << stage;
    const double forward = saved + static_cast<double>(pass.forward_extra),
                 backward = saved + static_cast<double>(pass.backward_extra);
    EXPECT_NEAR(static_cast<double>(pass.pending), static_cast<double>(real.pending),
                0.03 * static_cast<double>(real.pending))
        << "stage " << stage;
    EXPECT_NEAR(static_cast<double>(pass.offloaded), static_cast<double>(real.offloaded),
                0.01 * static_cast<double>(pass.offloaded));
    EXPECT_NEAR(forward, static_cast<double>(real.forward), c.forward_tolerance * forward)
        << "stage " << stage;
    if (c.backward_peak) {
      EXPECT_NEAR(backward, static_cast<double>(real.backward), c.tolerance * backward)
          << "stage " << stage;
    }
  });
}

}  // namespace megatron
