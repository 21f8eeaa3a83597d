#include "tools/support/check_serving.h"

#include <algorithm>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/inference/engine_config.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/inference/speculation/served_draft.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/model_table.h"
#include "megatron/runtime/device.h"
#include "megatron/runtime/device_models.h"
#include "megatron/serving/serve_config.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/batch_invariant.h"
#include "tools/support/load_model_flags.h"
#include "tools/support/served_model_flags.h"

namespace megatron {
namespace {

struct ServingCheckConfig : LoadModelConfig {
  bool serve = false;
  int64_t max_media = ServeLimits().max_media;
  bool json = false;

  void fields(FieldVisitor& v) override {
    model_fields(v);
    v.group("check --serve");
    v.field("serve", serve, "memory of `megatron serve` instead of that of training");
    v.field("batch_invariant_mode", batch_invariant_mode, kBatchInvariantHelp);
    v.field("max_media", max_media,
            "images and sounds of a request at most, of which the largest prompt has memory; 0: "
            "none are read");
    v.field("json", json, "print JSON, sizes in bytes");
  }
  void validate(Violations& v) const override {
    LoadModelConfig::validate(v);
    v.require(max_media >= 0, cat("--max-media is ", max_media), "0 or more");
  }
};

struct ServingPlan {
  DescribedModel model;
  ServedShape shape;
  int64_t block_size = 0;
  std::vector<ServingMemory> stages;
  const DeviceModel* device = nullptr;  // null: not named
  int64_t outside = 0;                  // beside the allocator, on each rank

