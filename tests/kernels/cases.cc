#include "tests/kernels/cases.h"

#include <algorithm>
#include <cmath>

#include "megatron/kernels/fp8/fp8.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/cross_entropy.h"
#include "megatron/tensor/embedding.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/norm.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/random.h"
#include "megatron/tensor/rotary.h"
#include "megatron/tensor/torch.h"
#include "tests/kernels/routing_cases.h"

namespace megatron {

double tolerance_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 1e-12;
    case at::kFloat:
      return 3e-6;
    case at::kHalf:
      return 2e-3;
    default:
      return 1e-2;
  }
}

at::ScalarType wide(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor normal(at::IntArrayRef shape, at::ScalarType type, uint64_t seed, double scale) {
  at::manual_seed(seed);
  return (at::randn(shape, at::kDouble) * scale).to(type);
}

namespace {

struct Shape {
  int64_t rows, columns;
};

std::string row_name(const std::string& op, at::ScalarType type, Shape shape) {
  return op + "_" + c10::toString(type) + "_" + std::to_string(shape.rows) + "x" +
         std::to_string(shape.columns);
}

// Outputs of f and the gradients of its floating inputs for the given dy (the last input).
Tensors with_gradients(const std::function<at::Tensor(const Tensors&)>& f, const Tensors& inputs,
                       size_t differentiable) {
  Tensors leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(i < differentiable ? inputs[i].detach().requires_grad_() : inputs[i]);
  }
  const at::Tensor y = f(leaves);
  y.backward(inputs.back());
  Tensors out = {y.detach()};
  for (size_t i = 0; i < differentiable; ++i) out.push_back(leaves[i].grad());
  return out;
}

std::string norm_name(Normalization kind, bool zero_centered, bool with_bias) {
  return std::string(kind == Normalization::kLayerNorm ? "layer_norm" : "rms_norm") +
         (zero_centered ? "_zero_centered" : "") + (with_bias ? "_bias" : "");
}

// `beside`: the gradient of another path of x is added to dx; here it is x itself.
KernelCase norm_case(Normalization kind, bool zero_centered, bool with_bias, at::ScalarType type,
                     Shape shape, bool beside = false) {
  KernelCase row;
  row.name =
      row_name(norm_name(kind, zero_centered, with_bias) + (beside ? "_beside" : ""), type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, shape.columns}, type, 1, 3.0),
                   normal({shape.columns}, type, 2), normal({shape.columns}, type, 3),
                   normal({shape.rows, shape.columns}, type, 4)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    const at::Tensor bias = with_bias ? t[2] : at::Tensor();
    const NormResult result = norm_forward(kind, t[0], t[1], bias, 1e-5, zero_centered);
    at::Tensor dgain = at::ones({shape.columns}, t[0].options().dtype(wide(type)));
    at::Tensor dbias = with_bias ? at::ones_like(dgain) : at::Tensor();
    const at::Tensor dx = norm_backward(kind, t[3], t[0], t[1], result.mean, result.rstd,
                                        zero_centered, dgain, dbias, beside ? t[0] : at::Tensor());
    Tensors out = {result.y, dx, dgain};
    if (with_bias) out.push_back(dbias);
    return out;
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const auto f = [=](const Tensors& leaves) {
      const at::Tensor& x = leaves[0];
      const at::Tensor centered = kind == Normalization::kLayerNorm ? x - x.mean(-1, true) : x;
      at::Tensor y = centered * (centered.square().mean(-1, true) + 1e-5).rsqrt();
      y = y * (zero_centered ? leaves[1] + 1 : leaves[1]);
      return with_bias ? y + leaves[2] : y;
    };
    Tensors out = with_gradients(f, t, with_bias ? 3 : 2);
    Tensors result = {out[0], beside ? out[1] + t[0] : out[1], out[2] + 1};
    if (with_bias) result.push_back(out[3] + 1);
    return result;
  };
  if (kind == Normalization::kLayerNorm) {
    row.eager = [=](const Tensors& t) {
      const auto f = [=](const Tensors& leaves) {
        return at::layer_norm(leaves[0], {shape.columns}, leaves[1], leaves[2], 1e-5);
      };
      return with_gradients(f, t, 3);
    };
  }
  row.tolerance = tolerance_of(type);
  row.bytes = shape.rows * shape.columns * 5 * static_cast<int64_t>(at::elementSize(type));
  return row;
}

// The output again from saved statistics: the same bits.
KernelCase norm_apply_case(Normalization kind, at::ScalarType type, Shape shape) {
  const bool has_bias = kind == Normalization::kLayerNorm;
  KernelCase row = norm_case(kind, true, has_bias, type, shape);
  row.name = "again_" + row.name;
  row.run = [=](const Tensors& t) -> Tensors {
    const at::Tensor bias = has_bias ? t[2] : at::Tensor();
    const NormResult result = norm_forward(kind, t[0], t[1], bias, 1e-5, true);
    return {norm_apply(kind, t[0], t[1], bias, result.mean, result.rstd, true) - result.y};
  };
  row.reference = [](const Tensors& t) -> Tensors { return {at::zeros_like(t[0])}; };
  row.tolerance = 1e-30;
  row.bytes = 0;
  return row;
}

