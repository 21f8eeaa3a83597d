#include "megatron/training/benchmarking/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/models/model_table.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/cross_entropy.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/embedding.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/norm.h"
#include "megatron/tensor/optimizer_ops.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/rotary.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/benchmarking/measured_attention.h"
#include "megatron/training/benchmarking/measured_linear.h"
#include "megatron/training/setup.h"
#include "megatron/transformer/layer_kinds.h"
#include "megatron/transformer/ssm/ssm_work.h"

namespace megatron {
namespace {

at::Tensor normal(at::IntArrayRef shape, at::ScalarType type, c10::Device device) {
  return at::randn(shape, at::dtype(type).device(device));
}

double bytes_of(std::initializer_list<at::Tensor> tensors) {
  double bytes = 0.0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<double>(tensor.nbytes());
  return bytes;
}

// The sizes that decide what a step computes.
struct Shapes {
  const ModelConfig& model;
  const TransformerConfig& config;
  int64_t layers, samples, length, hidden, vocabulary;
  at::ScalarType type;

  Shapes(const Arguments& arguments, const ModelConfig& of, const Vocabulary& words)
      : model(of),
        config(model.transformer),
        layers(config.num_layers),
        samples(arguments.training.micro_batch_size),
        length(config.seq_length),
        hidden(config.hidden_size),
        vocabulary(words.padded_size),
        type(model_dtype(arguments.optimizer)) {}
  int64_t rows() const { return samples * length; }

  LayerShape shape() const {
    LayerShape shape;
    shape.samples = samples;
    shape.tokens = shape.rows = rows();
    return shape;
  }
  // Layers count from 1.
  LayerCost cost(int64_t number) const {
    return model_layer_cost(model, number, shape(), /*offloaded=*/false);
  }
  EndsCost ends() const {
    return find_model_type(model.type).ends_cost(model, {shape(), vocabulary});
  }
  // `texts`: the part of the rows that is not padding, of the layer's tokens and of those that
  // cross attention attends to.
  std::vector<MeasuredLinear> layer(c10::Device device, int64_t number, double texts = 1.0,
                                    double encoded = 1.0) const {
    const LayerCost layer = cost(number);
    std::vector<MeasuredLinear> linears;
    for (const SublayerCost* half : {&layer.first, &layer.second}) {
      for (const LinearSize& size : half->linears) {
        const double share = size.share * (size.of_encoded ? encoded : texts);
        const auto of_size = static_cast<int64_t>(std::lround(share * static_cast<double>(rows())));
        linears.emplace_back(size.name, of_size, size.outputs, size.inputs, type, device,
                             config.quantization(number));
        if (size.gelu_in_input_grad) linears.back().gelu_input = linears.back().x;
      }
    }
    return linears;
  }
  // The first layer; of a hybrid model the first one of each letter.
  std::vector<int64_t> shown_layers() const {
    if (!config.is_hybrid()) return {1};
    std::vector<int64_t> numbers;
    const std::string letters = config.hybrid_letters();
    for (size_t i = 0; i < letters.size(); ++i)
      if (letters.find(letters[i]) == i) numbers.push_back(static_cast<int64_t>(i) + 1);
    return numbers;
  }
  // The MLP of a layer that has one; empty: none has.
  std::vector<LinearSize> mlp() const {
    if (!config.is_hybrid()) return cost(1).second.linears;
    const size_t layer = config.hybrid_letters().find('-');
    if (layer == std::string::npos) return {};
    return cost(static_cast<int64_t>(layer) + 1).first.linears;
  }
  MeasuredLinear head(c10::Device device, double share = 1.0) const {
    const auto of_head = static_cast<int64_t>(std::lround(share * static_cast<double>(rows())));
    return {"output_layer", std::max<int64_t>(1, of_head), vocabulary, hidden, type, device};
  }
  // Of the first layer that attends to its own tokens; none: no layer does.
  std::optional<AttentionSize> attention() const {
    for (const AttendedLayers& one : attended_layers(model, layers, shape(), {{}, 0}))
      if (!one.size.crosses) return one.size;
    return std::nullopt;
  }
};

// Optimizer state for the measurement: every element once, in blocks.
struct Update {
  FlatUpdate update;
  at::Tensor sum;

