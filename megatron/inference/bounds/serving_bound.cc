#include "megatron/inference/bounds/serving_bound.h"

#include <algorithm>
#include <chrono>

#include "megatron/base/check.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Seconds of one run, the best of a few rounds of `runs`. Reading a number waits for the device.
template <class F>
double seconds_of(const at::Tensor& last, int runs, F&& run) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto wait = [&] { last.flatten()[0].item(); };
  double best = 0.0;
  for (int round = 0; round < 4; ++round) {
    wait();
    const auto begin = now();
    for (int i = 0; i < runs; ++i) run();
    wait();
    const double seconds = std::chrono::duration<double>(now() - begin).count() / runs;
    if (round == 1 || (round > 1 && seconds < best)) best = seconds;  // the first one warms up
  }
  return best;
}

}  // namespace

MachineRates measure_rates(at::ScalarType type, at::Device device) {
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
    const at::TensorOptions options = at::dtype(type).device(device);
    const at::Tensor x = at::randn({m, k}, options), w = at::randn({n, k}, options),
                     y = at::empty({m, n}, options);
    rates.operations = 2.0 * static_cast<double>(m * n * k) /
                       seconds_of(y, gpu ? 20 : 2, [&] { linear_forward_into(x, w, {}, y); });
  }
  // What is free decides how large a cache becomes.
  if (gpu) c10::getDeviceAllocator(device.type())->emptyCache();
  return rates;
}

std::optional<ServedCost> served_cost(Model& model, int64_t cache_bytes) {
  const TransformerConfig& t = model.config().transformer;
  if (t.has_moe() || t.is_hybrid() || t.multi_latent_attention || t.is_quantized() ||
      t.has_adapters() || model.groups().tp.size() * model.groups().pp.size() > 1)
    return std::nullopt;
  ServedCost cost;
  const bool tied = !t.untie_embeddings_and_output_weights;
  model.visit([&](const std::string& name, Parameter& parameter) {
    const bool is_table = parameter.role == ParameterRole::kEmbedding;
    const bool is_head = parameter.role == ParameterRole::kOutput ||
                         (is_table && tied && name.find("word_embeddings") != std::string::npos);
    if (is_table && !is_head) return;
    const auto numbers = static_cast<double>(parameter.value.numel());
    cost.weight_bytes += numbers * static_cast<double>(parameter.value.element_size());
    if (parameter.value.dim() == 2)
      (is_head ? cost.head_operations : cost.operations) += 2.0 * numbers;
  });
  const auto layers = static_cast<double>(t.num_layers);
  cost.cache_bytes =
      layers * 2.0 * static_cast<double>(t.query_groups() * t.kv_channels * cache_bytes);
  cost.pair_operations = layers * 4.0 * static_cast<double>(t.num_attention_heads * t.kv_channels);
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
  const double weights = cost.weight_bytes / rates.copied_bytes;
  // Products read all weights once, however many rows there are.
  const double products =
      std::max(weights, together * (cost.operations + cost.head_operations) / rates.operations);
  const double seen = prompt + cached + (output - 1.0) / 2.0;
  ServingBound bound;
  bound.token_seconds = products + together * seen * cost.cache_bytes / rates.copied_bytes;
  const double pairs = prompt * (cached + prompt / 2.0);
  const double arithmetic =
      (prompt * cost.operations + pairs * cost.pair_operations + cost.head_operations) /
      rates.operations;
  // Prompts of several requests share a step.
  const double of_prompt = std::max(arithmetic, weights / together);
  const double all =
      requests * of_prompt + requests / together * (output - 1.0) * bound.token_seconds;
  bound.tokens_per_second = requests * output / all;
  return bound;
}

}  // namespace megatron