KernelCase activation_case(Activation activation, at::ScalarType type, Shape shape, double scale) {
  static const char* const kNames[] = {"gelu",         "gelu_tanh",   "relu",
                                       "squared_relu", "swiglu",      "geglu",
                                       "quick_geglu",  "exact_geglu", "quick_gelu"};
  const double offset = activation == Activation::kQuickGeglu ? 1.0 : 0.0;
  const int64_t width = is_gated(activation) ? 2 * shape.columns : shape.columns;
  KernelCase row;
  row.name =
      row_name(std::string(kNames[static_cast<int>(activation)]) + (scale > 10 ? "_extreme" : ""),
               type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, width}, type, 1, scale),
                   normal({shape.rows, shape.columns}, type, 2)};
  };
  row.run = [=](const Tensors& t) {
    return with_gradients(
        [=](const Tensors& leaves) { return activate(leaves[0], activation, offset); }, t, 1);
  };
  row.reference = [=](const Tensors& t) {
    const auto f = [=](const Tensors& leaves) -> at::Tensor {
      const at::Tensor& x = leaves[0];
      const auto gelu_tanh = [](const at::Tensor& a) {
        return 0.5 * a * (1 + at::tanh(std::sqrt(2 / M_PI) * (a + 0.044715 * a.pow(3))));
      };
      const std::vector<at::Tensor> half =
          is_gated(activation) ? x.chunk(2, -1) : std::vector<at::Tensor>{x};
      switch (activation) {
        case Activation::kGelu:
          return 0.5 * x * (1 + at::erf(x / std::sqrt(2.0)));
        case Activation::kGeluTanh:
          return gelu_tanh(x);
        case Activation::kRelu:
          return at::relu(x);
        case Activation::kSquaredRelu:
          return at::relu(x).square();
        case Activation::kSwiglu:
          return half[0] * at::sigmoid(half[0]) * half[1];
        case Activation::kGeglu:
          return gelu_tanh(half[0]) * half[1];
        case Activation::kQuickGeglu:
          return half[0] * at::sigmoid(1.702 * half[0]) * (half[1] + offset);
        case Activation::kExactGeglu:
          return 0.5 * half[0] * (1 + at::erf(half[0] / std::sqrt(2.0))) * half[1];
        case Activation::kQuickGelu:
          return x * at::sigmoid(1.702 * x);
      }
      return x;
    };
    return with_gradients(f, t, 1);
  };
  if (activation == Activation::kGelu || activation == Activation::kGeluTanh ||
      activation == Activation::kSwiglu) {
    row.eager = [=](const Tensors& t) {
      const auto f = [=](const Tensors& leaves) {
        if (activation == Activation::kSwiglu) {
          const std::vector<at::Tensor> half = leaves[0].chunk(2, -1);
          return at::silu(half[0]) * half[1];
        }
        return at::gelu(leaves[0], activation == Activation::kGelu ? "none" : "tanh");
      };
      return with_gradients(f, t, 1);
    };
  }
  row.tolerance = tolerance_of(type);
  row.bytes =
      shape.rows * (3 * width + 2 * shape.columns) * static_cast<int64_t>(at::elementSize(type));
  return row;
}

KernelCase rotary_case(bool interleaved, bool per_sample, at::ScalarType type, Shape shape) {
  const int64_t s = shape.rows, d = shape.columns, b = 2, n = 3,
                r = std::max<int64_t>(1, d / 2 - d / 8);
  KernelCase row;
  row.name = row_name(std::string("rotary") + (interleaved ? "_interleaved" : "") +
                          (per_sample ? "_per_sample" : ""),
                      type, shape);
  row.type = type;
  row.inputs = [=] {
    const at::Tensor angle = normal(
        per_sample ? std::vector<int64_t>{s, b, r} : std::vector<int64_t>{s, r}, at::kDouble, 2);
    return Tensors{normal({s, b, n, d + 5}, type, 1).narrow(3, 2, d), angle.cos().to(wide(type)),
                   angle.sin().to(wide(type)), normal({s, b, n, d}, type, 3)};
  };
  row.run = [=](const Tensors& t) {
    return with_gradients(
        [=](const Tensors& leaves) {
          return apply_rotary(leaves[0], leaves[1], leaves[2], interleaved);
        },
        t, 1);
  };
  row.reference = [=](const Tensors& t) {
    const auto f = [=](const Tensors& leaves) {
      const at::Tensor& x = leaves[0];
      at::Tensor cos = leaves[1].unsqueeze(-2), sin = leaves[2].unsqueeze(-2);
      if (!per_sample) {
        cos = cos.unsqueeze(1);
        sin = sin.unsqueeze(1);
      }
      const at::Tensor rest = x.narrow(3, 2 * r, d - 2 * r);
      if (interleaved) {
        const at::Tensor pairs = x.narrow(3, 0, 2 * r).reshape({s, b, n, r, 2});
        const at::Tensor a = pairs.select(4, 0), c = pairs.select(4, 1);
        return at::cat(
            {at::stack({a * cos - c * sin, c * cos + a * sin}, 4).reshape({s, b, n, 2 * r}), rest},
            3);
      }
      const at::Tensor a = x.narrow(3, 0, r), c = x.narrow(3, r, r);
      return at::cat({a * cos - c * sin, c * cos + a * sin, rest}, 3);
    };
    return with_gradients(f, t, 1);
  };
  row.tolerance = tolerance_of(type);
  row.bytes = s * b * n * d * 4 * static_cast<int64_t>(at::elementSize(type));
  return row;
}

