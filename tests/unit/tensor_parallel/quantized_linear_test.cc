// Linears with FP8 operands against PyTorch (tests/golden/fp8), over ranks, and what they save for
// the backward.
#include <torch/csrc/autograd/autograd.h>

#include <deque>

#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor_parallel/layers.h"
#include "tests/unit/tensor_parallel/testing.h"

namespace megatron {
namespace {

using torch::autograd::backward;

at::Tensor golden(const std::string& name) {
  static const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/fp8/fp8.safetensors");
  const SafetensorsEntry& entry = file.entry(name);
  at::Tensor out = at::empty(entry.shape, to_scalar_type(entry.dtype));
  file.read(entry, out.data_ptr());
  return out;
}

// A store with a version and delayed scales, as the training store has them.
class TestStore final : public ParameterStore {
 public:
  TestStore(Module& module, bool versioned, at::ScalarType type = at::kBFloat16)
      : versioned_(versioned) {
    module.visit([&](const std::string& name, Parameter& parameter) {
      if (parameter.name.empty()) parameter.name = name;
      parameter.value = at::zeros(parameter.local_shape, type);
      parameter.store = this;
      grads[name] = at::zeros(parameter.local_shape, at::kFloat);
      names_[&parameter] = name;
      if (!parameter.delayed_scaling) return;
      options_ = *parameter.delayed_scaling;
      scales = {at::zeros({3, 1 + options_.history_length}), at::zeros({3}), false};
    });
  }
  at::Tensor acquire(Parameter& parameter) override { return parameter.value; }
  void release(Parameter&) override {}
  GradTarget grad_target(Parameter& parameter) override {
    return {grads.at(names_.at(&parameter)), 1.0};
  }
  void grad_ready(Parameter&) override { ++ready; }
  int64_t values_version() const override { return versioned_ ? version : -1; }
  bool only_forward() const override { return served; }
  const DelayedScales* delayed_scales(const Parameter& weight) override {
    return weight.delayed_scaling && scales.state.defined() ? &scales : nullptr;
  }
  void end_step() {
    update_delayed_scales(scales.state, scales.amax, options_);
    scales.measured = true;
    ++version;
  }

  std::map<std::string, at::Tensor> grads;
  DelayedScales scales;
  int64_t version = 0;
  int ready = 0;
  bool served = false;

