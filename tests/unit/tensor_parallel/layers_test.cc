// Parallel linears and embeddings over ranks as threads, against the same layer on one rank, in
// fp64.
#include "megatron/tensor_parallel/layers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor_parallel/vocab_parallel_embedding.h"
#include "tests/unit/tensor_parallel/testing.h"

namespace megatron {
namespace {

constexpr int64_t kSequence = 8, kBatch = 2, kIn = 12, kOut = 16;

// Copies this rank's pieces of `whole` into the value, or adds them up the other way round.
void copy_pieces(const Parameter& parameter, const ParallelGroups& groups, const at::Tensor& whole,
                 at::Tensor local, bool to_local) {
  for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
    at::Tensor a = whole, b = local;
    for (size_t d = 0; d < piece.local_offset.size(); ++d) {
      const auto dim = static_cast<int64_t>(d);
      a = a.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
      b = b.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
    }
    to_local ? b.copy_(a) : a.copy_(b);
  }
}

// Weights that follow from the name alone.
void fill(Module& module, const ParallelGroups& groups) {
  module.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor whole = draw(parameter.global_shape, std::hash<std::string>{}(name) % 1000);
    copy_pieces(parameter, groups, whole, parameter.value, /*to_local=*/true);
  });
}

// The gradient a rank ends with: summed over the group where the placement says that it is partial.
at::Tensor reduced_grad(const PlainParameterStore& store, const Parameter& parameter,
                        const ProcessGroup& tp) {
  at::Tensor grad = store.grad(parameter).clone();
  if (parameter.placement.partial_grad.contains(Axis::kTensor)) tp.all_reduce(grad)->wait();
  return grad;
}

void expect_grads(Module& module, const PlainParameterStore& store, const ParallelGroups& groups,
                  const std::map<std::string, at::Tensor>& expected, const std::string& what) {
  size_t count = 0;
  module.visit([&](const std::string& name, Parameter& parameter) {
    ++count;
    at::Tensor local = at::zeros(parameter.local_shape, at::kDouble);
    copy_pieces(parameter, groups, expected.at(name), local, /*to_local=*/true);
    expect_near(reduced_grad(store, parameter, groups.tp), local, what + ", gradient of " + name);
  });
  EXPECT_EQ(count, expected.size()) << what;
}

struct ColumnCase {
  bool bias, norm, sequence_parallel, recompute_norm;
  std::vector<int64_t> parts = {};
  LoraOptions lora = {};
};

LinearOptions column_options(const ColumnCase& c) {
  LinearOptions options;
  options.lora = c.lora;
  options.bias = c.bias;
  options.input_norm = c.norm;
  options.sequence_parallel = c.sequence_parallel;
  options.recompute_norm = c.recompute_norm;
  options.parts = c.parts;
  return options;
}

struct Reference {
  at::Tensor y, dx;
  std::map<std::string, at::Tensor> grads;
};

// What adapters add, row by row of the linear.
at::Tensor adapted(const LoraOptions& lora, const at::Tensor& x, const at::Tensor& a,
                   const at::Tensor& b) {
  std::vector<at::Tensor> columns;
  int64_t row_of_b = 0;
  for (int64_t row = 0; row < kOut; ++row) {
    const int adapter =
        lora.adapter_of_row.empty() ? 0 : lora.adapter_of_row[static_cast<size_t>(row)];
    if (adapter < 0) {
      columns.push_back(at::zeros({x.size(0), x.size(1), 1}, x.options()));
      continue;
    }
    const at::Tensor z = at::matmul(x, a.narrow(0, adapter * lora.rank, lora.rank).t());
    columns.push_back(lora.scale * at::matmul(z, b.narrow(0, row_of_b++, 1).t()));
  }
  return at::cat(columns, -1);
}

// One adapter for all rows, adapters of queries, keys and values, of two of these, of a gate alone.
const LoraOptions kOneAdapter{3, 0.5};
const LoraOptions kThreeAdapters{2, 1.5, 3, {0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2}};
const LoraOptions kTwoAdapters{3, 2.0, 2, {0, 0, -1, 1, 0, 0, -1, 1, 0, 0, -1, 1, 0, 0, -1, 1}};
const LoraOptions kFirstPart{
    2, 2.0, 1, {0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}};

