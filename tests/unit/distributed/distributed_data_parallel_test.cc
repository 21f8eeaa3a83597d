#include "megatron/distributed/distributed_data_parallel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/comm/collective_history.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/distributed/shard_reduce.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// A module of parameters only: `weight` is used twice, `frozen` never.
struct Parameters : Module {
  Parameters() {
    declare("weight", weight, {3, 5});
    declare("bias", bias, {7});
    declare("frozen", frozen, {2, 2});
    weight.role = ParameterRole::kEmbedding;
    weight.uses = 2;
    frozen.trainable = false;
  }
  void declare(const char* name, Parameter& parameter, std::vector<int64_t> shape) {
    parameter.local_shape = shape;
    parameter.global_shape = shape;
    add(name, &parameter);
  }
  Parameter weight, bias, frozen;
};

// What a backward does: adds to the gradients and reports them.
void backward(Parameters& model, double value) {
  ParameterStore& store = *model.weight.store;
  for (Parameter* parameter : {&model.bias, &model.weight, &model.weight}) {
    const GradTarget target = store.grad_target(*parameter);
    target.to_add_to().add_(value);
    store.grad_ready(*parameter);
  }
}

ParallelGroups data_groups(const std::shared_ptr<Backend>& backend) {
  ParallelGroups groups;
  groups.world = ProcessGroup(backend, "world");
  groups.dp = ProcessGroup(backend, "dp");
  groups.dp_cp = ProcessGroup(backend, "dp_cp");
  return groups;
}

TEST(DistributedDataParallel, OwnsContiguousMemory) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    Parameters model;
    const ParallelGroups groups;
    {
      DistributedDataParallel ddp(model, groups, dtype, at::kCPU);
      EXPECT_EQ(model.weight.name, "weight");
      EXPECT_EQ(model.weight.store, &ddp);
      EXPECT_EQ(model.weight.value.scalar_type(), dtype);
      EXPECT_EQ(model.weight.value.sizes(), at::IntArrayRef({3, 5}));
      EXPECT_TRUE(ddp.acquire(model.bias).is_same(model.bias.value));
      const auto grad_type = dtype == at::kDouble ? at::kDouble : at::kFloat;
      EXPECT_EQ(ddp.grad(model.weight).scalar_type(), grad_type);
      EXPECT_EQ(ddp.grad_target(model.weight).beta, 1.0);
      // Last parameter first, starts aligned to 64 elements; frozen ones behind all others, without
      // gradients.
      EXPECT_EQ(model.bias.value.storage_offset(), 0);
      EXPECT_EQ(model.weight.value.storage_offset(), 64);
      EXPECT_EQ(model.frozen.value.storage_offset(), 128);
      EXPECT_EQ(ddp.flat_grads().numel(), 128);
      EXPECT_THROW(ddp.grad(model.frozen), InternalError);
      EXPECT_THROW(ddp.grad_target(model.frozen), InternalError);
      EXPECT_TRUE(model.weight.value.is_alias_of(ddp.flat_values()));
      EXPECT_EQ(ddp.layout().buckets.size(), 3u) << "the tied weight has its own bucket";

      backward(model, 2.0);
      backward(model, 0.5);
      EXPECT_TRUE(at::equal(ddp.grad(model.weight), at::full({3, 5}, 5.0, grad_type)));
      ddp.finish_grad_sync();
      EXPECT_TRUE(at::equal(ddp.grad(model.bias), at::full({7}, 2.5, grad_type)));
      EXPECT_EQ(at::count_nonzero(ddp.flat_grads()).item<int64_t>(), 22) << "gaps stay zero";
      ddp.zero_grad();
      EXPECT_EQ(ddp.grad_target(model.weight).beta, 0.0)
          << "the first gradient of a step replaces the last step's";
      EXPECT_EQ(ddp.grad_target(model.weight).beta, 1.0);
      ddp.zero_grad();
      ddp.finish_grad_sync();
      EXPECT_EQ(at::count_nonzero(ddp.flat_grads()).item<int64_t>(), 0)
          << "no gradient is a zero gradient";
    }
    EXPECT_EQ(model.weight.store, nullptr);
  }
}

TEST(DistributedDataParallel, ReportingTooOftenIsABug) {
  Parameters model;
  const ParallelGroups groups;
  DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU);
  ddp.zero_grad(2);
  ddp.grad_ready(model.bias);
  ddp.grad_ready(model.bias);
  EXPECT_THROW(ddp.grad_ready(model.bias), InternalError);
}

