// The conjugate pairs of mappings against explicit sums and slices, and the loss over a split
// vocabulary.
#include "megatron/tensor_parallel/mappings.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include "megatron/tensor_parallel/cross_entropy.h"
#include "tests/unit/tensor_parallel/testing.h"

namespace megatron {
namespace {

using Mapping = std::function<at::Tensor(const at::Tensor&, const ParallelGroups&)>;

struct MappingCase {
  const char* name;
  Mapping mapping;
  // From the tensors of all ranks to those of rank r, in the forward and in the backward.
  std::function<at::Tensor(const std::vector<at::Tensor>&, int64_t r)> forward, backward;
};

at::Tensor own(const std::vector<at::Tensor>& all, int64_t r) {
  return all[static_cast<size_t>(r)];
}
at::Tensor sum(const std::vector<at::Tensor>& all, int64_t) { return at::stack(all).sum(0); }
at::Tensor slice_of(const at::Tensor& x, int64_t dim, size_t ranks, int64_t r) {
  const int64_t n = x.size(dim) / static_cast<int64_t>(ranks);
  return x.narrow(dim, r * n, n);
}
at::Tensor gather_rows(const std::vector<at::Tensor>& all, int64_t) { return at::cat(all, 0); }
at::Tensor gather_columns(const std::vector<at::Tensor>& all, int64_t) { return at::cat(all, -1); }
at::Tensor slice_rows(const std::vector<at::Tensor>& all, int64_t r) {
  return slice_of(own(all, r), 0, all.size(), r);
}
at::Tensor slice_columns(const std::vector<at::Tensor>& all, int64_t r) {
  return slice_of(own(all, r), -1, all.size(), r);
}
at::Tensor sum_slice_rows(const std::vector<at::Tensor>& all, int64_t r) {
  return slice_of(sum(all, r), 0, all.size(), r);
}

Mapping by_collectives(at::Tensor (*map)(const at::Tensor&, const ProcessGroup&)) {
  return [map](const at::Tensor& x, const ParallelGroups& groups) { return map(x, groups.tp); };
}
// With the mailbox of the group, or without.
Mapping scattered_sum(bool mailbox) {
  return [mailbox](const at::Tensor& x, const ParallelGroups& groups) {
    if (mailbox) open_mailbox(groups, static_cast<int64_t>(x.nbytes()));
    return reduce_scatter_to_sequence_parallel_region(
        x, groups.tp, mailbox ? groups.tp.mailbox().get() : nullptr);
  };
}

const MappingCase kMappings[] = {
    {"copy", by_collectives(copy_to_tensor_model_parallel_region), own, sum},
    {"reduce", by_collectives(reduce_from_tensor_model_parallel_region), sum, own},
    {"gather", by_collectives(gather_from_tensor_model_parallel_region), gather_columns,
     slice_columns},
    {"scatter_sequence", by_collectives(scatter_to_sequence_parallel_region), slice_rows,
     gather_rows},
    {"gather_sequence", by_collectives(gather_from_sequence_parallel_region), gather_rows,
     sum_slice_rows},
    {"reduce_scatter_sequence", scattered_sum(false), sum_slice_rows, gather_rows},
    {"reduce_scatter_sequence, mailbox", scattered_sum(true), sum_slice_rows, gather_rows},
};

TEST(Mappings, EqualTheirDefinition) {
  for (const MappingCase& c : kMappings) {
    for (const int ranks : {2, 4}) {
      std::vector<at::Tensor> x, dy;
      for (int r = 0; r < ranks; ++r) x.push_back(draw({8, 2, 4}, 1 + static_cast<uint64_t>(r)));
      for (int r = 0; r < ranks; ++r)
        dy.push_back(draw(c.forward(x, r).sizes(), 101 + static_cast<uint64_t>(r)));
      run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
        const int64_t r = groups.tp.rank();
        const std::string what = cat(c.name, " on rank ", r, " of ", ranks);
        const at::Tensor input = leaf(own(x, r));
        const at::Tensor y = c.mapping(input, groups);
        expect_near(y, c.forward(x, r), what);
        torch::autograd::backward({y}, {own(dy, r)});
        expect_near(input.grad(), c.backward(dy, r), what + ", backward");
        EXPECT_TRUE(at::equal(input.detach(), own(x, r))) << what << " changed its input";
      });
    }
  }
}

TEST(Mappings, TakeGradientsOfAnyStrides) {
  run_tensor_ranks(2, [](const ParallelGroups& groups) {
    for (const MappingCase& c : kMappings) {
      const at::Tensor input = leaf(draw({4, 2, 4}, 3).transpose(0, 2));
      torch::autograd::backward({c.mapping(input, groups).sum()}, {});  // an expanded gradient
      EXPECT_EQ(input.grad().sizes(), input.sizes()) << c.name;
    }
  });
}

TEST(Mappings, OneRankReturnsItsInput) {
  const at::Tensor x = draw({4, 2, 6}, 1);
  for (const MappingCase& c : kMappings)
    EXPECT_TRUE(c.mapping(x, ParallelGroups()).is_same(x)) << c.name;
}