// y = norm(x) A^T + b by plain operations.
Reference column_reference(const ColumnCase& c, const at::Tensor& input, const at::Tensor& dy) {
  const ParallelGroups one;
  ColumnParallelLinear shapes("fc", kIn, kOut, column_options(c), one);
  std::map<std::string, at::Tensor> w;
  shapes.visit([&](const std::string& name, Parameter& parameter) {
    w[name] = leaf(draw(parameter.global_shape, std::hash<std::string>{}(name) % 1000));
  });
  const at::Tensor x = leaf(input);
  at::Tensor in = x;
  if (c.norm)
    in = at::layer_norm(x, {kIn}, w.at("layer_norm_weight"), w.at("layer_norm_bias"), 1e-5);
  at::Tensor y = at::matmul(in, w.at("weight").t());
  if (c.bias) y = y + w.at("bias");
  if (c.lora.rank > 0) y = y + adapted(c.lora, in, w.at("lora_A.weight"), w.at("lora_B.weight"));
  torch::autograd::backward({y}, {dy});
  Reference result{y.detach(), x.grad(), {}};
  for (auto& [name, weight] : w) result.grads[name] = weight.grad();
  return result;
}

// This rank's columns of a tensor whose last dimension has the parts of the layer.
at::Tensor own_columns(const at::Tensor& whole, const std::vector<int64_t>& parts,
                       const ProcessGroup& tp) {
  if (parts.empty()) return part(whole, -1, tp);
  std::vector<at::Tensor> columns;
  for (const at::Tensor& piece : whole.split_with_sizes(parts, -1))
    columns.push_back(part(piece, -1, tp));
  return at::cat(columns, -1);
}

TEST(ColumnParallelLinear, EqualsTheDenseLayer) {
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1), dy = draw({kSequence, kBatch, kOut}, 2);
  for (const ColumnCase& c :
       {ColumnCase{true, false, false, false}, ColumnCase{false, true, false, false},
        ColumnCase{true, true, true, false}, ColumnCase{true, true, true, true},
        ColumnCase{true, false, true, false}, ColumnCase{true, true, false, true, {4, 12}},
        ColumnCase{false, false, false, false, {}, kOneAdapter},
        ColumnCase{true, true, true, true, {}, kThreeAdapters},
        ColumnCase{false, true, false, false, {}, kTwoAdapters},
        ColumnCase{true, false, true, false, {4, 12}, kFirstPart}}) {
    const Reference expected = column_reference(c, x, dy);
    for (const int ranks : {1, 2, 4}) {
      run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
        const std::string what =
            cat("bias ", c.bias, " norm ", c.norm, " sequence ", c.sequence_parallel, " recompute ",
                c.recompute_norm, " rank ", groups.tp.rank(), " of ", ranks);
        ColumnParallelLinear layer("fc", kIn, kOut, column_options(c), groups);
        PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
        fill(layer, groups);
        const at::Tensor input = leaf(c.sequence_parallel ? part(x, 0, groups.tp) : x);
        const at::Tensor y = layer.forward(input);
        expect_near(y, own_columns(expected.y, c.parts, groups.tp), what);
        torch::autograd::backward({y}, {own_columns(dy, c.parts, groups.tp)});
        expect_near(input.grad(),
                    c.sequence_parallel ? part(expected.dx, 0, groups.tp) : expected.dx,
                    what + ", dx");
        expect_grads(layer, store, groups, expected.grads, what);
      });
    }
  }
}

TEST(ColumnParallelLinear, RecomputingTheNormChangesNoBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = draw({kSequence, kBatch, kIn}, 1).to(dtype),
                     dy = draw({kSequence, kBatch, kOut}, 2).to(dtype);
    std::vector<std::vector<at::Tensor>> runs;
    for (const bool recompute : {false, true}) {
      const ParallelGroups one;
      ColumnParallelLinear layer("fc", kIn, kOut, column_options({true, true, false, recompute}),
                                 one);
      PlainParameterStore store(layer, dtype, at::kCPU, true);
      fill(layer, one);
      const at::Tensor input = leaf(x), y = layer.forward(input);
      torch::autograd::backward({y}, {dy});
      std::vector<at::Tensor>& run =
          runs.emplace_back(std::vector<at::Tensor>{y.detach(), input.grad()});
      for (Parameter* parameter : layer.parameters()) run.push_back(store.grad(*parameter));
    }
    for (size_t i = 0; i < runs[0].size(); ++i) EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
  }
}