  Update(int64_t elements, at::ScalarType type, c10::Device device) {
    const auto zeros = [&](at::ScalarType t) {
      return at::zeros({elements}, at::dtype(t).device(device));
    };
    update.grad = normal({elements}, at::kFloat, device);
    update.master = normal({elements}, at::kFloat, device);
    update.states = {zeros(at::kFloat), zeros(at::kFloat)};
    if (type != at::kFloat) update.value = zeros(type);
    std::vector<UpdateBlock> blocks;
    for (int64_t at = 0; at < elements; at += kUpdateBlockElements) {
      UpdateBlock block;
      block.begin = at;
      block.count = static_cast<int32_t>(std::min(kUpdateBlockElements, elements - at));
      block.counts_in_norm = 1;
      blocks.push_back(block);
    }
    upload_blocks(update, blocks);
    sum = at::zeros({1}, at::dtype(at::kDouble).device(device));
  }
};

}  // namespace

double seconds_per_run(c10::Device device, double least, const std::function<void()>& work) {
  using Clock = std::chrono::steady_clock;
  work();
  work();
  for (int64_t runs = 1;;) {
    synchronize(device);
    const auto start = Clock::now();
    for (int64_t i = 0; i < runs; ++i) work();
    synchronize(device);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (seconds >= least) return seconds / static_cast<double>(runs);
    const double wanted = 1.2 * least / std::max(seconds, 1e-6) * static_cast<double>(runs);
    runs = std::max(runs + 1, static_cast<int64_t>(std::min(wanted, 100.0 * runs)));
  }
}

double device_seconds_per_run(c10::Device device, double least, const std::function<void()>& work) {
  if (!device.is_cuda()) return seconds_per_run(device, least, work);
  work();
  work();
  synchronize(device);
  DeviceGraphPool pool(device);
  DeviceGraph graph(pool, work);
  return seconds_per_run(device, least, [&] { graph.launch(); });
}

Ceiling copy_ceiling(c10::Device device, double least) {
  const int64_t elements = (device.is_cuda() ? int64_t{1} << 30 : int64_t{64} << 20) / 4;
  const at::Tensor from = normal({elements}, at::kFloat, device), to = at::empty_like(from);
  return {"copy", seconds_per_run(device, least, [&] { to.copy_(from); }), 0.0,
          bytes_of({from, to})};
}

std::vector<Ceiling> machine_ceilings(c10::Device device, double least) {
  std::vector<Ceiling> all;
  const at::ScalarType type = device.is_cuda() ? at::kBFloat16 : at::kFloat;
  const int64_t n = device.is_cuda() ? 8192 : 1024;
  const MeasuredLinear product("", n, n, n, type, device);
  all.push_back({cat("product of ", n, " x ", n, " x ", n, ", ", c10::toString(type)),
                 seconds_per_run(device, least, [&] { product.forward(); }), product.flops(), 0.0});
  all.push_back({cat("weight gradient of that size, sums in fp32"),
                 seconds_per_run(device, least, [&] { product.weight_grad(); }), product.flops(),
                 0.0});
  all.push_back(copy_ceiling(device, least));
  const PackedHeads heads = device.is_cuda() ? PackedHeads{8, 4, 128} : PackedHeads{1, 4, 32};
  const int64_t length = device.is_cuda() ? 4096 : 256;
  AttentionSize size;
  size.sequences = 2;
  size.queries = size.keys = length;
  size.heads = heads.groups * heads.heads_per_group;
  size.groups = heads.groups;
  size.key_size = size.value_size = heads.head_size;
  size.packed = size.causal = true;
  const MeasuredAttention attention(size, {}, type, device);
  const std::string shape = cat(heads.groups * heads.heads_per_group, " heads of ", heads.head_size,
                                ", ", heads.groups, " groups, 2 x ", length, " tokens, causal");
  all.push_back({cat("attention forward, ", shape),
                 seconds_per_run(device, least, [&] { attention.forward(); }),
                 attention.forward_flops(), 0.0});
  all.push_back({"attention forward and backward",
                 seconds_per_run(device, least, [&] { attention.both(); }),
                 3.5 * attention.forward_flops(), 0.0});
  if (!device.is_cuda()) return all;
  const HostCopies copies(device);
  const at::Tensor there = normal({int64_t{64} << 20}, at::kFloat, device);
  const at::Tensor here = copies.host_empty(there.sizes(), at::kFloat);
  const auto host = [&](const char* name, HostCopies::Stream stream, const at::Tensor& to,
                        const at::Tensor& from) {
    all.push_back({name,
                   seconds_per_run(device, least,
                                   [&] {
                                     copies.copy(stream, to, from);
                                     copies.mark(stream).synchronize();
                                   }),
                   0.0, bytes_of({from})});
  };
  host("copy to page-locked host memory", HostCopies::Stream::kToHost, here, there);
  host("copy from page-locked host memory", HostCopies::Stream::kFromHost, there, here);
  return all;
}

std::vector<Ceiling> collective_ceilings(const ProcessGroup& group, c10::Device device,
                                         double least) {
  std::vector<Ceiling> all;
  const int ranks = group.size();
  if (ranks == 1) return all;
  const int64_t elements =
      (device.is_cuda() ? int64_t{256} << 20 : int64_t{8} << 20) / 4 / ranks * ranks;
  const at::Tensor whole = normal({elements}, at::kFloat, device);
  const at::Tensor part = normal({elements / ranks}, at::kFloat, device);
  const double share = bytes_of({whole}) * (ranks - 1) / ranks;
  // Every rank must run the same number of them, so it depends on the size only.
  const int runs = std::max(2, static_cast<int>(least * (device.is_cuda() ? 200 : 20)));
  const auto time = [&](const char* name, double bytes, const std::function<void()>& work) {
    work();
    group.barrier();
    synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < runs; ++i) work();
    synchronize(device);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    all.push_back({name, seconds / runs, 0.0, bytes});
  };
  time("all-reduce", 2 * share, [&] { group.all_reduce(whole)->wait(); });
  time("all-gather", share, [&] { group.all_gather(whole, part)->wait(); });
  time("reduce-scatter", share, [&] { group.reduce_scatter(part, whole)->wait(); });
  return all;
}

