// Routed experts over ranks as threads, and the same by plain operations on all tokens.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/moe/capacity.h"
#include "megatron/transformer/moe/routed_experts.h"
#include "tests/unit/transformer/block_pass.h"

namespace megatron {

// e expert ranks, x expert-tensor ranks, and as many copies of that group.
struct ExpertMesh {
  int ep = 1, etp = 1, copies = 1;
  int size() const { return ep * etp * copies; }
  std::string text() const { return cat("ep ", ep, " etp ", etp, " copies ", copies); }
};

inline ParallelGroups groups_of(const ExpertMesh& shape, const std::shared_ptr<Backend>& backend) {
  MeshSizes sizes;
  sizes.data = shape.size();
  sizes.expert = shape.ep;
  sizes.expert_tensor = shape.etp;
  const Mesh mesh(sizes);
  ParallelGroups groups;
  groups.world = ProcessGroup(backend, "world");
  const auto make = [&](AxisSet axes, const std::string& name) {
    return groups.world.subgroup(mesh.group(backend->rank(), axes), name);
  };
  groups.ep = make({Axis::kExpert}, "ep");
  groups.etp = make({Axis::kExpertTensor}, "etp");
  groups.edp = make({Axis::kExpertData}, "edp");
  groups.ep_etp = make({Axis::kExpertTensor, Axis::kExpert}, "ep_etp");
  return groups;
}

// Tokens of all ranks, in the order of ranks.
struct ExpertTokens {
  std::vector<int64_t> of_rank;
  at::Tensor x, choices, weights, dy;  // [R, h], [R, k], [R, k], [R, h]
  at::Tensor padding = {};             // [R, E]; undefined: none
  std::vector<int64_t> capacity = {};  // of each rank, with padding
  int64_t first(int rank) const {
    int64_t sum = 0;
    for (int r = 0; r < rank; ++r) sum += of_rank[static_cast<size_t>(r)];
    return sum;
  }
  at::Tensor part(const at::Tensor& all, int rank) const {
    return all.narrow(0, first(rank), of_rank[static_cast<size_t>(rank)]).contiguous();
  }
};

// How tokens choose experts: evenly; by Zipf's law; all one of them; only those of one rank; none
// of one rank's; a quarter of them.
enum class Load { kEven, kZipf, kOneExpert, kOneRank, kWithoutOneRank, kQuarter };
inline constexpr Load kLoads[] = {Load::kEven,    Load::kZipf,           Load::kOneExpert,
                                  Load::kOneRank, Load::kWithoutOneRank, Load::kQuarter};

// k different experts of each of n tokens, of `ranks` ranks' experts; `hot`: the rank or expert.
inline at::Tensor draw_choices(Load load, int64_t n, int64_t k, int64_t experts, int64_t ranks,
                               int64_t hot = 0) {
  std::mt19937 random(static_cast<unsigned>(n + 17 * k + 31 * static_cast<int64_t>(load)));
  const at::Tensor choices = at::empty({n, k}, at::kInt);
  const int64_t per_rank = experts / ranks;
  for (int64_t i = 0; i < n; ++i) {
    std::vector<std::pair<double, int64_t>> keys;
    for (int64_t e = 0; e < experts; ++e) {
      const double u = (static_cast<double>(random()) + 1.0) / 4294967297.0;
      double weight = 1.0;
      if (load == Load::kZipf) weight = 1.0 / static_cast<double>(e + 1);
      if (load == Load::kOneExpert && e == hot) weight = 1e9;
      if (load == Load::kOneRank && e / per_rank != hot) weight = 1e-9;
      if (load == Load::kWithoutOneRank && e / per_rank == hot) weight = 1e-9;
      if (load == Load::kQuarter && e % 4 != 1) weight = 1e-9;
      double key = -std::log(u) / weight;
      if (load == Load::kEven) key = static_cast<double>((e - i * k % experts + experts) % experts);
      keys.emplace_back(key, e);
    }
    std::sort(keys.begin(), keys.end());
    for (int64_t j = 0; j < k; ++j)
      choices[i][j] = static_cast<int>(keys[static_cast<size_t>(j)].second);
  }
  return choices;
}

inline ExpertTokens draw_tokens(const std::vector<int64_t>& of_rank, int64_t h,
                                const at::Tensor& choices) {
  int64_t n = 0;
  for (int64_t rows : of_rank) n += rows;
  const int64_t k = choices.size(1);
  return {of_rank, draw({n, h}, 1), choices, draw({n, k}, 2).abs(), draw({n, h}, 3)};
}

// Values of all parameters, which follow from their names.
inline at::Tensor value_of(const std::string& name, const std::vector<int64_t>& shape) {
  return draw(shape, std::hash<std::string>{}(name) % 1000).mul_(0.5);
}

// Copies this rank's pieces of `whole` to its local tensor.
inline at::Tensor local_pieces(const Parameter& parameter, const ParallelGroups& groups,
                               const at::Tensor& whole) {
  at::Tensor local = at::zeros(parameter.local_shape, whole.options());
  for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
    at::Tensor a = whole, b = local;
    for (size_t d = 0; d < piece.local_offset.size(); ++d) {
      const auto dim = static_cast<int64_t>(d);
      a = a.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
      b = b.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
    }
    b.copy_(a);
  }
  return local;
}

