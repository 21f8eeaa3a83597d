#include "megatron/optimizer/optimizer.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/optimizer/host_states.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

constexpr int64_t kSamples = 4;

OptimizerConfig test_config() {
  OptimizerConfig config;
  config.lr = 1e-2;
  config.lr_decay_style = LrDecayStyle::kConstant;
  config.weight_decay = 0.1;
  return config;
}

// A model with its store and its optimizer.
struct Fixture {
  explicit Fixture(const OptimizerConfig& config, at::ScalarType dtype = at::kFloat,
                   ParallelGroups ranks = ParallelGroups())
      : groups(std::move(ranks)) {
    model.declare("embedding.word_embeddings.weight", {40, 150}, ParameterRole::kEmbedding)
        .valid_rows = 37;
    model.declare("linear.weight", {30, 50});
    model.declare("linear.bias", {30}, ParameterRole::kBias);
    model.declare("q_layernorm.weight", {8}, ParameterRole::kQKNorm);
    model.declare("frozen.weight", {9, 9}).trainable = false;
    ddp = std::make_unique<DistributedDataParallel>(model, groups, dtype, at::kCPU);
    start_values(model);
    const TrainLength length{100, std::nullopt, kSamples};
    optimizer = std::make_unique<Optimizer>(config, make_schedule(config, length), *ddp);
  }

  void step(int t, double factor = 1.0) {
    set_gradients(model, *ddp, t, 0.1, factor);
    optimizer->step(1.0, kSamples);
  }

  // Every tensor that a step may change.
  std::vector<at::Tensor> snapshot() {
    std::vector<at::Tensor> all = {ddp->flat_values().clone()};
    for (const StateTensor& entry : optimizer->tensors()) all.push_back(entry.data.clone());
    return all;
  }

  ParallelGroups groups;
  TestModel model;
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;
};

bool same_bytes(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(a[i].data_ptr(), b[i].data_ptr(), a[i].nbytes()) != 0) return false;
  }
  return true;
}