// Sums over two ranks, whatever the readiness: overlapped, only at the end, and with a parameter
// that no pass uses.
TEST(DistributedDataParallel, SumsOverDataRanks) {
  for (const int64_t bucket_size : {0, 1}) {
    for (const bool overlap : {false, true}) {
      run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
        Parameters model;
        const auto history = std::make_shared<CollectiveHistory>();
        const ParallelGroups groups = data_groups(record_calls(backend, history));
        const auto num_calls = [&] {
          int64_t count = 0;
          for (const auto& [channel, issued] : history->snapshot().issued) count += issued;
          return count;
        };
        DistributedDataParallelConfig config;
        if (bucket_size > 0) config.ddp_bucket_size = bucket_size;
        config.overlap_grad_reduce = overlap;
        DistributedDataParallel ddp(model, groups, at::kDouble, at::kCPU, config);
        EXPECT_EQ(ddp.layout().buckets.size(), 3u) << "bias, the tied weight, what is frozen";
        for (int step = 0; step < 3; ++step) {
          ddp.zero_grad(2);
          backward(model, 1.0 + backend->rank());           // 1 and 2
          backward(model, 10.0 * (1.0 + backend->rank()));  // 10 and 20
          // Overlapped, each bucket is under way before the last pass has ended.
          const auto num_buckets = static_cast<int64_t>(ddp.layout().num_trained_buckets);
          EXPECT_EQ(num_calls(), (overlap ? step + 1 : step) * num_buckets);
          ddp.finish_grad_sync();
          EXPECT_EQ(num_calls(), (step + 1) * num_buckets);
          EXPECT_TRUE(at::equal(ddp.grad(model.bias), at::full({7}, 33.0, at::kDouble)));
          EXPECT_TRUE(at::equal(ddp.grad(model.weight), at::full({3, 5}, 66.0, at::kDouble)));
        }
      });
    }
  }
}

// Two parameters become ready in one order on one rank and in the other order on the other; one is
// used by one rank alone.
TEST(DistributedDataParallel, RanksMayDifferInTheOrderOfReadiness) {
  for (const auto sharding :
       {ShardingStrategy::kNoShard, ShardingStrategy::kOptim, ShardingStrategy::kOptimGrads}) {
    run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
      Parameters model;
      model.frozen.trainable = true;
      const ParallelGroups groups = data_groups(backend);
      DistributedDataParallelConfig config;
      config.use_megatron_fsdp = true;
      config.data_parallel_sharding_strategy = sharding;
      config.overlap_grad_reduce = true;
      config.ddp_bucket_size = 1;
      DistributedDataParallel ddp(model, groups, at::kDouble, at::kCPU, config);
      const auto add = [&](Parameter& parameter, double value) {
        ddp.grad_target(parameter).to_add_to().add_(value);
        ddp.grad_ready(parameter);
      };
      const bool first = backend->rank() == 0;
      ddp.zero_grad(2);
      for (int pass = 0; pass < 2; ++pass) {
        for (Parameter* parameter :
             {first ? &model.bias : &model.weight, first ? &model.weight : &model.bias}) {
          for (int use = 0; use < parameter->uses; ++use) add(*parameter, 1.0);
        }
        if (first && pass == 1) add(model.frozen, 5.0);
      }
      ddp.finish_grad_sync();
      for (const FlatShard& shard : ddp.shards()) {
        for (const FlatSlot& slot : shard.slots) {
          const double expected =
              slot.parameter == &model.frozen ? 5.0 : 4.0 * slot.parameter->uses;
          const at::Tensor mine = shard.grads.narrow(0, slot.begin, slot.num_elements());
          EXPECT_TRUE(at::equal(mine, at::full_like(mine, expected))) << slot.parameter->name;
        }
      }
    });
  }
}

TEST(DistributedDataParallel, PartialGradientsAreSummedOverTensorRanks) {
  run_ranks(4, [](const std::shared_ptr<Backend>& backend) {
    Parameters model;
    model.bias.placement.partial_grad.insert(Axis::kTensor);
    ParallelGroups groups;
    const int rank = backend->rank();
    groups.world = ProcessGroup(backend, "world");
    groups.tp = groups.world.subgroup({rank / 2 * 2, rank / 2 * 2 + 1}, "tp");
    groups.dp_cp = groups.world.subgroup({rank % 2, rank % 2 + 2}, "dp_cp");
    DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU);
    ddp.zero_grad();
    backward(model, 1.0);
    ddp.finish_grad_sync();
    EXPECT_TRUE(at::equal(ddp.grad(model.bias), at::full({7}, 4.0)));
    EXPECT_TRUE(at::equal(ddp.grad(model.weight), at::full({3, 5}, 4.0)))
        << "two uses, two data ranks";
  });
}