// A store whose gradients hold NaN until the first one is assigned; with `deferring` it keeps the
// weight gradients until run().
class AssigningStore final : public ParameterStore {
 public:
  AssigningStore(Module& module, const ParallelGroups& groups, at::ScalarType type,
                 bool deferring = false)
      : deferring_(deferring) {
    module.visit([&](const std::string& name, Parameter& parameter) {
      parameter.value =
          local_pieces(parameter, groups, value_of(name, parameter.global_shape)).to(type);
      parameter.store = this;
      const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
      grads_[&parameter] = {at::full(parameter.local_shape, std::nan(""), at::dtype(wide)), 0.0};
    });
  }
  at::Tensor acquire(Parameter& parameter) override {
    ++acquired_;
    return parameter.value;
  }
  void release(Parameter&) override { --acquired_; }
  GradTarget grad_target(Parameter& parameter) override {
    GradTarget& target = grads_.at(&parameter);
    const GradTarget now = target;
    target.beta = 1.0;
    return now;
  }
  void grad_ready(Parameter& parameter) override { ++ready_[&parameter]; }
  bool defer(std::function<void()> work) override {
    if (deferring_) deferred_.push_back(std::move(work));
    return deferring_;
  }
  bool defers() const override { return deferring_; }
  void run() {
    for (const auto& work : deferred_) work();
    deferred_.clear();
  }
  const at::Tensor& grad(const Parameter& parameter) const { return grads_.at(&parameter).tensor; }
  int ready(const Parameter& parameter) const {
    const auto found = ready_.find(&parameter);
    return found == ready_.end() ? 0 : found->second;
  }
  int acquired() const { return acquired_; }  // and not released

 private:
  const bool deferring_;
  std::map<const Parameter*, GradTarget> grads_;
  std::map<const Parameter*, int> ready_;
  std::vector<std::function<void()>> deferred_;
  int acquired_ = 0;
};

// What the experts give for all tokens.
struct ExpertsPass {
  at::Tensor y, dx, dweights;
  std::map<std::string, at::Tensor> grads;
};

inline at::Tensor reference_activation(const at::Tensor& u, const ExpertActivation& activation) {
  if (activation.kind == Activation::kGelu) return at::gelu(u);
  if (activation.kind == Activation::kSquaredRelu) return at::relu(u).square();
  at::Tensor gate = u.chunk(2, -1)[0], up = u.chunk(2, -1)[1];
  if (activation.clamp) {
    gate = gate.clamp_max(*activation.clamp);
    up = up.clamp(-*activation.clamp, *activation.clamp);
  }
  const double slope = activation.kind == Activation::kQuickGeglu ? 1.702 : 1.0;
  return gate * at::sigmoid(slope * gate) * (up + activation.offset);
}