TEST(ColumnParallelLinear, FrozenParametersGetNoGradientButPassItOn) {
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1), dy = draw({kSequence, kBatch, kOut}, 2);
  const ColumnCase c{true, true, false, false};
  const Reference expected = column_reference(c, x, dy);
  const ParallelGroups one;
  ColumnParallelLinear layer("fc", kIn, kOut, column_options(c), one);
  PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
  fill(layer, one);
  for (Parameter* parameter : layer.parameters()) parameter->trainable = false;
  const at::Tensor input = leaf(x);
  torch::autograd::backward({layer.forward(input)}, {dy});
  expect_near(input.grad(), expected.dx, "dx");
  for (Parameter* parameter : layer.parameters())
    EXPECT_EQ(store.grad(*parameter).abs().max().item<double>(), 0.0);
}

TEST(Linear, TrainsWithoutAnInputThatNeedsAGradient) {
  const ParallelGroups one;
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1);
  const at::Tensor column_sums = x.sum(at::IntArrayRef{0, 1}).unsqueeze(0).expand({kOut, kIn});
  ColumnParallelLinear column("fc1", kIn, kOut, {}, one);
  RowParallelLinear row("fc2", kIn, kOut, {}, one);
  PlainParameterStore column_store(column, at::kDouble, at::kCPU, true),
      row_store(row, at::kDouble, at::kCPU, true);
  torch::autograd::backward({column.forward(x).sum()}, {});
  torch::autograd::backward({row.forward(x).sum()}, {});
  expect_near(column_store.grad(*column.parameters()[0]), column_sums, "column");
  expect_near(row_store.grad(*row.parameters()[0]), column_sums, "row");
}

TEST(ColumnParallelLinear, WeightOfAnotherModule) {
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1), dy = draw({kSequence, kBatch, kOut}, 2);
  const Reference expected = column_reference({false, false, false, false}, x, dy);
  for (const int ranks : {1, 2, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
        const std::string what =
            cat("sequence ", sequence_parallel, " rank ", groups.tp.rank(), " of ", ranks);
        ColumnParallelLinear holder("table", kIn, kOut,
                                    column_options({false, false, false, false}), groups);
        PlainParameterStore store(holder, at::kDouble, at::kCPU, true);
        fill(holder, groups);
        const at::Tensor input = leaf(sequence_parallel ? part(x, 0, groups.tp) : x);
        ColumnParallelLinear layer(holder.weight(), sequence_parallel, groups);
        const at::Tensor y = layer.forward(input);
        expect_near(y, part(expected.y, -1, groups.tp), what);
        torch::autograd::backward({y}, {part(dy, -1, groups.tp)});
        expect_near(input.grad(), sequence_parallel ? part(expected.dx, 0, groups.tp) : expected.dx,
                    what + ", dx");
        expect_grads(holder, store, groups, expected.grads, what);
      });
    }
  }
}

