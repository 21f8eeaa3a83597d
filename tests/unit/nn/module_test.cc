// Modules, parameter stores, norms, activation recomputation.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/norm.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

Parameter parameter_of(std::vector<int64_t> shape) {
  Parameter parameter;
  parameter.local_shape = parameter.global_shape = std::move(shape);
  return parameter;
}

class Leaf : public Module {
 public:
  explicit Leaf(std::vector<int64_t> shape) : weight(parameter_of(std::move(shape))) {
    add("weight", &weight);
  }
  Parameter weight;
};

// first.weight, second.weight, and first.weight again under "tied".
class Tree : public Module {
 public:
  Tree() : first({3, 2}), second({5}), own(parameter_of({4})) {
    add("first", &first);
    add("second", &second);
    add("own", &own);
    add("tied", &first.weight);
  }
  Leaf first, second;
  Parameter own;
};

// A module around one parameter that is not its own.
class Holder : public Module {
 public:
  explicit Holder(Parameter* parameter) { add("weight", parameter); }
};

std::vector<std::string> names_of(Module& module, const std::string& prefix = "") {
  std::vector<std::string> names;
  module.visit([&](const std::string& name, Parameter&) { names.push_back(name); }, prefix);
  return names;
}

TEST(Module, VisitsOwnParametersThenChildrenAndSharedOnesOnce) {
  Tree tree;
  // "tied" is a parameter of the root and therefore comes before the children that hold it too.
  EXPECT_EQ(names_of(tree), (std::vector<std::string>{"own", "tied", "second.weight"}));
  EXPECT_EQ(names_of(tree, "model"),
            (std::vector<std::string>{"model.own", "model.tied", "model.second.weight"}));
  EXPECT_EQ(tree.parameters(),
            (std::vector<Parameter*>{&tree.own, &tree.first.weight, &tree.second.weight}));
  EXPECT_EQ(tree.num_parameters(), 4 + 6 + 5);
  tree.name_parameters("a.b");
  EXPECT_EQ(tree.first.weight.name, "a.b.tied");
  EXPECT_EQ(tree.second.weight.name, "a.b.second.weight");
}

TEST(Module, CountsNoVocabularyPadding) {
  Leaf table({16, 3});
  table.weight.valid_rows = 10;
  EXPECT_EQ(table.num_parameters(), 30);
}

// Counts something in every step.
class Counter : public Module {
 public:
  explicit Counter(std::vector<int> own) : counts(at::tensor(own, at::kInt)) {}
  at::Tensor counts, ended;

 protected:
  at::Tensor step_counts() override { return counts; }
  void step_ended(const at::Tensor& skipped) override { ended = counts * (1 - skipped); }
};

TEST(Module, CountsAreSummedOverTheStageBeforeTheStepEnds) {
  run_ranks(4, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const int r = groups.world.rank();
    Counter first({r, 1, 2}), second({5, 5 * r});
    const at::Tensor ratio =
        end_step({&first, &second}, at::zeros({}, at::kLong), groups).largest_over_mean;
    EXPECT_TRUE(at::equal(first.ended, at::tensor({6, 4, 8}, at::kLong)));
    EXPECT_TRUE(at::equal(second.ended, at::tensor({20, 30}, at::kLong)));
    EXPECT_NEAR(ratio.item<double>(), 8.0 / 6, 1e-12);
  });
  Counter one({0, 0});
  EXPECT_EQ(end_step({&one}, at::zeros({}, at::kLong), {}).largest_over_mean.item<double>(), 1);
  Tree none;
  EXPECT_FALSE(end_step({&none}, at::zeros({}, at::kLong), {}).largest_over_mean.defined());
}

TEST(PlainParameterStore, AllocatesZerosAndAccumulates) {
  for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    Tree tree;
    tree.name_parameters();
    PlainParameterStore store(tree, dtype, at::kCPU, /*gradients=*/true);
    for (Parameter* parameter : tree.parameters()) {
      EXPECT_EQ(parameter->value.sizes().vec(), parameter->local_shape);
      EXPECT_EQ(parameter->value.scalar_type(), dtype);
      EXPECT_EQ(parameter->value.abs().sum().item<double>(), 0.0);
      EXPECT_EQ(store.grad(*parameter).scalar_type(),
                dtype == at::kDouble ? at::kDouble : at::kFloat);
      const GradTarget target = parameter->store->grad_target(*parameter);
      EXPECT_EQ(target.beta, 1.0);
      target.tensor.add_(2.0);
      EXPECT_TRUE(at::equal(store.grad(*parameter), at::full_like(target.tensor, 2.0)));
    }
    store.zero_grad();
    EXPECT_EQ(store.grad(tree.own).abs().sum().item<double>(), 0.0);
  }
}