// A loop over tokens and choices, with autograd.
inline ExpertsPass reference_pass(const RoutedExpertsOptions& options, const ExpertTokens& tokens) {
  const ParallelGroups one;
  RoutedExperts shapes(options, one);
  std::map<std::string, at::Tensor> w;
  shapes.visit([&](const std::string& name, Parameter& parameter) {
    w[name] = value_of(name, parameter.global_shape).set_requires_grad(true);
  });
  const at::Tensor x = tokens.x.detach().clone().set_requires_grad(true),
                   weights = tokens.weights.detach().clone().set_requires_grad(true);
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < x.size(0); ++i) {
    at::Tensor y = at::zeros({x.size(1)}, x.options());
    for (int64_t j = 0; j < tokens.choices.size(1); ++j) {
      const int64_t e = tokens.choices[i][j].item<int>();
      if (e < 0) continue;
      const at::Tensor weight = weights[i][j];
      const at::Tensor in = options.weights_on_input ? weight * x[i] : x[i];
      at::Tensor u = at::mv(w.at("linear_fc1.weight")[e], in);
      if (options.mlp.bias) u = u + w.at("linear_fc1.bias")[e];
      at::Tensor o =
          at::mv(w.at("linear_fc2.weight")[e], reference_activation(u, options.mlp.activation));
      if (options.mlp.bias) o = o + w.at("linear_fc2.bias")[e];
      y = y + (options.weights_on_input ? o : weight * o);
    }
    rows.push_back(y);
  }
  ExpertsPass pass;
  const at::Tensor y = rows.empty() ? at::zeros_like(x) : at::stack(rows);
  pass.y = y.detach();
  if (y.requires_grad()) torch::autograd::backward({(y * tokens.dy).sum()}, {});
  const auto grad_of = [](const at::Tensor& t) {
    return t.grad().defined() ? t.grad() : at::zeros_like(t);
  };
  pass.dx = grad_of(x);
  pass.dweights = grad_of(weights);
  for (const auto& [name, value] : w) pass.grads[name] = grad_of(value);
  return pass;
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected,
                         const std::string& what, double tolerance = 1e-11) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  const at::Tensor a = actual.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  const double error = (a - b).abs().max().item<double>();
  EXPECT_LE(error, tolerance * std::max(1.0, b.abs().max().item<double>())) << what;
  EXPECT_FALSE(std::isnan(error)) << what;
}

// Drops what is beyond a capacity on each rank, and fills every expert up to it.
inline ExpertTokens padded_to_capacity(ExpertTokens tokens, int64_t experts, double factor) {
  std::vector<at::Tensor> choices, padding;
  for (int rank = 0; rank < static_cast<int>(tokens.of_rank.size()); ++rank) {
    Routing routing{tokens.part(tokens.choices, rank), tokens.part(tokens.weights, rank), {}, {}};
    routing.kept = within_capacity(routing, experts, {factor});
    tokens.capacity.push_back(
        expert_capacity(routing.choices.size(0), routing.choices.size(1), experts, factor));
    padding.push_back(padding_to_capacity(routing, experts, tokens.capacity.back()));
    choices.push_back(routing.choices.masked_fill(routing.kept.logical_not(), -1));
  }
  tokens.choices = at::cat(choices);
  tokens.padding = at::cat(padding);
  return tokens;
}

// One forward and backward of this rank's tokens.
struct RankPass {
  at::Tensor y, dx, dweights;
};
inline RankPass run_experts(RoutedExperts& experts, const ExpertTokens& tokens, int rank,
                            at::ScalarType type = at::kDouble) {
  const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor x = tokens.part(tokens.x, rank).to(type).clone().set_requires_grad(true);
  const at::Tensor weights =
      tokens.part(tokens.weights, rank).to(wide).clone().set_requires_grad(true);
  Routing routing{tokens.part(tokens.choices, rank), weights, {}, {}};
  if (tokens.padding.defined()) {
    routing.padding = tokens.part(tokens.padding, rank);
    routing.capacity = tokens.capacity[static_cast<size_t>(rank)];
  }
  const at::Tensor y = experts.forward(x, routing);
  torch::autograd::backward({y}, {tokens.part(tokens.dy, rank).to(type)});
  return {y.detach(), x.grad(), weights.grad()};
}

}  // namespace megatron
