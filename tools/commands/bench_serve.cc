// megatron bench serve: requests at a server as many clients would send them, and what they see.
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/base/value_checks.h"
#include "megatron/inference/bounds/serving_bound.h"
#include "megatron/runtime/device.h"
#include "megatron/runtime/job.h"
#include "megatron/runtime/kernel_profile.h"
#include "megatron/runtime/shared_settings.h"
#include "megatron/serving/bench/load_generator.h"
#include "tools/support/api_key.h"
#include "tools/support/served_job.h"

namespace megatron {
namespace {

constexpr std::string_view kArrivalPatterns[] = {"poisson", "constant"};

struct BenchServeConfig : Config {
  std::string url;
  std::string model;
  std::string api_key_file;
  std::string ca_file;
  int64_t num_requests = 100;
  int64_t num_warmup = 4;
  int64_t concurrency = 16;
  double request_rate = 0.0;
  ArrivalPattern arrival_pattern = ArrivalPattern::kPoisson;
  int64_t prompt_tokens = 512;
  int64_t output_tokens = 128;
  int64_t prefix_tokens = 0;
  double temperature = 0.0;
  int64_t seed = 1234;
  int64_t bench_kernels = 0;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("bench serve");
    v.field(
        "url", url,
        "a server of the OpenAI API that takes token ids (http://127.0.0.1:8000), in place of a "
        "model to load, which is asked without HTTP");
    v.field("model", model, "name of the model; default: the server's first");
    v.field("api_key_file", api_key_file, "a file with the key for the server");
    v.field("ca_file", ca_file, "PEM file of the authorities for https; default: the system's");
    v.field("num_requests", num_requests, "requests that are measured");
    v.field("num_warmup", num_warmup, "requests before them");
    v.field("concurrency", concurrency, "requests in flight at most");
    v.field("request_rate", request_rate, "arrivals a second; 0: a request begins when one ends");
    v.choice("arrival_pattern", arrival_pattern, kArrivalPatterns,
             "of --request-rate: a Poisson process, or all at the same distance");
    v.field("prompt_tokens", prompt_tokens, "random tokens of a prompt");
    v.field("output_tokens", output_tokens, "tokens of a reply; the end token does not end it");
    v.field("prefix_tokens", prefix_tokens, "tokens of each prompt that all of them share");
    v.field("temperature", temperature, "of the draws");
    v.field("seed", seed, "of prompts and arrivals");
    v.field("bench_kernels", bench_kernels,
            "of a model that is loaded, the requests once more under the profiler: time by kind of "
            "work and this many of the longest kernels (0: none)");
    v.field("json", json, "print JSON");
  }
  void validate(Violations& violations) const override {
    at_least(violations, "--num-requests", num_requests, 1);
    at_least(violations, "--num-warmup", num_warmup, 0);
    at_least(violations, "--concurrency", concurrency, 1);
    at_least(violations, "--prompt-tokens", prompt_tokens, 1);
    at_least(violations, "--output-tokens", output_tokens, 1);
    at_least(violations, "--prefix-tokens", prefix_tokens, 0);
    violations.require(
        prefix_tokens <= prompt_tokens,
        cat("--prefix-tokens ", prefix_tokens, " is above --prompt-tokens ", prompt_tokens));
    violations.require(std::isfinite(request_rate) && request_rate >= 0.0,
                       cat("--request-rate ", request_rate, " is negative"));
    at_least(violations, "--bench-kernels", bench_kernels, 0);
    violations.require(bench_kernels == 0 || url.empty(),
                       "--bench-kernels measures this process, and --url is another one");
    violations.require(temperature >= 0.0, cat("--temperature ", temperature, " is negative"));
  }
};

// The kernels of a load, each from its start to its end.
std::string kernels_of(EngineService& engine, int64_t vocab_size, const ClientLoad& load,
                       c10::Device device, int64_t most) {
  ClientLoad measured = load;
  measured.num_warmup = 0;
  ++measured.seed;  // other prompts: the cache knows the first ones
  const std::unique_ptr<LoadTarget> target = make_engine_target(engine, vocab_size);
  const std::vector<KernelEvent> events = profile_kernels([&] {
    run_load(*target, measured, {});
    synchronize(device);
  });
  return events.empty() ? "no kernels: there is no GPU\n"
                        : kernel_table(summarize_kernels(events), static_cast<size_t>(most));
}

// How often the driver was asked for device memory so far.
int64_t device_allocations(const c10::Device& device) {
  if (!device.is_cuda()) return 0;
  return c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(device.index()).num_device_alloc;
}

// What this machine allows at most, and how much of it the load had; "": that is not known.
std::string bound_text(ModelService& service, const EngineConfig& engine, const ClientLoad& load,
                       const LoadSummary& summary, const MachineRates& rates) {
  const LoadedModel& loaded = service.rank().loaded();
  const bool narrow = engine.kv_cache_dtype == KvCacheType::kFp8;
  const auto cost = served_cost(*loaded.model, narrow ? 1 : c10::elementSize(loaded.dtype));
  if (!cost) return "";
  const int64_t cached = engine.prefix_caching ? load.prefix_tokens : 0;
  const ServingBound bound =
      serving_bound(*cost,
                    {.requests = load.num_requests,
                     .together = std::min(load.concurrency, engine.max_requests),
                     .prompt_tokens = std::max<int64_t>(1, load.prompt_tokens - cached),
                     .cached_tokens = cached,
                     .output_tokens = load.output_tokens},
                    rates);
  const auto percent = [](double part) { return format_fixed(100.0 * part, 1) + "%"; };
  std::string text = cat(
      "bound of this machine: copies of ", format_fixed(rates.copied_bytes * 1e-12, 2),
      " TB/s and products of ", format_fixed(rates.operations * 1e-12, 1), " TFLOP/s",
      rates.fp8_operations > 0 ? cat(" (FP8: ", format_fixed(rates.fp8_operations * 1e-12, 1), ")")
                               : "",
      " allow ", format_fixed(bound.token_seconds * 1e3, 2), " ms between tokens");
  if (load.request_rate == 0.0)
    text += cat(" and ", format_fixed(bound.tokens_per_second, 1), " generated tokens/s, of which ",
                percent(summary.output_tokens_per_second / bound.tokens_per_second), " were seen");
  return text;
}

struct BenchServeFlags : ServedJobFlags {
  BenchServeConfig config;
};

ClientLoad client_load(const BenchServeConfig& config) {
  return {.num_requests = config.num_requests,
          .num_warmup = config.num_warmup,
          .concurrency = config.concurrency,
          .request_rate = config.request_rate,
          .arrivals = config.arrival_pattern,
          .prompt_tokens = config.prompt_tokens,
          .output_tokens = config.output_tokens,
          .prefix_tokens = config.prefix_tokens,
          .temperature = config.temperature,
          .seed = static_cast<uint64_t>(config.seed)};
}

LoadResult send_load(LoadTarget& target, const ClientLoad& load) {
  LoadResult result = run_load(target, load, [&](int64_t ended) {
    set_status_line(cat(ended, " of ", load.num_requests, " requests"));
  });
  set_status_line("");
  return result;
}

void check_none_failed(const LoadSummary& summary, const ClientLoad& load) {
  MEGATRON_CHECK(summary.failed == 0, summary.failed, " of ", load.num_requests,
                 " requests failed: ", summary.problems.front());
}

// A server that others have started.
int bench_server(const BenchServeConfig& config) {
  const ClientLoad load = client_load(config);
  const std::unique_ptr<LoadTarget> target = make_http_target(
      parse_url(config.url), config.ca_file, read_api_key(config.api_key_file), config.model);
  const LoadSummary summary = summarise(send_load(*target, load));
  print_line(config.json ? summary_json(summary, load) : summary_text(summary));
  check_none_failed(summary, load);
  return 0;
}

// A model that this process, or several ranks together, load.
int bench_model(const BenchServeFlags& flags, const Job& job) {
  const BenchServeConfig& config = flags.config;
  const ClientLoad load = client_load(config);
  const c10::Device device = choose_device(flags.load.device, job.local_rank);
  MachineRates rates;
  if (!config.json && job.is_first())
    rates = measure_rates(device.is_cuda() ? at::kBFloat16 : at::kFloat, device,
                          flags.load.fp8_format != Fp8Format::kNone);
  const std::shared_ptr<ModelService> service = join_served_job(flags, job, {}, {});
  if (!service) return 0;
  const int64_t vocab_size = service->model().tokenizer->vocab_size();
  const std::unique_ptr<LoadTarget> target = make_engine_target(service->engine(), vocab_size);
  service->warm_up();
  service->start();
  if (job.after_first_step) job.after_first_step();
  const int64_t allocations = device_allocations(device);
  const LoadSummary summary = summarise(send_load(*target, load));
  std::string kernels;
  if (config.bench_kernels > 0)
    kernels = kernels_of(service->engine(), vocab_size, load, device, config.bench_kernels);
  const EngineStats stats = service->engine().stats();
  service->stop();
  if (stats.cached_tokens > 0)
    log_info(cat("prompts: ", stats.cached_tokens, " of ", stats.prompt_tokens,
                 " tokens were in the cache, those of warming up included"));
  if (stats.drafts > 0)
    log_info(cat("drafts: ", stats.accepted_drafts, " of ", stats.drafts, " stand, in ",
                 stats.steps, " steps for ", stats.output_tokens, " tokens"));
  // The line of the start says what was planned.
  if (const int64_t most = memory_use(device).max_allocated; most > 0)
    log_info(cat("memory: at most ", format_bytes(static_cast<double>(most)), " allocated, ",
                 device_allocations(device) - allocations, " device allocations behind the start"));
  print_line(config.json ? summary_json(summary, load) : summary_text(summary));
  if (!config.json) {
    if (const std::string bound = bound_text(*service, flags.engine, load, summary, rates);
        !bound.empty())
      print_line(bound);
    if (!kernels.empty()) print_line(kernels);
  }
  check_none_failed(summary, load);
  return 0;
}

}  // namespace

int bench_serve(int argc, char** argv) {
  BenchServeFlags flags;
  flags.load.required = false;
  Config* const configs[] = {&flags.config, &flags.load, &flags.engine, &flags.ranks, &flags.comm};
  if (!parse_or_help("megatron bench serve --url URL|--load DIR [flags]", configs, argc, argv,
                     {.known = known_inference_flags(/*ranks=*/true),
                      .validate =
                          [&](Violations& v) {
                            require_url_or_load(flags.config.url, flags.load, v);
                            v.require(
                                flags.config.url.empty() || flags.ranks.ranks() == 1,
                                "ranks are those of a model that is loaded, and --url is a server");
                          },
                      .positional = "load"}))
    return 0;
  if (!flags.config.url.empty()) return bench_server(flags.config);
  flags.engine.max_media = ServeLimits().max_media;
  const Launch launch = launch_from_environment();
  RuntimeOptions options = served_job_options(flags, launch, "megatron bench serve");
  options.settings = [&] { return shared_settings(configs); };
  return run_job(launch, options, [&](const Job& job) { return bench_model(flags, job); });
}

}  // namespace megatron