TEST(Optimizer, NormZerosAndFrozenParameters) {
  Fixture run(test_config());
  run.model[0].value.narrow(0, 37, 3).zero_();  // padded rows
  const at::Tensor frozen = run.model[4].value.clone();
  set_gradients(run.model, *run.ddp, 0, 0.1, 1.0);
  run.ddp->grad(run.model[0]).narrow(0, 37, 3).zero_();
  run.ddp->grad(run.model[2]).narrow(0, 0, 7).zero_();
  double squares = 0;
  for (size_t k = 0; k < 4; ++k) {
    squares += run.ddp->grad(run.model[k]).to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_EQ(run.optimizer->num_zeros(), 7.0) << "padded rows do not count";
  double weights = 0;
  for (size_t k = 0; k < 4; ++k)
    weights += run.model[k].value.to(at::kDouble).square().sum().item<double>();
  EXPECT_NEAR(run.optimizer->params_norm(), std::sqrt(weights), 1e-9);
  run.optimizer->step(2.0, kSamples);
  const StepState state = run.optimizer->read_state();
  EXPECT_NEAR(state.grad_norm, std::sqrt(squares) / 2.0, 1e-9);
  EXPECT_EQ(state.num_steps, kSamples);
  EXPECT_TRUE(at::equal(run.model[4].value, frozen));
}

TEST(Optimizer, WeightDecayFollowsTheRules) {
  OptimizerConfig config = test_config();
  config.optimizer = "sgd";
  for (const bool qk : {false, true}) {
    config.apply_wd_to_qk_layernorm = qk;
    Fixture run(config);
    std::vector<at::Tensor> before;
    for (size_t k = 0; k < 4; ++k) before.push_back(run.model[k].value.clone());
    run.ddp->zero_grad();
    run.optimizer->step(1.0, kSamples);
    const bool decays[] = {true, true, false, qk};
    for (size_t k = 0; k < 4; ++k) {
      const at::Tensor expected = decays[k] ? before[k] * (1.0 - 1e-2 * 0.1) : before[k];
      EXPECT_TRUE(at::allclose(run.model[k].value, expected, 1e-6, 1e-8)) << run.model[k].name;
    }
  }
}

// With the factor of one parameter it alone moves, bit for bit, as by that rate; the record holds
// the rate without factors.
TEST(Optimizer, AFactorOfTheLearningRateIsThatRate) {
  constexpr double kFactor = 0.1;
  for (const char* rule : {"adam", "sgd"}) {
    for (const double in_host_memory : {0.0, 0.5, 1.0}) {
      for (const bool narrow : {false, true}) {
        if (narrow && rule == std::string("sgd")) continue;
        SCOPED_TRACE(cat(rule, " in host memory ", in_host_memory, " narrow ", narrow));
        OptimizerConfig config = test_config();
        config.optimizer = rule;
        config.optimizer_cpu_offload = in_host_memory > 0;
        if (in_host_memory > 0) config.optimizer_offload_fraction = in_host_memory;
        if (narrow)
          config.main_params_dtype = config.exp_avg_dtype = config.exp_avg_sq_dtype =
              StateType::kBf16;
        const auto stepped = [&](double lr, double factor) {
          config.lr = lr;
          auto run = std::make_unique<Fixture>(config, narrow ? at::kBFloat16 : at::kFloat);
          run->model[1].lr_factor = run->model[2].lr_factor = factor;
          run->optimizer =
              std::make_unique<Optimizer>(config, run->optimizer->schedule(), *run->ddp);
          run->step(0);
          EXPECT_EQ(run->optimizer->read_state().lr[0], lr);
          return run;
        };
        const double lr = *test_config().lr;
        const auto plain = stepped(lr, 1.0), all = stepped(lr * kFactor, 1.0),
                   chosen = stepped(lr, kFactor);
        for (size_t k = 0; k < 4; ++k) {
          const at::Tensor& value = chosen->model[k].value;
          EXPECT_TRUE(at::equal(value, (k == 1 || k == 2 ? all : plain)->model[k].value)) << k;
          EXPECT_FALSE(at::equal(value, (k == 1 || k == 2 ? plain : all)->model[k].value)) << k;
        }
      }
    }
  }
}

TEST(Optimizer, PaddedRowsStayZero) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Fixture run(test_config(), dtype);
    run.model[0].value.narrow(0, 37, 3).zero_();
    run.optimizer->reload_masters();
    for (int t = 0; t < 5; ++t) {
      set_gradients(run.model, *run.ddp, t, 0.1, 1.0);
      run.ddp->grad(run.model[0]).narrow(0, 37, 3).zero_();
      run.optimizer->step(1.0, kSamples);
    }
    EXPECT_EQ(at::count_nonzero(run.model[0].value.narrow(0, 37, 3)).item<int64_t>(), 0);
    EXPECT_GT(at::count_nonzero(run.model[0].value.narrow(0, 0, 37)).item<int64_t>(), 0);
  }
}

// Masters move by less than a bf16 rounding step and still add up.
TEST(Optimizer, MasterWeightsKeepSmallUpdates) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    OptimizerConfig config = test_config();
    config.lr = 1e-5;
    config.weight_decay = 0.0;
    (dtype == at::kHalf ? config.fp16 : config.bf16) = true;
    config.loss_scale = dtype == at::kHalf ? std::optional<double>(1.0) : std::nullopt;
    Fixture run(config, dtype);
    const at::Tensor start = run.model[1].value.to(at::kFloat);
    for (int t = 0; t < 200; ++t) {
      run.ddp->flat_grads().fill_(1.0);
      run.optimizer->step(1.0, kSamples);
    }
    for (const StateTensor& entry : run.optimizer->tensors()) {
      if (entry.description.key != "optimizer.state.fp32_param.linear.weight") continue;
      EXPECT_TRUE(at::allclose(start - entry.data.view_as(start), at::full_like(start, 200 * 1e-5),
                               1e-2, 1e-6));
      EXPECT_TRUE(at::equal(entry.data.to(dtype), run.model[1].value.view({-1})));
    }
  }
}

TEST(Optimizer, BadStepsLeaveEveryByteAlone) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    OptimizerConfig config = test_config();
    config.max_consecutive_bad_steps = 3;
    Fixture run(config, dtype);
    run.step(0);
    const auto before = run.snapshot();
    const StepState good = run.optimizer->read_state();
    int bad_steps = 0;
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity(),
          std::numeric_limits<double>::infinity()}) {
      EXPECT_FALSE(run.optimizer->must_stop(run.optimizer->read_state()));
      set_gradients(run.model, *run.ddp, 1, 0.1, 1.0);
      run.ddp->grad(run.model[1]).view({-1})[77].fill_(bad);
      run.optimizer->step(1.0, kSamples);
      EXPECT_TRUE(same_bytes(before, run.snapshot()));
      const StepState state = run.optimizer->read_state();
      EXPECT_EQ(state.skip, 1);
      EXPECT_EQ(state.num_skipped, ++bad_steps);
      EXPECT_EQ(state.consecutive_bad, bad_steps);
      EXPECT_EQ(state.num_steps, good.num_steps);
      EXPECT_EQ(state.adam_steps, good.adam_steps);
    }
    EXPECT_TRUE(run.optimizer->must_stop(run.optimizer->read_state()));
    run.step(2);
    EXPECT_FALSE(run.optimizer->must_stop(run.optimizer->read_state()));
    EXPECT_FALSE(same_bytes(before, run.snapshot()));
  }
}