TEST(PlainParameterStore, WithoutGradientsSaysSo) {
  Tree tree;
  tree.name_parameters();
  PlainParameterStore store(tree, at::kFloat, at::kCPU, /*gradients=*/false);
  try {
    store.grad_target(tree.own);
    FAIL() << "no error";
  } catch (const InternalError& error) {
    EXPECT_NE(
        std::string(error.what()).find("no gradient of own: the store was made without gradients"),
        std::string::npos)
        << error.what();
  }
}

// A store whose targets overwrite or scale what is there, and that counts.
class ScalingStore : public ParameterStore {
 public:
  explicit ScalingStore(double beta) : beta(beta) {}
  at::Tensor acquire(Parameter& parameter) override {
    ++acquired;
    return parameter.value;
  }
  void release(Parameter&) override { --acquired; }
  GradTarget grad_target(Parameter&) override { return {grad, beta}; }
  void grad_ready(Parameter&) override { ++ready; }
  at::Tensor grad;
  double beta;
  int acquired = 0, ready = 0;
};

TEST(Differentiable, AccumulatesWithBetaAndReportsReady) {
  Leaf leaf({3});
  ScalingStore store(0.25);
  leaf.weight.store = &store;
  leaf.weight.value = at::arange(1, 4, at::kDouble);
  store.grad = at::full({3}, 8.0, at::kDouble);
  const at::Tensor factor = at::tensor({2.0, 3.0, 5.0}, at::kDouble);
  const at::Tensor y = differentiable(leaf.weight) * factor;
  EXPECT_TRUE(at::equal(y.detach(), leaf.weight.value * factor));
  torch::autograd::backward({y.sum()}, {});
  EXPECT_TRUE(at::equal(store.grad, factor + 2.0));
  EXPECT_EQ(store.ready, 1);
  EXPECT_EQ(store.acquired, 0);
}

TEST(Differentiable, FrozenParameterGetsNoGradient) {
  Leaf leaf({3});
  leaf.weight.trainable = false;
  ScalingStore store(0.0);
  leaf.weight.store = &store;
  leaf.weight.value = at::ones({3}, at::kDouble);
  store.grad = at::full({3}, 8.0, at::kDouble);
  const at::Tensor weight = differentiable(leaf.weight),
                   x = at::full({3}, 2.0, at::kDouble).set_requires_grad(true);
  EXPECT_FALSE(weight.requires_grad());
  EXPECT_EQ(store.acquired, 0) << "nothing of the store is held until a backward";
  const at::Tensor loss = (weight * x).sum();
  leaf.weight.value.fill_(5.0);  // the memory belongs to another parameter now
  torch::autograd::backward({loss}, {});
  EXPECT_TRUE(at::equal(x.grad(), at::ones({3}, at::kDouble)));
  EXPECT_TRUE(at::equal(store.grad, at::full({3}, 8.0, at::kDouble)));
  EXPECT_EQ(store.ready, 0);
}

TEST(Differentiable, WithoutAutogradReleasesAtOnce) {
  Leaf leaf({3});
  ScalingStore store(0.0);
  leaf.weight.store = &store;
  leaf.weight.value = at::arange(1, 4, at::kDouble);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(differentiable(leaf.weight), leaf.weight.value));
  EXPECT_EQ(store.acquired, 0);
}

TEST(Differentiable, NeedsAStore) {
  Leaf leaf({3});
  EXPECT_THROW(differentiable(leaf.weight), InternalError);
}

TEST(AcquiredValue, ReleasesAtTheEndOfItsScope) {
  Leaf leaf({3});
  ScalingStore store(1.0);
  leaf.weight.store = &store;
  leaf.weight.value = at::ones({3});
  {
    const AcquiredValue value(&leaf.weight), none(nullptr);
    EXPECT_EQ(store.acquired, 1);
    EXPECT_TRUE(value.value().is_same(leaf.weight.value));
    EXPECT_FALSE(none.value().defined());
  }
  EXPECT_EQ(store.acquired, 0);
}

