// Activation offloading: which tensors are offloaded, when their device memory is freed, in which
// order they are reloaded.
#include "megatron/nn/activation_offload.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include "megatron/nn/any_size_offload.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/allocation_meter.h"

namespace megatron {
namespace {

constexpr int64_t kElements = 1000;
constexpr int64_t kBytes = kElements * 8;

at::Tensor input() {
  return at::linspace(-1.0, 1.0, kElements, at::kDouble).set_requires_grad(true);
}

bool all(const at::Tensor&) { return true; }

// x -> exp(x) / 2, layer by layer; exp saves its output, each layer is a group.
at::Tensor layers(at::Tensor x, int count, OffloadedPass* pass) {
  for (int i = 0; i < count; ++i) {
    if (pass != nullptr) pass->begin_group();
    const OffloadScope scope(pass, all);
    x = x.exp() / 2.0;
  }
  return x;
}

TEST(ActivationOffload, GivesTheSameGradientsFromHostMemory) {
  const at::Tensor x = input(), y = input();
  layers(x, 4, nullptr).sum().backward();
  ActivationOffload offload(c10::kCPU, {1, 1});
  OffloadedPass pass(offload);
  const at::Tensor end = layers(y, 4, &pass);
  EXPECT_EQ(offload.counts().tensors, 4);
  EXPECT_EQ(offload.counts().bytes_to_host, 4 * kBytes);
  pass.begin_backward();
  end.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  EXPECT_EQ(offload.counts().late_groups, 0) << "each group is called back before it is needed";
  EXPECT_EQ(offload.counts().bytes_from_host, 2 * kBytes) << "the last two groups had not left";
  EXPECT_EQ(offload.counts().host_bytes, 0);
  EXPECT_EQ(offload.counts().most_host_bytes, 4 * kBytes);
}

// On the device there are the group that is computed, those in flight, and in the backward the one
// that comes next.
TEST(ActivationOffload, DeviceMemoryIsBoundedByTheGroupsInFlight) {
  for (const int64_t in_flight : {1, 2, 3}) {
    const at::Tensor x = input();
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    ActivationOffload offload(c10::kCPU, {1, in_flight});
    OffloadedPass pass(offload);
    at::Tensor y = layers(x, 8, &pass);
    EXPECT_EQ(meter->live, (in_flight + 2) * kBytes)
        << "what was computed last, its group, and those in flight";
    pass.begin_group();
    EXPECT_EQ(meter->live, (in_flight + 1) * kBytes);
    for (int i = 0; i < 4; ++i) pass.begin_group();
    EXPECT_EQ(meter->live, kBytes) << "the result";
    meter->most = 0;
    pass.begin_backward();
    at::Tensor root = y.sum();
    y.reset();
    root.backward();
    EXPECT_EQ(offload.counts().late_groups, 0);
    EXPECT_EQ(offload.counts().bytes_from_host, 8 * kBytes);
    // Two groups; the gradient, what a layer makes of it twice; the gradient of the sum is a view
    // of one number.
    EXPECT_LE(meter->most, 5 * kBytes + 1024);
  }
}

TEST(ActivationOffload, PassesInFlightHaveTheirOwnGroups) {
  std::vector<at::Tensor> plain, offloaded, ends;
  ActivationOffload offload(c10::kCPU, {1, 1});
  std::vector<OffloadedPass> passes;
  for (int i = 0; i < 3; ++i) {
    plain.push_back((input() * (i + 1.0)).detach().set_requires_grad(true));
    offloaded.push_back(plain.back().detach().clone().set_requires_grad(true));
    passes.emplace_back(offload);
  }
  for (size_t i = 0; i < 3; ++i) ends.push_back(layers(offloaded[i], 3, &passes[i]).sum());
  EXPECT_EQ(offload.counts().host_bytes, 9 * kBytes);
  for (const size_t i : {0, 2, 1}) {
    layers(plain[i], 3, nullptr).sum().backward();
    passes[i].begin_backward();
    ends[i].backward();
    passes[i] = OffloadedPass();
    EXPECT_TRUE(at::equal(plain[i].grad(), offloaded[i].grad())) << i;
  }
  EXPECT_EQ(offload.counts().host_bytes, 0);
  EXPECT_EQ(offload.counts().late_groups, 0);
}

TEST(ActivationOffload, OnlyWhatIsChosenAndLargeEnough) {
  const at::Tensor x = input(), small = at::ones({10}, at::kDouble).set_requires_grad(true);
  ActivationOffload offload(c10::kCPU, {kElements, 1});
  OffloadedPass pass(offload);
  at::Tensor root;
  {
    const OffloadScope scope(&pass, [&](const at::Tensor& saved) { return !saved.is_alias_of(x); });
    root = (x * x).sum() + small.exp().sum();
    EXPECT_EQ(offload.counts().tensors, 0);
    const OffloadScope nothing(nullptr, all);
    root = root + x.exp().sum();
    EXPECT_EQ(offload.counts().tensors, 1);
  }
  root = root + x.exp().sum();
  EXPECT_EQ(offload.counts().tensors, 1) << "the scope is over";
  root.backward();
  EXPECT_TRUE(at::allclose(x.grad(), 2 * x.detach() + 2 * x.detach().exp()));
  EXPECT_TRUE(at::equal(small.grad(), small.detach().exp()));
  EXPECT_EQ(offload.counts().late_groups, 1) << "nobody said that the backward begins";
}

// Two nodes that save one tensor share its copy; strides are kept where memory has no holes.
TEST(ActivationOffload, AnySizeWhereItIsAskedFor) {
  ActivationOffload offload(c10::kCPU, {1000, 1});
  OffloadedPass pass(offload);
  const at::Tensor x = at::randn({3, 4}).requires_grad_();
  const auto save = [&] {
    const OffloadScope scope(&pass, [](const at::Tensor&) { return true; });
    return (x * x).sum();
  };
  const at::Tensor small = save();
  EXPECT_EQ(offload.counts().tensors, 0);
  at::Tensor any;
  {
    const AnySizeOffload any_size;
    {
      const AnySizeOffload nested;
    }
    any = save();
  }
  EXPECT_EQ(offload.counts().tensors, 1);
  const at::Tensor again = save();
  EXPECT_EQ(offload.counts().tensors, 1);
  pass.begin_backward();
  any.backward();
  EXPECT_TRUE(x.grad().equal(2 * x.detach()));
}

TEST(ActivationOffload, StridesAndSharing) {
  ActivationOffload offload(c10::kCPU, {1, 1});
  OffloadedPass pass(offload);
  const at::Tensor x = at::arange(24, at::kDouble).view({2, 3, 4});
  const auto transposed = pass.keep(x.transpose(0, 2)), flat = pass.keep(x.view({24}));
  EXPECT_EQ(offload.counts().tensors, 1);
  const auto columns = pass.keep(x.narrow(2, 1, 2)),
             expanded = pass.keep(x.select(2, 0).unsqueeze(2).expand({2, 3, 5}));
  EXPECT_EQ(offload.counts().tensors, 2) << "repeated elements stay";
  for (int i = 0; i < 3; ++i) pass.begin_group();
  const at::Tensor back = transposed();
  EXPECT_TRUE(at::equal(back, x.transpose(0, 2)));
  EXPECT_EQ(back.strides(), x.transpose(0, 2).strides());
  EXPECT_FALSE(back.is_alias_of(x));
  EXPECT_TRUE(flat().is_alias_of(back));
  EXPECT_TRUE(at::equal(flat(), x.view({24})));
  EXPECT_TRUE(at::equal(columns(), x.narrow(2, 1, 2)));
  EXPECT_TRUE(expanded().is_alias_of(x));
}

TEST(ActivationOffload, InputsOfRecomputedParts) {
  const at::Tensor x = input(), y = input();
  layers(x, 3, nullptr).sum().backward();
  ActivationOffload offload(c10::kCPU, {1, 1});
  OffloadedPass pass(offload);
  RecomputeTape tape;
  at::Tensor end = y;
  for (int i = 0; i < 3; ++i) {
    pass.begin_group();
    end = tape.run([](const at::Tensor& in) { return layers(in, 1, nullptr); }, end,
                   [&](const at::Tensor& in) { return pass.keep(in); });
  }
  for (int i = 0; i < 3; ++i) pass.begin_group();
  pass.begin_backward();
  tape.backward(end.sum());
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
  EXPECT_EQ(offload.counts().bytes_from_host, 3 * kBytes);
  EXPECT_EQ(offload.counts().late_groups, 0);
}

TEST(ActivationOffload, AForwardWithoutABackwardLeavesNothing) {
  ActivationOffload offload(c10::kCPU, {1, 1});
  {
    OffloadedPass pass(offload);
    const at::Tensor end = layers(input(), 3, &pass);
    EXPECT_GT(offload.counts().host_bytes, 0);
  }
  EXPECT_EQ(offload.counts().host_bytes, 0);
}

}  // namespace
}  // namespace megatron
