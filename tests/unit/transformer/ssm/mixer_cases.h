// What holds for every recurrent sublayer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "megatron/base/format.h"
#include "megatron/comm/thread_backend.h"
#include "tests/unit/transformer/ragged_steps.h"
#include "tests/unit/transformer/ssm/mixer_pass.h"

namespace megatron {

template <class Mixer>
void expect_heads_over_tensor_ranks(MixerRun what, std::initializer_list<int> sizes,
                                    const std::string& label) {
  what.document_ids = two_rows_of_ids(what.x.size(0), 5);
  const MixerPass serial = run_mixer<Mixer>(what, ParallelGroups(), false);
  for (const int t : sizes)
    for (const bool sequence_parallel : {false, true})
      run_ranks(t, [&](const std::shared_ptr<Backend>& world) {
        ParallelConfig parallel;
        parallel.tensor_model_parallel_size = t;
        parallel.sequence_parallel = sequence_parallel;
        expect_part<Mixer>(what, serial, make_parallel_groups(parallel, world), sequence_parallel,
                           cat(label, "ranks ", t, ", sequence ", sequence_parallel));
      });
}

// `what` has 24 tokens: segments of 6 and of 4, with borders inside, at and across them.
template <class Mixer>
void expect_segments_over_context_ranks(MixerRun what) {
  for (const int c : {2, 3})
    for (const int64_t border : {0, 1, 3, 4, 7, 9, 12, 23}) {
      what.document_ids = border > 0 ? two_rows_of_ids(24, border) : at::Tensor();
      const MixerPass serial = run_mixer<Mixer>(what, ParallelGroups(), false);
      run_ranks(c, [&](const std::shared_ptr<Backend>& world) {
        ParallelConfig parallel;
        parallel.context_parallel_size = c;
        expect_part<Mixer>(what, serial, make_parallel_groups(parallel, world), false,
                           cat("context ", c, ", border ", border));
      });
    }
}

// `what` has 8 tokens: segments of two rows, shorter than what a convolution reads, on two context
// ranks of two tensor ranks each.
template <class Mixer>
void expect_short_segments(MixerRun what) {
  what.document_ids = two_rows_of_ids(8, 3);
  const MixerPass serial = run_mixer<Mixer>(what, ParallelGroups(), false);
  run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = 2;
    parallel.context_parallel_size = 2;
    expect_part<Mixer>(what, serial, make_parallel_groups(parallel, world), true, "2 x 2");
  });
}

// `packed` has 20 tokens.
template <class Mixer>
void expect_packed_documents_are_documents_alone(MixerRun packed) {
  packed.x = packed.x.narrow(1, 0, 1).contiguous();
  packed.dy = packed.dy.narrow(1, 0, 1).contiguous();
  packed.document_ids = two_rows_of_ids(20, 6).narrow(0, 0, 1);
  const ParallelGroups one;
  const MixerPass all = run_mixer<Mixer>(packed, one, false);
  std::map<std::string, at::Tensor> sums;
  int64_t begin = 0;
  for (const int64_t end : {6, 7, 20}) {
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, end - begin); };
    const MixerPass alone =
        run_mixer<Mixer>({packed.config, part(packed.x), part(packed.dy), {}}, one, false);
    EXPECT_LT(largest(part(all.y) - alone.y), 1e-12);
    EXPECT_LT(largest(part(all.dx) - alone.dx), 1e-12);
    for (const auto& [name, grad] : alone.grads)
      sums[name] = sums.contains(name) ? sums[name] + grad : grad;
    begin = end;
  }
  for (const auto& [name, grad] : all.grads) EXPECT_LT(largest(grad - sums[name]), 1e-12) << name;
}