// -- norms

struct NormCase {
  Normalization kind;
  bool zero_centered;
};

TEST(Norm, EqualsTheFormulaForwardAndBackward) {
  for (const NormCase c :
       {NormCase{Normalization::kLayerNorm, false}, NormCase{Normalization::kLayerNorm, true},
        NormCase{Normalization::kRMSNorm, false}, NormCase{Normalization::kRMSNorm, true}}) {
    at::manual_seed(3);
    NormOptions options;
    options.kind = c.kind;
    options.eps = 1e-3;
    options.zero_centered = c.zero_centered;
    Norm norm(6, options);
    PlainParameterStore store(norm, at::kDouble, at::kCPU, true);
    const std::vector<Parameter*> parameters = norm.parameters();
    const bool layer_norm = c.kind == Normalization::kLayerNorm;
    ASSERT_EQ(parameters.size(), layer_norm ? 2u : 1u);
    EXPECT_EQ(static_cast<int>(parameters[0]->init.kind),
              static_cast<int>(c.zero_centered ? Init::Kind::kZero : Init::Kind::kOne));
    for (Parameter* parameter : parameters) parameter->value.copy_(at::randn({6}, at::kDouble));
    const at::Tensor x = at::randn({2, 3, 6}, at::kDouble).set_requires_grad(true),
                     dy = at::randn({2, 3, 6}, at::kDouble);

    const at::Tensor w = parameters[0]->value.clone().set_requires_grad(true);
    const at::Tensor b = (layer_norm ? parameters[1]->value.clone() : at::zeros({6}, at::kDouble))
                             .set_requires_grad(true);
    const at::Tensor x2 = x.detach().clone().set_requires_grad(true);
    const at::Tensor centered = layer_norm ? x2 - x2.mean(-1, true) : x2;
    const at::Tensor scale = c.zero_centered ? w + 1.0 : w;
    const at::Tensor expected =
        centered * at::rsqrt((centered * centered).mean(-1, true) + 1e-3) * scale + b;
    torch::autograd::backward({expected}, {dy});

    const at::Tensor y = norm.forward(x);
    EXPECT_TRUE(at::allclose(y, expected, 1e-12, 1e-12));
    torch::autograd::backward({y}, {dy});
    EXPECT_TRUE(at::allclose(x.grad(), x2.grad(), 1e-10, 1e-12));
    EXPECT_TRUE(at::allclose(store.grad(*parameters[0]), w.grad(), 1e-10, 1e-12));
    if (layer_norm) {
      EXPECT_TRUE(at::allclose(store.grad(*parameters[1]), b.grad(), 1e-10, 1e-12));
    }
  }
}

TEST(Norm, FrozenNormPassesTheGradientThrough) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Norm norm(4, {});
    PlainParameterStore store(norm, dtype, at::kCPU, true);
    norm.parameters()[0]->value.fill_(2.0);
    const auto gradient = [&] {
      const at::Tensor x = at::arange(8, dtype).view({2, 4}).set_requires_grad(true);
      torch::autograd::backward({norm.forward(x)}, {at::arange(8, dtype).view({2, 4}).square()});
      return x.grad();
    };
    const at::Tensor trained = gradient();
    store.zero_grad();
    for (Parameter* parameter : norm.parameters()) parameter->trainable = false;
    EXPECT_TRUE(at::equal(gradient(), trained));
    for (Parameter* parameter : norm.parameters())
      EXPECT_EQ(store.grad(*parameter).abs().sum().item<double>(), 0.0);
  }
}

TEST(Norm, TrainsWithoutAnInputThatNeedsAGradient) {
  Norm norm(4, {});
  PlainParameterStore store(norm, at::kFloat, at::kCPU, true);
  torch::autograd::backward({norm.forward(at::arange(8, at::kFloat).view({2, 4})).sum()}, {});
  EXPECT_TRUE(at::equal(store.grad(*norm.parameters()[1]), at::full({4}, 2.0)));
}

// -- recomputation