TEST(Mappings, RefuseALengthThatDoesNotDivide) {
  const at::Tensor x = at::zeros({5, 1, 4});
  const std::string expected = "dimension 0 of size 5 over 2 ranks";
  for (const Mapping& mapping :
       {by_collectives(scatter_to_sequence_parallel_region), scattered_sum(false)}) {
    run_tensor_ranks(2, [&](const ParallelGroups& groups) {
      const std::string error = error_of([&] { mapping(x, groups); });
      EXPECT_NE(error.find(expected), std::string::npos) << error;
    });
  }
}

// -- cross entropy

struct LossCase {
  int64_t vocab, padded;
  double z_coeff;
};

TEST(VocabParallelCrossEntropy, EqualsLogSoftmaxOverAnyNumberOfRanks) {
  for (const LossCase c : {LossCase{16, 16, 0.0}, LossCase{13, 16, 0.0}, LossCase{13, 16, 0.3},
                           LossCase{7, 16, 0.1}}) {
    for (const int ranks : {1, 2, 4}) {
      const int64_t s = 5, b = 3;
      at::Tensor logits = draw({s, b, c.padded}, 7).mul_(4.0);
      logits.slice(-1, c.vocab).fill_(1e4);  // padding would win if it counted
      at::Tensor targets =
          at::arange(s * b, at::kLong).mul(5).remainder(c.vocab).view({s, b}).contiguous();
      targets[2][1] = -1;
      targets[0][0] = -100;
      const at::Tensor weight = draw({s, b}, 8);

      const at::Tensor reference = leaf(logits);
      const at::Tensor valid = reference.slice(-1, 0, c.vocab);
      const at::Tensor lse = at::logsumexp(valid, -1);
      const at::Tensor expected =
          (-at::log_softmax(valid, -1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1) +
           c.z_coeff * lse * lse) *
          (targets >= 0);
      torch::autograd::backward({(expected * weight).sum()}, {});
      EXPECT_EQ(expected[2][1].item<double>(), 0.0);

      run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
        const std::string what = cat("vocabulary ", c.vocab, ", z ", c.z_coeff, ", rank ",
                                     groups.tp.rank(), " of ", ranks);
        const at::Tensor local = leaf(part(logits, -1, groups.tp));
        const at::Tensor loss =
            vocab_parallel_cross_entropy(local * 1.0, targets, c.vocab, c.z_coeff, groups.tp);
        expect_near(loss, expected, what);
        torch::autograd::backward({(loss * weight).sum()}, {});
        expect_near(local.grad(), part(reference.grad(), -1, groups.tp), what + ", gradient");

        SplitCrossEntropy split(local.detach().clone(), targets, c.vocab, c.z_coeff,
                                groups.tp.rank());
        at::Tensor all = at::empty({ranks, 3, s * b}, at::kDouble);
        groups.tp.all_gather(all, split.statistics())->wait();
        expect_near(split.loss(all), expected, what + ", in two halves");
        expect_near(split.backward(weight), part(reference.grad(), -1, groups.tp),
                    what + ", gradient in two halves");
      });
    }
  }
}

TEST(VocabParallelCrossEntropy, LowPrecisionLogitsGiveAnFp32Loss) {
  const at::Tensor logits = draw({4, 2, 8}, 9).to(at::kBFloat16);
  const at::Tensor targets = at::arange(8, at::kLong).view({4, 2});
  const at::Tensor expected =
      -at::log_softmax(logits.to(at::kDouble), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1);
  run_tensor_ranks(2, [&](const ParallelGroups& groups) {
    const at::Tensor loss =
        vocab_parallel_cross_entropy(part(logits, -1, groups.tp), targets, 8, 0.0, groups.tp);
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(loss.to(at::kDouble), expected, 1e-5, 1e-5));
  });
}

TEST(VocabParallelCrossEntropy, RefusesTargetsOfAnotherShape) {
  const std::string error = error_of([] {
    vocab_parallel_cross_entropy(at::zeros({4, 2, 8}), at::zeros({2, 4}, at::kLong), 8, 0.0, {});
  });
  EXPECT_NE(
      error.find("vocab_parallel_cross_entropy logits has shape [4, 2, 8], expected [2, 4, 8]"),
      std::string::npos)
      << error;
}

TEST(Mappings, DistributedSavedActivationComesBackWhole) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](const std::shared_ptr<Backend>& backend) {
      const ProcessGroup tp(backend, "tp");
      for (const auto& shape : {std::vector<int64_t>{4, 3, 2}, {5}, {1, 1}}) {  // not all divide
        int64_t count = 1;
        for (const int64_t size : shape) count *= size;
        at::Tensor x = at::arange(count, at::kDouble).view(shape);
        const auto whole = distribute_saved_activation(x, tp);
        const at::Tensor expected = x.clone();
        x.zero_();
        EXPECT_TRUE(at::equal(whole(), expected))
            << ranks << " ranks, " << shape.size() << " dimensions";
      }
    });
  }
}

}  // namespace
}  // namespace megatron