KernelCase cross_entropy_case(at::ScalarType type, Shape shape, int64_t padding, double scale,
                              bool in_place) {
  const int64_t valid = shape.columns - padding;
  KernelCase row;
  row.name = row_name(
      std::string("cross_entropy") + (in_place ? "_in_place" : "") + (scale > 10 ? "_extreme" : ""),
      type, shape);
  row.type = type;
  row.inputs = [=] {
    at::manual_seed(2);
    at::Tensor targets =
        at::randint(-2, valid + 2, {shape.rows}, at::kLong);  // some in other shards
    at::Tensor logits = normal({shape.rows, shape.columns}, type, 1, scale);
    if (padding > 0)
      logits.narrow(1, valid, padding).fill_(std::numeric_limits<double>::quiet_NaN());
    return Tensors{logits, targets, normal({shape.rows}, wide(type), 3)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    const CrossEntropyParts parts = cross_entropy_parts(t[0], t[1], valid);
    const at::Tensor lse = parts.sum.log() + parts.max;
    const at::Tensor logits = in_place ? t[0].clone() : t[0];
    const at::Tensor dlogits =
        cross_entropy_backward(logits, t[1], lse, t[2], valid, 1e-2, in_place);
    return {parts.max, parts.target, parts.sum, dlogits};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor logits = t[0].narrow(1, 0, valid).detach().requires_grad_();
    const at::Tensor here = t[1].ge(0).logical_and(t[1].lt(valid));
    const at::Tensor target =
        logits.gather(1, t[1].clamp(0, valid - 1).unsqueeze(1)).squeeze(1) * here;
    const at::Tensor lse = logits.logsumexp(1), max = std::get<0>(logits.max(1));
    // scale * (lse - target) + z * scale * lse^2; a target of another shard leaves only the
    // softmax.
    const at::Tensor loss = (t[2] * (lse - target + 1e-2 * lse.square())).sum();
    loss.backward();
    const at::Tensor grad =
        at::cat({logits.grad(), at::zeros({shape.rows, padding}, logits.options())}, 1);
    return {max.detach(), target.detach(), at::exp(lse - max).detach(), grad};
  };
  row.eager = [=](const Tensors& t) {
    const at::Tensor ids = t[1].clamp(0, valid - 1);
    const auto f = [&](const Tensors& leaves) {
      return at::cross_entropy_loss(leaves[0], ids, {}, at::Reduction::None);
    };
    return with_gradients(f, {t[0], t[2].to(type)}, 1);
  };
  row.tolerance = tolerance_of(type);
  row.bytes = shape.rows * shape.columns * 4 * static_cast<int64_t>(at::elementSize(type));
  return row;
}

KernelCase embedding_case(at::ScalarType type, Shape shape) {
  const int64_t vocabulary = 37;
  KernelCase row;
  row.name = row_name("embedding", type, shape);
  row.type = type;
  row.inputs = [=] {
    at::manual_seed(5);
    return Tensors{normal({vocabulary, shape.columns}, type, 1),
                   at::randint(-3, vocabulary, {shape.rows}, at::kLong),
                   normal({shape.rows, shape.columns}, type, 2)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    at::Tensor grad = at::ones({vocabulary, shape.columns}, t[0].options().dtype(wide(type)));
    embedding_backward(t[2], t[1], grad);
    return {embedding_forward(t[0], t[1]), grad};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor used = t[1].ge(0).to(t[0].scalar_type()).unsqueeze(1), ids = t[1].clamp_min(0);
    const at::Tensor out = t[0].index_select(0, ids) * used;
    return {out, at::ones_like(t[0]).index_add(0, ids, t[2] * used)};
  };
  row.eager = [=](const Tensors& t) {
    const at::Tensor ids = t[1].clamp_min(0);
    const auto f = [&](const Tensors& leaves) { return at::embedding(leaves[0], ids); };
    return with_gradients(f, {t[0], t[2]}, 1);
  };
  row.tolerance = tolerance_of(wide(type));
  row.bytes = shape.rows * shape.columns * 5 * static_cast<int64_t>(at::elementSize(type));
  return row;
}

KernelCase dropout_case(at::ScalarType type, at::ScalarType residual_type, Shape shape) {
  const TokenPositions place{at::arange(5, 7), at::arange(3, 3 + shape.rows)};
  const RandomKey key = random_key(11, "hidden", 3);
  KernelCase row;
  row.name = row_name("dropout_add_" + std::string(c10::toString(residual_type)), type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, 2, shape.columns}, type, 1),
                   normal({shape.rows, 2, shape.columns}, residual_type, 2), place.sample,
                   place.position, normal({shape.rows, 2, shape.columns}, residual_type, 3)};
  };
  row.run = [=](const Tensors& t) {
    const TokenPositions here{t[2], t[3]};
    return with_gradients(
        [&](const Tensors& leaves) { return dropout_add(leaves[0], leaves[1], 0.3, key, here); }, t,
        2);
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor keep = dropout(at::ones_like(t[0]), 0.3, key, place);
    return {t[0] * keep + t[1], t[4] * keep, t[4]};
  };
  row.eager = [=](const Tensors& t) {
    const auto f = [](const Tensors& leaves) {
      return at::dropout(leaves[0], 0.3, true) + leaves[1];
    };
    return with_gradients(f, t, 2);
  };
  row.tolerance = tolerance_of(residual_type == type ? type : at::kBFloat16);
  row.bit_equal = true;
  row.bytes = shape.rows * 2 * shape.columns * 5 * static_cast<int64_t>(at::elementSize(type));
  return row;
}