// y = tanh(w * x) with a parameter, as a body of a cut.
struct Chain {
  explicit Chain(int length) {
    for (int i = 0; i < length; ++i) {
      Leaf& leaf = *leaves.emplace_back(std::make_unique<Leaf>(std::vector<int64_t>{4}));
      stores.push_back(std::make_unique<PlainParameterStore>(leaf, at::kDouble, at::kCPU, true));
      leaf.weight.value.copy_(at::linspace(0.5 + i, 1.5 + i, 4, at::kDouble));
    }
  }
  at::Tensor body(size_t i, const at::Tensor& x) {
    ++calls;
    return at::tanh(differentiable(leaves[i]->weight) * x);
  }
  at::Tensor grad(size_t i) { return stores[i]->grad(leaves[i]->weight); }
  std::vector<std::unique_ptr<Leaf>> leaves;
  std::vector<std::unique_ptr<PlainParameterStore>> stores;
  int calls = 0;
};

at::Tensor chain_input(bool requires_grad) {
  return at::linspace(-1.0, 1.0, 4, at::kDouble).set_requires_grad(requires_grad);
}

TEST(RecomputeTape, GradientsEqualThoseOfAPlainBackward) {
  for (const bool input_needs_grad : {true, false}) {
    Chain plain(3), taped(3);
    const at::Tensor x = chain_input(input_needs_grad), x2 = chain_input(input_needs_grad);
    at::Tensor y = x * 2.0, y2 = x2 * 2.0;
    RecomputeTape tape;
    for (size_t i = 0; i < 3; ++i) {
      y = plain.body(i, y) + 0.5 * y;  // the input of a cut is used beside it too
      y2 = tape.run([&, i](const at::Tensor& in) { return taped.body(i, in) + 0.5 * in; }, y2);
    }
    const at::Tensor root = (y * y).sum(), root2 = (y2 * y2).sum();
    EXPECT_TRUE(at::equal(root.detach(), root2.detach()));
    torch::autograd::backward({root}, {});
    EXPECT_EQ(taped.calls, 3);
    tape.backward(root2);
    EXPECT_EQ(taped.calls, 6) << "each body runs once more";
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(plain.grad(i), taped.grad(i))) << i;
    EXPECT_EQ(x2.grad().defined(), input_needs_grad);
    if (input_needs_grad) {
      EXPECT_TRUE(at::equal(x.grad(), x2.grad()));
    }
  }
}

TEST(RecomputeTape, RecordedOperationsBetweenCutsAndAGivenGradient) {
  Chain plain(2), taped(2);
  const at::Tensor x = chain_input(true), x2 = chain_input(true);
  const at::Tensor y = plain.body(1, plain.body(0, x).sin()).exp();
  RecomputeTape tape;
  const at::Tensor a = tape.run([&](const at::Tensor& in) { return taped.body(0, in); }, x2);
  const at::Tensor y2 =
      tape.run([&](const at::Tensor& in) { return taped.body(1, in); }, a.sin()).exp();
  const at::Tensor gradient = at::arange(4, at::kDouble);
  torch::autograd::backward({y}, {gradient});
  tape.backward(y2, gradient);
  EXPECT_TRUE(at::equal(x.grad(), x2.grad()));
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(plain.grad(i), taped.grad(i))) << i;
}

TEST(RecomputeTape, InputsAreKeptByTheKeeper) {
  Chain plain(2), taped(2);
  const at::Tensor x = chain_input(true), x2 = chain_input(true);
  std::vector<std::string> calls;
  int kept = 0;
  RecomputeTape tape;
  const auto keeper = [&](const at::Tensor& in) -> std::function<at::Tensor()> {
    calls.push_back(cat("keep ", kept));
    return [&calls, i = kept++, text = in.clone()] {
      calls.push_back(cat("give ", i));
      return text;
    };
  };
  at::Tensor y = x.sin(), y2 = x2.sin();
  for (size_t i = 0; i < 2; ++i) {
    y = plain.body(i, y);
    y2 = tape.run([&, i](const at::Tensor& in) { return taped.body(i, in); }, y2, keeper);
  }
  torch::autograd::backward({y.sum()}, {});
  tape.backward(y2.sum());
  EXPECT_TRUE(at::equal(x.grad(), x2.grad()));
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(plain.grad(i), taped.grad(i))) << i;
  EXPECT_EQ(calls, (std::vector<std::string>{"keep 0", "keep 1", "give 1", "give 0"}));
}