namespace {

// Measures kernels and collects what they reach.
struct Bench {
  const Arguments& arguments;
  const Vocabulary& vocabulary;
  const c10::Device device;
  const double least;       // seconds of each measurement
  const std::string& only;  // what the names of those that are measured contain
  const Shapes shapes;
  std::vector<Ceiling> all;

  at::Tensor random(int64_t columns) const {
    return normal({shapes.rows(), columns}, shapes.type, device);
  }
  void add(std::string name, double flops, double bytes, const std::function<void()>& work,
           decltype(&seconds_per_run) measure = seconds_per_run) {
    if (name.find(only) == std::string::npos) return;
    all.push_back({std::move(name), measure(device, least, work), flops, bytes});
  }
};

void add_linears(Bench& bench) {
  const Shapes& shapes = bench.shapes;
  const c10::Device device = bench.device;
  std::vector<MeasuredLinear> linears;
  for (const int64_t number : shapes.shown_layers())
    for (MeasuredLinear& linear : shapes.layer(device, number))
      linears.push_back(std::move(linear));
  linears.push_back(shapes.head(device));
  for (const MeasuredLinear& linear : linears) {
    bench.add(linear.name + " forward", linear.flops(), 0.0, [&] { linear.forward(); });
    bench.add(linear.name + " input gradient", linear.flops(), 0.0, [&] { linear.input_grad(); });
    bench.add(linear.name + " weight gradient", linear.flops(), 0.0, [&] { linear.weight_grad(); });
  }
}

void add_attention(Bench& bench) {
  const std::optional<AttentionSize> size = bench.shapes.attention();
  if (!size) return;
  const MeasuredAttention attention(*size, {}, bench.shapes.type, bench.device);
  const double flops = attention.forward_flops();
  bench.add("attention forward", flops, 0.0, [&] { attention.forward(); });
  bench.add("attention forward and backward", 3.5 * flops, 0.0, [&] { attention.both(); });
}

void add_norm(Bench& bench) {
  const Shapes& shapes = bench.shapes;
  const Normalization kind = shapes.config.normalization;
  const c10::Device device = bench.device;
  const at::Tensor x = bench.random(shapes.hidden), dy = bench.random(shapes.hidden),
                   residual = bench.random(shapes.hidden);
  const at::Tensor weight = normal({shapes.hidden}, shapes.type, device);
  const at::Tensor bias = kind == Normalization::kLayerNorm ? weight.clone() : at::Tensor();
  const at::Tensor dweight = at::zeros({shapes.hidden}, at::dtype(at::kFloat).device(device));
  const at::Tensor dbias = bias.defined() ? at::zeros_like(dweight) : at::Tensor();
  const NormResult norm = norm_forward(kind, x, weight, bias, 1e-5, false);
  bench.add("norm forward", 0.0, bytes_of({x, x}),
            [&] { norm_forward(kind, x, weight, bias, 1e-5, false); });
  bench.add("norm backward with the residual's gradient", 0.0, bytes_of({dy, x, residual, x}), [&] {
    norm_backward(kind, dy, x, weight, norm.mean, norm.rstd, false, dweight, dbias, residual);
  });
  bench.add("bias gradient", 0.0, bytes_of({dy}), [&] { bias_grad(dy, dweight, 1.0); });
}

// Of the MLP, between its linears.
void add_activation(Bench& bench) {
  const std::vector<LinearSize> linears = bench.shapes.mlp();
  if (linears.empty()) return;
  const Activation activation = bench.shapes.config.activation();
  const at::Tensor x = bench.random(linears.front().outputs),
                   dy = bench.random(linears.back().inputs);
  bench.add("activation forward", 0.0, bytes_of({x, dy}), [&] { activate(x, activation); });
  bench.add("activation backward", 0.0, bytes_of({x, dy, x}),
            [&] { activation_backward(dy, x, activation); });
}

void add_rotary(Bench& bench) {
  const Shapes& shapes = bench.shapes;
  const std::optional<AttentionSize> size = shapes.attention();
  if (!size) return;
  const c10::Device device = bench.device;
  const at::Tensor heads =
      normal({shapes.length, shapes.samples, size->heads + size->groups, size->key_size},
             shapes.type, device);
  const at::Tensor angle =
      at::randn({shapes.length, size->key_size / 2}, at::dtype(at::kFloat).device(device));
  const at::Tensor cosine = angle.cos(), sine = angle.sin();
  bench.add("rotary, in place", 0.0, bytes_of({heads, heads}),
            [&] { rotate_(heads, cosine, sine, false, 1.0); });
}

void add_cross_entropy(Bench& bench) {
  const Shapes& shapes = bench.shapes;
  const c10::Device device = bench.device;
  const at::Tensor logits = bench.random(shapes.vocabulary);
  const at::Tensor targets =
      at::randint(bench.vocabulary.size, {shapes.rows()}, at::dtype(at::kLong).device(device));
  const at::Tensor scale = at::full({shapes.rows()}, 1e-3, at::dtype(at::kFloat).device(device));
  const CrossEntropyParts parts = cross_entropy_parts(logits, targets, bench.vocabulary.size);
  const at::Tensor lse = parts.max + parts.sum.log();
  bench.add("cross entropy forward", 0.0, bytes_of({logits}),
            [&] { cross_entropy_parts(logits, targets, bench.vocabulary.size); });
  bench.add("cross entropy backward", 0.0, bytes_of({logits, logits}), [&] {
    cross_entropy_backward(logits, targets, lse, scale, bench.vocabulary.size, 0.0,
                           /*in_place=*/false);
  });
}

void add_embedding(Bench& bench) {
  const Shapes& shapes = bench.shapes;
  const c10::Device device = bench.device;
  const at::Tensor table = normal({shapes.vocabulary, shapes.hidden}, shapes.type, device);
  const at::Tensor ids = at::randint(bench.vocabulary.size, {shapes.length, shapes.samples},
                                     at::dtype(at::kLong).device(device));
  const at::Tensor rows = embedding_forward(table, ids);
  const at::Tensor target = at::zeros(table.sizes(), at::dtype(at::kFloat).device(device));
  bench.add("embedding forward", 0.0, bytes_of({rows, rows}),
            [&] { embedding_forward(table, ids); });
  bench.add("embedding backward", 0.0, 5.0 * bytes_of({rows}),
            [&] { embedding_backward(rows, ids, target); });
}

void add_update(Bench& bench) {
  const Shapes& shapes = bench.shapes;
  const c10::Device device = bench.device;
  Update update(device.is_cuda() ? int64_t{256} << 20 : int64_t{1} << 20, shapes.type, device);
  FlatUpdate& u = update.update;
  OptimizerConfig config = bench.arguments.optimizer;
  if (!config.lr) config.lr = 1e-4;
  const StepState start = initial_step_state(config);
  at::Tensor state = at::empty({static_cast<int64_t>(sizeof start)}, at::kByte);
  std::memcpy(state.data_ptr(), &start, sizeof start);
  state = state.to(device);
  bench.add("gradient norm", 0.0, bytes_of({u.grad}), [&] { sum_of_squares(u, update.sum); });
  double bytes =
      bytes_of({u.grad, u.master, u.master, u.states[0], u.states[0], u.states[1], u.states[1]});
  if (u.value.defined()) bytes += bytes_of({u.value});
  bench.add("AdamW", 0.0, bytes, [&] { adamw_update(u, state, {0.9, 0.95, 1e-8}); });
}

}  // namespace