KernelCase random_case(at::ScalarType type, Shape shape) {
  KernelCase row;
  row.name = row_name("random", type, shape);
  row.type = type;
  row.inputs = [=] { return Tensors{at::empty({shape.rows, shape.columns}, type)}; };
  row.run = [=](const Tensors& t) -> Tensors {
    at::Tensor draws = at::empty_like(t[0]), flat = at::empty_like(t[0]);
    normal_(draws, 0.5, random_key(1, "n"), 3, shape.columns + 7, 5);
    uniform_(flat, -1.0, 2.0, random_key(1, "u"), 3, shape.columns + 7, 5);
    return {draws, flat};
  };
  row.reference = [=](const Tensors&) -> Tensors {
    // Rows cut out of the whole tensor, in fp64.
    at::Tensor draws = at::empty({3 + shape.rows, shape.columns + 7}, at::kDouble),
               flat = at::empty_like(draws);
    normal_(draws, 0.5, random_key(1, "n"), 0, shape.columns + 7, 0);
    uniform_(flat, -1.0, 2.0, random_key(1, "u"), 0, shape.columns + 7, 0);
    const auto part = [=](const at::Tensor& x) {
      return x.narrow(0, 3, shape.rows).narrow(1, 5, shape.columns);
    };
    return {part(draws), part(flat)};
  };
  row.eager = [=](const Tensors& t) -> Tensors {
    return {at::randn_like(t[0]) * 0.5, at::rand_like(t[0]) * 3 - 1};
  };
  row.tolerance = tolerance_of(type);
  row.bit_equal = true;
  row.bytes = shape.rows * shape.columns * 2 * static_cast<int64_t>(at::elementSize(type));
  return row;
}

KernelCase linear_case(at::ScalarType type, Shape shape) {
  const int64_t n = 24;
  KernelCase row;
  row.name = row_name("linear", type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, shape.columns}, type, 1),
                   normal({n, shape.columns}, type, 2), normal({n}, type, 3),
                   normal({shape.rows, n}, type, 4)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    at::Tensor dw = at::ones({n, shape.columns}, t[0].options().dtype(wide(type)));
    at::Tensor db = at::ones({n}, dw.options());
    linear_weight_grad(t[3], t[0], dw, 0.5);
    bias_grad(t[3], db, 0.5);
    return {linear_forward(t[0], t[1], t[2]),
            linear_forward(t[0], t[1], t[2], t[3]),
            linear_input_grad(t[3], t[1]),
            linear_input_grad(t[3], t[1], t[0]),
            dw,
            db};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor y = at::matmul(t[0], t[1].t()) + t[2];
    const at::Tensor dx = at::matmul(t[3], t[1]);
    return {y,
            y + t[3],
            dx,
            at::gelu_backward(dx, t[0], "tanh"),
            at::matmul(t[3].t(), t[0]) + 0.5,
            t[3].sum(0) + 0.5};
  };
  row.tolerance = tolerance_of(type);
  return row;
}

// A product of few rows with a matrix that is large enough for a kernel of its own.
KernelCase few_rows_case(at::ScalarType type, int64_t rows, int64_t n, int64_t k) {
  KernelCase row;
  row.name = row_name("few_rows_of_" + std::to_string(n), type, {rows, k});
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({rows, k}, type, 1), normal({n, k}, type, 2, 0.1), normal({n}, type, 3),
                   normal({rows, n}, type, 4)};
  };
  row.run = [](const Tensors& t) -> Tensors {
    return {linear_forward(t[0], t[1], {}), linear_forward(t[0], t[1], t[2], t[3])};
  };
  row.reference = [](const Tensors& t) -> Tensors {
    const at::Tensor y = at::matmul(t[0], t[1].t());
    return {y, y + t[2] + t[3]};
  };
  row.tolerance = tolerance_of(type);
  row.bytes = 2 * n * k * static_cast<int64_t>(at::elementSize(type));
  return row;
}

