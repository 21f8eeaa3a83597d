// megatron check: every rule that a configuration breaks on a number of ranks, and what it costs where it breaks none:
// layers and parameters by stage, memory and communication of a rank, the schedule as a picture. Without GPUs.
#include "megatron/base/check.h"

#include <string>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/training/flag_table.h"
#include "megatron/training/layout_check.h"
#include "tools/commands.h"

namespace megatron {
namespace {

struct CheckConfig : Config {
  int64_t world_size = 1;
  std::string svg;
  bool json = false;
  bool show_schedule = true;

  void fields(FieldVisitor& visitor) override {
    visitor.group("check");
    visitor.field("world_size", world_size, "ranks of the job");
    visitor.field("svg", svg, "write a picture of the pipeline's schedule to this file");
    visitor.field("json", json, "print JSON, sizes in bytes");
    visitor.field("show_schedule", show_schedule, "draw the pipeline's schedule as text");
  }
  void validate(Violations& violations) const override {
    if (world_size < 1) violations.add(cat("--world-size is ", world_size), "a positive number");
  }
};

// What a run needs and its layout does not depend on; told apart from what was given.
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
    tokenizer.tokenizer_type = "NullTokenizer";  // the size of its vocabulary has to be given
    if (!tokenizer.vocab_size) tokenizer.vocab_size = tokenizer.padded_vocab_size;
  });
  fill(arguments.optimizer.lr.has_value() || arguments.training.skip_train, "--lr",
       [&] { arguments.optimizer.lr = 1e-4; });
  fill(arguments.training.train_iters || arguments.training.train_samples, "--train-iters or --train-samples",
       [&] { arguments.training.train_iters = 1000000; });
  return missing;
}

int64_t vocabulary_rows(const Arguments& arguments) {
  const TokenizerConfig& config = arguments.tokenizer;
  if (config.padded_vocab_size) return *config.padded_vocab_size;
  const int64_t size = config.vocab_size ? *config.vocab_size : make_tokenizer(config)->vocab_size();
  return padded_vocab_size(config, size, arguments.vocabulary_ranks());
}

}  // namespace

int check_command(int argc, char** argv) {
  Arguments arguments;
  CheckConfig config;
  std::vector<std::string> missing;
  std::vector<Config*> configs = arguments.configs();
  configs.push_back(&config);
  ParseOptions options;
  options.known = flag_table();
  options.finalize = [&] {
    missing = fill_in(arguments);
    arguments.world_size = config.world_size;
    arguments.finalize();
  };
  options.validate = [&](Violations& violations) { arguments.validate(violations); };
  if (parse_flags(configs, argc, argv, options).help) {
    print_line(help_text("megatron check --world-size N [--config FILE] [flags of pretrain]", configs));
    return 0;
  }
  const bool on_gpu = arguments.training.device != DeviceChoice::kCpu;
  const LayoutPlan plan = make_layout_plan(arguments, vocabulary_rows(arguments), on_gpu);
  const LayoutReport report = make_layout_report(plan);
  if (!config.svg.empty()) write_file_atomically(config.svg, schedule_svg(plan));
  if (config.json) {
    print_line(layout_json(plan, report));
    return 0;
  }
  print_line(layout_text(plan, report));
  if (plan.pipeline > 1 && config.show_schedule) print_line(schedule_text(plan, 150));
  std::string needs;
  for (const std::string& flag : missing) needs += (needs.empty() ? "" : ", ") + flag;
  print_line("every rule holds");
  if (!needs.empty()) print_line(cat("pretrain will also need ", needs));
  return 0;
}

}  // namespace megatron
