#include "tests/kernels/routing_cases.h"

#include <algorithm>
#include <limits>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr std::array<double, kBalanceTerms> kCoefficients = {0.3, 0.2, 0.1, 0.01};

struct RouterShape {
  int64_t rows, experts, sequences, topk;
};

// --- The formulas in ATen's operations ---

at::Tensor stable_order(const at::Tensor& scores) {
  return std::get<1>(at::sort(scores, /*stable=*/true, -1, /*descending=*/true));
}

at::Tensor plain_scores(const at::Tensor& logits, RouterScore score) {
  return score == RouterScore::kSigmoid ? at::sigmoid(logits) : at::softplus(logits).sqrt();
}

at::Tensor plain_shares(const at::Tensor& logits, RouterScore score) {
  if (score == RouterScore::kSoftmax) return logits.softmax(-1);
  const at::Tensor scores = plain_scores(logits, score);
  return scores / (scores.sum(-1, true) + 1e-20);
}

at::Tensor plain_choices(const at::Tensor& logits, const at::Tensor& bias,
                         const RoutingOptions& options) {
  at::Tensor scores = logits;
  if (options.score != RouterScore::kSoftmax) {
    scores = plain_scores(logits, options.score);
  } else if (options.pre_softmax) {
    scores = logits.softmax(-1);
  }
  if (bias.defined()) scores = scores + bias;
  if (options.num_groups > 0) {
    const int64_t n = logits.size(0), groups = options.num_groups;
    const at::Tensor grouped = scores.reshape({n, groups, logits.size(1) / groups});
    const int64_t summed =
        options.group_score == GroupScore::kMax ? 1 : options.topk / options.group_topk;
    const at::Tensor best = std::get<0>(grouped.sort(-1, true)).narrow(-1, 0, summed).sum(-1);
    const at::Tensor outside =
        at::ones({n, groups}, logits.options().dtype(at::kBool))
            .scatter(-1, stable_order(best).narrow(-1, 0, options.group_topk), false);
    scores = grouped.masked_fill(outside.unsqueeze(-1), -std::numeric_limits<double>::infinity())
                 .reshape(logits.sizes());
  }
  return stable_order(scores).narrow(-1, 0, options.topk);
}

at::Tensor plain_weights(const at::Tensor& logits, const at::Tensor& choices,
                         const RoutingOptions& options) {
  at::Tensor weights;
  if (options.score != RouterScore::kSoftmax) {
    weights = plain_scores(logits.gather(1, choices), options.score);
    if (options.topk > 1) weights = weights / (weights.sum(1, true) + 1e-20);
  } else if (options.pre_softmax) {
    weights = logits.softmax(-1).gather(1, choices);
  } else {
    weights = logits.gather(1, choices).softmax(-1);
  }
  return options.scaling_factor == 0.0 ? weights : weights * options.scaling_factor;
}

// [b, E] fp64: rows that are no padding and have e among their k highest shares.
at::Tensor plain_counts(const at::Tensor& shares, const at::Tensor& padding, int64_t b, int64_t k) {
  const at::Tensor best = stable_order(shares).narrow(-1, 0, k);
  const at::Tensor chosen = at::zeros(shares.sizes(), at::kDouble)
                                .scatter(1, best, 1.0)
                                .masked_fill(padding.unsqueeze(1), 0.0);
  return chosen.view({-1, b, shares.size(1)}).sum(0);
}

struct PlainLosses {
  Tensors losses;
  at::Tensor weight;
};

PlainLosses plain_losses(const at::Tensor& logits, const at::Tensor& padding,
                         const at::Tensor& of_sequence, const RoutingOptions& options) {
  const int64_t b = of_sequence.numel(), experts = logits.size(1);
  const at::Tensor p = plain_shares(logits, options.score);
  const at::Tensor a = of_sequence.repeat({logits.size(0) / b}).masked_fill(padding, 0.0);
  const at::Tensor counts = plain_counts(p.detach(), padding, b, options.topk);
  const double k = static_cast<double>(options.topk);
  const auto shares = [&](const at::Tensor& n) { return n * k / n.sum(-1, true).clamp_min(1); };
  const at::Tensor sums = (p * a.unsqueeze(1)).view({-1, b, experts}).sum(0);
  const double scale = static_cast<double>(experts) / k;
  PlainLosses result;
  result.losses = {(sums * shares(counts.sum(0))).sum() * scale,
                   (sums * shares(counts)).sum() * scale,
                   (sums * shares(counts.sum(0) * 2 + 1)).sum() * scale,
                   (a * logits.logsumexp(1).square()).sum()};
  for (size_t i = 0; i < kBalanceTerms; ++i) result.losses[i] = result.losses[i] * kCoefficients[i];
  result.weight = a.sum();
  return result;
}

