// Segments of a sequence over context ranks: published states, the same bits on every rank, rows
// that a convolution reads and where their gradients go.
#include "megatron/transformer/ssm/segments.h"

#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "megatron/comm/thread_backend.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "megatron/transformer/ssm/causal_conv.h"
#include "megatron/transformer/ssm/ssd_scan.h"
#include "megatron/transformer/transformer_block.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ssm/mixer_config.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

// Four segments of two tokens on two ranks: rank 0 holds the first and the last.
TEST(Segments, VectorsOverTwoRanks) {
  for (const bool two_documents : {false, true}) {
    const at::Tensor runs = document_runs(two_documents ? ids({0, 0, 0, 1, 1, 1, 1, 1})
                                                        : ids({0, 0, 0, 0, 0, 0, 0, 0}));
    const auto rows = [](const at::Tensor& x) { return x.unsqueeze(1); };
    const ScanOperands all{rows(u(1, {8, 1, 1})),
                           time_steps(rows(u(2, {8, 1}) - 0.5), at::zeros({1}, at::kDouble), {}),
                           -at::exp(u(3, {1})),
                           rows(u(4, {8, 1, 2})),
                           rows(u(5, {8, 1, 2})),
                           u(6, {1}),
                           {}};
    const at::Tensor dy = rows(u(8, {8, 1, 1}));
    std::mutex mutex;
    std::vector<std::vector<at::Tensor>> states(2), grads(2);
    at::Tensor y = at::empty({8}, at::kDouble), dx = at::empty({8}, at::kDouble);
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      const ProcessGroup cp(world, "cp");
      const auto own = [&](const at::Tensor& x) { return zigzag_slice(x, 0, cp); };
      const Segments segments(4, runs, 4, cp);
      std::vector<ScanOperands> parts;
      std::vector<at::Tensor> decay, added, own_grads;
      for (const Segments::Segment& segment : segments.own()) {
        const auto part = [&](const at::Tensor& x) { return segment.rows_of(own(x)); };
        const ScanOperands o{part(all.x), part(all.dt), all.A,       part(all.B),
                             part(all.C), all.D,        segment.runs};
        decay.push_back(ssd_decay(o, segment.run).view({1, 1, 1, 1}));
        added.push_back(ssd_state(o, segment.run, 128));
        own_grads.push_back(ssd_state_grad(part(dy), o, segment.run, 128));
        parts.push_back(o);
      }
      const std::vector<at::Tensor> decays = segments.of_all(decay);
      const std::vector<at::Tensor> before = states_before(decays, segments.of_all(added)),
                                    after = state_grads_after(decays, segments.of_all(own_grads));
      const std::lock_guard lock(mutex);
      states[static_cast<size_t>(cp.rank())] = before;
      grads[static_cast<size_t>(cp.rank())] = after;
      for (size_t i = 0; i < parts.size(); ++i) {
        const Segments::Segment& segment = segments.own()[i];
        const ScanState initial{before[static_cast<size_t>(segment.index)], segment.run};
        y.narrow(0, 2 * segment.index, 2).copy_(ssd_scan(parts[i], initial, 128).y.view({-1}));
        dx.narrow(0, 2 * segment.index, 2)
            .copy_(ssd_scan_backward(segment.rows_of(own(dy)),
                                     after[static_cast<size_t>(segment.index)], parts[i], initial,
                                     128)
                       .x.view({-1}));
      }
    });
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(at::equal(states[0][i], states[1][i])) << i;
      EXPECT_TRUE(at::equal(grads[0][i], grads[1][i])) << i;
    }
    expect_vector(at::cat(states[0]),
                  two_documents
                      ? std::vector<double>{0, 0, -0.36549146853, 0.118063337933, -0.00127526420214,
                                            0.0321742294129, 0.30642845378, 0.0336585032172}
                      : std::vector<double>{0, 0, -0.36549146853, 0.118063337933, -0.196813605214,
                                            0.190368673953, 0.165822048411, 0.147411908718},
                  "states before segments");
    expect_vector(
        y,
        two_documents
            ? std::vector<double>{0.633389003141, 0.629573729262, 0.304596616371, -0.283527591398,
                                  -0.858164782135, -0.714819038749, -0.899600226005, 0.290502199137}
            : std::vector<double>{0.633389003141, 0.629573729262, 0.304596616371, -0.24190143283,
                                  -0.748155569148, -0.71430734713, -0.962779739434, 0.276859791613},
        "y");
    expect_vector(
        dx,
        two_documents
            ? std::vector<double>{0.0773080994283, -1.2733795118, -0.651261113458, -0.16465899853,
                                  0.248080931486, 0.919941885839, 1.09842442131, 0.258568133297}
            : std::vector<double>{-0.318831371548, -0.977776151104, -0.384900257348, -0.16465899853,
                                  0.248080931486, 0.919941885839, 1.09842442131, 0.258568133297},
        "dx");
  }
}