TEST(ColumnParallelLinear, SendsForItsInputBeforeItGoesBack) {
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1), dy = draw({kSequence, kBatch, kOut}, 2);
  for (const bool recompute_norm : {false, true}) {
    const ColumnCase c = {true, true, true, recompute_norm};
    const Reference expected = column_reference(c, x, 2 * dy);
    for (const int ranks : {1, 2, 4}) {
      run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
        const std::string what =
            cat(recompute_norm ? "norm rebuilt, rank " : "rank ", groups.tp.rank(), " of ", ranks);
        open_mailbox(groups, kSequence / ranks * kBatch * kIn * 8);
        ColumnParallelLinear layer("fc", kIn, kOut, column_options(c), groups);
        PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
        fill(layer, groups);
        const at::Tensor start = leaf(part(x, 0, groups.tp));
        at::Tensor input;
        const SublayerOutput result = layer.forward_with_residual(start, &input);
        EXPECT_EQ(input.defined(), !recompute_norm);
        const at::Tensor between = 2 * result.output;
        int64_t before = -1, sent = 0;
        between.register_hook([&](const at::Tensor&) { sent = num_exchanges(groups) - before; });
        const at::Tensor end = layer.prefetch_input_in_backward(between, input);
        before = num_exchanges(groups);
        torch::autograd::backward({end}, {part(dy, -1, groups.tp)});
        EXPECT_EQ(sent, ranks > 1 && !recompute_norm ? 1 : 0) << what;
        EXPECT_EQ(num_exchanges(groups) - before, ranks > 1 ? 2 : 0)
            << what << ": the input and the gradient";
        expect_near(start.grad(), part(expected.dx, 0, groups.tp), what + ", dx");
        expect_grads(layer, store, groups, expected.grads, what);
        groups.tp.barrier();
      });
    }
  }
}

TEST(RowParallelLinear, EqualsTheDenseLayer) {
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1), dy = draw({kSequence, kBatch, kOut}, 2);
  for (const bool bias : {true, false}) {
    for (const bool sequence_parallel : {false, true}) {
      const LoraOptions lora = bias == sequence_parallel ? kOneAdapter : LoraOptions{};
      const Reference expected = column_reference({bias, false, false, false, {}, lora}, x, dy);
      for (const int ranks : {1, 2, 4}) {
        run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
          const std::string what = cat("bias ", bias, " sequence ", sequence_parallel, " rank ",
                                       groups.tp.rank(), " of ", ranks);
          LinearOptions options;
          options.bias = bias;
          options.sequence_parallel = sequence_parallel;
          options.lora = lora;
          RowParallelLinear layer("fc", kIn, kOut, options, groups);
          PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
          fill(layer, groups);
          const at::Tensor input = leaf(part(x, -1, groups.tp));
          const at::Tensor y = layer.forward(input);
          const auto rows = [&](const at::Tensor& whole) {
            return sequence_parallel ? part(whole, 0, groups.tp) : whole;
          };
          expect_near(y, rows(expected.y), what);
          torch::autograd::backward({y}, {rows(dy)});
          expect_near(input.grad(), part(expected.dx, -1, groups.tp), what + ", dx");
          expect_grads(layer, store, groups, expected.grads, what);
        });
      }
    }
  }
}

// The layer with its activation inside gives the bits of the two one after the other, whether it
// saves the activation's input alone or what it gave, too.
TEST(RowParallelLinear, ContainsAnActivation) {
  for (const Activation kind : {Activation::kGeluTanh, Activation::kSwiglu}) {
    const at::Tensor x = draw({kSequence, kBatch, is_gated(kind) ? 2 * kIn : kIn}, 1),
                     dy = draw({kSequence, kBatch, kOut}, 2);
    std::vector<std::vector<at::Tensor>> runs;
    for (const int variant : {0, 1, 2}) {
      const bool inside = variant > 0;
      const ParallelGroups one;
      LinearOptions options;
      if (inside) options.input_activation = kind;
      options.recompute_activation = variant == 1;
      RowParallelLinear layer("fc", kIn, kOut, options, one);
      PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
      fill(layer, one);
      const at::Tensor input = leaf(x), y = layer.forward(inside ? input : activate(input, kind));
      torch::autograd::backward({y}, {dy});
      std::vector<at::Tensor>& run =
          runs.emplace_back(std::vector<at::Tensor>{y.detach(), input.grad()});
      for (Parameter* parameter : layer.parameters()) run.push_back(store.grad(*parameter));
    }
    for (size_t i = 0; i < runs[0].size(); ++i) {
      EXPECT_TRUE(at::equal(runs[0][i], runs[1][i])) << i;
      EXPECT_TRUE(at::equal(runs[0][i], runs[2][i])) << i;
    }
  }
}