// Between forward and backward a cut holds its input alone, and an end holds no tensor.
TEST(RecomputeTape, OutputsAreNotKept) {
  at::Tensor x = chain_input(false);
  BackwardEnd end(x);
  RecomputeTape tape;
  at::Tensor y = tape.run([](const at::Tensor& in) { return in.exp(); }, x);
  const c10::weak_intrusive_ptr<c10::StorageImpl> output(y.storage().getWeakStorageImpl());
  BackwardRoot root(y);
  y.reset();
  EXPECT_TRUE(output.expired());
  tape.backward(std::move(root), at::ones({4}, at::kDouble));
  EXPECT_TRUE(at::equal(end.take_grad(), x.detach().exp()));
  EXPECT_FALSE(end.take_grad().defined());
}

TEST(RecomputeTape, UnusedOutputIsNotRecomputed) {
  Chain taped(2);
  const at::Tensor x = chain_input(true);
  RecomputeTape tape;
  const at::Tensor used = tape.run([&](const at::Tensor& in) { return taped.body(0, in); }, x);
  tape.run([&](const at::Tensor& in) { return taped.body(1, in); }, used);
  tape.backward(used.sum());
  EXPECT_EQ(taped.calls, 3);
  EXPECT_EQ(taped.grad(1).abs().sum().item<double>(), 0.0);
  EXPECT_GT(taped.grad(0).abs().sum().item<double>(), 0.0);
  EXPECT_TRUE(x.grad().defined());
}

TEST(RecomputeTape, BodyThatIgnoresItsInput) {
  Chain taped(1);
  const at::Tensor x = chain_input(true);
  RecomputeTape tape;
  const at::Tensor y =
      tape.run([&](const at::Tensor&) { return taped.body(0, at::ones({4}, at::kDouble)); }, x);
  tape.backward(y.sum());
  EXPECT_GT(taped.grad(0).abs().sum().item<double>(), 0.0);
  EXPECT_FALSE(x.grad().defined());
}

// y = x * c with c computed by each call otherwise: 1, 2, ... What is kept decides the gradient.
TEST(RecomputeTape, AValueIsComputedOnce) {
  const at::Tensor x = chain_input(true);
  double calls = 0;
  RecomputeTape tape;
  const auto next = [&] { return at::full({}, ++calls, at::kDouble); };
  const auto body = [&](const at::Tensor& in) {
    const at::Tensor first = tape.once(next);
    return in * first * 10 + in * tape.once(next);
  };
  const at::Tensor middle = tape.run(body, x);  // 12 x
  const at::Tensor between = middle * tape.once(next);
  const at::Tensor y = tape.run(body, between);  // (40 + 5) 3 middle
  EXPECT_EQ(calls, 5);
  tape.backward(y.sum());
  EXPECT_EQ(calls, 5) << "nothing is computed again";
  EXPECT_TRUE(at::equal(x.grad(), at::full({4}, 12.0 * 3 * 45, at::kDouble)));
}

TEST(RecomputeTape, ABodyMakesTheSameCallsAgain) {
  for (const int more : {-1, 1}) {
    const at::Tensor x = chain_input(true);
    int calls = 2;
    RecomputeTape tape;
    const at::Tensor y = tape.run(
        [&](const at::Tensor& in) {
          for (int i = 0; i < calls; ++i) tape.once([&] { return at::ones({}); });
          return in * 2;
        },
        x);
    calls += more;
    EXPECT_THROW(tape.backward(y.sum()), InternalError);
  }
}

TEST(RecomputeTape, WithoutGradientsRunsTheBodyOnce) {
  Chain taped(1);
  const at::NoGradGuard no_grad;
  RecomputeTape tape;
  const at::Tensor x = chain_input(false);
  const at::Tensor y = tape.run(
      [&](const at::Tensor& in) {
        EXPECT_TRUE(in.is_same(x));
        return taped.body(0, in);
      },
      x);
  EXPECT_EQ(taped.calls, 1);
  EXPECT_FALSE(y.requires_grad());
}

}  // namespace
}  // namespace megatron
