#include "megatron/inference/memory_plan.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/comm/described_backend.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/interop/load_model.h"
#include "megatron/kernels/sampling.h"
#include "megatron/kernels/sum_parts.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/divided_rows.h"
#include "megatron/transformer/attention/core_attention_cost.h"

namespace megatron {
namespace {

constexpr double kPlanGiB = 1 << 30;
constexpr int kSmallMiB = 16;  // that steps need for small tensors, amply
constexpr int64_t kServedBlasWorkspace = int64_t{32} << 20;  // of one cuBLAS handle on Hopper

// Rows of each rank from which on a step divides them: on GPUs as many as keep products of one
// rank's rows bound by arithmetic, on CPUs few, so that small models take that path.
constexpr int64_t kDividedRowsOfGpu = 256, kDividedRowsOfCpu = 8;

// A step of `tokens` rows.
LayerShape step_shape(const ServedShape& served, int64_t tokens) {
  LayerShape shape;
  shape.tokens = shape.rows = tokens;
  shape.element = shape.residual = served.element;
  shape.sum = std::max<int64_t>(4, served.element);
  shape.tensor = served.tensor_ranks;
  shape.on_gpu = served.on_gpu;
  return shape;
}

// Of attention of `tokens` queries, the last ones of a sequence, to all of its positions, which
// are more: keys and values in tensors of their own, the mask, and what computes with them.
int64_t chunk_attention_peak(const TransformerConfig& t, int64_t layer, const LayerShape& shape,
                             int64_t positions, int64_t kept) {
  CoreAttentionSizes sizes;
  sizes.heads = t.num_attention_heads / shape.tensor;
  sizes.groups = t.multi_latent_attention ? sizes.heads
                                          : std::max<int64_t>(1, t.query_groups() / shape.tensor);
  sizes.key = t.multi_latent_attention ? t.query_head_size() : t.kv_channels;
  sizes.value = t.value_head_size();
  sizes.others = positions;
  const CoreAttentionCost attention(t, layer, shape, sizes);
  const int64_t e = shape.element, tokens = shape.tokens, pairs = tokens * positions;
  int64_t read = is_batch_invariant() && !t.multi_latent_attention ? 0 : kept * positions;
  // Of latents keys and values, and keys with their rotated features, in place of the queries' own;
  // else rotated queries are a tensor of their own.
  if (t.multi_latent_attention)
    read += (positions - tokens) * sizes.heads * (t.qk_head_dim + sizes.value + sizes.key) * e;
  else
    read += attention.q;
  if (is_batch_invariant()) return read;  // keys are read in their blocks
  const int64_t mask = pairs * (1 + static_cast<int64_t>(sizeof(int64_t)));  // with distances
  if (shape.on_gpu || t.attn_logit_softcapping > 0 || !t.window(layer).empty() ||
      t.attention_backend == AttentionBackend::kUnfused)
    return read + std::max(mask, pairs + attention.forward_extra());
  // libtorch's kernel adds the mask, and wants all heads to have keys and values of one width.
  const int64_t heads = positions * sizes.heads * sizes.key * e;
  const int64_t repeated = (sizes.groups < sizes.heads ? 2
                            : sizes.value < sizes.key  ? 1
                                                       : 0) *
                           heads;
  const int64_t out = tokens * sizes.heads * (2 * sizes.key * e + shape.sum);
  return read + std::max(mask, pairs * e + repeated + out);
}

// Of the layer that needs most, with its input and its output; the step is one chunk.
int64_t layer_peak(const ModelConfig& config, const StageSlice& slice, const ServedShape& served,
                   int64_t tokens) {
  ModelConfig chunk = config;
  chunk.transformer.seq_length = tokens;
  chunk.transformer.attention_dropout = 0.0;
  const LayerShape shape = step_shape(served, tokens);
  int64_t most = 0;
  for (int64_t layer = slice.first_layer + 1; layer <= slice.first_layer + slice.num_layers;
       ++layer) {
    const LayerCost cost = model_layer_cost(chunk, layer, shape, /*offloaded=*/false);
    const auto attends = [&](const SublayerCost& half) {
      return half.kept.position > 0 && served.max_positions > 0
                 ? chunk_attention_peak(chunk.transformer, layer, shape, served.max_positions,
                                        half.kept.position)
                 : 0;
    };
    most = std::max({most, 2 * cost.stream + cost.first.unrecorded_peak + attends(cost.first),
                     3 * cost.stream + cost.second.unrecorded_peak + attends(cost.second)});
  }
  return most;
}

// Logits as the output layer gives them; in fp32, unless they are; edited; and for penalties a
// count of each id.
int64_t sampling_peak(const ModelConfig& config, const ServedShape& served) {
  const int64_t wide = std::max<int64_t>(4, served.element);
  const int64_t each = served.element + (served.element < wide ? wide : 0) + wide +
                       static_cast<int64_t>(sizeof(int32_t));
  const int64_t rows =
      std::min(served.slots * (1 + served.drafts), std::max(served.slots, served.max_step_tokens));
  return rows * config.padded_vocab_size / served.tensor_ranks * each;
}

// Activations and logits of the largest graph; smaller ones use the same memory.
int64_t graph_memory(const ModelConfig& config, const StageSlice& slice,
                     const ServedShape& served) {
  ServedShape decoding = served;
  decoding.max_positions = 0;  // keys are read where they lie
  return layer_peak(config, slice, decoding, served.graph_rows) +
         served.graph_rows * config.padded_vocab_size / served.tensor_ranks * served.element;
}

// Of a weight that is held in FP8 alone: codes, and fp32 scales for 128 x 128 of them or for all.
int64_t quantized_bytes(const Parameter& weight) {
  constexpr int64_t kScaleBytes = 4, kBlock = 128;
  const std::vector<int64_t>& shape = weight.local_shape;
  const int64_t elements = c10::multiply_integers(shape);
  const int64_t columns = shape.back(), rows = shape[shape.size() - 2];
  const int64_t matrices = elements / std::max<int64_t>(1, rows * columns);
  const auto blocks = [](int64_t n) { return (n + kBlock - 1) / kBlock; };
  return elements + kScaleBytes * matrices *
                        (weight.quantization == QuantizationRecipe::kBlockwise
                             ? blocks(rows) * blocks(columns)
                             : 1);
}

}  // namespace

KeptBytes kept_bytes(const ModelConfig& config, const StageSlice& slice, int64_t tensor_ranks,
                     int64_t element, const StateKeeping& keeping, bool fp8_cache) {
  LayerShape shape;
  shape.tokens = shape.rows = 1;
  shape.element = shape.residual = element;
  shape.sum = std::max<int64_t>(4, element);
  shape.tensor = tensor_ranks;
  shape.keeping = keeping;
  KeptBytes kept;
  for (int64_t layer = slice.first_layer + 1; layer <= slice.first_layer + slice.num_layers;
       ++layer)
    kept += model_layer_cost(config, layer, shape, /*offloaded=*/false).kept();
  if (fp8_cache) kept.position /= element;
  return kept;
}

CachePlan plan_cache(const KeptBytes& kept, const CacheDemand& demand, int64_t budget) {
  CachePlan plan;
  plan.block_bytes = kept.position * demand.block_size;
  plan.state_bytes = kept.sequence * demand.slots;
  const int64_t left = budget - plan.state_bytes;
  const int64_t fit = plan.block_bytes > 0 || left < 0
                          ? left / std::max<int64_t>(1, plan.block_bytes)
                          : demand.wanted;
  MEGATRON_CHECK(
      fit >= demand.needed, "a cache of ", format_fixed(static_cast<double>(budget) / kPlanGiB, 2),
      " GiB holds ", std::max<int64_t>(0, fit), " blocks of ", demand.block_size, " tokens, and ",
      demand.needed, demand.needed == 1 ? " is" : " are", " needed; each takes ", plan.block_bytes,
      " bytes, beside ", plan.state_bytes, " bytes of states", "\nhint: ", demand.hint);
  plan.blocks = static_cast<int32_t>(std::min({demand.wanted, fit, int64_t{INT32_MAX}}));
  return plan;
}

int64_t gpu_cache_budget(int64_t free_bytes, int64_t step_bytes) {
  return std::min(static_cast<int64_t>(0.8 * static_cast<double>(free_bytes)),
                  free_bytes - step_bytes);
}

std::optional<int64_t> free_memory(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first;
}

void hold_memory(c10::Device device, int64_t bytes) {
  if (device.is_cpu()) return;
  const at::TensorOptions options = at::dtype(at::kByte).device(device);
  std::vector<at::Tensor> pieces = {at::empty({bytes}, options)};
  // Tensors of at most 1 MiB have memory of their own in the allocator.
  for (int i = 0; i < kSmallMiB; ++i) pieces.push_back(at::empty({int64_t{1} << 20}, options));
}

int64_t cache_budget(c10::Device device, int64_t step_bytes) {
  if (const auto free = free_memory(device)) return gpu_cache_budget(*free, step_bytes);
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kib = 0; file >> name >> kib; std::getline(file, unit))
    if (name == "MemAvailable:") return kib * 1024 / 4;
  return int64_t{4} << 30;
}

