// megatron retro: what a model that retrieves needs beside its data. A database of the chunks of
// training documents, their vectors, an index of these, and the neighbours of every sample.
#include <array>
#include <charconv>
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/launch.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/tensor/threads.h"
#include "megatron/training/arguments/flag_table.h"
#include "megatron/training/arguments/retro_rules.h"
#include "megatron/training/training_job.h"
#include "tools/support/ranks_command.h"
#include "tools/support/retro_build.h"

namespace megatron {
namespace {

// The flags of the run decide which samples there are; those of its model and its ranks do not.
void keep_what_samples_depend_on(Arguments& arguments) {
  TransformerConfig model;
  model.num_layers = 1;
  model.hidden_size = 64;
  model.num_attention_heads = 1;
  model.seq_length = arguments.transformer.seq_length;
  model.seed = arguments.transformer.seed;
  arguments.transformer = model;
  arguments.parallel = ParallelConfig();
  arguments.pipeline = PipelineConfig();
  arguments.ddp = DistributedDataParallelConfig();
  arguments.optimizer = OptimizerConfig();
  arguments.optimizer.lr = 1e-4;
  arguments.training.task = "gpt";
  arguments.finalize();
}

void check_samples_are_known(const Arguments& arguments, Violations& violations) {
  const int64_t s = arguments.transformer.seq_length,
                m = own_config<RetroConfig>(arguments.own).retro_chunk_length;
  violations.require(m <= 0 || s % m == 0,
                     cat("--seq-length ", s, " is no multiple of --retro-chunk-length ", m));
  violations.require(!own_config<RetroDataConfig>(arguments.own).retro_project_dir.empty(),
                     "--retro-project-dir is required", "a folder");
  violations.require(
      arguments.training.train_samples || arguments.training.global_batch_size,
      "which samples are trained on depends on --global-batch-size, which is not given",
      "that of the run, or --train-samples");
}

struct Shown {
  std::string split;
  int64_t sample = -1;
};

Shown parse_shown(const std::string& text) {
  Shown out;
  const size_t colon = text.find(':');
  const char* end = text.data() + text.size();
  if (colon != std::string::npos) {
    out.split = text.substr(0, colon);
    const auto [last, error] = std::from_chars(text.data() + colon + 1, end, out.sample);
    if (error != std::errc() || last != end) out.sample = -1;
  }
  if (out.sample < 0)
    throw UsageError(cat("--show ", text, " names no sample\nhint: SPLIT:SAMPLE, as train:0"));
  return out;
}

int run_steps(const Arguments& arguments, const RetroBuildConfig& config, const Job& job) {
  use_threads(arguments.training.num_threads, job.local_world_size);
  RetroBuild build(arguments, config, job);
  if (!config.show.empty()) {
    const Shown shown = parse_shown(config.show);
    build.show(shown.split, shown.sample);
    return 0;
  }
  for (const std::string& step : retro_steps(config.retro_tasks)) build.run(step);
  job.groups.world.barrier();  // the first rank may hold the store of all
  return 0;
}

}  // namespace

extern "C" int megatron_retro(int argc, char** argv) {
  const Launch launch = launch_from_environment();
  Arguments arguments;
  RetroBuildConfig config;
  std::vector<Config*> configs = arguments.configs();
  configs.push_back(&config);
  ParseOptions options;
  use_flag_table(options, arguments);
  options.finalize = [&] { keep_what_samples_depend_on(arguments); };
  options.validate = [&](Violations& violations) {
    arguments.validate(violations);
    check_samples_are_known(arguments, violations);
  };
  ParseResult parsed;
  RanksCommand command;
  command.parse = [&] {
    parsed = parse_flags(configs, argc, argv, options);
    if (parsed.help) return true;
    retro_steps(config.retro_tasks);
    if (!config.show.empty()) parse_shown(config.show);
    if (!config.show.empty() && launch.world_size > 1)
      throw UsageError("--show prints from one process\nhint: start it without a launcher");
    return false;
  };
  command.help = [&] {
    return run_help(
        "megatron retro --retro-project-dir DIR --retro-embedder MODEL "
        "[--retro-tasks STEPS] [flags of pretrain]\n"
        "       megatron retro ... --show SPLIT:SAMPLE",
        configs, parsed.help_topic, &config);
  };
  command.run = [&] {
    std::array<Config*, 1> more{&config};
    return run_job(
        launch, arguments, [&](const Job& job) { return run_steps(arguments, config, job); }, more);
  };
  return run_command(launch, command);
}

}  // namespace megatron