// Values and nothing else, whatever they are.
TEST(Optimizer, FrozenParametersHaveNeitherGradientNorState) {
  Fixture run(test_config());
  run.model[4].value.fill_(std::numeric_limits<double>::quiet_NaN());
  run.step(0);
  EXPECT_EQ(run.optimizer->read_state().skip, 0);
  EXPECT_TRUE(std::isfinite(run.optimizer->params_norm()));
  EXPECT_EQ(run.ddp->flat_values().numel() - run.ddp->flat_grads().numel(), 128)
      << "81, rounded up";
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const Optimizer optimizer(test_config(), run.optimizer->schedule(), *run.ddp);
  const auto moments_of = [](int64_t elements) {
    return 2 * static_cast<int64_t>(sizeof(float)) * elements;
  };
  const int64_t trained = moments_of(run.ddp->flat_grads().numel());
  EXPECT_GE(meter->live, trained);
  EXPECT_LT(meter->live, trained + moments_of(128)) << "no moments of frozen values";
}

TEST(Optimizer, DynamicLossScale) {
  OptimizerConfig config = test_config();
  config.fp16 = true;
  config.initial_loss_scale = 65536.0;
  config.hysteresis = 1;
  config.loss_scale_window = 2;
  Fixture run(config, at::kHalf);
  EXPECT_EQ(run.optimizer->loss_scale_tensor().scalar_type(), at::kFloat);
  EXPECT_EQ(run.optimizer->loss_scale_tensor().dim(), 0);
  EXPECT_EQ(run.optimizer->loss_scale_tensor().item<double>(), 65536.0);
  run.step(0, HUGE_VAL);
  EXPECT_EQ(run.optimizer->loss_scale_tensor().item<double>(), 32768.0);
  EXPECT_FALSE(run.optimizer->must_stop(run.optimizer->read_state()));
  run.step(1, 32768.0);
  run.step(2, 32768.0);
  EXPECT_EQ(run.optimizer->loss_scale_tensor().item<double>(), 65536.0);
  EXPECT_EQ(run.optimizer->read_state().num_skipped, 1);
}

// The scale of the loss cancels: powers of two change no bit.
TEST(Optimizer, LossScaleAndWeightCancel) {
  Fixture plain(test_config());
  OptimizerConfig config = test_config();
  config.fp16 = true;
  config.loss_scale = 1024.0;
  Fixture scaled(config);
  for (int t = 0; t < 5; ++t) {
    plain.step(t);
    set_gradients(scaled.model, *scaled.ddp, t, 0.1, 1024.0 * 8.0);
    scaled.optimizer->step(at::full({}, 8.0f), kSamples);
  }
  EXPECT_TRUE(same_bytes(plain.snapshot(), scaled.snapshot()));
}

TEST(Optimizer, ResultDoesNotDependOnThreads) {
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> reference;
  double norm = 0;
  for (const int n : {1, 2, 3}) {
    at::set_num_threads(n);
    Fixture run(test_config());
    for (int t = 0; t < 3; ++t) run.step(t);
    if (n == 1) {
      reference = run.snapshot();
      norm = run.optimizer->read_state().grad_norm;
    }
    EXPECT_TRUE(same_bytes(reference, run.snapshot()));
    EXPECT_EQ(run.optimizer->read_state().grad_norm, norm);
  }
  at::set_num_threads(threads);
}