std::vector<Ceiling> kernel_ceilings(const Arguments& arguments, const ModelConfig& model,
                                     const Vocabulary& vocabulary, c10::Device device, double least,
                                     const std::string& only) {
  const at::NoGradGuard no_grad;
  Bench bench{arguments, vocabulary, device, least, only, Shapes(arguments, model, vocabulary), {}};
  for (const auto add : {add_linears, add_attention, add_norm, add_activation, add_rotary,
                         add_cross_entropy, add_embedding, add_update})
    add(bench);
  for (const SsmWork& work :
       ssm_work(model.transformer, bench.shapes.samples, bench.shapes.type, device))
    bench.add(work.name, work.operations, work.bytes, work.run, device_seconds_per_run);
  return std::move(bench.all);
}

StepFloor step_floor(const Arguments& arguments, const ModelConfig& model,
                     const Vocabulary& vocabulary, const Batch& batch, int64_t num_microbatches,
                     int64_t updated_parameters, c10::Device device, double least) {
  const at::NoGradGuard no_grad;
  const Shapes shapes(arguments, model, vocabulary);
  const EndsCost ends = shapes.ends();
  const StackTexts texts(batch, ends.first_stack);
  const auto h = static_cast<double>(shapes.hidden);
  // Rows of the head: those of the last stack, or the positions that the loss counts
  const double head_share =
      std::min(1.0, ends.head_products / (h * static_cast<double>(shapes.vocabulary))) *
      (batch.most_counted > 0 ? 1.0 : texts.share(shapes.layers));
  const auto passes = static_cast<double>(num_microbatches);
  StepFloor floor;
  // Elements that the other kernels read or write, per token and per step
  double of_token = 0.0, of_weights = 0.0;
  {
    // Layers of one kind share their operands.
    std::map<std::string, std::vector<MeasuredLinear>> kinds;
    std::vector<const std::vector<MeasuredLinear>*> layers_of;
    for (int64_t number = 1; number <= shapes.layers; ++number) {
      const QuantizationOptions options = shapes.config.quantization(number);
      const LayerCost cost = shapes.cost(number);
      std::string kind = cat(shapes.config.layer_letters(number), static_cast<int>(options.recipe));
      for (const SublayerCost* half : {&cost.first, &cost.second})
        for (const LinearSize& size : half->linears) kind += size.name;
      if (!kinds.contains(kind))
        kinds.emplace(kind, shapes.layer(device, number, texts.share(number), texts.share(1)));
      layers_of.push_back(&kinds.at(kind));
      of_token += texts.share(number) * (cost.first.moved_elements + cost.second.moved_elements);
      if (!options.enabled()) continue;
      // Quantised weights; if scaled by their own amax, they are read once more.
      for (const MeasuredLinear& linear : *layers_of.back())
        of_weights += static_cast<double>(linear.w.numel()) *
                      (options.recipe == QuantizationRecipe::kTensorwise ? 2.0 : 1.0);
    }
    const MeasuredLinear head = shapes.head(device, head_share);
    const double seconds = seconds_per_run(device, least, [&] {
      for (const std::vector<MeasuredLinear>* linears : layers_of)
        for (const MeasuredLinear& linear : *linears) linear.forward();
      head.forward();
      head.backward();
      for (auto linears = layers_of.rbegin(); linears != layers_of.rend(); ++linears)
        for (auto linear = (*linears)->rbegin(); linear != (*linears)->rend(); ++linear)
          linear->backward();
    });
    floor.gemm_ms = 1e3 * passes * seconds;
  }
  for (const AttendedLayers& one : attended_layers(model, shapes.layers, shapes.shape(), texts)) {
    const MeasuredAttention attention(one.size, one.rows, shapes.type, device);
    floor.attention_ms += 1e3 * passes * static_cast<double>(one.layers) *
                          device_seconds_per_run(device, least / 2, [&] { attention.both(); });
  }
  double bytes_of_states = 0.0;  // of a micro-batch, which of_token counts, too
  for (const SsmWork& work : ssm_work(shapes.config, shapes.samples, shapes.type, device)) {
    const auto runs =
        static_cast<double>(work.runs * shapes.config.count_hybrid_letter(work.letter));
    if (runs == 0) continue;
    floor.states_ms += 1e3 * passes * runs * device_seconds_per_run(device, least / 4, work.run);
    bytes_of_states += runs * work.bytes;
  }
  const Ceiling copy = copy_ceiling(device, least / 4);
  // Cross entropy: logits; logits, their gradient
  of_token += head_share * 3 * static_cast<double>(shapes.vocabulary);
  of_token += texts.share(1) * (2 * h + 4 * h + 5 * h);  // embedding, final norm
  const auto width = static_cast<double>(at::elementSize(shapes.type));
  const double of_step = passes * static_cast<double>(shapes.rows()) * of_token + of_weights;
  floor.memory_ms = 1e3 * (of_step * width - passes * bytes_of_states) / copy.byte_rate();
  const OptimizerConfig& o = arguments.optimizer;
  const bool half_model = shapes.type != at::kFloat;
  // The gradient, for its norm and for the update
  double of_parameter = 8.0;
  // Read and written
  of_parameter += 2.0 * static_cast<double>(optimizer_state_bytes(o, half_model));
  of_parameter += keeps_masters(o, half_model) ? width : 2 * width;
  floor.optimizer_ms =
      1e3 * static_cast<double>(updated_parameters) * of_parameter / copy.byte_rate();
  return floor;
}

}  // namespace megatron
