#include "megatron/distributed/distributed_data_parallel.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
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
    target.tensor.mul_(target.beta).add_(value);
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
      // Last parameter first, starts aligned to 64 elements.
      EXPECT_EQ(model.frozen.value.storage_offset(), 0);
      EXPECT_EQ(model.bias.value.storage_offset(), 64);
      EXPECT_EQ(model.weight.value.storage_offset(), 128);
      EXPECT_TRUE(model.weight.value.is_alias_of(ddp.buffer().values()));
      EXPECT_EQ(ddp.buffer().layout().buckets.size(), 2u) << "the tied weight has its own bucket";

      backward(model, 2.0);
      backward(model, 0.5);
      EXPECT_TRUE(at::equal(ddp.grad(model.weight), at::full({3, 5}, 5.0, grad_type)));
      ddp.finish_grad_sync();
      EXPECT_TRUE(at::equal(ddp.grad(model.bias), at::full({7}, 2.5, grad_type)));
      EXPECT_EQ(at::count_nonzero(ddp.buffer().grads()).item<int64_t>(), 22) << "gaps stay zero";
      ddp.zero_grad();
      EXPECT_EQ(at::count_nonzero(ddp.buffer().grads()).item<int64_t>(), 0);
    }
    EXPECT_EQ(model.weight.store, nullptr);
  }
}

TEST(DistributedDataParallel, RefusesExperts) {
  Parameters model;
  model.weight.placement.expert = true;
  try {
    DistributedDataParallel ddp(model, ParallelGroups(), at::kFloat, at::kCPU);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "parameter weight belongs to an expert, which data parallelism does not support yet");
  }
}

TEST(DistributedDataParallel, ReportingTooOftenIsABug) {
  Parameters model;
  const ParallelGroups groups;
  DistributedDataParallel ddp(model, groups, at::kFloat, at::kCPU);
  ddp.last_pass();
  ddp.grad_ready(model.bias);
  EXPECT_THROW(ddp.grad_ready(model.bias), InternalError);
}

// Sums over two ranks, whatever the readiness: overlapped, only at the end, and with a parameter that one rank never uses.
TEST(DistributedDataParallel, SumsOverDataRanks) {
  for (const int64_t bucket_size : {0, 1}) {
    for (const bool overlap : {false, true}) {
      run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
        Parameters model;
        const ParallelGroups groups = data_groups(backend);
        DistributedDataParallel ddp(model, groups, at::kDouble, at::kCPU, {bucket_size});
        for (int step = 0; step < 3; ++step) {
          ddp.zero_grad();
          backward(model, 1.0 + backend->rank());  // 1 and 2
          if (overlap) ddp.last_pass();
          backward(model, 10.0 * (1.0 + backend->rank()));  // 10 and 20
          if (backend->rank() == 1) ddp.grad_target(model.frozen).tensor.add_(4.0);
          ddp.finish_grad_sync();
          EXPECT_TRUE(at::equal(ddp.grad(model.bias), at::full({7}, 33.0, at::kDouble)));
          EXPECT_TRUE(at::equal(ddp.grad(model.weight), at::full({3, 5}, 66.0, at::kDouble)));
          EXPECT_TRUE(at::equal(ddp.grad(model.frozen), at::full({2, 2}, 4.0, at::kDouble)));
        }
      });
    }
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
    ddp.last_pass();
    backward(model, 1.0);
    ddp.finish_grad_sync();
    EXPECT_TRUE(at::equal(ddp.grad(model.bias), at::full({7}, 4.0)));
    EXPECT_TRUE(at::equal(ddp.grad(model.weight), at::full({3, 5}, 4.0))) << "two uses, two data ranks";
  });
}

}  // namespace
}  // namespace megatron