// Four ranks, two of which hold each expert: its gradients are summed over those, in buckets of
// their own; other gradients over all four.
TEST(DistributedDataParallel, ExpertsAreSummedOverTheirOwnRanks) {
  for (const int strategy : {0, 1, 2}) {
    run_ranks(4, [strategy](const std::shared_ptr<Backend>& backend) {
      ParallelConfig parallel;
      parallel.expert_model_parallel_size = 2;
      const ParallelGroups groups = make_parallel_groups(parallel, backend);
      Parameters model;
      model.bias.placement.expert = true;
      DistributedDataParallelConfig config;
      config.use_distributed_optimizer = strategy == 1;
      config.use_megatron_fsdp = strategy == 2;
      if (strategy == 2)
        config.data_parallel_sharding_strategy = ShardingStrategy::kOptimGradsParams;
      DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU, config);
      EXPECT_EQ(ddp.data_grid(model.bias).shard.size(), strategy == 0 ? 1 : 2);
      EXPECT_EQ(ddp.data_grid(model.weight).shard.size(), strategy == 0 ? 1 : 4);
      const int rank = backend->rank();
      ddp.zero_grad();
      backward(model, rank + 1.0);
      ddp.finish_grad_sync();
      int64_t expert_elements = 0, other_elements = 0;
      for (const FlatShard& shard : ddp.shards()) {
        if (!shard.trained()) continue;
        for (const FlatSlot& slot : shard.slots) {
          const bool expert = slot.parameter == &model.bias;
          EXPECT_EQ(shard.domain, expert ? 1 : 0);
          const double expected = expert ? 2.0 * (rank % 2) + 4.0 : 20.0;
          const at::Tensor mine = shard.grads.narrow(0, slot.begin, slot.num_elements());
          EXPECT_TRUE(at::equal(mine, at::full_like(mine, expected))) << slot.parameter->name;
          (expert ? expert_elements : other_elements) += slot.num_elements();
        }
      }
      // Each element of a domain is on one rank of its shard group.
      const at::Tensor counts = at::tensor({other_elements}, at::kLong);
      ddp.data_grid(model.weight).shard.all_reduce(counts)->wait();
      EXPECT_EQ(counts.item<int64_t>(), 15);
      const at::Tensor of_expert = at::tensor({expert_elements}, at::kLong);
      ddp.data_grid(model.bias).shard.all_reduce(of_expert)->wait();
      EXPECT_EQ(of_expert.item<int64_t>(), 7);
      // One replica of each expert is stored, by each of its two shards or by the first rank.
      for (const StateTensor& entry : ddp.state()) {
        const bool expert = entry.description.key == "bias";
        const int replicas = strategy != 0 ? 0 : expert ? rank / 2 : rank;
        EXPECT_EQ(entry.description.replica_id, replicas) << entry.description.key;
      }
    });
  }
}

