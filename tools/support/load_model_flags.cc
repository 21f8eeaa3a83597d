#include "tools/support/load_model_flags.h"

#include <chrono>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/threads.h"
#include "megatron/base/value_checks.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr std::string_view kDTypes[] = {"stored", "fp32", "bf16", "fp16", "fp64"};

constexpr std::optional<at::ScalarType> kScalarTypes[] = {std::nullopt, at::kFloat, at::kBFloat16,
                                                          at::kHalf, at::kDouble};
// In the order of Fp8Format and Fp8Recipe.
constexpr std::string_view kFp8Formats[] = {"none", "e4m3", "hybrid"};
constexpr std::string_view kFp8Recipes[] = {"delayed", "tensorwise", "blockwise"};
constexpr std::string_view kDevices[] = {"auto", "cpu", "cuda", "h100", "h200", "b200"};

}  // namespace

void LoadModelConfig::fields(FieldVisitor& v) {
  common_fields(v);
  v.field("adapter", adapter, "folder of PEFT with adapters for that model");
}

void LoadModelConfig::common_fields(FieldVisitor& v) {
  model_fields(v);
  v.field("num_threads", num_threads, kNumThreadsHelp);
  v.field("batch_invariant_mode", batch_invariant_mode, kBatchInvariantHelp);
}

void LoadModelConfig::model_fields(FieldVisitor& v) {
  v.group("model");
  v.field("load", load,
          "folder of checkpoints, one checkpoint, a folder of Hugging Face, or a GGUF file");
  v.field("ckpt_step", ckpt_step, "take this iteration instead of the newest");
  v.choice("dtype", dtype, kDTypes, "element type to compute in");
  v.choice("device", device, kDevices,
           "auto: the GPU when there is one; h100, h200, b200: a GPU of that model");
  v.choice("fp8_format", fp8_format, kFp8Formats,
           "round the weights of linears to FP8 when they are loaded, and multiply in it; both "
           "formats mean e4m3, hybrid's other one is for gradients");
  v.choice("fp8_recipe", fp8_recipe, kFp8Recipes,
           "with --fp8-format: scales of 128 elements and 128 x 128 of a weight, or of a tensor");
  v.field(
      "int8", int8,
      "on a CPU: round the weights of linears and of the output layer to 8-bit integers, with a "
      "scale for each output, and multiply in them");
}

void LoadModelConfig::validate(Violations& violations) const {
  if (load.empty())
    violations.add("--load is required", "give the folder that --save of pretrain named");
  at_least(violations, "--num-threads", num_threads, 0);
  violations.require(!int8 || fp8_format == Fp8Format::kNone,
                     "--int8 and --fp8-format are both given", "give one of them");
  violations.require(fp8_recipe != Fp8Recipe::kDelayed,
                     "--fp8-recipe delayed takes scales from earlier steps of training, which a "
                     "loaded model has none of",
                     "blockwise or tensorwise");
}

LoadModelRequest load_model_request(const LoadModelConfig& config, int local_rank) {
  LoadModelRequest request;
  request.load = config.load;
  request.adapter = config.adapter;
  request.ckpt_step = config.ckpt_step;
  request.dtype = kScalarTypes[static_cast<size_t>(config.dtype)];
  request.device = choose_device(config.device, local_rank);
  if (config.fp8_format != Fp8Format::kNone) request.fp8 = config.fp8_recipe;
  request.int8 = config.int8;
  request.dummy_weights = config.load_format == LoadFormat::kDummy;
  request.batch_invariant = config.batch_invariant_mode;
  request.accept = config.accept;
  return request;
}

LoadedModel load_model(const LoadModelConfig& config, const ParallelGroups& groups,
                       bool tokenizer_required, int local_rank, int local_ranks,
                       Agreement* agreement) {
  use_threads(config.num_threads, local_ranks);
  LoadModelRequest request = load_model_request(config, local_rank);
  request.agreement = agreement;
  request.tokenizer_required = tokenizer_required;
  const auto begin = std::chrono::steady_clock::now();
  LoadedModel loaded = load_model(request, groups);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  for (const std::string& warning : loaded.warnings) log_warning(warning);
  log_info(cat("loaded iteration ", loaded.iteration, " from ", loaded.directory.string(), " in ",
               format_fixed(seconds.count(), 2), " s"));
  return loaded;
}

}  // namespace megatron
