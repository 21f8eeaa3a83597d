// Rows of the table for layers of experts.
#include <string>

#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/experts/weighted_activation.h"
#include "megatron/tensor/torch.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

at::Tensor gate_of(const at::Tensor& x, const ExpertActivation& activation) {
  switch (activation.kind) {
    case Activation::kSwiglu:
      return at::silu(x);
    case Activation::kGeglu:
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kQuickGeglu:
    case Activation::kQuickGelu:
      return x * at::sigmoid(1.702 * x);
    case Activation::kGelu:
    case Activation::kExactGeglu:
      return at::gelu(x);
    case Activation::kRelu:
      return at::relu(x);
    default:
      return at::relu(x).square();
  }
}

at::Tensor activation_of(const at::Tensor& x, const ExpertActivation& activation) {
  if (!is_gated(activation.kind)) return gate_of(x, activation);
  at::Tensor gate = x.chunk(2, -1)[0], up = x.chunk(2, -1)[1];
  if (activation.clamp) {
    gate = gate.clamp_max(*activation.clamp);
    up = up.clamp(-*activation.clamp, *activation.clamp);
  }
  return gate_of(gate, activation) * (up + activation.offset);
}

// y, and the gradients of x and of the weights.
KernelCase weighted_activation_case(const ExpertActivation& activation, at::ScalarType type,
                                    int64_t rows, int64_t features) {
  const int64_t width = is_gated(activation.kind) ? 2 * features : features;
  KernelCase row;
  row.name = "weighted_activation_" + std::to_string(static_cast<int>(activation.kind)) +
             (activation.clamp ? "_clamped_" : "_") + c10::toString(type) + "_" +
             std::to_string(rows) + "x" + std::to_string(features);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({rows, width}, type, 1), normal({rows}, wide(type), 2),
                   normal({rows, features}, type, 3)};
  };
  row.run = [=](const Tensors& t) {
    const auto grads =
        weighted_activation_backward(t[2], t[0], t[1], activation, {.y = true, .amax = true});
    return Tensors{weighted_activation(t[0], t[1], activation), grads.dx, grads.dweights, grads.y,
                   grads.amax};
  };
  row.reference = [=](const Tensors& t) {
    const at::Tensor x = t[0].detach().requires_grad_(), weights = t[1].detach().requires_grad_();
    const at::Tensor y = activation_of(x, activation) * weights.unsqueeze(1);
    y.backward(t[2]);
    return Tensors{y.detach(), x.grad(), weights.grad(), y.detach(),
                   x.grad().abs().amax(1).to(at::kFloat)};
  };
  row.tolerance = tolerance_of(type);
  row.bytes = rows * (4 * width + 4 * features) * static_cast<int64_t>(c10::elementSize(type));
  return row;
}

// Distinct experts of each token; some choices are dropped.
at::Tensor draw_choices(int64_t tokens, int64_t k, int64_t num_experts) {
  at::manual_seed(4);
  const at::Tensor scores = at::rand({tokens, num_experts}, at::kDouble);
  const at::Tensor choices = scores.argsort(int64_t{-1}, false).narrow(1, 0, k).to(at::kInt);
  return choices.masked_fill(at::rand({tokens, k}, at::kDouble) < 0.1, -1);
}

Tensors plain_order(const at::Tensor& choices, int64_t first, int64_t num_experts) {
  const at::Tensor local = choices.reshape({-1}).to(at::kLong) - first;
  const at::Tensor mine = local.ge(0).logical_and(local.lt(num_experts));
  const at::Tensor expert = at::where(mine, local, num_experts);
  const at::Tensor order = std::get<1>(at::sort(expert, /*stable=*/true, 0, false));
  const at::Tensor row = at::empty_like(order).scatter_(0, order, at::arange(order.numel()));
  return {at::bincount(expert, {}, num_experts + 1).narrow(0, 0, num_experts), order,
          at::where(mine, row, -1).view(choices.sizes())};
}

KernelCase order_case(int64_t tokens, int64_t k, int64_t num_experts, int64_t first,
                      int64_t experts) {
  KernelCase row;
  row.name = "order_by_expert_" + std::to_string(tokens) + "x" + std::to_string(k) + "_of_" +
             std::to_string(num_experts) + "_from_" + std::to_string(first);
  row.inputs = [=] { return Tensors{draw_choices(tokens, k, num_experts)}; };
  row.run = [=](const Tensors& t) {
    const ExpertOrder order = order_by_expert(t[0], first, experts);
    return Tensors{order.counts, order.choices, order.rows};
  };
  row.reference = [=](const Tensors& t) { return plain_order(t[0], first, experts); };
  row.tolerance = 1e-12;
  row.bit_equal = true;
  return row;
}