// Delayed scales of experts: four ranks, two of which hold each half of four experts. Largest
// values are joined over those two alone; an expert that saw no rows keeps its scale and history.
TEST(DistributedDataParallel, ScalesOfExpertsAreThoseOfTheirRanks) {
  run_ranks(4, [](const std::shared_ptr<Backend>& backend) {
    ParallelConfig parallel;
    parallel.expert_model_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(parallel, backend);
    Parameters model;
    model.bias.placement = {{{0, Axis::kExpert, {}}}, {}, true};
    model.bias.local_shape = {2};
    model.bias.global_shape = {4};
    DelayedScalingOptions options;
    options.history_length = 2;
    options.most_recent = false;
    model.weight.delayed_scaling = model.bias.delayed_scaling = options;
    DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU, {});
    const DelayedScales& experts = *ddp.delayed_scales(model.bias);
    ASSERT_EQ(experts.state.sizes(), (std::vector<int64_t>{2, 3, 3}));
    const int rank = backend->rank();
    ddp.zero_grad();
    experts.amax.fill_(static_cast<float>(1 << rank));
    experts.amax[1][0] = 0;  // no rows of the second expert
    ddp.delayed_scales(model.weight)->amax.fill_(static_cast<float>(1 << rank));
    ddp.update_delayed_scales();
    const float largest = rank % 2 == 0 ? 4 : 8;
    EXPECT_EQ(experts.state[0][0][0].item<float>(), 448 / largest);
    EXPECT_EQ(experts.state[0][2][0].item<float>(), 57344 / largest);
    EXPECT_EQ(experts.state[1][0].abs().max().item<float>(), 0) << "never measured";
    EXPECT_EQ(ddp.delayed_scales(model.weight)->state[0][0].item<float>(), 448.0f / 8);
    const at::Tensor before = experts.state.clone();
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      experts.amax[1].fill_(2);
      ddp.update_delayed_scales();
    }
    EXPECT_TRUE(at::equal(experts.state[0], before[0])) << "an expert without rows";
    EXPECT_EQ(experts.state[1][0][0].item<float>(), 448 / 2);
    for (const StateTensor& entry : ddp.delayed_scaling_state()) {
      if (entry.description.key != "fp8.bias") continue;
      EXPECT_EQ(entry.description.global_shape, (std::vector<int64_t>{4, 3, 3}));
      ASSERT_EQ(entry.description.pieces.size(), 1u);
      EXPECT_EQ(entry.description.pieces[0].global.offset[0], 2 * (rank % 2));
      EXPECT_EQ(entry.description.replica_id, rank / 2);
    }
  });
}

// What travels is rounded to bf16, what is kept is not.
TEST(DistributedDataParallel, SumsInBf16) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    Parameters model;
    const ParallelGroups groups = data_groups(backend);
    DistributedDataParallelConfig config;
    config.grad_reduce_in_bf16 = true;
    DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU, config);
    ddp.zero_grad(2);
    backward(model, 1.0);
    backward(model, 0.001);
    EXPECT_EQ(ddp.grad(model.bias)[0].item<float>(), 1.001f);
    ddp.finish_grad_sync();
    EXPECT_EQ(ddp.grad(model.bias)[0].item<float>(), 2.0f);
  });
}

TEST(DistributedDataParallel, WeightGradientsCanWait) {
  Parameters model;
  const ParallelGroups groups;
  DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU);
  EXPECT_FALSE(ddp.defer([] {}));
  std::vector<std::function<void()>> queue;
  int runs = 0;
  ddp.defer_weight_gradients_to(&queue);
  EXPECT_TRUE(ddp.defer([&] { ++runs; }));
  ddp.defer_weight_gradients_to(nullptr);
  EXPECT_FALSE(ddp.defer([] {}));
  ASSERT_EQ(queue.size(), 1u);
  queue[0]();
  EXPECT_EQ(runs, 1);
}

std::string rejection(const DistributedDataParallelConfig& config) {
  Violations violations;
  config.validate(violations);
  return violations.empty() ? "" : violations.messages()[0];
}

// In pieces or at once, into the bucket itself or beside it; one bucket under way behind the other,
// while a rank is late.
TEST(ShardReduce, AddsPartsInTheOrderOfTheRanks) {
  constexpr int64_t kPart = 1000;
  for (const int ranks : {2, 3}) {
    for (const int64_t staged : {int64_t{1} << 20, int64_t{256}}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        run_ranks(ranks, [&](const std::shared_ptr<Backend>& backend) {
          const ProcessGroup group(backend, "shard");
          ShardReduce parts(group, kPart, at::TensorOptions().dtype(type), /*peer_copies=*/true,
                            staged);
          EXPECT_TRUE(parts.copies());
          const at::Tensor sum = at::full({kPart}, 7.0, at::kFloat);
          std::deque<std::pair<std::shared_ptr<Work>, std::function<void()>>> under_way;
          const auto finish_all_but = [&](size_t count) {
            for (; under_way.size() > count; under_way.pop_front()) {
              under_way.front().first->wait();
              under_way.front().second();
            }
          };
          for (int bucket = 0; bucket < 5; ++bucket) {
            if (bucket % ranks == group.rank())
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
            const int64_t count = kPart - 100 * bucket;
            const auto whole_of = [&](int rank) {
              return at::sin(at::arange(ranks * count, at::kFloat) * (0.1 + bucket + 10 * rank))
                  .to(type);
            };
            at::Tensor expected = at::zeros({count}, at::kFloat);
            for (int rank = 0; rank < ranks; ++rank)
              expected += whole_of(rank).narrow(0, group.rank() * count, count).to(at::kFloat);
            expected = expected.to(type);
            const at::Tensor whole = whole_of(group.rank());
            const at::Tensor own = whole.narrow(0, group.rank() * count, count);
            if (bucket % 2 == 0) {
              under_way.emplace_back(parts.start(whole, own, /*accumulate=*/false), [=] {
                EXPECT_TRUE(at::equal(own, expected)) << "bucket " << bucket;
              });
            } else {
              const at::Tensor target = sum.narrow(0, 0, count), before = target.clone();
              under_way.emplace_back(parts.start(whole, target, /*accumulate=*/true), [=] {
                EXPECT_TRUE(at::equal(target, before + expected.to(at::kFloat)))
                    << "bucket " << bucket;
              });
            }
            finish_all_but(1);
          }
          finish_all_but(0);
        });
      }
    }
  }
}