  int64_t ranks() const { return shape.tensor_ranks * shape.stages; }
  const ServingMemory& fullest() const {
    return *std::ranges::max_element(stages, {}, &ServingMemory::total);
  }
  int64_t needed() const { return outside + fullest().total(); }
  bool fits() const { return device == nullptr || needed() <= device->memory_bytes; }
  int32_t blocks() const { return stages.front().cache.blocks; }
  int64_t blocks_of_a_request() const {
    return (shape.max_positions + block_size - 1) / block_size;
  }
};

// Bytes for the cache of one rank, beside what the stage needs.
int64_t budget_for(const ServingPlan& plan, const ServingMemory& stage, c10::Device device) {
  if (plan.device != nullptr)
    return gpu_cache_budget(
        plan.device->memory_bytes - plan.outside - stage.weights - stage.draft.weights,
        stage.passing());
  return cache_budget(device, stage.passing());
}

ServingPlan make_plan(const ServingCheckConfig& config, const ServedRanksConfig& ranks,
                      const EngineConfig& engine) {
  ServingPlan plan;
  plan.device = device_model(config.device);
  const bool named = plan.device != nullptr;
  const c10::Device device = named ? c10::Device(c10::kCPU) : choose_device(config.device, 0);
  LoadModelConfig described = config;  // of a device that need not be here
  described.device = DeviceChoice::kCpu;
  described.accept = accepts_drafts(engine.speculation, nullptr);
  plan.model = describe_model(load_model_request(described), ranks.tensor_model_parallel_size);
  const ModelType& type = find_model_type(plan.model.config.type);
  MEGATRON_CHECK(type.decodes, config.load,
                 ": the memory of a server is planned for decoders, and a model of type ",
                 type.title, " is none", type.not_served.empty() ? "" : ": ", type.not_served);
  if (config.batch_invariant_mode) {
    engine.check_batch_invariant();
    check_batch_invariant(plan.model.config.transformer,
                          named ? at::Device(at::kCUDA) : at::Device(device), plan.model.dtype,
                          ranks.tensor_model_parallel_size);
  }
  set_batch_invariant(config.batch_invariant_mode);  // layers keep what it needs
  plan.shape = served_shape(engine, plan.model.config, plan.model.dtype,
                            /*on_gpu=*/named || !device.is_cpu());
  if (config.int8 && plan.shape.on_gpu)
    throw UsageError("--int8 multiplies on CPUs alone\nhint: --device cpu, or --fp8-format e4m3");
  plan.shape.int8 = config.int8;
  plan.shape.tensor_ranks = ranks.tensor_model_parallel_size;
  plan.shape.stages = ranks.pipeline_model_parallel_size;
  if (const std::string& folder = engine.speculation.speculative_model; !folder.empty()) {
    described.load = folder;
    described.ckpt_step.reset();
    described.accept = [&](const ModelConfig& model, const Tokenizer*) {
      check_draft_model(folder, model);
    };
    const DescribedModel draft = describe_model(load_model_request(described), 1);
    plan.shape.draft = draft_memory(draft.config, draft.dtype, plan.shape);
  }
  plan.block_size = engine.block_size;
  if (plan.shape.on_gpu)
    plan.outside = kCudaContextBytes + (plan.shape.tensor_ranks > 1 ? kCommunicatorBytes : 0) +
                   (plan.shape.stages > 1 ? kCommunicatorBytes : 0);
  for (int64_t i = 0; i < plan.shape.stages; ++i)
    plan.stages.push_back(serving_memory(plan.model.config, plan.shape, i));
  if (!plan.fits()) return plan;  // without any cache
  for (ServingMemory& stage : plan.stages)
    stage.cache = served_cache(engine, plan.model.config, plan.shape, stage.slice,
                               budget_for(plan, stage, device));
  const int32_t fewest = std::ranges::min(plan.stages, {}, [](const ServingMemory& stage) {
                           return stage.cache.blocks;
                         }).cache.blocks;
  for (ServingMemory& stage : plan.stages) stage.cache.blocks = fewest;
  return plan;
}

// -- text

std::string bytes_text(int64_t bytes) { return format_bytes(static_cast<double>(bytes)); }

std::string layers_of(const StageSlice& slice) {
  return cat(slice.first_layer + 1, "-", slice.first_layer + slice.num_layers);
}

void print_plan(const ServingPlan& plan) {
  int64_t parameters = 0;
  for (const ServingMemory& stage : plan.stages) parameters += stage.parameters;
  print_line(cat(plan.model.config.transformer.num_layers, " layers, ",
                 c10::toString(plan.model.dtype), ", on ", plan.ranks(),
                 plan.ranks() == 1 ? " rank" : " ranks", ": ", plan.shape.tensor_ranks, " tensor, ",
                 plan.shape.stages, plan.shape.stages == 1 ? " stage" : " stages",
                 "; memory of a rank"));
  std::vector<std::vector<std::string>> rows = {{"stage", "layers", "parameters", "weights",
                                                 "cache", "states", "activations", "sampling",
                                                 "libraries", "together"}};
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const ServingMemory& stage = plan.stages[i];
    rows.push_back({std::to_string(i), layers_of(stage.slice),
                    format_count(static_cast<uint64_t>(stage.parameters)),
                    bytes_text(stage.weights),
                    bytes_text(stage.cache.blocks * stage.cache.block_bytes),
                    bytes_text(stage.cache.state_bytes), bytes_text(stage.activations),
                    bytes_text(stage.sampling), bytes_text(stage.library_workspace),
                    bytes_text(stage.total())});
  }
  for (const std::string& line : format_table(rows, [](size_t column) { return column > 1; }))
    print_line("  " + line);
  if (plan.shape.draft.weights > 0)
    print_line(cat("draft model, on the first rank: weights ", bytes_text(plan.shape.draft.weights),
                   ", its largest step ", bytes_text(plan.shape.draft.step), ", and ",
                   bytes_text(plan.blocks() * plan.block_size * plan.shape.draft.kept.position),
                   " of the cache"));
  const EncoderMemory& encoder = plan.stages.front().encoder;
  if (encoder.weights > 0)
    print_line(cat("encoders of images and sounds: ", bytes_text(encoder.weights),
                   " of the weights; the largest prompt takes ",
                   encoder.unknown ? "what the shapes of its images ask for, which is not counted"
                                   : bytes_text(encoder.passing())));
  if (plan.blocks() > 0) {
    const int64_t tokens = plan.blocks() * plan.block_size;
    print_line(cat("cache: ", tokens, " tokens in blocks of ", plan.block_size, "; up to ",
                   plan.shape.slots, " requests at a time, of ",
                   std::min(tokens, plan.shape.max_positions), " tokens at most; of that length ",
                   std::max<int64_t>(1, plan.blocks() / plan.blocks_of_a_request()),
                   " fit together"));
    if (tokens < plan.shape.max_positions)
      print_line(cat("the cache holds no request of the ", plan.shape.max_positions,
                     " tokens that the model or --inference-max-seq-length allow"));
  }
  if (plan.device == nullptr) return;
  print_line(cat(plan.fits() ? "fits an " : "DOES NOT FIT an ", plan.device->name,
                 ": a rank needs ", bytes_text(plan.needed()), " of ",
                 bytes_text(plan.device->memory_bytes),
                 plan.fits() ? ""
                             : "\nhint: more --tensor-model-parallel-size or "
                               "--pipeline-model-parallel-size, or a smaller "
                               "--inference-dynamic-batching-max-tokens"));
}

void print_plan_as_json(const ServingPlan& plan) {
  JsonWriter json(2);
  json.begin_object()
      .member("tensor", plan.shape.tensor_ranks)
      .member("pipeline", plan.shape.stages)
      .member("block_size", plan.block_size)
      .member("blocks", plan.blocks());
  json.member("max_requests", plan.shape.slots)
      .member("max_positions", plan.shape.max_positions)
      .member("outside_bytes", plan.outside);
  if (plan.device != nullptr)
    json.key("device")
        .begin_object()
        .member("name", plan.device->name)
        .member("memory_bytes", plan.device->memory_bytes)
        .member("needed_bytes", plan.needed())
        .member("fits", plan.fits())
        .end_object();
  json.key("stages").begin_array();
  for (const ServingMemory& stage : plan.stages) {
    json.begin_object()
        .member("first_layer", stage.slice.first_layer + 1)
        .member("num_layers", stage.slice.num_layers)
        .member("parameters", stage.parameters);
    json.key("memory_bytes").begin_object();
    json.member("weights", stage.weights)
        .member("cache", stage.cache.blocks * stage.cache.block_bytes)
        .member("states", stage.cache.state_bytes);
    json.member("activations", stage.activations)
        .member("sampling", stage.sampling)
        .member("libraries", stage.library_workspace)
        .member("draft_model", stage.draft.weights)
        .member("encoder_weights", stage.encoder.weights)
        .member("encoder", stage.encoder.passing())
        .member("together", stage.total());
    json.end_object().end_object();
  }
  json.end_array().end_object();
  print_line(json.text());
}

}  // namespace

bool asks_for_serving(int argc, const char* const* argv) {
  return std::any_of(argv + std::min(argc, 1), argv + argc, [](const char* argument) {
    return std::string_view(argument) == "--serve" || std::string_view(argument) == "--serve=true";
  });
}

int check_serving(int argc, const char* const* argv) {
  ServingCheckConfig config;
  ServedRanksConfig ranks;
  EngineConfig engine;
  Config* const configs[] = {&config, &ranks, &engine};
  if (!parse_or_help("megatron check --serve --load DIR [flags of the engine]", configs, argc, argv,
                     {.positional = "load"}))
    return 0;
  engine.max_media = config.max_media;
  const ServingPlan plan = make_plan(config, ranks, engine);
  config.json ? print_plan_as_json(plan) : print_plan(plan);
  return plan.fits() ? 0 : kExitFailure;
}

}  // namespace megatron