TEST(RowParallelLinear, FrozenParametersGetNoGradientButPassItOn) {
  const ParallelGroups one;
  RowParallelLinear layer("fc", kIn, kOut, {}, one);
  PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
  fill(layer, one);
  for (Parameter* parameter : layer.parameters()) parameter->trainable = false;
  const at::Tensor input = leaf(draw({kSequence, kBatch, kIn}, 1)),
                   dy = draw({kSequence, kBatch, kOut}, 2);
  torch::autograd::backward({layer.forward(input)}, {dy});
  expect_near(input.grad(), at::matmul(dy, layer.parameters()[0]->value), "dx");
  for (Parameter* parameter : layer.parameters())
    EXPECT_EQ(store.grad(*parameter).abs().max().item<double>(), 0.0);
}

// A store that says in which order gradients were ready.
class OrderOfGradients final : public ParameterStore {
 public:
  OrderOfGradients(Module& module, std::vector<std::string>& ready)
      : plain_(module, at::kDouble, at::kCPU, true), ready_(ready) {
    module.visit([&](const std::string& name, Parameter& parameter) {
      parameter.store = this;
      names_[&parameter] = name;
    });
  }
  at::Tensor acquire(Parameter& parameter) override { return plain_.acquire(parameter); }
  void release(Parameter& parameter) override { plain_.release(parameter); }
  GradTarget grad_target(Parameter& parameter) override { return plain_.grad_target(parameter); }
  void grad_ready(Parameter& parameter) override { ready_.push_back(names_.at(&parameter)); }
  const PlainParameterStore& plain() const { return plain_; }

 private:
  PlainParameterStore plain_;
  std::vector<std::string>& ready_;
  std::map<const Parameter*, std::string> names_;
};

// Two MLPs with sequence parallelism, wide enough that a weight gradient hides the way of rows: it
// waits for the next exchange (Note [Postponed weight gradients]), the last ones for the end of the
// backward, and no number changes.
TEST(Linear, PostponedWeightGradientsAreTheSame) {
  const int64_t hidden = 16, width = 8192;
  const at::Tensor x = draw({kSequence, kBatch, hidden}, 1),
                   dy = draw({kSequence, kBatch, hidden}, 2);
  struct Result {
    at::Tensor y, dx;
    std::map<std::string, at::Tensor> grads;
    std::vector<std::string> ready;
  };
  const auto run = [&](const ParallelGroups& groups) {
    LinearOptions column, row;
    column.input_norm = column.sequence_parallel = row.sequence_parallel = true;
    std::vector<std::unique_ptr<Module>> layers;
    std::vector<std::unique_ptr<OrderOfGradients>> stores;
    Result result;
    const auto rows = [&](const at::Tensor& whole) { return part(whole, 0, groups.tp); };
    const at::Tensor input = leaf(rows(x));
    at::Tensor y = input;
    const auto add = [&](auto layer) {
      stores.push_back(std::make_unique<OrderOfGradients>(*layer, result.ready));
      fill(*layer, groups);
      y = layer->forward(y);
      layers.push_back(std::move(layer));
    };
    for (const char* mlp : {"1", "2"}) {
      add(std::make_unique<ColumnParallelLinear>(cat("column", mlp), hidden, width, column,
                                                 groups));
      add(std::make_unique<RowParallelLinear>(cat("row", mlp), width, hidden, row, groups));
    }
    torch::autograd::backward({y}, {rows(dy)});
    result.y = y;
    result.dx = input.grad();
    for (size_t i = 0; i < layers.size(); ++i) {
      layers[i]->visit([&](const std::string& name, Parameter& parameter) {
        at::Tensor whole = at::zeros(parameter.global_shape, at::kDouble);
        copy_pieces(parameter, groups, whole,
                    reduced_grad(stores[i]->plain(), parameter, groups.tp), /*to_local=*/false);
        if (!parameter.placement.shards.empty()) groups.tp.all_reduce(whole)->wait();
        result.grads[cat(i, ".", name)] = whole;
      });
    }
    return result;
  };
  const Result alone = run({});
  EXPECT_EQ(alone.ready.back(), "layer_norm_bias");
  for (const int ranks : {2, 4}) {
    run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
      open_mailbox(groups, kSequence / ranks * kBatch * hidden * 8);
      const Result divided = run(groups);
      const std::string what = cat("rank ", groups.tp.rank(), " of ", ranks);
      expect_near(divided.y, part(alone.y, 0, groups.tp), what);
      expect_near(divided.dx, part(alone.dx, 0, groups.tp), what + ", dx");
      for (const auto& [name, grad] : alone.grads)
        expect_near(divided.grads.at(name), grad, what + ", gradient of " + name);
      EXPECT_EQ(divided.ready.size(), alone.ready.size()) << what;
      EXPECT_EQ(divided.ready.back(), "weight") << what << ": the first layer's came last";
      groups.tp.barrier();
    });
  }
}

