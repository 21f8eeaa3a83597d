// megatron prove: shows that a layout of ranks changes nothing but rounding, for the user's own
// configuration.
#include "megatron/training/proving/prove.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/launch.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/flag_table.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/training/training_job.h"
#include "tools/support/prove_served.h"
#include "tools/support/ranks_command.h"

namespace megatron {
namespace {

struct ProveConfig : Config {
  int64_t world_size = 0;
  std::optional<int64_t> max_axis;
  int64_t steps = 3;
  bool thorough = false;
  bool json = false;

  void fields(FieldVisitor& visitor) override {
    visitor.group("prove");
    visitor.field(
        "world_size", world_size,
        "ranks of the job, as threads on the CPU; 0: two data-parallel ranks, those that a "
        "launcher started, or with --device cuda one on this machine's GPU");
    visitor.field("max_axis", max_axis,
                  "longer axes of tensor, context and data ranks are cut down to this; default: 4, "
                  "for threads");
    visitor.field("steps", steps, "training steps that are compared in fp64");
    visitor.field("thorough", thorough,
                  "also what takes minutes: 512 steps in the run's own type, however large the "
                  "model stays");
    visitor.field("json", json, "print JSON");
  }
  void validate(Violations& violations) const override {
    if (world_size < 0) violations.add(cat("--world-size is ", world_size), "a positive number");
    if (max_axis && *max_axis < 1)
      violations.add(cat("--max-axis is ", *max_axis), "a positive number");
    if (steps < 1) violations.add(cat("--steps is ", steps), "a positive number");
  }
};

std::string line_text(const ProofLine& line) {
  return cat(format_text("  %-16s %6lld %10.2e %10.2e  %-7s ", line.quantity.c_str(),
                         static_cast<long long>(line.compared), line.difference, line.allowed,
                         line.failed == 0 ? "holds" : "FAILS"),
             line.worst);
}

void print_proof(const Proof& proof) {
  print_line(cat(proof.dtype, ": ", proof.claim));
  print_line(
      "  quantity       compared difference       band  verdict  nearest to the limit, or first "
      "beyond it");
  for (const ProofLine& line : proof.lines)
    if (line.compared > 0) print_line(line_text(line));
  for (const std::string& fault : proof.faults) print_line(cat("  FAILS: ", fault));
  if (proof.routed_tokens > 0)
    print_line(cat("  routers: ", proof.routed_otherwise, " of ", proof.routed_tokens,
                   " tokens would go to other experts than on one rank"));
  for (const std::string& what : proof.not_proved) print_line(cat("  not proved: ", what));
  constexpr size_t kNamed = 8;
  for (size_t i = 0; i < std::min(proof.hidden.size(), kNamed); ++i) {
    const HiddenBias& hidden = proof.hidden[i];
    print_line(hidden.visible < 1
                   ? cat("  not proved: errors below ", format_text("%.1f%%", 100 * hidden.visible),
                         " of the ", hidden.name, ", which rounding hides")
                   : cat("  not proved: the ", hidden.name, ", of which rounding leaves nothing"));
  }
  if (proof.hidden.size() > kNamed)
    print_line(cat("  not proved: ", proof.hidden.size() - kNamed, " more of these (--json)"));
}

std::string json_text(const Shrunk& shrunk, const std::vector<Proof>& proofs, bool holds) {
  JsonWriter json(2);
  json.begin_object()
      .member("holds", holds)
      .member("shrunk", shrunk.changes)
      .member("lost", shrunk.lost);
  json.key("proofs").begin_array();
  for (const Proof& proof : proofs) {
    json.begin_object()
        .member("dtype", proof.dtype)
        .member("claim", proof.claim)
        .member("holds", proof.holds())
        .key("lines")
        .begin_array();
    for (const ProofLine& line : proof.lines) {
      json.begin_object()
          .member("quantity", line.quantity)
          .member("compared", line.compared)
          .member("failed", line.failed);
      json.member("difference", line.difference)
          .member("band", line.allowed)
          .member("worst", line.worst)
          .end_object();
    }
    json.end_array()
        .member("faults", proof.faults)
        .member("not_proved", proof.not_proved)
        .member("routed_tokens", proof.routed_tokens)
        .member("routed_otherwise", proof.routed_otherwise)
        .key("hidden")
        .begin_array();
    for (const HiddenBias& hidden : proof.hidden) {
      json.begin_object().member("name", hidden.name);
      if (hidden.visible < 1) json.member("visible", hidden.visible);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().end_object();
  return json.text();
}

// Prints the proofs and the ranks that ran them; on the first rank.
void print_proofs(const Shrunk& shrunk, const std::vector<Proof>& proofs, const std::string& ranks,
                  bool holds, bool json) {
  if (json) return print_line(json_text(shrunk, proofs, holds));
  print_line(cat("a tiny model of the same structure, ", shrunk.arguments.world_size, " ranks as ",
                 ranks, " against one:"));
  for (const std::string& change : shrunk.changes) print_line("  " + change);
  for (const std::string& lost : shrunk.lost) print_line(cat("  not proved: ", lost));
  for (const Proof& proof : proofs) print_proof(proof);
  print_line(holds ? "the layout changes nothing but rounding"
                   : "MISMATCH: this layout does not compute what one rank computes");
}

// With threads as ranks; axes with too many ranks for one machine are shortened.
int prove_with_threads(const Arguments& arguments, const ProveConfig& config) {
  use_threads(arguments.training.num_threads);
  const Shrunk shrunk =
      shrink(arguments, config.max_axis.value_or(4), static_cast<int>(config.steps));
  const PretrainTask task = find_task(arguments);
  std::vector<Proof> proofs =
      prove(task, shrunk.arguments, static_cast<int>(config.steps), config.thorough);
  proofs.push_back(prove_served(task, shrunk.arguments));
  const bool holds = all_hold(proofs, Job());
  print_proofs(shrunk, proofs, "threads", holds, config.json);
  return holds ? 0 : kExitFailure;
}

// Ranks on GPUs cannot be threads.
bool runs_as_process(const Arguments& arguments, const Launch& launch) {
  const DeviceChoice device = arguments.training.device;
  return launch.world_size > 1 || (device != DeviceChoice::kAuto && device != DeviceChoice::kCpu);
}

// As one of the ranks of a launcher, or alone, each on its device. All ranks exit with the verdict.
int prove_with_processes(const Arguments& arguments, ProveConfig& config, const Launch& launch) {
  const Shrunk shrunk = shrink(arguments, launch.world_size, static_cast<int>(config.steps),
                               /*on_gpu=*/arguments.training.device != DeviceChoice::kCpu);
  return run_job(
      launch, shrunk.arguments,
      [&](const Job& job) {
        const c10::Device device = choose_device(arguments.training.device, job.local_rank);
        use_threads(arguments.training.num_threads, job.local_world_size);
        const PretrainTask task = find_task(arguments);
        std::vector<Proof> proofs = prove(task, shrunk.arguments, static_cast<int>(config.steps),
                                          job, device, config.thorough);
        if (job.is_first()) proofs.push_back(prove_served(task, shrunk.arguments));
        const bool holds = all_hold(proofs, job);
        if (job.is_first())
          print_proofs(shrunk, proofs, device.is_cuda() ? "processes on GPUs" : "processes", holds,
                       config.json);
        return holds ? 0 : kExitFailure;
      },
      std::array<Config*, 1>{&config});
}

}  // namespace

extern "C" int megatron_prove(int argc, char** argv) {
  const Launch launch = launch_from_environment();
  Arguments arguments;
  ProveConfig config;
  std::vector<Config*> configs = arguments.configs();
  configs.push_back(&config);
  ParseOptions options;
  use_flag_table(options, arguments);
  options.finalize = [&] {
    // Nothing is read or written: the data is synthetic and the vocabulary size does not matter.
    if (arguments.data.data_path.empty()) arguments.data.mock_data = true;
    if (arguments.tokenizer.tokenizer_type.empty())
      arguments.tokenizer.tokenizer_type = "ByteLevelTokenizer";
    if (!arguments.optimizer.lr) arguments.optimizer.lr = 1e-3;
    if (!arguments.training.train_iters && !arguments.training.train_samples)
      arguments.training.train_iters = 100;
    const ParallelConfig& p = arguments.parallel;
    arguments.world_size = runs_as_process(arguments, launch) ? launch.world_size
                           : config.world_size > 0
                               ? config.world_size
                               : 2 * p.tensor_model_parallel_size * p.pipeline_model_parallel_size *
                                     p.context_parallel_size;
    arguments.finalize();
  };
  options.validate = [&](Violations& violations) {
    arguments.validate(violations);
    if (!runs_as_process(arguments, launch)) return;
    if (config.world_size > 0 && config.world_size != launch.world_size)
      violations.add(
          cat("--world-size is ", config.world_size, ", but ", launch.world_size,
              launch.world_size == 1 ? " rank was started" : " ranks were started"),
          launch.world_size == 1
              ? "several ranks on GPUs are processes: start them with a launcher (torchrun)"
              : "leave it out under a launcher");
    if (config.max_axis && launch.world_size > 1)
      violations.add(
          "--max-axis reduces the number of ranks, but a launcher has already started them",
          "leave it out under a launcher");
  };
  ParseResult parsed;
  RanksCommand command;
  command.parse = [&] {
    parsed = parse_flags(configs, argc, argv, options);
    return parsed.help;
  };
  command.help = [&] {
    return run_help("megatron prove [--world-size N] [flags of pretrain]", configs,
                    parsed.help_topic, &config);
  };
  command.run = [&] {
    return runs_as_process(arguments, launch) ? prove_with_processes(arguments, config, launch)
                                              : prove_with_threads(arguments, config);
  };
  return run_command(launch, command);
}

}  // namespace megatron