// Segments longer and shorter than the three rows that a convolution looks back.
TEST(Segments, RowsBeforeAndTheirGradients) {
  for (const int64_t length : {1, 2, 5}) {
    const int64_t s = 6 * length;
    const at::Tensor rows = u(1, {s, 2, 3});
    const at::Tensor padded = at::cat({at::zeros({3, 2, 3}, at::kDouble), rows});
    run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
      const ProcessGroup cp(world, "cp");
      const Segments segments(2 * length, {}, 4, cp);
      const std::vector<at::Tensor> before = segments.rows_before(zigzag_slice(rows, 0, cp));
      std::vector<at::Tensor> grads;
      for (size_t i = 0; i < 2; ++i) {
        const int64_t index = segments.own()[i].index;
        EXPECT_TRUE(at::equal(before[i], padded.narrow(0, index * length, 3))) << index;
        // Of each row before segment j the gradient 10^j
        grads.push_back(at::full({3, 2, 3}, std::pow(10.0, index), at::kDouble));
      }
      at::Tensor du = at::zeros({2 * length, 2, 3}, at::kDouble);
      segments.return_row_grads(grads, du);
      at::Tensor expected = at::zeros({s + 3, 2, 3}, at::kDouble);
      for (int64_t index = 0; index < 6; ++index)
        expected.narrow(0, index * length, 3) += std::pow(10.0, index);
      EXPECT_TRUE(at::equal(du, zigzag_slice(expected.narrow(0, 3, s), 0, cp)));
    });
  }
}

// What the layers of a block are told of documents.
std::vector<at::Tensor>& seen_runs() {
  static std::vector<at::Tensor> seen;
  return seen;
}

class RunsReader final : public Layer {
 public:
  using Layer::Layer;
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override {
    seen_runs().push_back(context.pass.document_runs);
    return x;
  }
};

std::unique_ptr<Layer> make_reader(const TransformerConfig&, int64_t layer_number, bool,
                                   const ParallelGroups&) {
  return std::make_unique<RunsReader>(layer_number);
}

// Once for all layers of a forward, and only where some layer has states.
TEST(Segments, ABlockNumbersDocumentsOnce) {
  const ParallelGroups one;
  TransformerConfig config = mixer_config(4, 2);
  for (const bool recurs : {true, false}) {
    if (!recurs) config.layer_pattern.clear();
    TransformerBlock block(config, 0, 2, /*final_norm=*/false, false, one, make_reader);
    ForwardContext pass = context_of(6, 1);
    pass.document_ids = ids({3, 3, 5, 3, 3, 3});
    seen_runs().clear();
    block.forward(at::zeros({6, 1, 8}, at::kDouble), pass);
    ASSERT_EQ(seen_runs().size(), 2u);
    EXPECT_EQ(seen_runs()[0].defined(), recurs);
    if (!recurs) continue;
    EXPECT_TRUE(at::equal(seen_runs()[0], document_runs(pass.document_ids)));
    EXPECT_TRUE(seen_runs()[0].is_same(seen_runs()[1]));
  }
}

}  // namespace
}  // namespace megatron
