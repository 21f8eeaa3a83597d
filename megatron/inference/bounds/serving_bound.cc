#include "megatron/inference/bounds/serving_bound.h"

#include <algorithm>
#include <chrono>

#include "megatron/base/check.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one run, the best of a few rounds of `runs`. Reading a number waits for the device.
template <class F>
double seconds_of(const at::Tensor& last, int runs, F&& run) {
  const auto wait = [&] { last.flatten()[0].item(); };
  double best = 0.0;
  for (int round = 0; round < 4; ++round) {
    wait();
    const double begin = now();
    for (int i = 0; i < runs; ++i) run();
    wait();
    const double seconds = (now() - begin) / runs;
    if (round == 1 || (round > 1 && seconds < best)) best = seconds;  // the first one warms up
  }
  return best;
}

// Seconds of one run in the second half of `whole` seconds of them.
template <class F>
double sustained_seconds_of(const at::Tensor& last, int runs, double whole, F&& run) {
  const auto wait = [&] { last.flatten()[0].item(); };
  const double begin = now();
  double half = begin;
  int64_t counted = 0;
  for (double at = begin; at < begin + whole || counted == 0; at = now()) {
    for (int i = 0; i < runs; ++i) run();
    wait();
    if (at < begin + whole / 2)
      half = now();
    else
      counted += runs;
  }
  return (now() - half) / static_cast<double>(counted);
}

}  // namespace

MachineRates measure_rates(at::ScalarType type, at::Device device, bool fp8) {
  const bool gpu = device.is_cuda();
  const at::NoGradGuard no_grad;
  MachineRates rates;
  {
    const int64_t bytes = int64_t{gpu ? 512 : 64} << 20;
    const at::Tensor from = at::ones({bytes / 4}, at::dtype(at::kFloat).device(device)),
                     to = at::empty_like(from);
    rates.copied_bytes =
        2.0 * static_cast<double>(bytes) / seconds_of(to, gpu ? 10 : 2, [&] { to.copy_(from); });
  }
  {
    const int64_t m = gpu ? 4096 : 256, n = gpu ? 16384 : 2048, k = gpu ? 4096 : 1024;
    const int runs = gpu ? 50 : 2;
    const double whole = gpu ? 2.0 : 0.1, operations = 2.0 * static_cast<double>(m * n * k);
    const at::TensorOptions options = at::dtype(type).device(device);
    const at::Tensor x = at::randn({m, k}, options), w = at::randn({n, k}, options),
                     y = at::empty({m, n}, options);
    rates.operations = operations / sustained_seconds_of(y, runs, whole,
                                                         [&] { linear_forward_into(x, w, {}, y); });
    if (fp8) {
      const auto codes = [](const at::Tensor& of) {
        return quantize_tensor(of, at::kFloat8_e4m3fn, {true, false}).rows;
      };
      const QuantizedMatrix a = codes(x), b = codes(w);
      at::Tensor product = y;
      rates.fp8_operations = operations / sustained_seconds_of(y, runs, whole, [&] {
                               product = quantized_product(a, b, type, {}, /*fast=*/true);
                             });
    }
  }
  // What is free decides how large a cache becomes.
  if (gpu) c10::getDeviceAllocator(device.type())->emptyCache();
  return rates;
}

std::optional<ServedCost> served_cost(Model& model, int64_t cache_bytes) {
  const TransformerConfig& t = model.config().transformer;
  if (t.has_moe() || t.is_hybrid() || t.multi_latent_attention || t.has_adapters() ||
      t.fp4_format != Fp4Format::kNone || model.groups().pp.size() > 1)
    return std::nullopt;
  const int64_t ranks = model.groups().tp.size();
  ServedCost cost;
  const bool tied = !t.untie_embeddings_and_output_weights;
  model.visit([&](const std::string& name, Parameter& parameter) {
    const bool is_table = parameter.role == ParameterRole::kEmbedding;
    const bool is_head = parameter.role == ParameterRole::kOutput ||
                         (is_table && tied && name.find("word_embeddings") != std::string::npos);
    if (is_table && !is_head) return;
    // Of a weight whose quantised copy is kept alone the value is empty.
    const auto numbers = static_cast<double>(c10::multiply_integers(parameter.local_shape));
    const bool fp8 = holds_quantized_alone(parameter);
    cost.weight_bytes +=
        numbers * (fp8 ? 1.0 : static_cast<double>(parameter.value.element_size()));
    if (parameter.local_shape.size() != 2) return;
    (is_head ? cost.head_operations : fp8 ? cost.fp8_operations : cost.operations) += 2.0 * numbers;
  });
  const auto layers = static_cast<double>(t.num_layers);
  // Where there are more ranks than groups, several have the same one.
  const int64_t groups = std::max<int64_t>(1, t.query_groups() / ranks);
  cost.cache_bytes = layers * 2.0 * static_cast<double>(groups * t.kv_channels * cache_bytes);
  cost.pair_operations =
      layers * 4.0 * static_cast<double>(t.num_attention_heads / ranks * t.kv_channels);
  return cost;
}

ServingBound serving_bound(const ServedCost& cost, const ServedLoad& load,
                           const MachineRates& rates) {
  MEGATRON_ASSERT(rates.copied_bytes > 0 && rates.operations > 0 && load.together > 0,
                  "the bound of a machine without rates");
  const auto requests = static_cast<double>(load.requests);
  const double together = std::min(static_cast<double>(load.together), requests);
  const auto prompt = static_cast<double>(load.prompt_tokens),
             cached = static_cast<double>(load.cached_tokens),
             output = static_cast<double>(load.output_tokens);
  MEGATRON_ASSERT(cost.fp8_operations == 0 || rates.fp8_operations > 0,
                  "the bound of FP8 products whose rate was not measured");
  // Of the products of a token through all layers.
  const double layers =
      cost.operations / rates.operations +
      (cost.fp8_operations > 0 ? cost.fp8_operations / rates.fp8_operations : 0.0);
  const double head = cost.head_operations / rates.operations;
  const double weights = cost.weight_bytes / rates.copied_bytes;
  // Products read all weights once, however many rows there are.
  const double products = std::max(weights, together * (layers + head));
  // What all have in the cache could be read once for all of them.
  const double read = together * (prompt + (output - 1.0) / 2.0) + cached;
  ServingBound bound;
  bound.token_seconds = products + read * cost.cache_bytes / rates.copied_bytes;
  const double pairs = prompt * (cached + prompt / 2.0);
  const double arithmetic =
      prompt * layers + pairs * cost.pair_operations / rates.operations + head;
  // Prompts of several requests share a step.
  const double of_prompt = std::max(arithmetic, weights / together);
  const double all =
      requests * of_prompt + requests / together * (output - 1.0) * bound.token_seconds;
  bound.tokens_per_second = requests * output / all;
  return bound;
}

}  // namespace megatron