EncoderMemory encoder_memory(const ModelConfig& config, const ServedShape& shape) {
  const auto* given = config.own.as<MimoConfig>();
  if (given == nullptr || shape.max_media == 0) return {};
  ModelConfig alone = config;
  auto& own = *alone.own.as<MimoConfig>();
  own.encoder_tensor_model_parallel_size = 1;
  // Of an image with tiles several pictures: only the context limits them.
  if (own.most_pictures == 0 && !own.has_own_sizes() && !own.pixel_shuffle && !own.vision_newlines)
    own.most_pictures = shape.max_media;
  EncoderMemory memory;
  memory.unknown = own.vision_newlines && own.most_pictures == 0;
  ServedShape one = shape;
  one.tensor_ranks = 1;
  EndsShape ends;
  ends.layer = step_shape(one, config.transformer.seq_length);
  ends.vocabulary = config.padded_vocab_size;
  ends.trains = [](std::string_view) { return false; };
  const EndsCost cost = mimo_ends_cost(alone, ends);
  if (!memory.unknown) {
    // The rows leave in fp32.
    const int64_t rows = shape.element == sizeof(float)
                             ? 0
                             : config.transformer.seq_length * config.transformer.hidden_size *
                                   static_cast<int64_t>(sizeof(float));
    // The places of images' features and those of sounds' are added.
    const int64_t added =
        own.sees() && own.hears()
            ? config.transformer.seq_length * config.transformer.hidden_size * shape.element
            : 0;
    memory.step =
        cost.media + cost.encoder + cost.features + cost.embedding.forward_peak + rows + added;
    if (shape.on_gpu) memory.step += kServedBlasWorkspace;
  }
  return memory;
}