TEST(Linear, IsTheBaseWhileAdaptersAreOff) {
  const at::NoGradGuard no_grad;
  const ParallelGroups one;
  const at::Tensor x = draw({kSequence, kBatch, kIn}, 1);
  LinearOptions options;
  options.bias = false;
  options.lora = kOneAdapter;
  ColumnParallelLinear column("fc1", kIn, kOut, options, one);
  RowParallelLinear row("fc2", kIn, kOut, options, one);
  PlainParameterStore column_store(column, at::kDouble, at::kCPU, false),
      row_store(row, at::kDouble, at::kCPU, false);
  fill(column, one);
  fill(row, one);
  const at::Tensor base = at::matmul(x, column.weight().value.t());
  EXPECT_FALSE(at::allclose(column.forward(x), base, 1e-3));
  const AdaptersOff off;
  expect_near(column.forward(x), base, "column");
  expect_near(row.forward(x), base, "row");
}

TEST(Linear, AdaptersStartAsInPeft) {
  const ParallelGroups one;
  LinearOptions options;
  options.lora = kThreeAdapters;
  ColumnParallelLinear layer("fc1", kIn, kOut, options, one);
  PlainParameterStore store(layer, at::kDouble, at::kCPU, false);
  initialize_parameters(layer, 1, one);
  for (Parameter* parameter : layer.parameters()) {
    if (parameter->local_shape[0] == 6) {  // A: uniform within 1 / sqrt(inputs)
      EXPECT_LE(parameter->value.abs().max().item<double>(), 1 / std::sqrt(double{kIn}));
      EXPECT_GT(parameter->value.abs().max().item<double>(), 0.8 / std::sqrt(double{kIn}));
    }
    if (parameter->local_shape.back() == 2) {  // B
      EXPECT_EQ(parameter->value.abs().max().item<double>(), 0.0);
    }
  }
}

TEST(Linear, RefusesAdaptersOfPartsThatDoNotDivideAsTheWeightDoes) {
  run_tensor_ranks(2, [](const ParallelGroups& groups) {
    LinearOptions options;
    options.lora = {2, 1.0, 1, {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1}};
    EXPECT_EQ(error_of([&] { ColumnParallelLinear("linear_qkv", kIn, kOut, options, groups); }),
              "adapters of some of queries, keys and values with fewer --num-query-groups than "
              "--tensor-model-parallel-size 2 are not built\n"
              "hint: give all of them to --lora-targets: linear_q linear_k linear_v");
  });
}

TEST(Linear, RefusesSizesThatDoNotDivide) {
  run_tensor_ranks(4, [](const ParallelGroups& groups) {
    EXPECT_EQ(error_of([&] { ColumnParallelLinear("linear_fc1", 8, 18, {}, groups); }),
              "linear_fc1: output size 18 is not divisible by 4 tensor-parallel ranks");
    EXPECT_EQ(error_of([&] { RowParallelLinear("linear_fc2", 18, 8, {}, groups); }),
              "linear_fc2: input size 18 is not divisible by 4 tensor-parallel ranks");
    LinearOptions gated;
    gated.parts = {6, 6};
    EXPECT_EQ(error_of([&] { ColumnParallelLinear("linear_fc1", 8, 12, gated, groups); }),
              "linear_fc1: output size 6 is not divisible by 4 tensor-parallel ranks");
    EXPECT_EQ(error_of([&] { VocabParallelEmbedding(10, 14, 4, Init::zero(), false, groups); }),
              "padded vocabulary of 14 rows: expected at least 10 and a multiple of 4 "
              "tensor-parallel ranks");
    EXPECT_EQ(error_of([&] { VocabParallelEmbedding(10, 8, 4, Init::zero(), false, groups); }),
              "padded vocabulary of 8 rows: expected at least 10 and a multiple of 4 "
              "tensor-parallel ranks");
  });
}