// Stop after any step, store everything, load it into a new optimizer: the rest of the run is equal
// to the bit.
TEST(Optimizer, StateIsClosed) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf}) {
    OptimizerConfig config = test_config();
    config.lr_decay_style = LrDecayStyle::kCosine;
    config.fp16 = dtype == at::kHalf;
    config.initial_loss_scale = 1024.0;
    config.loss_scale_window = 3;
    Fixture whole(config, dtype);
    const auto run = [](Fixture& run, int begin, int end) {
      for (int t = begin; t < end; ++t) run.step(t, t == 2 ? HUGE_VAL : 100.0 * (t + 1));
    };
    run(whole, 0, 8);

    Fixture first(config, dtype);
    run(first, 0, 5);
    Fixture second(config, dtype);
    second.ddp->flat_values().copy_(first.ddp->flat_values());
    const auto from = first.optimizer->tensors();
    const auto to = second.optimizer->tensors();
    ASSERT_EQ(from.size(), to.size());
    for (size_t i = 0; i < from.size(); ++i) {
      EXPECT_EQ(from[i].description.key, to[i].description.key);
      to[i].data.copy_(from[i].data);
    }
    second.optimizer->load_state(
        step_state_from_json(step_state_to_json(first.optimizer->read_state())));
    second.optimizer->set_schedule(
        schedule_from_json(schedule_to_json(first.optimizer->schedule())));
    run(second, 5, 8);
    EXPECT_TRUE(same_bytes(whole.snapshot(), second.snapshot()));
    EXPECT_EQ(step_state_to_json(whole.optimizer->read_state()),
              step_state_to_json(second.optimizer->read_state()));
  }
}

// States in host memory: the same bits in every tensor, through skipped steps, and the same when
// loaded.
TEST(Optimizer, StatesInHostMemoryChangeNoBit) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const bool narrow : {false, true}) {
      if (narrow && dtype != at::kBFloat16) continue;
      for (const char* const rule : {"adam", "sgd"}) {
        if (narrow && rule == std::string("sgd")) continue;
        OptimizerConfig config = test_config();
        config.optimizer = rule;
        config.fp16 = dtype == at::kHalf;
        config.initial_loss_scale = 1024.0;
        if (narrow)
          config.main_params_dtype = config.exp_avg_dtype = config.exp_avg_sq_dtype =
              StateType::kBf16;
        const auto steps = [](Fixture& run, int begin, int end) {
          for (int t = begin; t < end; ++t)
            run.step(t, t == 0 || t == 3 ? HUGE_VAL : 100.0 * (t + 1));
        };
        Fixture plain(config, dtype);
        steps(plain, 0, 6);
        for (const double fraction : {1.0, 0.5, 0.05}) {
          SCOPED_TRACE(cat(at::toString(dtype), " narrow ", narrow, " fraction ", fraction));
          config.optimizer_cpu_offload = true;
          config.optimizer_offload_fraction = fraction;
          Fixture offloaded(config, dtype);
          steps(offloaded, 0, 6);
          EXPECT_TRUE(same_bytes(plain.snapshot(), offloaded.snapshot()));
          EXPECT_EQ(step_state_to_json(plain.optimizer->read_state()),
                    step_state_to_json(offloaded.optimizer->read_state()));
          EXPECT_NEAR(plain.optimizer->params_norm(), offloaded.optimizer->params_norm(),
                      1e-12 * plain.optimizer->params_norm());

          // As a checkpoint moves it: from host memory to another one, whose first step is skipped.
          Fixture resumed(config, dtype);
          resumed.ddp->flat_values().copy_(offloaded.ddp->flat_values());
          const auto from = offloaded.optimizer->tensors(), to = resumed.optimizer->tensors();
          ASSERT_EQ(from.size(), plain.optimizer->tensors().size());
          for (size_t i = 0; i < from.size(); ++i) {
            EXPECT_EQ(from[i].description.key, plain.optimizer->tensors()[i].description.key);
            to[i].data.copy_(from[i].data);
          }
          resumed.optimizer->load_state(offloaded.optimizer->read_state());
          resumed.optimizer->reload_values();
          for (int t = 6; t < 9; ++t) {
            offloaded.step(t, t == 6 ? HUGE_VAL : 100.0);
            resumed.step(t, t == 6 ? HUGE_VAL : 100.0);
          }
          EXPECT_TRUE(same_bytes(offloaded.snapshot(), resumed.snapshot()));
          config.optimizer_cpu_offload = false;
        }
      }
    }
  }
}