// With an RMSNorm before it and SwiGLU behind it, in one kernel where there is one.
KernelCase fused_rows_case(at::ScalarType type, int64_t rows, int64_t n, int64_t k) {
  constexpr double kEps = 1e-5;
  KernelCase row;
  row.name = row_name("fused_rows_of_" + std::to_string(n), type, {rows, k});
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({rows, k}, type, 1, 3.0), normal({n, k}, type, 2, 0.02),
                   normal({k}, type, 3), normal({n}, type, 4)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    const auto product = [&](bool zero_centered, bool swiglu) {
      const at::Tensor bias = swiglu ? at::Tensor() : t[3];
      const at::Tensor y =
          fused_linear_forward(t[0], t[1], bias, {t[2], kEps, zero_centered, swiglu});
      if (y.defined()) return y;
      const at::Tensor gain = t[2].to(type == at::kDouble ? at::kDouble : at::kFloat);
      const at::Tensor z = linear_forward(
          norm_forward(Normalization::kRMSNorm, t[0], gain, {}, kEps, zero_centered).y, t[1], bias);
      return swiglu ? activation_forward(z, Activation::kSwiglu, 0.0) : z;
    };
    return {product(false, false), product(true, false), product(false, true)};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor normed = t[0] / (t[0].square().mean(-1, true) + kEps).sqrt();
    const at::Tensor plain = at::matmul(normed * t[2], t[1].t());
    const auto halves = plain.chunk(2, -1);
    return {plain + t[3], at::matmul(normed * (t[2] + 1), t[1].t()) + t[3],
            at::silu(halves[0]) * halves[1]};
  };
  row.tolerance = tolerance_of(type);
  row.bytes = 3 * n * k * static_cast<int64_t>(at::elementSize(type));
  return row;
}

// The codes of x and of its transpose as bytes, and the scale.
KernelCase fp8_cast_case(at::ScalarType codes, at::ScalarType type, Shape shape) {
  KernelCase row;
  row.name = row_name(std::string("fp8_cast_") + c10::toString(codes), type, shape);
  row.type = type;
  row.inputs = [=] { return Tensors{normal({shape.rows, shape.columns}, type, 1, 3.0)}; };
  row.run = [=](const Tensors& t) -> Tensors {
    const QuantizedTensor q = quantize_tensor(t[0], codes, {});
    return {q.rows.codes.view(at::kByte), q.columns.codes.view(at::kByte),
            at::stack({q.rows.scale[0], q.rows.scale[kFp8InverseAt]})};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const at::Tensor x = t[0].to(at::kFloat),
                     largest =
                         at::full({}, codes == at::kFloat8_e5m2 ? 57344.0f : 448.0f, at::kFloat);
    const at::Tensor scale = largest / x.abs().max();
    const at::Tensor y =
        at::minimum(at::maximum(x * scale, -largest), largest).to(codes).view(at::kByte);
    return {y, y.t().contiguous(), at::stack({scale, 1 / scale})};
  };
  row.tolerance = 1e-30;
  row.bit_equal = true;
  row.bytes = shape.rows * shape.columns * (2 * static_cast<int64_t>(at::elementSize(type)) + 2);
  return row;
}

// The same in blocks of 128, along both dimensions or square.
KernelCase fp8_block_case(bool square, at::ScalarType type, Shape shape) {
  KernelCase row;
  row.name = row_name(square ? "fp8_squares" : "fp8_vectors", type, shape);
  row.type = type;
  row.inputs = [=] { return Tensors{normal({shape.rows, shape.columns}, type, 1, 3.0)}; };
  row.run = [=](const Tensors& t) -> Tensors {
    const QuantizedTensor q = quantize_blocks(t[0], at::kFloat8_e4m3fn, {}, square);
    return {q.rows.codes.view(at::kByte), q.columns.codes.view(at::kByte), q.rows.scale,
            q.columns.scale};
  };
  row.reference = [=](const Tensors& t) -> Tensors {
    const auto blocks = [&](const at::Tensor& m) -> Tensors {
      const int64_t r = m.size(0), c = m.size(1) / 128, height = square ? 128 : 1;
      const at::Tensor x = m.contiguous().view({r / height, height, c, 128});
      const at::Tensor scale =
          at::exp2(at::floor(at::log2(448.0 / x.abs().amax(at::IntArrayRef{1, 3}, true))));
      at::Tensor inverse = at::reciprocal(scale).view({r / height, c});
      inverse = square ? at::constant_pad_nd(inverse, {0, (4 - c % 4) % 4}) : inverse.t();
      return {(x * scale)
                  .clamp(-448, 448)
                  .to(at::kFloat)
                  .to(at::kFloat8_e4m3fn)
                  .view(at::kByte)
                  .view({r, c * 128}),
              inverse};
    };
    const Tensors rows = blocks(t[0]), columns = blocks(t[0].t());
    return {rows[0], columns[0], rows[1], columns[1]};
  };
  row.tolerance = 1e-30;
  row.bit_equal = true;
  row.bytes = shape.rows * shape.columns * (static_cast<int64_t>(at::elementSize(type)) + 2);
  return row;
}

