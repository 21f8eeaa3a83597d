// Output projection and loss fused in chunks, against the two operations on one rank, in fp64.
#include "megatron/tensor_parallel/linear_cross_entropy.h"

#include <torch/csrc/autograd/autograd.h>

#include "megatron/nn/parameter_store.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/tensor_parallel/layers.h"
#include "tests/unit/tensor_parallel/testing.h"

namespace megatron {
namespace {

constexpr int64_t kTargets = 12, kTargetBatch = 2, kHidden = 10, kVocabulary = 22, kRows = 24;

// An output layer's weight.
class Table : public Module {
 public:
  explicit Table(int ranks) {
    weight.local_shape = {kRows / ranks, kHidden};
    weight.global_shape = {kRows, kHidden};
    weight.valid_rows = kVocabulary;
    weight.placement.shards = {{0, Axis::kTensor, {}}};
    add("weight", &weight);
    name_parameters();
  }
  Parameter weight;
};

at::Tensor targets() {
  at::Tensor ids = (at::arange(kTargets * kTargetBatch, at::kLong) * 7 % kVocabulary)
                       .view({kTargets, kTargetBatch})
                       .clone();
  ids[3][1] = -1;
  return ids;
}

struct Expected {
  at::Tensor loss, dx, dw;
};

Expected one_after_the_other(double z_coeff) {
  const ParallelGroups groups;
  Table table(1);
  const PlainParameterStore store(table, at::kDouble, at::kCPU, /*gradients=*/true);
  table.weight.value.copy_(draw({kRows, kHidden}, 1));
  const at::Tensor x = leaf(draw({kTargets, kTargetBatch, kHidden}, 2));
  ColumnParallelLinear layer(table.weight, /*sequence_parallel=*/false, groups);
  const at::Tensor loss =
      vocab_parallel_cross_entropy(layer.forward(x), targets(), kVocabulary, z_coeff, groups.tp);
  loss.backward(draw({kTargets, kTargetBatch}, 3));
  return {loss.detach(), x.grad(), store.grad(table.weight)};
}

TEST(LinearCrossEntropy, IsTheProjectionAndTheLoss) {
  for (const double z_coeff : {0.0, 0.01}) {
    const Expected expected = one_after_the_other(z_coeff);
    for (const int ranks : {1, 2}) {
      for (const bool sequence_parallel : {false, true}) {
        for (const int64_t chunk : {0, 1, 5, 24, 100}) {
          run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
            const std::string what = cat(ranks, " ranks, parts of ", chunk,
                                         sequence_parallel ? ", sequence parallel" : "");
            Table table(ranks);
            const PlainParameterStore store(table, at::kDouble, at::kCPU, /*gradients=*/true);
            table.weight.value.copy_(part(draw({kRows, kHidden}, 1), 0, groups.tp));
            const at::Tensor whole = draw({kTargets, kTargetBatch, kHidden}, 2);
            const at::Tensor x = leaf(sequence_parallel ? part(whole, 0, groups.tp) : whole);
            const at::Tensor grad = draw({kTargets, kTargetBatch}, 3);
            const at::Tensor loss =
                linear_cross_entropy(table.weight, x, targets(), grad,
                                     {kVocabulary, z_coeff, chunk, sequence_parallel}, groups.tp);
            loss.backward(grad);
            expect_near(loss, expected.loss, what + ", loss");
            expect_near(x.grad(), sequence_parallel ? part(expected.dx, 0, groups.tp) : expected.dx,
                        what + ", dx");
            expect_near(store.grad(table.weight), part(expected.dw, 0, groups.tp), what + ", dw");
          });
        }
      }
    }
  }
}

TEST(LinearCrossEntropy, FrozenTablesGetNoGradient) {
  const ParallelGroups groups;
  Table table(1);
  const PlainParameterStore store(table, at::kDouble, at::kCPU, /*gradients=*/true);
  table.weight.trainable = false;
  const at::Tensor x = leaf(draw({kTargets, kTargetBatch, kHidden}, 2)),
                   grad = draw({kTargets, kTargetBatch}, 3);
  linear_cross_entropy(table.weight, x, targets(), grad, {kVocabulary, 0.0, 5, false}, groups.tp)
      .backward(grad);
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(at::equal(store.grad(table.weight), at::zeros({kRows, kHidden}, at::kDouble)));
}

TEST(LinearCrossEntropy, PartsAreEqualAndBelowOneGibibyte) {
  EXPECT_EQ(cross_entropy_chunk(8192, 128256, 2), 4096);
  EXPECT_EQ(cross_entropy_chunk(32768, 128256, 2), 4096);
  EXPECT_EQ(cross_entropy_chunk(16384, 50304, 2), 8192);
  EXPECT_EQ(cross_entropy_chunk(100, 50304, 2), 100);
  EXPECT_EQ(cross_entropy_chunk(0, 50304, 2), 1);
}

}  // namespace
}  // namespace megatron