// Prompts in slices that end anywhere, beside sequences of single tokens; slots change hands.
// `what` has 12 tokens.
template <class Mixer>
void expect_slices_are_one_pass(const MixerRun& what) {
  const ParallelGroups one;
  const at::NoGradGuard no_grad;
  Mixer mixer(what.config, 1, false, one);
  PlainParameterStore store(mixer, at::kDouble, at::kCPU, false);
  initialize_parameters(mixer, 3, one);
  const ForwardContext whole_pass = context_of(12, 2);
  const at::Tensor whole = mixer.forward(what.x, LayerContext{whole_pass, {}}, false).output;
  RecurrentState state;
  RaggedSteps steps(2, 12, 4);
  const std::vector<std::vector<StepPart>> plan = {{{0, 0, 1}, {1, 0, 2}},
                                                   {{0, 1, 1}, {1, 2, 1}},
                                                   {{0, 2, 3}, {1, 3, 5}},
                                                   {{0, 5, 1}},
                                                   {{0, 6, 1}, {1, 8, 4}},
                                                   {{0, 7, 5}},
                                                   {{0, 0, 3}},
                                                   {{0, 3, 1}}};
  for (const std::vector<StepPart>& parts : plan) {
    const RaggedBatch batch = steps.batch(parts);
    const DecodingPass decoding{steps.state, batch};
    const ForwardContext pass = RaggedSteps::context_of(decoding);
    std::vector<at::Tensor> in, expected;
    for (const StepPart& part : parts) {
      in.push_back(what.x.narrow(1, part.sequence, 1).narrow(0, part.first, part.count));
      expected.push_back(whole.narrow(1, part.sequence, 1).narrow(0, part.first, part.count));
    }
    const at::Tensor y =
        mixer.forward(at::cat(in), LayerContext{pass, {}, false, &state}, false).output;
    EXPECT_LT(largest(y - at::cat(expected)), 1e-12);
  }
}

// What lies between the linears of a sublayer.
template <class Mixer>
struct OpenMixer : Mixer {
  using Mixer::core_;
  using Mixer::Mixer;
};

// Rows [begin, end) of both sequences of `mixed` [s, 2, ...], in slices that end anywhere, mingled.
template <class Core>
at::Tensor decode_in_slices(Core& core, const at::Tensor& mixed, RecurrentState& state) {
  const int64_t s = mixed.size(0);
  RaggedSteps steps(2, s, 4);
  std::vector<at::Tensor> outputs[2];
  const std::vector<int64_t> lengths = {3, 1, 1, 9, 1, 17, 2, 1};
  std::vector<int64_t> done = {0, 0};
  for (size_t turn = 0; done[0] < s || done[1] < s; ++turn) {
    std::vector<StepPart> parts;
    for (const int64_t sequence : {0, 1}) {
      const auto i = static_cast<size_t>(sequence);
      const int64_t count = std::min(lengths[(turn + 3 * i) % lengths.size()], s - done[i]);
      if (count > 0) parts.push_back({sequence, done[i], count});
    }
    std::ranges::stable_sort(parts, {}, [](const StepPart& part) { return part.count > 1; });
    std::vector<at::Tensor> in;
    for (const StepPart& part : parts)
      in.push_back(mixed.narrow(1, part.sequence, 1).narrow(0, part.first, part.count));
    const at::Tensor o = core.decode(at::cat(in), state, steps.batch(parts));
    int64_t row = 0;
    for (const StepPart& part : parts) {
      outputs[part.sequence].push_back(o.narrow(0, row, part.count));
      done[static_cast<size_t>(part.sequence)] += part.count;
      row += part.count;
    }
  }
  return at::cat({at::cat(outputs[0]), at::cat(outputs[1])}, 1);
}

