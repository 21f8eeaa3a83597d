// megatron check: all rules that a configuration violates on a number of ranks; for a valid one
// layers and parameters by stage, memory and communication of a rank, and a drawing of the
// schedule. With --serve memory of a server (support/check_serving.h). Needs no GPU.
#include "megatron/base/check.h"

#include <optional>
#include <string>
#include <vector>

#include "megatron/base/exit_codes.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/models/model_table.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/training/arguments/flag_table.h"
#include "megatron/training/planning/layout_check.h"
#include "megatron/training/planning/layout_verdict.h"
#include "megatron/training/tasks/tasks.h"
#include "tools/support/check_serving.h"

namespace megatron {
namespace {

struct CheckConfig : Config {
  int64_t world_size = 1;
  std::string svg;
  bool json = false;
  bool show_schedule = true;
  std::optional<double> attained_tflops, inside_bandwidth, network_bandwidth, checkpoint_bandwidth,
      checkpoint_bandwidth_of_all;
  std::optional<int64_t> ranks_per_machine;
  std::optional<double> load_factor;

  void fields(FieldVisitor& visitor) override {
    visitor.group("check");
    visitor.field("world_size", world_size, "ranks of the job");
    visitor.field("svg", svg, "write a picture of the pipeline's schedule to this file");
    visitor.field("json", json, "print JSON, sizes in bytes");
    visitor.field("show_schedule", show_schedule, "draw the pipeline's schedule as text");
    visitor.field("attained_tflops", attained_tflops,
                  "TFLOP/s that a rank attains in the layers, for the time of a step; default: "
                  "what --device h100, "
                  "h200 or b200 is known to attain");
    visitor.field("inside_bandwidth", inside_bandwidth,
                  "GB/s that a rank sends to ranks of its machine; needed by that time unless "
                  "--device says it");
    visitor.field(
        "network_bandwidth", network_bandwidth,
        "GB/s that a rank sends to other machines; needed by that time unless --device says it");
    visitor.field("ranks_per_machine", ranks_per_machine, "ranks of one machine; default: 8");
    visitor.field("load_factor", load_factor,
                  "plan for ranks whose experts have this multiple of a balanced share of tokens; "
                  "default: 1");
    visitor.field("checkpoint_bandwidth", checkpoint_bandwidth,
                  "GB/s that a rank writes, for the time of a checkpoint");
    visitor.field("checkpoint_bandwidth_of_all", checkpoint_bandwidth_of_all,
                  "GB/s that all ranks write together at most; default: no limit");
  }
  void validate(Violations& violations) const override {
    if (world_size < 1) violations.add(cat("--world-size is ", world_size), "a positive number");
    if (ranks_per_machine && *ranks_per_machine < 1)
      violations.add(cat("--ranks-per-machine is ", *ranks_per_machine), "a positive number");
    const auto positive = [&](const char* flag, const std::optional<double>& value) {
      if (value && !(*value > 0)) violations.add(cat(flag, " is ", *value), "a positive number");
    };
    positive("--attained-tflops", attained_tflops);
    positive("--inside-bandwidth", inside_bandwidth);
    positive("--network-bandwidth", network_bandwidth);
    positive("--checkpoint-bandwidth", checkpoint_bandwidth);
    positive("--checkpoint-bandwidth-of-all", checkpoint_bandwidth_of_all);
    if (checkpoint_bandwidth_of_all && !checkpoint_bandwidth)
      violations.add("--checkpoint-bandwidth-of-all has no effect without --checkpoint-bandwidth");
  }
};

// Fills in required flags that do not affect the layout. Returns a note for each.
std::vector<std::string> fill_in(Arguments& arguments) {
  std::vector<std::string> missing;
  const auto fill = [&](bool given, const char* flag, const auto& set) {
    if (given) return;
    missing.emplace_back(flag);
    set();
  };
  DataConfig& data = arguments.data;
  const bool has_data = data.mock_data || !data.data_path.empty() || !data.data_args_path.empty() ||
                        !data.train_data_path.empty() || !data.valid_data_path.empty() ||
                        !data.test_data_path.empty() || !data.per_split_data_args_path.empty();
  fill(has_data, "data (--data-path, or --mock-data)", [&] { data.mock_data = true; });
  fill(!arguments.tokenizer.tokenizer_type.empty(), "--tokenizer-type", [&] {
    TokenizerConfig& tokenizer = arguments.tokenizer;
    tokenizer.tokenizer_type = "NullTokenizer";  // its vocabulary size must be given
    if (!tokenizer.vocab_size) tokenizer.vocab_size = tokenizer.padded_vocab_size;
  });
  fill(arguments.optimizer.lr.has_value() || arguments.training.skip_train, "--lr",
       [&] { arguments.optimizer.lr = 1e-4; });
  fill(arguments.training.train_iters || arguments.training.train_samples,
       "--train-iters or --train-samples", [&] { arguments.training.train_iters = 1000000; });
  return missing;
}

// The step time needs all three rates: given by flags, or those of the named device.
void speeds_are_known(const CheckConfig& config, const Arguments& arguments,
                      Violations& violations) {
  std::string missing;
  int given = 0;
  for (const auto& [flag, value] : {std::pair{"--attained-tflops", &config.attained_tflops},
                                    std::pair{"--inside-bandwidth", &config.inside_bandwidth},
                                    std::pair{"--network-bandwidth", &config.network_bandwidth}}) {
    given += value->has_value();
    if (!value->has_value()) missing += cat(missing.empty() ? "" : " and ", flag);
  }
  if (given > 0 && given < 3 && device_model(arguments.training.device) == nullptr)
    violations.add(cat("the time of a step also needs ", missing),
                   "give all three speeds, or a known GPU with --device h100, h200 or b200");
}

void load_is_possible(const std::optional<double>& load, const Arguments& arguments,
                      Violations& violations) {
  if (!load) return;
  const TransformerConfig& model = arguments.transformer;
  const int64_t ranks = arguments.parallel.expert_model_parallel_size;
  if (!model.has_moe() || ranks <= 1) {
    violations.add("--load-factor has no effect: every rank has all experts",
                   "--expert-model-parallel-size above 1");
    return;
  }
  if (model.num_experts % ranks != 0) return;  // a violation of its own
  const double worst = worst_expert_load(model, ranks);
  violations.require(*load >= 1 && *load <= worst,
                     cat("--load-factor ", *load, ": expected 1, balance, to ", worst,
                         ", where every token chooses the experts of one rank"));
}

LayoutQuestions questions_of(const CheckConfig& config, const Arguments& arguments) {
  LayoutQuestions questions;
  const DeviceModel* const device = questions.device = device_model(arguments.training.device);
  if (device != nullptr || config.attained_tflops) {
    MachineSpeeds speeds = device != nullptr ? speeds_of(*device, arguments) : MachineSpeeds{};
    if (config.attained_tflops) speeds.flops = *config.attained_tflops * 1e12;
    if (config.inside_bandwidth) speeds.inside_bandwidth = *config.inside_bandwidth * 1e9;
    if (config.network_bandwidth) speeds.network_bandwidth = *config.network_bandwidth * 1e9;
    if (config.ranks_per_machine) speeds.ranks_per_machine = *config.ranks_per_machine;
    questions.speeds = speeds;
  }
  questions.checkpoint_bandwidth = config.checkpoint_bandwidth.value_or(0) * 1e9;
  questions.checkpoint_bandwidth_of_all = config.checkpoint_bandwidth_of_all.value_or(0) * 1e9;
  return questions;
}

Vocabulary planned_vocabulary(const Arguments& arguments) {
  const TokenizerConfig& config = arguments.tokenizer;
  if (config.padded_vocab_size)
    return {config.vocab_size.value_or(*config.padded_vocab_size), *config.padded_vocab_size};
  const int64_t size =
      config.vocab_size ? *config.vocab_size : make_tokenizer(config)->vocab_size();
  const int64_t padded = padded_vocab_size(config, size, arguments.vocabulary_ranks());
  return {config.vocab_size.value_or(padded), padded};
}

ModelConfig model_config_of(const Arguments& arguments) {
  const Vocabulary vocabulary = likely_vocabulary(arguments);
  return whole_model(find_task(arguments).model_provider, arguments, vocabulary)->config();
}

}  // namespace

extern "C" int megatron_check(int argc, char** argv) {
  if (asks_for_serving(argc, argv)) return check_serving(argc, argv);
  Arguments arguments;
  CheckConfig config;
  std::vector<std::string> missing;
  std::vector<Config*> configs = arguments.configs();
  configs.push_back(&config);
  ParseOptions options;
  use_flag_table(options, arguments);
  options.finalize = [&] {
    missing = fill_in(arguments);
    arguments.world_size = config.world_size;
    arguments.finalize();
  };
  options.validate = [&](Violations& violations) {
    arguments.validate(violations);
    speeds_are_known(config, arguments, violations);
    load_is_possible(config.load_factor, arguments, violations);
  };
  if (const ParseResult parsed = parse_flags(configs, argc, argv, options); parsed.help) {
    print_line(
        run_help("megatron check --world-size N [--config FILE] [flags of pretrain]\n"
                 "       megatron check --serve --load DIR [flags of the engine]",
                 configs, parsed.help_topic, &config));
    return 0;
  }
  if (arguments.parallel.hybrid_context_parallel)
    throw UsageError(
        "memory and communication with --hybrid-context-parallel depend on the lengths of the "
        "documents, which check does "
        "not see\nhint: every rule holds; leave it out to see what a fixed --context-parallel-size "
        "costs");
  if (const std::string_view reason = unplanned_reason(model_config_of(arguments)); !reason.empty())
    throw UsageError(std::string(reason));
  const bool on_gpu = arguments.training.device != DeviceChoice::kCpu;
  LayoutPlan plan = make_layout_plan(arguments, planned_vocabulary(arguments), on_gpu,
                                     find_task(arguments).model_provider);
  plan.set_expert_load(config.load_factor.value_or(1.0));
  const LayoutReport report = make_layout_report(plan, questions_of(config, arguments));
  if (!config.svg.empty()) write_file_atomically(config.svg, schedule_svg(plan));
  const std::optional<DeviceVerdict>& verdict = report.verdict;
  const int outcome = verdict && !verdict->fits() ? kExitFailure : 0;
  if (config.json) {
    print_line(layout_json(plan, report));
    return outcome;
  }
  print_line(layout_text(plan, report));
  if (plan.pipeline > 1 && config.show_schedule) print_line(schedule_text(plan, 150));
  const std::string dropout = attention_dropout_text(plan, report);
  if (!dropout.empty()) log_warning(dropout);
  print_line("every rule holds");
  if (!missing.empty()) print_line(cat("pretrain will also need ", listed(missing)));
  if (!verdict) return 0;
  print_line(verdict_text(*verdict));
  if (!verdict->device->measured && report.step)
    print_line(cat("the time of a step on a ", verdict->device->name,
                   " is scaled from measurements on Hopper GPUs"));
  return outcome;
}

}  // namespace megatron