namespace {

// What CUDA graphs of an encoder of pictures hold: the largest one's forward.
int64_t picture_graph_memory(const ModelConfig& config, const ServedShape& shape) {
  const auto* own = config.own.as<MimoConfig>();
  if (own == nullptr || !own->sees() || own->has_own_sizes() || shape.tensor_ranks > 1 ||
      shape.graph_rows == 0)
    return 0;
  ServedShape graphed = shape;
  graphed.max_media = std::min(shape.max_media, PictureGraphs::kMostPictures);
  return encoder_memory(config, graphed).step;
}

}  // namespace

std::string ServingMemory::text() const {
  const auto bytes = [](int64_t count) { return format_bytes(static_cast<double>(count)); };
  return cat("memory: weights ", bytes(weights),
             draft.weights > 0 ? cat(", draft model ", bytes(draft.weights)) : "", ", cache ",
             bytes(cache.bytes()), ", the largest step ", bytes(step()),
             encoder.step > 0
                 ? cat(", the largest prompt of images or sounds ", bytes(encoder.passing()))
                 : "",
             ", together ", bytes(total()));
}

void ServingMemory::check_fits(int64_t free_bytes) const {
  const auto gib = [](int64_t count) {
    return format_fixed(std::floor(100.0 * static_cast<double>(count) / kPlanGiB) / 100.0, 2);
  };
  MEGATRON_CHECK(cache.bytes() + step() <= free_bytes, "a cache of ", gib(cache.bytes()),
                 " GiB and the largest step of ", gib(step()), " GiB do not fit the ",
                 gib(free_bytes), " GiB that the GPU has free beside the weights",
                 "\nhint: --inference-dynamic-batching-buffer-size-gb ",
                 gib(std::max<int64_t>(0, free_bytes - step())), " or less");
}