// The largest magnitude: alone, and measured by a norm and by an activation in both directions.
KernelCase amax_case(at::ScalarType type, Shape shape) {
  KernelCase row;
  row.name = row_name("amax", type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, 2 * shape.columns}, type, 1, 3.0),
                   normal({shape.rows, shape.columns}, type, 2)};
  };
  const auto outputs = [](const Tensors& t, const Tensors& amax) -> Tensors {
    const at::Tensor gain = at::ones({t[0].size(1)}, t[0].options());
    const auto of = [&](size_t i) { return amax.empty() ? at::Tensor() : amax[i]; };
    return {norm_forward(Normalization::kRMSNorm, t[0], gain, {}, 1e-5, false, of(0)).y,
            norm_forward(Normalization::kLayerNorm, t[0], gain, gain, 1e-5, false, of(1)).y,
            activation_forward(t[0], Activation::kSwiglu, 0.0, of(2)),
            activation_backward(t[1], t[0], Activation::kSwiglu, 0.0, of(3)),
            activation_forward(t[0], Activation::kSquaredRelu, 0.0, of(4))};
  };
  // Measured minus what the outputs hold: zeros; and the largest of the input.
  row.run = [=](const Tensors& t) -> Tensors {
    Tensors amax;
    for (int i = 0; i < 5; ++i) amax.push_back(at::zeros({1}, t[0].options().dtype(at::kFloat)));
    const Tensors out = outputs(t, amax);
    at::Tensor wrong = at::zeros({1}, amax[0].options());
    for (size_t i = 0; i < out.size(); ++i)
      wrong = wrong + (amax[i] - out[i].abs().max().to(at::kFloat)).abs();
    return {wrong, largest_magnitude(t[0])};
  };
  row.reference = [](const Tensors& t) -> Tensors {
    return {at::zeros({1}), t[0].abs().max().reshape({1})};
  };
  row.tolerance = 1e-30;
  row.bit_equal = true;
  return row;
}

// Codes that a gated activation writes at once, against those of its result; in both directions.
// The part that differs.
KernelCase fp8_activation_case(Activation activation, bool blocks, at::ScalarType type,
                               Shape shape) {
  KernelCase row;
  row.name = row_name((blocks ? "fp8_block_activation_" : "fp8_activation_") +
                          std::to_string(static_cast<int>(activation)),
                      type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, 2 * shape.columns}, type, 1, 3.0),
                   normal({shape.rows, shape.columns}, type, 2)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    Tensors wrong;
    for (const bool backward : {false, true}) {
      const at::Tensor scale = at::full({1}, 37.5, t[0].options().dtype(at::kFloat)),
                       amax = at::zeros_like(scale);
      const at::Tensor result = backward ? activation_backward(t[1], t[0], activation, 1.0)
                                         : activation_forward(t[0], activation, 1.0);
      const at::ScalarType codes = backward ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
      const QuantizedTensor two = blocks ? quantize_blocks(result, codes, {}, false)
                                         : quantize_tensor(result, codes, {}, {scale});
      const TensorScale by = blocks ? TensorScale{} : TensorScale{scale, {}, amax};
      const QuantizedTensor one =
          quantize_activation(t[0], backward ? t[1] : at::Tensor(), activation, 1.0, codes, {}, by);
      for (const auto& [a, b] :
           {std::pair{one.rows, two.rows}, std::pair{one.columns, two.columns}}) {
        wrong.push_back(a.codes.view(at::kByte).ne(b.codes.view(at::kByte)).to(at::kFloat).mean());
        // The rest pads.
        const auto written = [&](const at::Tensor& scales) {
          return blocks ? scales : at::stack({scales[0], scales[kFp8InverseAt]});
        };
        wrong.push_back(written(a.scale).ne(written(b.scale)).to(at::kFloat).mean());
      }
      if (!blocks) wrong.push_back((amax / result.abs().max().to(at::kFloat) - 1).squeeze());
    }
    return wrong;
  };
  row.reference = [=](const Tensors&) -> Tensors {
    return Tensors(blocks ? 8 : 10, at::zeros({}));
  };
  row.tolerance = 1e-2;  // two kernels of a GPU may contract a product and a sum differently
  return row;
}

// Codes that a norm writes at once, against those of its result, and the statistics. The part that
// differs.
KernelCase fp8_norm_case(Normalization kind, at::ScalarType codes, at::ScalarType type,
                         Shape shape) {
  const bool layer_norm = kind == Normalization::kLayerNorm;
  KernelCase row;
  row.name =
      row_name(std::string("fp8_") + norm_name(kind, true, layer_norm) + "_" + c10::toString(codes),
               type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, shape.columns}, type, 1, 3.0),
                   normal({shape.columns}, type, 2), normal({shape.columns}, type, 3)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    const at::Tensor bias = layer_norm ? t[2] : at::Tensor();
    const at::Tensor scale = at::full({1}, 37.5, t[0].options().dtype(at::kFloat)),
                     amax = at::zeros_like(scale);
    const NormResult normed = norm_forward(kind, t[0], t[1], bias, 1e-5, true);
    const QuantizedTensor two = quantize_tensor(normed.y, codes, {}, {scale});
    const QuantizedNorm one =
        quantize_norm(kind, t[0], t[1], bias, 1e-5, true, codes, {}, {scale, {}, amax});
    Tensors wrong = {(amax / normed.y.abs().max().to(at::kFloat) - 1).squeeze(),
                     (one.rstd / normed.rstd - 1).abs().max()};
    if (layer_norm) wrong.push_back((one.mean - normed.mean).abs().max());
    for (const auto& [a, b] :
         {std::pair{one.codes.rows, two.rows}, std::pair{one.codes.columns, two.columns}}) {
      wrong.push_back(a.codes.view(at::kByte).ne(b.codes.view(at::kByte)).to(at::kFloat).mean());
      for (const int64_t i : {int64_t{0}, kFp8InverseAt}) wrong.push_back(a.scale[i] - b.scale[i]);
    }
    return wrong;
  };
  row.reference = [=](const Tensors&) -> Tensors {
    return Tensors(layer_norm ? 9 : 8, at::zeros({}));
  };
  row.tolerance = 1e-2;  // two kernels of a GPU add a row in different orders
  return row;
}