 private:
  const bool versioned_;
  DelayedScalingOptions options_;
  std::map<const Parameter*, std::string> names_;
};

QuantizationOptions recipe(QuantizationRecipe recipe, bool hybrid) {
  QuantizationOptions options;
  options.recipe = recipe;
  options.hybrid = hybrid;
  return options;
}

// || a - b || / || b ||
double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide = b.to(at::kDouble);
  return (at::linalg_vector_norm(a.detach().to(at::kDouble) - wide, 2) /
          at::linalg_vector_norm(wide, 2))
      .item<double>();
}

struct Products {
  at::Tensor y, dx, dw, db;
};

template <class Layer>
Products run(Layer& layer, TestStore& store, const at::Tensor& x, const at::Tensor& dy) {
  const at::Tensor input = leaf(x);
  const at::Tensor y = layer.forward(input);
  backward({y}, {dy});
  return {y.detach(), input.grad(), store.grads.at("weight"), store.grads.at("bias")};
}

template <class Layer>
Products run_golden(const std::string& inputs, const QuantizationOptions& quantization) {
  const at::Tensor x = golden(inputs + ".in.x"), w = golden(inputs + ".in.w");
  LinearOptions options;
  options.quantization = quantization;
  const ParallelGroups one;
  Layer layer("fc", w.size(1), w.size(0), options, one);
  TestStore store(layer, true);
  for (Parameter* parameter : layer.parameters())
    parameter->value.copy_(parameter->local_shape.size() == 2 ? w : golden(inputs + ".in.bias"));
  return run(layer, store, x, golden(inputs + ".in.dy"));
}

constexpr double kBf16 = 3e-3, kFp32 = 2e-6;  // one rounding to bf16 on average; fp32 sums

// The golden holds every fourth or eighth row.
at::Tensor some_rows(const at::Tensor& t, int64_t every = 4) {
  return t.slice(0, 0, std::nullopt, every);
}

// `forward`: the golden with y, which is one for both formats; default: the same.
void expect_golden(const Products& got, const std::string& name, int64_t every = 4,
                   const std::string& forward = "") {
  const auto part = [&](const at::Tensor& t) { return some_rows(t, every); };
  EXPECT_LT(distance(part(got.y), golden((forward.empty() ? name : forward) + ".y")), kBf16)
      << name;
  EXPECT_LT(distance(part(got.dx), golden(name + ".dx")), kBf16) << name;
  EXPECT_LT(distance(part(got.dw), golden(name + ".dw")), kFp32) << name;
}

TEST(QuantizedLinear, EqualsPyTorchWithOneScalePerTensor) {
  for (const bool hybrid : {true, false}) {
    const std::string name = hybrid ? "tensorwise_hybrid" : "tensorwise_e4m3";
    const QuantizationOptions options = recipe(QuantizationRecipe::kTensorwise, hybrid);
    expect_golden(run_golden<ColumnParallelLinear>("tensorwise", options), name, 4, "tensorwise");
    expect_golden(run_golden<RowParallelLinear>("tensorwise", options), name, 4, "tensorwise");
    const QuantizedTensor x = quantize_tensor(golden("tensorwise.in.x"), at::kFloat8_e4m3fn, {});
    EXPECT_TRUE(at::equal(x.rows.codes.view(at::kByte), golden("tensorwise.x_codes")));
    const QuantizedTensor dy =
        quantize_tensor(golden("tensorwise.in.dy"), options.type(OperandRole::kGradient), {});
    EXPECT_TRUE(at::equal(dy.rows.codes.view(at::kByte), golden(name + ".dy_codes")));
  }
  // The comparison can tell FP8 from bf16.
  const at::Tensor plain = linear_forward(golden("tensorwise.in.x"), golden("tensorwise.in.w"),
                                          golden("tensorwise.in.bias"));
  EXPECT_GT(distance(some_rows(plain), golden("tensorwise.y")), 3 * kBf16);
}

TEST(QuantizedLinear, EqualsPyTorchWithBlocks) {
  for (const bool hybrid : {true, false}) {
    const std::string name = hybrid ? "blockwise_hybrid" : "blockwise_e4m3";
    const QuantizationOptions options = recipe(QuantizationRecipe::kBlockwise, hybrid);
    expect_golden(run_golden<ColumnParallelLinear>("blockwise", options), name, 8, "blockwise");
    expect_golden(run_golden<RowParallelLinear>("blockwise", options), name, 8, "blockwise");
    const QuantizedTensor x =
        quantize_blocks(golden("blockwise.in.x"), at::kFloat8_e4m3fn, {}, false);
    EXPECT_TRUE(at::equal(x.rows.codes.view(at::kByte), golden("blockwise.x_codes")));
  }
}

TEST(QuantizedLinear, EqualsPyTorchWithDelayedScales) {
  const at::Tensor x = golden("delayed.in.x"), w = golden("delayed.in.w"),
                   dy = golden("delayed.in.dy");
  LinearOptions options;
  options.quantization = recipe(QuantizationRecipe::kDelayed, true);
  options.quantization.delayed = {3, /*most_recent=*/false, /*margin=*/1, at::kFloat8_e5m2};
  const ParallelGroups one;
  ColumnParallelLinear layer("fc", 48, 64, options, one);
  TestStore store(layer, true);
  for (Parameter* parameter : layer.parameters())
    parameter->value.copy_(parameter->local_shape.size() == 2 ? w : golden("delayed.in.bias"));
  const double factors[] = {1.0, 2.0, 0.25, 0.0625, 4.0, 1.0};
  for (int step = 0; step < 6; ++step) {
    const std::string name = cat("delayed.", step);
    for (auto& [key, grad] : store.grads) grad.zero_();
    if (step == 3) {
      // An evaluation between two steps leaves no trace, although it is the first to see the
      // weight.
      const at::NoGradGuard no_grad;
      layer.forward(x * 100);
    }
    const Products got = run(layer, store, x * factors[step], dy * factors[step]);
    expect_golden(got, name);
    layer.forward(
        leaf(x * (0.5 * factors[step])));  // another micro-batch: the largest of all counts
    store.end_step();
    int role = 0;
    for (const char* tensor : {"x", "w", "dy"})
      EXPECT_TRUE(at::allclose(store.scales.state.select(0, role++),
                               golden(cat(name, ".", tensor, "_state")), 1e-6, 0))
          << name << tensor;
  }
}

TEST(QuantizedLinear, AWeightIsQuantisedWhenItChanges) {
  for (const bool versioned : {true, false}) {
    LinearOptions options;
    options.quantization = recipe(QuantizationRecipe::kTensorwise, true);
    const ParallelGroups one;
    RowParallelLinear layer("fc", 32, 16, options, one);
    TestStore store(layer, versioned);
    Parameter& weight = *layer.parameters()[0];
    weight.value.copy_(draw({16, 32}, 1));
    const at::Tensor x = draw({16, 32}, 2, at::kBFloat16);
    const at::Tensor before = layer.forward(x);
    weight.value.mul_(2);
    EXPECT_EQ(at::equal(layer.forward(x), before), versioned)
        << "codes stay while the version does";
    ++store.version;
    EXPECT_TRUE(at::equal(layer.forward(x), before * 2));
  }
}

// Without a backward an input's rows have scales of their own: a row's result is that of the row
// alone, and of its values rounded by the power of two that its own largest one allows.
TEST(QuantizedLinear, ServedRowsAreRoundedByThemselves) {
  const ParallelGroups one;
  LinearOptions fc1_options, fc2_options;
  fc1_options.quantization = fc2_options.quantization =
      recipe(QuantizationRecipe::kTensorwise, false);
  fc1_options.input_norm = true;
  fc1_options.norm.kind = Normalization::kRMSNorm;
  fc2_options.input_activation = Activation::kSwiglu;
  ColumnParallelLinear fc1("fc1", 64, 96, fc1_options, one);
  RowParallelLinear fc2("fc2", 48, 64, fc2_options, one);
  TestStore store1(fc1, true), store2(fc2, true);
  store1.served = store2.served = true;
  for (Module* module : {static_cast<Module*>(&fc1), static_cast<Module*>(&fc2)})
    for (Parameter* p : module->parameters()) p->value.copy_(draw(p->local_shape, 5));
  const at::Tensor x = draw({21, 1, 64}, 3, at::kBFloat16) *
                       draw({21, 1, 1}, 4, at::kBFloat16).exp(),
                   residual = draw({21, 1, 64}, 6, at::kBFloat16);
  const at::NoGradGuard no_grad;
  const auto forward = [&](int64_t first, int64_t count) {
    const at::Tensor h = fc1.forward(x.narrow(0, first, count)),
                     y = fc2.forward(h, residual.narrow(0, first, count));
    return std::pair{h, y};
  };
  const auto [h, y] = forward(0, 21);
  for (const int64_t row : {0, 7, 20}) {
    const auto [h_alone, y_alone] = forward(row, 1);
    EXPECT_LT(distance(h.narrow(0, row, 1), h_alone), kBf16) << row;
    EXPECT_LT(distance(y.narrow(0, row, 1), y_alone), kBf16) << row;
  }
  const auto value = [](Module& layer, const std::string& end) {
    for (Parameter* p : layer.parameters())
      if (p->name.ends_with(end)) return p->value;
    return at::Tensor();
  };
  const auto rounded = [](const at::Tensor& t) {
    const at::Tensor rows = t.reshape({-1, t.size(-1)}).to(at::kFloat),
                     scale = at::exp2(at::floor(at::log2(448.0f / rows.abs().amax(1, true))));
    return (rows * scale).to(at::kFloat8_e4m3fn).to(at::kFloat) / scale;
  };
  const auto weight = [](const at::Tensor& w) {
    return dequantize(quantize_tensor(w, at::kFloat8_e4m3fn, {}).rows);
  };
  const at::Tensor gain = value(fc1, "layer_norm_weight"),
                   normed = norm_forward(Normalization::kRMSNorm, x, gain, {}, 1e-5, false).y;
  EXPECT_LT(distance(h.view({21, 96}),
                     at::mm(rounded(normed), weight(fc1.weight().value).t()) + value(fc1, "bias")),
            kBf16);
  EXPECT_LT(
      distance(y.view({21, 64}), at::mm(rounded(activation_forward(h, Activation::kSwiglu, 0.0)),
                                        weight(value(fc2, "weight")).t()) +
                                     value(fc2, "bias") + residual.view({21, 64})),
      kBf16);
}

// The same layers with the norm and the activation outside, where the linear measures by itself.
// With delayed scaling and no bias the activation writes codes alone, in both directions.
void expect_same_inside_and_outside(bool biased) {
  const ParallelGroups one;
  for (const QuantizationRecipe r : {QuantizationRecipe::kTensorwise, QuantizationRecipe::kDelayed,
                                     QuantizationRecipe::kBlockwise}) {
    const at::Tensor x = draw({128, 1, 128}, 3, at::kBFloat16),
                     dy = draw({128, 1, 128}, 4, at::kBFloat16);
    std::vector<at::Tensor> results[3];
    for (int variant = 0; variant < 3;
         ++variant) {  // inside; inside and built again in the backward; outside
      LinearOptions fc1_options, fc2_options;
      fc1_options.quantization = fc2_options.quantization = recipe(r, true);
      fc1_options.bias = fc2_options.bias = biased;
      fc1_options.input_norm = variant < 2;
      fc1_options.norm.kind = Normalization::kRMSNorm;
      fc1_options.recompute_norm = fc2_options.recompute_activation = variant == 1;
      ColumnParallelLinear fc1("fc1", 128, 512, fc1_options, one);
      if (variant < 2) {
        fc2_options.input_activation = Activation::kSwiglu;
        fc2_options.input_from = &fc1;
      }
      RowParallelLinear fc2("fc2", 256, 128, fc2_options, one);
      Norm norm(128, fc1_options.norm);
      TestStore store1(fc1, true), store2(fc2, true);
      PlainParameterStore norm_store(norm, at::kBFloat16, at::kCPU, true);
      norm.parameters()[0]->value.fill_(1);
      for (Module* module : {static_cast<Module*>(&fc1), static_cast<Module*>(&fc2)}) {
        for (Parameter* p : module->parameters()) {
          if (p->local_shape.size() == 2) p->value.copy_(draw(p->local_shape, 5) * 0.1);
          if (p->role == ParameterRole::kNorm) p->value.fill_(1);
        }
      }
      for (int step = 0; step < 2; ++step) {
        for (auto* store : {&store1, &store2})
          for (auto& [name, grad] : store->grads) grad.zero_();
        const at::Tensor input = leaf(x);
        at::Tensor h = variant < 2 ? fc1.forward(input) : fc1.forward(norm.forward(input));
        if (variant == 2) h = activate(h, Activation::kSwiglu);
        const at::Tensor y = fc2.forward(h);
        backward({y}, {dy});
        results[variant].insert(results[variant].end(),
                                {y.detach(), input.grad(), store1.grads.at("weight").clone(),
                                 store2.grads.at("weight").clone()});
        if (r != QuantizationRecipe::kDelayed) continue;
        for (TestStore* store : {&store1, &store2}) {
          EXPECT_TRUE((store->scales.amax > 0).all().item<bool>())
              << "every operand is measured for the next step";
          store->end_step();
          results[variant].push_back(store->scales.state.clone());
        }
      }
    }
    for (int variant : {1, 2}) {
      ASSERT_EQ(results[variant].size(), results[0].size());
      for (size_t i = 0; i < results[0].size(); ++i)
        EXPECT_TRUE(at::equal(results[variant][i], results[0][i]))
            << "recipe " << static_cast<int>(r) << " variant " << variant << " result " << i;
    }
  }
}

TEST(QuantizedLinear, NormAndActivationInsideMeasureWhatTheyWrite) {
  expect_same_inside_and_outside(true);
  expect_same_inside_and_outside(false);
}

TEST(QuantizedLinear, WeightGradientsCanStayInTheModelsType) {
  QuantizationOptions options = recipe(QuantizationRecipe::kTensorwise, true);
  options.weight_gradient = false;
  const Products got = run_golden<ColumnParallelLinear>("tensorwise", options);
  const at::Tensor x = golden("tensorwise.in.x"), dy = golden("tensorwise.in.dy");
  EXPECT_LT(distance(got.dw, at::matmul(dy.to(at::kDouble).t(), x.to(at::kDouble))), kFp32);
  EXPECT_LT(distance(some_rows(got.dx), golden("tensorwise_hybrid.dx")), kBf16);
}

// Over ranks each rank multiplies the dequantised parts that it has; sequence parallelism changes
// nothing.
TEST(QuantizedLinear, RanksMultiplyTheirParts) {
  const at::Tensor x = draw({16, 2, 64}, 1, at::kBFloat16),
                   dy = draw({16, 2, 96}, 2, at::kBFloat16);
  const at::Tensor w = draw({96, 64}, 3, at::kBFloat16);
  for (const bool sequence_parallel : {false, true}) {
    run_tensor_ranks(2, [&](const ParallelGroups& groups) {
      LinearOptions options;
      options.bias = false;
      options.sequence_parallel = sequence_parallel;
      options.quantization = recipe(QuantizationRecipe::kTensorwise, true);
      ColumnParallelLinear layer("fc", 64, 96, options, groups);
      TestStore store(layer, true);
      const at::Tensor own = part(w, 0, groups.tp), own_dy = part(dy, 2, groups.tp);
      layer.weight().value.copy_(own);
      const at::Tensor input = leaf(sequence_parallel ? part(x, 0, groups.tp) : x);
      const at::Tensor y = layer.forward(input);
      backward({y}, {own_dy});
      const at::Tensor x8 = dequantize(quantize_tensor(x, at::kFloat8_e4m3fn, {}).rows),
                       w8 = dequantize(quantize_tensor(own, at::kFloat8_e4m3fn, {}).rows),
                       dy8 = dequantize(quantize_tensor(own_dy, at::kFloat8_e5m2, {}).rows);
      EXPECT_LT(distance(y.view({32, 48}), at::matmul(x8, w8.t())), kBf16);
      EXPECT_LT(distance(store.grads.at("weight"), at::matmul(dy8.t(), x8)), kFp32);
      at::Tensor dx = at::matmul(dy8, w8).to(at::kBFloat16);
      groups.tp.all_reduce(dx)->wait();
      dx = dx.view({16, 2, 64});
      EXPECT_LT(distance(input.grad(), sequence_parallel ? part(dx, 0, groups.tp) : dx), 2 * kBf16);

      RowParallelLinear row("fc", 64, 96, options, groups);
      TestStore row_store(row, true);
      row.parameters()[0]->value.copy_(part(w, 1, groups.tp));
      const at::Tensor row_input = leaf(part(x, 2, groups.tp));
      const at::Tensor row_y = row.forward(row_input);
      backward({row_y}, {sequence_parallel ? part(dy, 0, groups.tp) : dy});
      const at::Tensor xr = dequantize(
                           quantize_tensor(part(x, 2, groups.tp), at::kFloat8_e4m3fn, {}).rows),
                       g = dequantize(quantize_tensor(dy, at::kFloat8_e5m2, {}).rows);
      EXPECT_LT(distance(row_store.grads.at("weight"), at::matmul(g.t(), xr)), kFp32);
    });
  }
}

TEST(QuantizedLinear, SizesThatDoNotFitAreNamed) {
  LinearOptions options;
  options.quantization = recipe(QuantizationRecipe::kTensorwise, true);
  const ParallelGroups one;
  ColumnParallelLinear layer("fc", 32, 16, options, one);
  TestStore store(layer, true);
  layer.weight().name = "decoder.layers.0.mlp.linear_fc1.weight";
  const std::string error = error_of([&] { layer.forward(draw({5, 32}, 1, at::kBFloat16)); });
  EXPECT_NE(error.find("decoder.layers.0.mlp.linear_fc1.weight: its input of 5 x 32 cannot be "
                       "quantised, both must be multiples of 16"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace megatron