TEST(VocabParallelEmbedding, EqualsTheWholeTable) {
  const int64_t vocab = 10, padded = 16, h = 6;
  const at::Tensor ids = at::tensor({0, 9, 4, 3, 3, 8, 7, 1, 2, 9, 0, 5, 5, 5, 6, 9}, at::kLong)
                             .view({kBatch, kSequence});
  const at::Tensor dy = draw({kSequence, kBatch, h}, 2);
  const at::Tensor table = leaf(draw({padded, h}, std::hash<std::string>{}("weight") % 1000));
  const at::Tensor expected = table.index({ids.t()});
  torch::autograd::backward({expected}, {dy});
  for (const int ranks : {1, 2, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      run_tensor_ranks(ranks, [&](const ParallelGroups& groups) {
        const std::string what =
            cat("sequence ", sequence_parallel, " rank ", groups.tp.rank(), " of ", ranks);
        VocabParallelEmbedding layer(vocab, padded, h, Init::normal(1.0), sequence_parallel,
                                     groups);
        EXPECT_EQ(layer.weight().valid_rows, vocab);
        PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
        fill(layer, groups);
        const auto rows = [&](const at::Tensor& whole) {
          return sequence_parallel ? part(whole, 0, groups.tp) : whole;
        };
        const at::Tensor y = layer.forward(ids);
        expect_near(y, rows(expected), what);
        torch::autograd::backward({y}, {rows(dy)});
        expect_near(store.grad(layer.weight()), part(table.grad(), 0, groups.tp),
                    what + ", gradient");
      });
    }
  }
}

TEST(VocabParallelEmbedding, FrozenTableGetsNoGradient) {
  const ParallelGroups one;
  VocabParallelEmbedding layer(10, 10, 4, Init::zero(), false, one);
  PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
  layer.weight().trainable = false;
  torch::autograd::backward({layer.forward(at::zeros({1, 2}, at::kLong)).sum()}, {});
  EXPECT_EQ(store.grad(layer.weight()).abs().max().item<double>(), 0.0);
}

TEST(VocabParallelEmbedding, RefusesIdsOutsideTheTable) {
  for (const int ranks : {1, 2}) {
    run_tensor_ranks(ranks, [](const ParallelGroups& groups) {
      VocabParallelEmbedding layer(10, 12, 4, Init::zero(), false, groups);
      PlainParameterStore store(layer, at::kFloat, at::kCPU, false);
      for (const int64_t id : {int64_t{12}, int64_t{1} << 40, int64_t{-1}}) {
        const std::string error = error_of([&] { layer.forward(at::full({1, 2}, id, at::kLong)); });
        EXPECT_NE(error.find(cat("token id ", id, " is outside the embedding of 12 rows")),
                  std::string::npos)
            << error;
      }
      const at::Tensor none = layer.forward(at::full({1, 2}, kNoToken, at::kLong));
      EXPECT_EQ(none.abs().max().item<double>(), 0.0);
    });
  }
}

TEST(Embedding, GathersAndAccumulates) {
  Embedding layer(5, 3, Init::zero());
  PlainParameterStore store(layer, at::kDouble, at::kCPU, true);
  Parameter& weight = *layer.parameters()[0];
  weight.value.copy_(draw({5, 3}, 1));
  const at::Tensor ids = at::tensor({4, 0, 4}, at::kLong);
  const at::Tensor y = layer.forward(ids);
  EXPECT_TRUE(at::equal(y, weight.value.index({ids})));
  torch::autograd::backward({y.sum()}, {});
  EXPECT_TRUE(at::equal(store.grad(weight).select(1, 0),
                        at::tensor({1.0, 0.0, 0.0, 0.0, 2.0}, at::kDouble)));
  const std::string error = error_of([&] { layer.forward(at::tensor({5}, at::kLong)); });
  EXPECT_NE(error.find("id 5 is outside the embedding of 5 rows"), std::string::npos) << error;
}

}  // namespace
}  // namespace megatron
