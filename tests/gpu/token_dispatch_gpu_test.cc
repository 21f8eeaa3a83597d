// Tokens on their way to the experts of several ranks and back, by `flex`.
#include <gtest/gtest.h>

#include <iostream>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/peer_rows.h"
#include "megatron/transformer/moe/token_dispatcher.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/timing.h"

namespace megatron {
namespace {

struct Tokens {
  at::Tensor x, choices, weights;  // [R, c] bf16, [R, k] int32, [R, k] fp32
};

// The same wherever a rank's tokens are drawn.
Tokens tokens_of(int rank, int64_t count, int64_t columns, int64_t experts, int64_t topk,
                 at::Device device) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank) + 7);
  const at::Tensor scores = at::rand({count, experts}, generator),
                   weights = at::rand({count, topk}, generator);
  return {at::randn({count, columns}, generator).to(device, at::kBFloat16),
          std::get<1>(scores.topk(topk)).to(device, at::kInt), weights.to(device)};
}

// Experts that multiply by their numbers.
ExpertRows multiplied(TokenDispatch& dispatch, const Tokens& tokens, bool weighted,
                      int64_t first_expert) {
  const RowsOfRound rows = dispatch.to_experts(tokens.x, weighted ? tokens.weights : at::Tensor(),
                                               dispatch.communicates());
  const auto run = [&](int64_t round) {
    ExpertRows in = rows(round);
    const at::Tensor counts = dispatch.counts(round).rows.to(at::kLong);
    const at::Tensor factor =
        at::repeat_interleave(at::arange(counts.numel(), counts.options()) + (first_expert + 1),
                              counts)
            .to(at::kFloat);
    in.rows = (in.rows * factor.unsqueeze(1)).to(at::kBFloat16);
    if (weighted) in.weights = in.weights * factor;
    return in;
  };
  return dispatch.from_experts(run, tokens.x);
}

TEST(TokenDispatchGpu, FlexGivesTheBitsOfOneRank) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kExperts = 64, kTopk = 6, kColumns = 520;
  for (const int ranks : {2, 4})
    for (const double rank_capacity : {0.0, 0.7})
      run_gpu_ranks(ranks, [&](const std::shared_ptr<Backend>& world, at::Device device) {
        const at::NoGradGuard no_grad;
        ParallelConfig parallel;
        parallel.expert_model_parallel_size = ranks;
        const ParallelGroups all = make_parallel_groups(parallel, world), none;
        const ExpertGroups groups = expert_groups(all);
        const int rank = groups.ep.rank();
        groups.memory->reserve(device, 1);
        DispatchOptions options{TokenDispatcherType::kFlex, kExperts, rank_capacity};
        for (const int64_t count : {300, 1000, 41}) {
          const Tokens tokens =
              tokens_of(rank, rank == 1 ? count / 40 : count, kColumns, kExperts, kTopk, device);
          const auto flex = dispatch_tokens(tokens.choices, options, groups),
                     alone = dispatch_tokens(tokens.choices, options, expert_groups(none));
          EXPECT_EQ(flex->rounds() > 1, rank_capacity > 0);
          for (const bool weighted : {true, false, false}) {
            const ExpertRows got = multiplied(*flex, tokens, weighted, rank * (kExperts / ranks)),
                             expected = multiplied(*alone, tokens, weighted, 0);
            EXPECT_TRUE(at::equal(got.rows, expected.rows)) << count << " tokens, rank " << rank;
            if (weighted) {
              EXPECT_TRUE(at::equal(got.weights, expected.weights)) << count << ", rank " << rank;
            }
          }
        }
      });
}

// One micro-batch of Qwen3-30B-A3B and of eight experts over all GPUs of the machine, or over two
// ranks that share one: what a rank sends, and how fast.
TEST(TokenDispatchGpu, Rates) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const int ranks = std::max<int>(2, c10::cuda::device_count());
  for (const auto& [experts, topk, tokens] : {std::array<int64_t, 3>{128, 8, 8192}, {8, 2, 8192}})
    run_gpu_ranks(ranks, [&, experts = experts, topk = topk, count = tokens](
                             const std::shared_ptr<Backend>& world, at::Device device) {
      const at::NoGradGuard no_grad;
      ParallelConfig parallel;
      parallel.expert_model_parallel_size = ranks;
      const ParallelGroups all = make_parallel_groups(parallel, world);
      const ExpertGroups groups = expert_groups(all);
      groups.memory->reserve(device, 1);
      const Tokens tokens = tokens_of(world->rank(), count, 2048, experts, topk, device);
      const auto dispatch =
          dispatch_tokens(tokens.choices, {TokenDispatcherType::kFlex, experts}, groups);
      const ExpertRows rows = dispatch->to_experts(tokens.x, tokens.weights, true)(0);
      const auto out = [&] { dispatch->to_experts(tokens.x, {}, true)(0); };
      const auto back = [&] {
        dispatch->from_experts([&](int64_t) { return ExpertRows{rows.rows, {}, {}}; }, {});
      };
      const auto sent_by = [&](const std::function<void()>& work) {
        const int64_t before = groups.memory->bytes_sent();
        work();
        return static_cast<double>(groups.memory->bytes_sent() - before) * 1e-6;
      };
      const double sent_out = sent_by(out), sent_back = sent_by(back);
      const std::vector<double> ms = milliseconds(tokens.x, {out, back});
      if (world->rank() == 0)
        std::cout << topk << " of " << experts << " experts on " << ranks << " ranks, "
                  << static_cast<int>(c10::cuda::device_count()) << " GPUs: out " << sent_out
                  << " MB, " << ms[0] << " ms, " << sent_out / ms[0] << " GB/s; back " << sent_back
                  << " MB, " << ms[1] << " ms, " << sent_back / ms[1] << " GB/s" << std::endl;
    });
}

}  // namespace
}  // namespace megatron