// Rows of codes with a scale for each, of values, a norm and a gated activation, against PyTorch's
// cast of what the separate kernels make. The part that differs.
KernelCase fp8_rows_case(at::ScalarType type, Shape shape) {
  KernelCase row;
  row.name = row_name("fp8_rows", type, shape);
  row.type = type;
  row.inputs = [=] {
    return Tensors{normal({shape.rows, shape.columns}, type, 1, 3.0) *
                       at::arange(shape.rows).unsqueeze(1).to(type),  // one row is zeros
                   normal({shape.columns}, type, 2), normal({shape.columns}, type, 3),
                   normal({shape.rows, 2 * shape.columns}, type, 4, 3.0)};
  };
  row.run = [=](const Tensors& t) -> Tensors {
    Tensors wrong;
    const auto compare = [&](const QuantizedMatrix& one, const at::Tensor& result) {
      const at::Tensor values = result.to(at::kFloat), amax = values.abs().amax(1),
                       scale = at::where(amax > 0, at::exp2(at::floor(at::log2(448.0 / amax))),
                                         at::ones_like(amax));
      wrong.push_back((one.scale * scale - 1).abs().max());
      wrong.push_back((values * scale.unsqueeze(1))
                          .clamp(-448.0, 448.0)
                          .to(at::kFloat8_e4m3fn)
                          .view(at::kByte)
                          .ne(one.codes.view(at::kByte))
                          .to(at::kFloat)
                          .mean());
    };
    compare(quantize_rows(t[0]), t[0]);
    for (const auto& [kind, bias] : {std::pair{Normalization::kRMSNorm, at::Tensor()},
                                     std::pair{Normalization::kLayerNorm, t[2]}})
      compare(quantize_norm_rows(kind, t[0], t[1], bias, 1e-5, true),
              norm_forward(kind, t[0], t[1], bias, 1e-5, true).y);
    for (const Activation gated : {Activation::kSwiglu, Activation::kGeglu, Activation::kQuickGeglu,
                                   Activation::kExactGeglu})
      compare(quantize_activation_rows(t[3], gated, 1.0), activation_forward(t[3], gated, 1.0));
    return wrong;
  };
  row.reference = [=](const Tensors&) -> Tensors { return Tensors(14, at::zeros({})); };
  row.tolerance = 1e-2;  // two kernels add a row in different orders
  return row;
}

void add_cases(std::vector<KernelCase>& rows, at::ScalarType type,
               const std::vector<Shape>& shapes) {
  for (const Shape shape : shapes) {
    rows.push_back(norm_case(Normalization::kLayerNorm, false, true, type, shape));
    rows.push_back(norm_case(Normalization::kLayerNorm, true, false, type, shape));
    rows.push_back(norm_case(Normalization::kRMSNorm, false, false, type, shape));
    rows.push_back(norm_case(Normalization::kRMSNorm, true, false, type, shape));
    rows.push_back(norm_apply_case(Normalization::kLayerNorm, type, shape));
    rows.push_back(norm_apply_case(Normalization::kRMSNorm, type, shape));
    for (int i = 0; i < 9; ++i)
      rows.push_back(activation_case(static_cast<Activation>(i), type, shape, 2.0));
    rows.push_back(
        rotary_case(false, false, type, {shape.rows, std::max<int64_t>(2, shape.columns)}));
    rows.push_back(
        rotary_case(true, true, type, {shape.rows, std::max<int64_t>(2, shape.columns)}));
    rows.push_back(cross_entropy_case(type, shape, 0, 2.0, false));
    if (shape.columns > 5) rows.push_back(cross_entropy_case(type, shape, 5, 2.0, true));
    rows.push_back(embedding_case(type, shape));
    rows.push_back(dropout_case(type, type, shape));
    if (type != wide(type)) rows.push_back(dropout_case(type, at::kFloat, shape));
    rows.push_back(random_case(type, shape));
    rows.push_back(linear_case(type, shape));
  }
  // Rows of odd length, of which a large product has a copy
  if (at::elementSize(type) == 2) rows.push_back(linear_case(type, {700, 44}));
}

}  // namespace