// More pieces than buffers, and padding inside one.
TEST(HostStates, PiecesGiveTheBitsOfTheWhole) {
  constexpr int64_t kSize = 1000;
  std::vector<UpdateBlock> blocks;
  for (int64_t at = 0; at < kSize; at += 50) {
    UpdateBlock block;
    block.begin = at;
    block.count = at == 700 ? 40 : 50;  // the rest is padding
    block.weight_decay_mult = 1.0f;
    blocks.push_back(block);
  }
  StepState record;
  record.adam_steps = 1;
  record.lr[0] = 0.1;
  record.weight_decay = 0.01;
  const at::Tensor state = at::empty({static_cast<int64_t>(sizeof record)}, at::kByte);
  const auto update = [](FlatUpdate& piece, const at::Tensor& at_step) {
    adamw_update(piece, at_step, {0.9, 0.999, 1e-8});
  };
  const at::Tensor start = at::arange(kSize, at::kFloat).div(kSize);
  at::Tensor values = start.to(at::kBFloat16), grads = at::empty({kSize});
  FlatUpdate plain;
  plain.grad = grads;
  plain.master = values.to(at::kFloat);
  plain.states = {at::zeros({kSize}), at::zeros({kSize})};
  plain.value = values.clone();
  upload_blocks(plain, blocks);
  HostStates host(c10::kCPU, /*piece_elements=*/100);
  host.add(values, grads, {at::kFloat, {at::kFloat, at::kFloat}}, blocks);
  for (int step = 0; step < 3; ++step) {
    grads.copy_(at::sin(at::arange(kSize) * (0.3 + step)));
    record.skip = step == 1;
    std::memcpy(state.data_ptr(), &record, sizeof record);
    host.begin();
    host.step(state, update);
    update(plain, state);
    EXPECT_TRUE(at::equal(values, plain.value)) << step;
    for (size_t k = 0; k < plain.states.size(); ++k)
      EXPECT_TRUE(at::equal(host.states(0).states[k], plain.states[k])) << step;
  }
  EXPECT_GT((values.to(at::kFloat) - start).abs().max().item<double>(), 0.1);
}

// What lies where: by whole parameters, the last ones of the buffer in host memory; frozen values
// are nobody's.
TEST(Optimizer, AFractionOfTheStatesIsInHostMemory) {
  const auto device_bytes = [](double fraction) {
    OptimizerConfig config = test_config();
    config.optimizer_cpu_offload = fraction > 0;
    if (fraction > 0) config.optimizer_offload_fraction = fraction;
    Fixture run(config, at::kBFloat16);
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    const Optimizer optimizer(config, run.optimizer->schedule(), *run.ddp);
    return meter->live;
  };
  const int64_t all = device_bytes(0), none = device_bytes(1), half = device_bytes(0.5);
  EXPECT_GT(all, 12 * 40 * 150) << "master weight and two moments in fp32";
  EXPECT_LT(none, 4096);
  EXPECT_GT(half, none);
  EXPECT_LT(half, all);
  OptimizerConfig config = test_config();
  config.optimizer_cpu_offload = true;
  for (const bool reload : {false, true}) {
    Fixture run(config, at::kBFloat16);
    run.model[4].value.fill_(7.0);  // frozen, changed behind the optimizer's back
    if (reload) run.optimizer->reload_masters();
    run.step(0);
    EXPECT_TRUE(at::equal(run.model[4].value, at::full({9, 9}, 7.0, at::kBFloat16)));
  }
}

TEST(Optimizer, NamesOfItsTensors) {
  Fixture run(test_config(), at::kBFloat16);
  std::vector<std::string> keys;
  for (const StateTensor& entry : run.optimizer->tensors()) {
    keys.push_back(entry.description.key);
    EXPECT_EQ(entry.description.flat_begin, 0);
    EXPECT_EQ(entry.description.flat_end, entry.data.numel());
    EXPECT_EQ(entry.data.scalar_type(), at::kFloat);
  }
  ASSERT_EQ(keys.size(), 12u) << "three for each parameter that is not frozen";
  EXPECT_EQ(keys[0], "optimizer.state.fp32_param.embedding.word_embeddings.weight");
  EXPECT_EQ(keys[1], "optimizer.state.exp_avg.embedding.word_embeddings.weight");
  EXPECT_EQ(keys[2], "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight");

  OptimizerConfig config = test_config();
  config.optimizer = "sgd";
  Fixture sgd(config);
  ASSERT_EQ(sgd.optimizer->tensors().size(), 4u);
  EXPECT_EQ(sgd.optimizer->tensors()[1].description.key,
            "optimizer.state.momentum_buffer.linear.weight");
}