int64_t served_sum_bytes(const ModelConfig& config, int64_t rows, int64_t element) {
  const auto histogram = kSelectionBins * static_cast<int64_t>(sizeof(int64_t));
  return rows * std::max(config.transformer.hidden_size * element, histogram);
}

int64_t divided_rows_from(const Model& model, bool on_gpu, int64_t most_rows) {
  const int64_t ranks = model.groups().tp.size();
  const bool can = model.config().transformer.can_divide_rows() &&
                   model.sequence_input() == SequenceInputUse::kNone;
  if (ranks == 1 || ranks > kMaxSumParts || !can) return 0;
  const int64_t from = ranks * (on_gpu ? kDividedRowsOfGpu : kDividedRowsOfCpu);
  return most_rows >= from ? from : 0;
}

int64_t divided_part_bytes(const Model& model, int64_t rows, int64_t element) {
  return DividedRows::count_of(rows, model.groups().tp.size()) *
         model.config().transformer.hidden_size * element;
}

ServingMemory serving_memory(const ModelConfig& config, const ServedShape& shape, int64_t stage) {
  ServingMemory memory;
  memory.slice = served_slice(config, stage, shape.stages);
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = shape.tensor_ranks;
  parallel.pipeline_model_parallel_size = shape.stages;
  const Mesh mesh = make_mesh(parallel, shape.tensor_ranks * shape.stages);
  const ParallelGroups groups = make_parallel_groups(
      parallel, described_backend(mesh.rank_at({Axis::kPipeline}, static_cast<int>(stage)),
                                  mesh.world_size()));
  const std::unique_ptr<Model> model = make_model(config, groups, memory.slice);
  if (stage == 0) memory.encoder = encoder_memory(config, shape);
  if (stage == 0 && shape.on_gpu) memory.encoder.graphs = picture_graph_memory(config, shape);
  for (const Parameter* parameter : model->parameters()) {
    const int64_t elements = c10::multiply_integers(parameter->local_shape);
    const int64_t element =
        parameter->keeps_fp32 ? std::max<int64_t>(4, shape.element) : shape.element;
    const int64_t bytes = holds_quantized_alone(*parameter) ? quantized_bytes(*parameter)
                          : shape.int8 ? int8_store_bytes(*parameter, element, memory.slice.head)
                                       : elements * element;
    memory.parameters += elements;
    memory.weights += bytes;
    if (parameter->name.starts_with("vision_") || parameter->name.starts_with("audio_") ||
        parameter->name == "image_newline")
      memory.encoder.weights += bytes;
  }
  memory.activations = layer_peak(config, memory.slice, shape, shape.max_step_tokens);
  if (memory.slice.head) memory.sampling = sampling_peak(config, shape);
  if (shape.on_gpu) memory.library_workspace = kServedBlasWorkspace;
  const bool keys_alone =
      kept_bytes(config, memory.slice, shape.tensor_ranks, shape.element, shape.keeping).sequence ==
      0;
  if (shape.graph_rows > 0 && shape.stages == 1 && keys_alone)
    memory.graphs = graph_memory(config, memory.slice, shape);
  if (shape.on_gpu && shape.tensor_ranks > 1)
    memory.sums = PeerCollectives::memory_bytes(
        shape.tensor_ranks,
        served_sum_bytes(config, std::max(shape.slots, shape.graph_rows), shape.element));
  if (shape.on_gpu && divided_rows_from(*model, shape.on_gpu, shape.max_step_tokens) > 0)
    memory.sums += PeerMailbox::memory_bytes(
        shape.tensor_ranks, divided_part_bytes(*model, shape.max_step_tokens, shape.element));
  if (stage == 0) memory.draft = shape.draft;
  return memory;
}

DraftMemory draft_memory(const ModelConfig& draft, at::ScalarType dtype,
                         const ServedShape& served) {
  ServedShape alone = served;
  alone.tensor_ranks = alone.stages = 1;
  alone.drafts = alone.graph_rows = 0;
  alone.element = static_cast<int64_t>(c10::elementSize(dtype));
  alone.keeping = {};
  alone.draft = {};
  const ServingMemory memory = serving_memory(draft, alone, 0);
  return {memory.weights, memory.step(), kept_bytes(draft, memory.slice, 1, alone.element)};
}

}  // namespace megatron