std::vector<KernelCase> kernel_cases(bool perf) {
  std::vector<KernelCase> rows;
  if (perf) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16})
      add_cases(rows, type, {{2048, 1024}});
    rows.push_back(few_rows_case(at::kBFloat16, 1, 28672, 4096));
    rows.push_back(few_rows_case(at::kBFloat16, 1, 4096, 14336));
    rows.push_back(few_rows_case(at::kBFloat16, 1, 6144, 4096));
    rows.push_back(few_rows_case(at::kBFloat16, 4, 28672, 4096));
    rows.push_back(fused_rows_case(at::kBFloat16, 1, 28672, 4096));
    rows.push_back(fused_rows_case(at::kBFloat16, 4, 28672, 4096));
    for (const Shape shape : {Shape{8192, 4096}, Shape{8192, 28672}}) {
      rows.push_back(fp8_cast_case(at::kFloat8_e4m3fn, at::kBFloat16, shape));
      rows.push_back(fp8_block_case(false, at::kBFloat16, shape));
      rows.push_back(fp8_block_case(true, at::kBFloat16, shape));
    }
    add_expert_cases(rows, perf);
    add_paged_cases(rows, perf);
    for (KernelCase& row : routing_cases(perf)) rows.push_back(std::move(row));
    std::erase_if(rows, [](const KernelCase& row) { return row.bytes == 0; });
    return rows;
  }
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf})
    for (int64_t few = 1; few <= 5; ++few) {
      rows.push_back(few_rows_case(type, few, 700 + few, few % 2 == 0 ? 1032 : 2304));
      rows.push_back(
          fused_rows_case(type, few, few % 2 == 0 ? 520 : 120, few % 2 == 0 ? 1032 : 4608));
    }
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    add_cases(rows, type, {{1, 1}, {7, 127}, {129, 7}, {130, 1030}});
    for (int i = 0; i < 9; ++i)
      rows.push_back(activation_case(static_cast<Activation>(i), type, {5, 64}, 60.0));
    rows.push_back(cross_entropy_case(type, {5, 64}, 3, 300.0, false));
    // Whole packs: rows of one, several and many warps, of one pack a thread and more.
    for (const Shape shape : {Shape{37, 64}, Shape{33, 1032}, Shape{18, 4096}, Shape{17, 8192}}) {
      rows.push_back(norm_case(Normalization::kLayerNorm, false, true, type, shape, true));
      rows.push_back(norm_case(Normalization::kRMSNorm, true, false, type, shape, true));
      rows.push_back(norm_case(Normalization::kRMSNorm, false, false, type, shape));
    }
    for (int i = 4; i < 7; ++i)
      rows.push_back(activation_case(static_cast<Activation>(i), type, {5, 2056}, 2.0));
    // Ids that come up more often than a warp is wide.
    for (const Shape shape : {Shape{2500, 24}, Shape{300, 1032}})
      rows.push_back(embedding_case(type, shape));
  }
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Shape shape : {Shape{16, 16}, Shape{48, 80}, Shape{144, 208}, Shape{512, 384}}) {
      rows.push_back(fp8_cast_case(at::kFloat8_e4m3fn, type, shape));
      rows.push_back(fp8_cast_case(at::kFloat8_e5m2, type, shape));
    }
    for (const Activation gated : {Activation::kSwiglu, Activation::kGeglu, Activation::kQuickGeglu,
                                   Activation::kExactGeglu})
      for (const Shape shape : {Shape{16, 16}, Shape{144, 208}})
        rows.push_back(fp8_activation_case(gated, false, type, shape));
    for (const Normalization kind : {Normalization::kRMSNorm, Normalization::kLayerNorm})
      for (const Shape shape : {Shape{16, 16}, Shape{48, 208}, Shape{4240, 1024}, Shape{32, 4096}})
        rows.push_back(fp8_norm_case(kind, shape.rows == 48 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn,
                                     type, shape));
    for (const Shape shape :
         {Shape{1, 16}, Shape{48, 208}, Shape{33, 4096}, Shape{5, 14336}, Shape{3, 20480}})
      rows.push_back(fp8_rows_case(type, shape));
    for (const Shape shape : {Shape{128, 128}, Shape{256, 384}})
      rows.push_back(fp8_activation_case(Activation::kSwiglu, true, type, shape));
    for (const Shape shape : {Shape{128, 128}, Shape{384, 640}}) {
      rows.push_back(fp8_block_case(false, type, shape));
      rows.push_back(fp8_block_case(true, type, shape));
    }
    for (const Shape shape : {Shape{1, 1}, Shape{7, 127}, Shape{130, 1024}})
      rows.push_back(amax_case(type, shape));
  }
  add_expert_cases(rows, perf);
  add_paged_cases(rows, perf);
  add_sampling_cases(rows, perf);
  for (KernelCase& row : routing_cases(perf)) rows.push_back(std::move(row));
  return rows;
}

Tensors run_on(const KernelCase& kernel_case, const Tensors& inputs, const at::Device& device) {
  Tensors there;
  for (const at::Tensor& t : inputs) there.push_back(t.to(device));
  Tensors out;
  for (const at::Tensor& t : kernel_case.run(there)) out.push_back(t.to(at::kCPU));
  return out;
}

double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  const double infinity = std::numeric_limits<double>::infinity();
  if (got.sizes() != expected.sizes()) return infinity;
  if (got.numel() == 0) return 0.0;
  const at::Tensor a = got.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  const double error = (a - b).abs().max().item<double>();
  return std::isnan(error) ? infinity : error / std::max(1.0, b.abs().max().item<double>());
}

}  // namespace megatron