TEST(Optimizer, MastersAreRemadeFromValues) {
  Fixture run(test_config(), at::kBFloat16);
  run.model[1].value.fill_(0.5);
  run.optimizer->reload_masters();
  const StateTensor master = run.optimizer->tensors()[3];
  EXPECT_EQ(master.description.key, "optimizer.state.fp32_param.linear.weight");
  EXPECT_TRUE(at::equal(master.data, at::full({30 * 50}, 0.5)));
}

// Two tensor ranks that each hold half of one matrix, and all of the rest, see the norm of one rank
// that holds everything.
TEST(Optimizer, NormCountsEachLogicalParameterOnce) {
  Fixture single(test_config(), at::kDouble);
  single.step(0);
  const double expected = single.optimizer->read_state().grad_norm;
  run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(backend, "tp");
    groups.model_parallel = ProcessGroup(backend, "model_parallel");
    TestModel model;
    model.declare("embedding.word_embeddings.weight", {40, 150}, ParameterRole::kEmbedding);
    Parameter& half = model.declare("linear.weight", {15, 50});
    half.global_shape = {30, 50};
    half.placement.shards.push_back({0, Axis::kTensor, {}});
    model.declare("linear.bias", {30}, ParameterRole::kBias);
    model.declare("q_layernorm.weight", {8}, ParameterRole::kQKNorm);
    DistributedDataParallel ddp(model, groups, at::kDouble, at::kCPU);
    const OptimizerConfig config = test_config();
    Optimizer optimizer(config, make_schedule(config, {100, std::nullopt, kSamples}), ddp);
    // The single rank's gradients, taken before its step changed the values.
    for (size_t k = 0; k < 4; ++k) {
      at::Tensor whole = single.ddp->grad(single.model[k]);
      if (k == 1) whole = whole.narrow(0, 15 * backend->rank(), 15);
      ddp.grad(model[k]).copy_(whole);
    }
    optimizer.step(1.0, kSamples);
    EXPECT_NEAR(optimizer.read_state().grad_norm, expected, expected * 1e-14);
  });
}

// Four data ranks with two experts, each on two ranks: every element of the dense weight and of
// both experts counts once, whole or in shards.
TEST(Optimizer, NormCountsEachExpertOnce) {
  for (const bool sharded : {false, true}) {
    run_ranks(4, [sharded](const std::shared_ptr<Backend>& backend) {
      ParallelConfig parallel;
      parallel.expert_model_parallel_size = 2;
      const ParallelGroups groups = make_parallel_groups(parallel, backend);
      TestModel model;
      model.declare("linear.weight", {4, 3});
      model.declare("experts.weight", {5, 1}).placement.expert = true;
      DistributedDataParallelConfig data;
      data.use_distributed_optimizer = sharded;
      DistributedDataParallel ddp(model, groups, at::kDouble, at::kCPU, data);
      const OptimizerConfig config = test_config();
      Optimizer optimizer(config, make_schedule(config, {100, std::nullopt, kSamples}), ddp);
      const auto step = [&](double of_expert) {
        ddp.zero_grad();
        for (Parameter* parameter : model.parameters()) {
          const double gradient = parameter->placement.expert ? of_expert : 1.0;
          ddp.grad_target(*parameter).to_add_to().add_(gradient);
          ddp.grad_ready(*parameter);
        }
        ddp.finish_grad_sync();
        optimizer.step(1.0, kSamples);
      };
      step(1.0 + groups.ep.rank());
      // The dense weight's gradient is 4; those of the experts are 2 and 4.
      EXPECT_NEAR(optimizer.read_state().grad_norm, std::sqrt(12 * 16.0 + 5 * 4.0 + 5 * 16.0),
                  1e-12);
      EXPECT_EQ(optimizer.num_zeros(), 0.0);
      // An infinity of one expert is one of the norm, not 0 times infinity.
      step(groups.ep.rank() == 1 ? HUGE_VAL : 1.0);
      EXPECT_EQ(optimizer.read_state().grad_norm, HUGE_VAL);
    });
  }
}

TEST(Optimizer, StateTensorIsTheRecord) {
  Fixture run(test_config());
  run.step(0);
  StepState copy;
  std::memcpy(&copy, run.optimizer->state_tensor().data_ptr(), sizeof(copy));
  EXPECT_EQ(step_state_to_json(copy), step_state_to_json(run.optimizer->read_state()));
}

}  // namespace
}  // namespace megatron