// --- Rows ---

// Logits (some tied, on purpose), gradient of the weights, bias, padding, weights of sequences.
Tensors router_inputs(const RouterShape& shape, at::ScalarType type) {
  at::manual_seed(static_cast<uint64_t>(shape.rows * 1000 + shape.experts));
  at::Tensor logits = at::randn({shape.rows, shape.experts}, at::kDouble) * 2;
  logits.slice(0, 0, shape.rows, 2).mul_(2).round_().div_(2);
  const at::Tensor dweights = at::randn({shape.rows, shape.topk}, at::kDouble);
  const at::Tensor bias = at::randn({shape.experts}, at::kDouble) * 0.25;
  const at::Tensor padding = at::rand({shape.rows}, at::kDouble) < 0.2;
  const at::Tensor of_sequence = at::rand({shape.sequences}, at::kDouble);
  return {logits.to(type), dweights.to(type), bias.to(type), padding, of_sequence};
}

KernelCase row_of(const char* kind, const NamedRouting& named, const RouterShape& shape,
                  at::ScalarType type) {
  KernelCase row;
  row.name = std::string("router_") + kind + "_" + named.name + "_" + c10::toString(type) + "_" +
             std::to_string(shape.rows) + "x" + std::to_string(shape.experts);
  row.type = type;
  row.inputs = [=] { return router_inputs(shape, type); };
  row.tolerance = type == at::kDouble ? 1e-12 : 3e-6;
  return row;
}

KernelCase choice_case(const NamedRouting& named, const RouterShape& shape, at::ScalarType type) {
  const RoutingOptions options = routing_of(named, shape.topk);
  KernelCase row = row_of("choice", named, shape, type);
  row.run = [=](const Tensors& t) -> Tensors {
    const at::Tensor bias = named.biased ? t[2] : at::Tensor();
    const RouterSums sums{.sequences = shape.sequences, .padding = t[3], .counts = true};
    const RouterPass pass = router_pass(t[0], bias, options, {}, sums);
    const RouterPass again = router_pass(t[0], {}, options, pass.choices, sums);
    at::Tensor chosen = at::zeros_like(pass.counts);
    add_assignments(pass.choices, {}, t[3], chosen);
    return {pass.choices,  pass.weights, pass.counts, router_choices(t[0], bias, options),
            again.weights, again.counts, chosen};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor choices = plain_choices(t[0], named.biased ? t[2] : at::Tensor(), options);
    const at::Tensor weights = plain_weights(t[0], choices, options);
    const at::Tensor counts =
        plain_counts(plain_shares(t[0], options.score), t[3], shape.sequences, shape.topk);
    const at::Tensor chosen = at::zeros_like(t[0])
                                  .scatter(1, choices, 1.0)
                                  .masked_fill(t[3].unsqueeze(1), 0.0)
                                  .view({-1, shape.sequences, shape.experts})
                                  .sum(0);
    return {choices, weights, counts, choices, weights, counts, chosen};
  };
  row.bit_equal = type == at::kFloat;  // the exponential of fp64 is another one on CUDA
  return row;
}

