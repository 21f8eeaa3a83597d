#include "tools/support/served_model_flags.h"

#include <algorithm>
#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/launch.h"
#include "megatron/models/model_table.h"
#include "tools/support/image_input.h"

namespace megatron {
namespace {

constexpr auto kSo = KnownFlag::Kind::kAlreadySo;
constexpr auto kNo = KnownFlag::Kind::kRefused;
constexpr char kGraphs[] =
    "steps that only decode run as CUDA graphs, see --inference-dynamic-batching-num-cuda-graphs; "
    "those that read prompts do not";
constexpr char kRouter[] =
    "replicas stand behind a router of their own, and do not speak with each other";
constexpr char kOneDevice[] =
    "this command computes on one device; megatron serve takes several, and --url asks it";
constexpr char kExperts[] = "experts are divided over the tensor ranks of a server, like the rest";
constexpr char kCollectives[] = "ranks exchange sums as in training";
constexpr char kStates[] =
    "states of sequences have memory of their own, one for each of --inference-max-requests; "
    "prefixes of models that have some are not kept";
constexpr char kCounts[] = "/metrics has counts and times, for Prometheus";

// The first kRankFlags are fields where a model has several ranks.
constexpr size_t kRankFlags = 2;
constexpr KnownFlag kInferenceFlags[] = {
    {"--tensor-model-parallel-size", kNo, kOneDevice, 1, 1, "1"},
    {"--pipeline-model-parallel-size", kNo, kOneDevice, 1, 1, "1"},
    {"--inference-dynamic-batching", kSo, "requests are always batched step by step"},
    {"--enable-chunked-prefill", kSo,
     "prompts longer than --inference-dynamic-batching-max-tokens are read in chunks"},
    {"--inference-dynamic-batching-prefix-caching-eviction-policy", kNo,
     "idle prefixes are evicted least recently used first", 1, 1, "lru"},
    {"--inference-dynamic-batching-logprobs-mode", kNo,
     "each request says which log-probabilities it wants", 1, 1, "raw_logprobs"},
    {"--inference-dynamic-batching-sampling-backend", kNo,
     "tokens are drawn by kernels of this program, the same on CPU and GPU", 1, 1, "torch"},
    {"--inference-dynamic-batching-async-sched-mode", kNo,
     "a step is planned while the one before runs, always", 1, 1, "async"},
    {"--use-legacy-static-engine", kNo, "there is one engine"},
    {"--inference-dynamic-batching-unified-memory-level", kNo,
     "keys and values move to host memory by --swap-space-gb, not by unified memory", 1, 1, "0"},
    {"--inference-dynamic-batching-paused-buffer-size-gb", kNo,
     "requests that make room have no memory of their own on the device; --swap-space-gb gives "
     "them host memory",
     1, 1},
    {"--inference-dynamic-batching-cuda-graph-mixed-prefill-count", kNo, kGraphs, 1, 1, "0"},
    {"--inference-cuda-graph-max-tokens", kNo, kGraphs, 1, 1, "0"},
    {"--inference-cuda-graph-scope", kNo, kGraphs, 1, 1, "none"},
    {"--decode-only-cuda-graphs", kSo, kGraphs},
    {"--batch-invariant-backend", kSo, "batch-invariant mode has one backend"},
    {"--inference-coordinator-port", kNo, kRouter, 1, 1},
    {"--inference-dynamic-batching-prefix-caching-coordinator-policy", kNo, kRouter, 1, 1},
    {"--inference-dynamic-batching-prefix-caching-routing-alpha", kNo, kRouter, 1, 1},
    {"--inference-shards", kNo, kRouter, 1, 1},
    {"--expert-model-parallel-size", kNo, kExperts, 1, 1, "1"},
    {"--nccl-all-reduce-for-prefill", kNo, kCollectives},
    {"--inference-fuse-tp-communication", kNo, kCollectives},
    {"--inference-disable-triton-nvls-kernels", kNo, kCollectives},
    {"--inference-moe-token-dispatcher-type", kNo, kExperts, 1, 1},
    {"--inference-disable-ep-consensus", kNo, kExperts},
    {"--inference-use-synchronous-zmq-collectives", kNo, kCollectives},
    {"--use-same-sampling-seed-across-dp-ranks", kNo,
     "each request has a seed of its own, given or drawn"},
    {"--flash-decode", kNo, "decoding has one kernel of paged attention"},
    {"--inference-grouped-gemm-backend", kNo, "experts have the grouped products of training", 1,
     1},
    {"--inference-moe-disable-fused-quant-kernels", kNo,
     "experts have the grouped products of training"},
    {"--inference-batch-times-seqlen-threshold", kNo,
     "a batch is one row of tokens, which pipelines do not divide", 1, 1, "-1"},
    {"--max-tokens-to-oom", kNo,
     "requests that the cache cannot hold are refused, or wait for others", 1, 1},
    {"--inference-dynamic-batching-mamba-memory-ratio", kNo, kStates, 1, 1},
    {"--inference-dynamic-batching-prefix-caching-mamba-gb", kNo, kStates, 1, 1},
    {"--inference-dynamic-batching-track-paused-request-events", kNo, kCounts},
    {"--inference-dynamic-batching-track-generated-token-events", kNo, kCounts},
    {"--inference-dynamic-batching-cuda-graph-sizing-distribution", kNo, kGraphs, 1, 1},
    {"--inference-cuda-graph-all-prefills", kNo, kGraphs},
    {"--inference-logging-step-interval", kNo, kCounts, 1, 1, "0"},
    {"--inference-text-gen-server-logging", kNo,
     "--log-prompts logs prompts, and /metrics has counts and times"},
    {"--inference-wandb-logging", kNo, kCounts},
};

constexpr std::string_view kLoadFormats[] = {"auto", "dummy"};

// {"name", "folder"} of NAME=DIR.
std::pair<std::string, std::filesystem::path> split_adapter(const std::string& text) {
  const size_t equals = text.find('=');
  return {text.substr(0, equals), equals == std::string::npos ? "" : text.substr(equals + 1)};
}

// Where what media become is said, for a model that reads some.
void set_media(const ServedModelConfig& config, const LoadedModel& loaded,
               ModelServiceOptions& options) {
  const bool reads = reads_media(loaded.config, MediaKind::kImage) ||
                     reads_media(loaded.config, MediaKind::kSound);
  MEGATRON_CHECK(reads || (config.media_model.empty() && config.audio_media_model.empty()),
                 config.media_model.empty() ? "--audio-media-model" : "--media-model",
                 " has no effect: the model reads text alone");
  MEGATRON_CHECK(
      reads_both_media(loaded.config) || config.audio_media_model.empty(),
      "--audio-media-model has no effect: the model does not read both images and sounds");
  if (!reads) return;
  if (!config.media_model.empty()) options.chat_templates = TemplateSource(config.media_model);
  try {
    ImageConfig media;
    media.media_model = config.media_model;
    media.audio_media_model = config.audio_media_model;
    options.media_folders = media_folders(media, loaded);
  } catch (const Error& error) {
    options.why_no_media = error.what();
    std::ranges::replace(options.why_no_media, '\n', ' ');
  }
}

}  // namespace

void ServedModelConfig::fields(FieldVisitor& v) {
  common_fields(v);
  v.choice(
      "load_format", load_format, kLoadFormats,
      "dummy: random weights, for measurements of speed and memory; of --load a config.json of "
      "Hugging Face is enough");
  v.field({"adapters", "--adapter"}, adapters,
          "NAME=DIR: folders of PEFT with adapters; a request names one as its model");
  v.field("chat_template", chat_template,
          "a file with a template, or the template, in place of the tokenizer's");
  v.field("media_model", media_model,
          "folder of a Hugging Face model, whose config.json, image processor and chat template "
          "say what images and sounds become; empty: the model's own folder");
  v.field("audio_media_model", audio_media_model, kAudioMediaModelHelp);
}

void ServedModelConfig::validate(Violations& v) const {
  if (required || !load.empty()) LoadModelConfig::validate(v);
  v.require(load_format != LoadFormat::kDummy || dtype != ModelDType::kStored,
            "--load-format dummy reads no weights that say a type", "--dtype bf16");
  std::set<std::string> names;
  for (const std::string& text : adapters) {
    const auto [name, folder] = split_adapter(text);
    v.require(!name.empty() && !folder.empty(), cat("--adapter ", text, " is not NAME=DIR"));
    v.require(names.insert(name).second, cat("--adapter names ", name, " twice"));
  }
}

void require_url_or_load(const std::string& url, const ServedModelConfig& config,
                         Violations& violations) {
  violations.require(url.empty() != config.load.empty(),
                     url.empty() ? "one of --url and --load is required"
                                 : "--url and --load are both given, expected one",
                     "--url http://127.0.0.1:8000 asks a server, --load DIR loads a model");
}

std::span<const KnownFlag> known_inference_flags(bool ranks) {
  return std::span(kInferenceFlags).subspan(ranks ? kRankFlags : 0);
}

std::unique_ptr<ServedRank> load_served_rank(const ServedModelConfig& config,
                                             const EngineConfig& engine,
                                             const ParallelGroups& groups, int local_rank,
                                             int local_ranks, Agreement* agreement) {
  if (config.batch_invariant_mode) engine.check_batch_invariant();
  AdapterFolders adapters;
  for (const std::string& text : config.adapters) adapters.push_back(split_adapter(text));
  ServedModelConfig checked = config;
  std::unique_ptr<LoadedDraft> draft;
  if (groups.world.rank() == 0)
    draft = load_draft(load_model_request(config, local_rank), engine.speculation);
  checked.accept = [&config, drafts = accepts_drafts(engine.speculation, draft.get())](
                       const ModelConfig& model, const Tokenizer* tokenizer) {
    const ModelType& type = find_model_type(model.type);
    MEGATRON_CHECK(type.not_served.empty(), config.load, ": a model of type ", type.title,
                   " is not served: ", type.not_served,
                   "\nhint: megatron generate --retro-project-dir or --neighbors");
    if (drafts) drafts(model, tokenizer);
  };
  LoadedModel loaded =
      load_model(checked, groups, /*tokenizer_required=*/true, local_rank, local_ranks, agreement);
  return std::make_unique<ServedRank>(load_model_request(config, local_rank), std::move(loaded),
                                      engine, adapters, local_ranks, std::move(draft));
}

std::unique_ptr<ModelService> make_model_service(std::unique_ptr<ServedRank> rank,
                                                 std::unique_ptr<FollowerLinks> links,
                                                 const ServedModelConfig& config,
                                                 const EngineConfig& engine,
                                                 const ServeConfig& serve,
                                                 const ServeLimits& limits) {
  ModelServiceOptions options;
  options.engine = engine;
  options.limits = limits;
  options.name = serve.served_model_name;
  options.chat_template = config.chat_template;
  options.tool_call_parser = serve.tool_call_parser;
  set_media(config, rank->loaded(), options);
  for (const std::string& text : config.adapters) options.adapters.push_back(split_adapter(text));
  return std::make_unique<ModelService>(std::move(rank), std::move(links), options);
}

std::unique_ptr<ModelService> load_served_model(const ServedModelConfig& config,
                                                const EngineConfig& engine,
                                                const ParallelGroups& groups) {
  const Launch launch = launch_from_environment();
  MEGATRON_CHECK(launch.world_size == 1, "this command computes on one device, and ",
                 launch.launcher, " started ", launch.world_size,
                 "\nhint: `megatron serve` takes several, and --url asks it");
  const ServeLimits limits;
  EngineConfig counted = engine;
  counted.max_media = limits.max_media;
  return make_model_service(load_served_rank(config, counted, groups), nullptr, config, counted, {},
                            limits);
}

}  // namespace megatron