// Each token's row at the places of its choices.
KernelCase spread_case(at::ScalarType type, int64_t tokens, int64_t k, int64_t columns) {
  KernelCase row;
  row.name = std::string("spread_rows_") + c10::toString(type) + "_" + std::to_string(tokens) +
             "x" + std::to_string(k) + "x" + std::to_string(columns);
  row.type = type;
  row.inputs = [=] {
    const at::Tensor places = at::randperm(tokens * k, at::kLong).view({tokens, k});
    return Tensors{normal({tokens, columns}, type, 1), places};
  };
  row.run = [](const Tensors& t) { return Tensors{spread_rows(t[0], t[1])}; };
  row.reference = [=](const Tensors& t) {
    const at::Tensor from =
        at::empty_like(t[1].view({-1}))
            .scatter_(0, t[1].view({-1}), at::arange(tokens * k, t[1].options()).div(k, "floor"));
    return Tensors{t[0].index_select(0, from)};
  };
  row.tolerance = tolerance_of(type);
  row.bit_equal = true;
  return row;
}

// Rows taken into the order of experts, and the sums of a token's rows: rounded, added to something
// and rounded, and added to wider sums.
KernelCase rows_case(at::ScalarType type, int64_t tokens, int64_t k, int64_t columns) {
  KernelCase row;
  row.name = std::string("expert_rows_") + c10::toString(type) + "_" + std::to_string(tokens) +
             "x" + std::to_string(k) + "x" + std::to_string(columns);
  row.type = type;
  row.inputs = [=] {
    const Tensors order = plain_order(draw_choices(tokens, k, 16), 0, 16);
    return Tensors{normal({tokens, columns}, type, 1), normal({tokens, columns}, wide(type), 2),
                   order[1], order[2]};
  };
  row.run = [=](const Tensors& t) {
    const at::Tensor rows = gather_rows(t[0], t[2], k);
    at::Tensor sums = t[1].clone();
    add_rows(rows, t[3], sums);
    return Tensors{rows, sum_rows(rows, t[3]), sum_rows(rows, t[3], t[0]), sums,
                   gather_rows(t[0].select(1, 0), t[3], k)};
  };
  row.reference = [=](const Tensors& t) {
    const at::Tensor taken = t[3].ge(0), kept = taken.sum(1, true).to(at::kDouble);
    const at::Tensor values = t[0].select(1, 0).index({t[3].clamp_min(0).div(k, "floor")});
    return Tensors{t[0].index_select(0, t[2].div(k, "floor")), t[0] * kept, t[0] + t[0] * kept,
                   t[1] + t[0] * kept, at::where(taken, values, 0.0)};
  };
  row.tolerance = tolerance_of(type);
  row.bit_equal = true;
  row.bytes = tokens * k * columns * 4 * static_cast<int64_t>(c10::elementSize(type));
  return row;
}

}  // namespace

void add_expert_cases(std::vector<KernelCase>& rows, bool perf) {
  if (perf) {
    rows.push_back(weighted_activation_case({}, at::kBFloat16, 2048, 1024));
    rows.push_back(rows_case(at::kBFloat16, 1024, 2, 2048));
    rows.push_back(spread_case(at::kBFloat16, 1024, 8, 2048));
    return;
  }
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int kind = 0; kind < 8; ++kind)
      rows.push_back(weighted_activation_case({static_cast<Activation>(kind)}, type, 7, 127));
    rows.push_back(weighted_activation_case({Activation::kQuickGeglu, 1.0, 0.7}, type, 5, 768));
    rows.push_back(weighted_activation_case({Activation::kSwiglu}, type, 3, 7168));
    rows.push_back(rows_case(type, 37, 3, 130));
    rows.push_back(rows_case(type, 19, 8, 2048));
    rows.push_back(rows_case(type, 5, 1, 7));
    rows.push_back(spread_case(type, 19, 8, 2048));
    rows.push_back(spread_case(type, 5, 2, 7));
  }
  rows.push_back(order_case(1, 1, 4, 0, 4));
  rows.push_back(order_case(700, 2, 8, 0, 8));
  rows.push_back(order_case(2049, 6, 64, 16, 32));
  rows.push_back(order_case(5000, 8, 300, 0, 300));
}

}  // namespace megatron