// Losses, and the gradient of the logits from weights and losses.
KernelCase loss_case(const NamedRouting& named, const RouterShape& shape, at::ScalarType type) {
  const RoutingOptions options = routing_of(named, shape.topk);
  KernelCase row = row_of("losses", named, shape, type);
  row.run = [=](const Tensors& t) -> Tensors {
    const RouterSums sums{.sequences = shape.sequences,
                          .padding = t[3],
                          .shares = true,
                          .squares = true,
                          .counts = true};
    const RouterPass pass =
        router_pass(t[0], named.biased ? t[2] : at::Tensor(), options, {}, sums);
    const RouterLosses losses =
        router_losses(pass, pass.counts.sum(0) * 2 + 1, t[4], shape.topk, kCoefficients);
    std::array<at::Tensor, kBalanceTerms> dlosses;
    for (size_t i = 0; i < kBalanceTerms; ++i)
      dlosses[i] = at::full({}, 1.0 + static_cast<double>(i), losses.weights.options());
    Tensors out(losses.losses.begin(), losses.losses.end());
    out.push_back(losses.weights);
    const auto backward = [&](const at::Tensor& dweights, const auto& gradients) {
      out.push_back(
          router_backward(t[0], options, pass.choices, dweights, sums, losses, gradients));
    };
    backward(t[1], dlosses);
    backward({}, dlosses);
    backward(t[1], std::array<at::Tensor, kBalanceTerms>());
    return out;
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor logits = t[0].detach().clone().requires_grad_();
    const at::Tensor choices = plain_choices(t[0], named.biased ? t[2] : at::Tensor(), options);
    const at::Tensor weighed = (plain_weights(logits, choices, options) * t[1]).sum();
    const PlainLosses plain = plain_losses(logits, t[3], t[4], options);
    at::Tensor lost = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < kBalanceTerms; ++i)
      lost = lost + plain.losses[i] * (1.0 + static_cast<double>(i));
    Tensors out;
    for (const at::Tensor& loss : plain.losses) out.push_back(loss.detach());
    out.push_back(at::stack({plain.weight * kCoefficients[0], plain.weight * kCoefficients[1],
                             plain.weight * kCoefficients[2], plain.weight * kCoefficients[3]}));
    for (const at::Tensor& root : {weighed + lost, lost, weighed}) {
      logits.mutable_grad() = at::Tensor();
      root.backward({}, /*retain_graph=*/true);
      out.push_back(logits.grad().clone());
    }
    return out;
  };
  return row;
}

}  // namespace

const std::vector<NamedRouting>& named_routings() {
  using enum RouterScore;
  static const std::vector<NamedRouting> all = {
      {"after", {}},
      {"before", {.pre_softmax = true}},
      {"sigmoid_biased", {.score = kSigmoid, .scaling_factor = 2.5}, true},
      {"sqrtsoftplus", {.score = kSqrtSoftplus}},
      {"grouped_after", {.num_groups = 4, .group_topk = 2}},
      {"grouped_before",
       {.pre_softmax = true,
        .scaling_factor = 16.0,
        .num_groups = 4,
        .group_topk = 2,
        .group_score = GroupScore::kMax}},
      {"grouped_biased", {.score = kSigmoid, .num_groups = 4, .group_topk = 2}, true}};
  return all;
}

RoutingOptions routing_of(const NamedRouting& named, int64_t topk) {
  RoutingOptions options = named.options;
  options.topk = topk;
  options.group_topk = std::min(options.group_topk, topk);
  return options;
}

std::vector<KernelCase> routing_cases(bool perf) {
  std::vector<KernelCase> rows;
  if (perf) {
    for (const NamedRouting& named : named_routings()) {
      for (const RouterShape& shape : {RouterShape{8192, 8, 2, 2}, RouterShape{8192, 128, 2, 8}}) {
        rows.push_back(choice_case(named, shape, at::kFloat));
        rows.push_back(loss_case(named, shape, at::kFloat));
        for (size_t i = rows.size() - 2; i < rows.size(); ++i)
          rows[i].bytes = shape.rows * shape.experts * 4;
      }
    }
    return rows;
  }
  for (const at::ScalarType type : {at::kDouble, at::kFloat})
    for (const NamedRouting& named : named_routings())
      for (const RouterShape& shape :
           {RouterShape{0, 4, 1, 2}, RouterShape{1, 4, 1, 1}, RouterShape{14, 8, 2, 2},
            RouterShape{130, 64, 1, 6}, RouterShape{258, 132, 3, 8}, RouterShape{5, 2500, 1, 40}}) {
        rows.push_back(choice_case(named, shape, type));
        rows.push_back(loss_case(named, shape, type));
      }
  return rows;
}

}  // namespace megatron