TEST(DistributedDataParallelConfig, Rules) {
  const auto with = [](const std::function<void(DistributedDataParallelConfig&)>& change) {
    DistributedDataParallelConfig config;
    change(config);
    return rejection(config);
  };
  using Config = DistributedDataParallelConfig;
  EXPECT_EQ(with([](Config&) {}), "");
  EXPECT_EQ(with([](Config& c) {
              c.use_distributed_optimizer = c.overlap_param_gather = c.overlap_grad_reduce = true;
            }),
            "");
  EXPECT_EQ(with([](Config& c) { c.ddp_bucket_size = 0; }),
            "--ddp-bucket-size is 0\nhint: 1 or above");
  EXPECT_EQ(with([](Config& c) { c.num_distributed_optimizer_instances = 0; }),
            "--num-distributed-optimizer-instances is 0\nhint: 1 or above");
  EXPECT_EQ(with([](Config& c) { c.ddp_bucket_size = 1, c.ddp_num_buckets = 1; }),
            "--ddp-bucket-size and --ddp-num-buckets are both given\nhint: give one of them");
  EXPECT_EQ(with([](Config& c) { c.data_parallel_sharding_strategy = ShardingStrategy::kOptim; }),
            "--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp\n"
            "hint: give --use-megatron-fsdp too, or --use-distributed-optimizer for optim");
  EXPECT_EQ(with([](Config& c) { c.overlap_param_gather = c.overlap_grad_reduce = true; }),
            "--overlap-param-gather has nothing to gather: every rank updates every parameter\n"
            "hint: --use-distributed-optimizer, or --use-megatron-fsdp");
  EXPECT_EQ(with([](Config& c) { c.use_distributed_optimizer = c.overlap_param_gather = true; }),
            "--overlap-param-gather is given without --overlap-grad-reduce\nhint: give both");
  EXPECT_EQ(with([](Config& c) { c.num_distributed_optimizer_instances = 2; }),
            "--num-distributed-optimizer-instances 2 divides nothing: every rank updates every "
            "parameter\n"
            "hint: --use-distributed-optimizer, or --use-megatron-fsdp");
  EXPECT_EQ(with([](Config& c) { c.use_megatron_fsdp = true, c.ddp_num_buckets = 2; }),
            "--ddp-bucket-size and --ddp-num-buckets have no effect when parameters are sharded\n"
            "hint: leave them out: a layer is a bucket");
  EXPECT_EQ(
      with([](Config& c) { c.ddp_pad_buckets_for_high_nccl_busbw = true; }),
      "--ddp-pad-buckets-for-high-nccl-busbw has no effect on gradients that are not sharded\n"
      "hint: leave it out, or give --use-distributed-optimizer");
}

TEST(DataParallelGroups, InstancesAreNeighbours) {
  run_ranks(6, [](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = data_groups(backend);
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    config.num_distributed_optimizer_instances = 2;
    const DataGrid data = make_data_parallel_groups(groups, config).front();
    EXPECT_EQ(data.shard.size(), 3);
    EXPECT_EQ(data.shard.rank(), backend->rank() % 3);
    EXPECT_EQ(data.replica.size(), 2);
    EXPECT_EQ(data.replica.rank(), backend->rank() / 3);
    config.num_distributed_optimizer_instances = 4;
    try {
      make_data_parallel_groups(groups, config);
      FAIL();
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(),
                   "--num-distributed-optimizer-instances 4 does not divide the 6 ranks that hold "
                   "the same weights");
    }
  });
}

}  // namespace
}  // namespace megatron