// Decoding that replays chunks gives the bits of a forward over the whole sequence, whatever the
// slices; the recurrence does not.
template <class Mixer>
void expect_bits_of_the_forward(const TransformerConfig& config, int64_t s, at::ScalarType type) {
  const ParallelGroups one;
  const at::NoGradGuard no_grad;
  OpenMixer<Mixer> mixer(config, 1, false, one);
  PlainParameterStore store(mixer, type, at::kCPU, false);
  initialize_parameters(mixer, 3, one);
  const at::Tensor mixed = draw({s, 2, mixer.core_.shape().mixed()}, 7).to(type);
  std::vector<at::Tensor> whole;
  for (const int64_t sequence : {0, 1})
    whole.push_back(
        mixer.core_.forward(mixed.narrow(1, sequence, 1).contiguous(), context_of(s, 1)).o);
  const at::Tensor forward = at::cat(whole, 1);
  // Of a shorter sequence the same.
  for (const int64_t shorter : {s - 1, s / 2, int64_t{1}})
    EXPECT_TRUE(at::equal(mixer.core_
                              .forward(mixed.narrow(0, 0, shorter).narrow(1, 0, 1).contiguous(),
                                       context_of(shorter, 1))
                              .o,
                          whole[0].narrow(0, 0, shorter)))
        << shorter;
  RecurrentState replayed, recurrent;
  replayed.keep_as({.replays_chunks = true});
  EXPECT_TRUE(at::equal(decode_in_slices(mixer.core_, mixed, replayed), forward)) << type;
  const at::Tensor plain = decode_in_slices(mixer.core_, mixed, recurrent);
  if (type == at::kFloat) {
    EXPECT_FALSE(at::equal(plain, forward));
  }
  EXPECT_LT(largest(plain.to(at::kDouble) - forward.to(at::kDouble)),
            type == at::kFloat ? 1e-4 : 0.1);
  EXPECT_GT(replayed.slots().at(2)->bytes(), 0);
  EXPECT_EQ(replayed.slots().size(), 4u);
}

// States are kept in the types that are asked for, and round accordingly.
template <class Mixer>
void expect_states_of_types(const TransformerConfig& config, int64_t s) {
  const ParallelGroups one;
  const at::NoGradGuard no_grad;
  OpenMixer<Mixer> mixer(config, 1, false, one);
  PlainParameterStore store(mixer, at::kBFloat16, at::kCPU, false);
  initialize_parameters(mixer, 3, one);
  const at::Tensor mixed = draw({s, 2, mixer.core_.shape().mixed()}, 7).to(at::kBFloat16);
  const auto decoded = [&](const StateKeeping& keeping, at::ScalarType conv, at::ScalarType heads) {
    RecurrentState state;
    state.keep_as(keeping);
    const at::Tensor o = decode_in_slices(mixer.core_, mixed, state);
    EXPECT_EQ(state.slots()[0]->data().scalar_type(), conv);
    EXPECT_EQ(state.slots()[1]->data().scalar_type(), heads);
    return o.to(at::kDouble);
  };
  const at::Tensor usual = decoded({}, at::kBFloat16, at::kFloat);
  EXPECT_TRUE(at::equal(usual, decoded({.conv = at::kFloat}, at::kFloat, at::kFloat)));
  const at::Tensor narrow = decoded({.state = at::kBFloat16}, at::kBFloat16, at::kBFloat16);
  EXPECT_GT(largest(narrow - usual), 0.0);
  EXPECT_LT((narrow - usual).norm().item<double>(), 0.05 * usual.norm().item<double>());
  const at::Tensor half = decoded({.conv = at::kHalf, .state = at::kHalf}, at::kHalf, at::kHalf);
  EXPECT_LT((half - usual).norm().item<double>(), 0.05 * usual.norm().item<double>());
}

// The norm's output is made again in the backward, with the same bits.
template <class Mixer>
void expect_norm_again(const MixerRun& kept, const char* module, const ParallelGroups& groups) {
  MixerRun again = kept;
  again.config.recompute_granularity = RecomputeGranularity::kSelective;
  again.config.recompute_modules = {module};
  const MixerPass a = run_mixer<Mixer>(kept, groups, false),
                  b = run_mixer<Mixer>(again, groups, false);
  EXPECT_TRUE(at::equal(a.dx, b.dx));
  for (const auto& [name, grad] : a.grads) EXPECT_TRUE(at::equal(grad, b.grads.at(name)));
}

}  // namespace megatron
