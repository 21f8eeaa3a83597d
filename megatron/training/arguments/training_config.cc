#include "megatron/training/arguments/training_config.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/threads.h"

namespace megatron {

namespace {

constexpr std::array<std::string_view, 6> kDevices = {"auto", "cpu",  "cuda",
                                                      "h100", "h200", "b200"};
constexpr std::array<std::string_view, 4> kStarts = {"auto", "fresh", "resume", "resume-or-fresh"};
constexpr std::array<std::string_view, 2> kGraphImpls = {"none", "local"};
constexpr std::array<std::string_view, 2> kSaveFailures = {"stop", "continue"};
constexpr std::array<std::string_view, 4> kSignals = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"};
constexpr std::array<std::string_view, 3> kTimingOptions = {"max", "minmax", "all"};

// Adds a violation for a value that is below `least`.
void at_least(Violations& violations, std::string_view flag, std::optional<int64_t> value,
              int64_t least) {
  if (value && *value < least)
    violations.add(cat(flag, " is ", *value), cat("give an integer of at least ", least));
}

void check_stopped_exit_code(Violations& violations, std::optional<int64_t> code) {
  if (!code) return;
  if (*code < 0 || *code > 125)
    violations.add(cat("--stopped-exit-code is ", *code),
                   "give 0, or 4 to 125: shells use those above");
  for (const int taken : {kExitFailure, kExitUsage, kExitInternal, kExitRetry})
    if (*code == taken)
      violations.add(cat("--stopped-exit-code is ", *code, ", which stands for a failure"),
                     "give another one, such as 85");
}

// Whether the pattern matches the name, or a prefix of it that ends before a dot.
bool stands_for(const std::string& pattern, std::string_view name) {
  for (size_t end = name.find('.'); end != std::string_view::npos; end = name.find('.', end + 1))
    if (fnmatch(pattern.c_str(), std::string(name.substr(0, end)).c_str(), 0) == 0) return true;
  return fnmatch(pattern.c_str(), std::string(name).c_str(), 0) == 0;
}

bool any_stands_for(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return stands_for(pattern, name); });
}

}  // namespace

void TrainingConfig::fields(FieldVisitor& v) {
  training_fields(v);
  logging_fields(v);
  checkpoint_fields(v);
}

void TrainingConfig::training_fields(FieldVisitor& v) {
  v.group("training");
  v.role(FieldRole::kNumerics);
  v.field("task", task,
          "what is trained on: gpt (text), sft (conversations) or dpo (pairs of responses)");
  v.field("micro_batch_size", micro_batch_size,
          "samples per rank and pass; memory grows with it (required)");
  v.field(
      "global_batch_size", global_batch_size,
      "samples per iteration over all ranks; default: micro batch size times data-parallel size");
  v.role(FieldRole::kRun);
  v.field("step_batch_size_schedule", step_batch_size_schedule,
          "batch sizes that grow: \"0:32 10B:64\" is 64 samples from 10 billion tokens on");
  v.field("decrease_batch_size_if_needed", decrease_batch_size_if_needed,
          "round the global batch size down to what micro batches and ranks divide");
  v.field("train_iters", train_iters, "iterations of the whole run");
  v.field("train_samples", train_samples, "samples of the whole run, in place of --train-iters");
  v.role(FieldRole::kNumerics);
  v.field({"calculate_per_token_loss", "--no-calculate-per-token-loss", true},
          calculate_per_token_loss,
          "average the means of the micro-batches, as Megatron-LM does, in place of all tokens of "
          "the global batch");
  v.role(FieldRole::kRun);
  v.field(
      "adapter", adapter,
      "folder of PEFT whose adapters a new run starts from, with their rank, alpha and targets");
  v.role(FieldRole::kNumerics);
  v.field("freeze", freeze,
          "parameters that stay as they are: names or what names begin with, such as embedding "
          "decoder.layers.0 'decoder.layers.*.mlp'; no gradient and no optimizer state is kept for "
          "them");
  v.field("freeze_except", freeze_except, "freeze every parameter but these; patterns as --freeze");
  v.field("freeze_all_layers", freeze_all_layers, "freeze every parameter");
  v.role(FieldRole::kRun);
  v.field("skip_train", skip_train, "evaluate only");
  v.role(FieldRole::kMachine);
  v.choice("device", device, kDevices,
           "auto: the GPU when there is one; h100, h200, b200: a GPU of that model");
  v.field("num_threads", num_threads, kNumThreadsHelp);
  v.field({"gemm_tuning", "--no-gemm-tuning", true}, gemm_tuning,
          "take cuBLASLt's own choice of algorithms in place of the fastest, timed once and kept "
          "in ~/.cache/megatron");
  v.choice("cuda_graph_impl", cuda_graph_impl, kGraphImpls,
           "local: forward and backward of a micro-batch are one CUDA graph");
  v.field("enable_cuda_graph", enable_cuda_graph, "--cuda-graph-impl local");
  v.field("cuda_graph_warmup_steps", cuda_graph_warmup_steps,
          "iterations without CUDA graphs at the start of a run");
  v.role(FieldRole::kRun);
  v.field(
      "check_weight_hash_across_dp_replicas_interval",
      check_weight_hash_across_dp_replicas_interval,
      "iterations between comparisons, by hashes, of the weights, master weights and moments that "
      "several ranks hold; a difference names the rank and ends the run; 0: never; default: 100");
  v.field("exit_interval", exit_interval, "save and stop when the iteration is a multiple of this");
  v.field("exit_duration_in_mins", exit_duration_in_mins,
          "save and stop so early that the checkpoint is written within this many minutes");
  v.field({"exit_signal_handler", "--no-exit-signal-handler", true}, exit_signal_handler,
          "let signals end the process as usual; by default the first one saves and stops, the "
          "second stops at once");
  v.choice("exit_signal", exit_signal, kSignals, "handled besides SIGTERM and SIGINT");
  v.field("exit_signal_grace_seconds", exit_signal_grace_seconds,
          "how long after a signal the process is killed: a run whose step and save take longer "
          "says so; default: 30 under torchrun");
  v.field(
      "stopped_exit_code", stopped_exit_code,
      "exit code of a run that was stopped by a signal, --exit-interval or "
      "--exit-duration-in-mins and can be resumed; default: 0. Not under torchrun, which starts "
      "ranks again after any other code");
  v.group("validation");
  v.field("eval_iters", eval_iters, "global batches of one evaluation; 0: no evaluation");
  v.field("eval_interval", eval_interval,
          "iterations between evaluations; default: only after training");
  v.field("start_eval_at_iter", start_eval_at_iter, "no evaluation before this iteration");
  v.field("eval_global_batch_size", eval_global_batch_size, "default: --global-batch-size");
  v.field("eval_micro_batch_size", eval_micro_batch_size, "default: --micro-batch-size");
}

void TrainingConfig::logging_fields(FieldVisitor& v) {
  v.group("logging");
  v.field("log_interval", log_interval, "iterations between log lines");
  v.field("log_throughput", log_throughput, "TFLOP/s per GPU in the log line");
  v.field("log_params_norm", log_params_norm, "norm of the parameters in the log line");
  v.field("log_num_zeros_in_grad", log_num_zeros_in_grad,
          "number of zeros in the gradient in the log line");
  v.field("log_progress", log_progress, "append starts, saves and ends to progress.txt in --save");
  v.field("log_memory_interval", log_memory_interval,
          "iterations between reports of memory, the most over all ranks");
  v.field("timing_log_level", timing_log_level,
          "timers: 0 the iteration, 1 its parts, 2 each micro-batch (waits for the device)");
  v.choice(
      "timing_log_option", timing_log_option, kTimingOptions,
      "how timers of several ranks are shown: the longest, the shortest and the longest, or all");
  v.field("tensorboard_dir", tensorboard_dir, "folder of TensorBoard event files; empty: none");
  v.field("tensorboard_log_interval", tensorboard_log_interval,
          "iterations between TensorBoard records");
  v.field("tensorboard_queue_size", tensorboard_queue_size, "TensorBoard records between flushes");
  v.field("log_timers_to_tensorboard", log_timers_to_tensorboard, "timers in TensorBoard");
  v.field({"log_loss_scale_to_tensorboard",
           "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard", true},
          log_loss_scale_to_tensorboard, "no loss scale in TensorBoard");
  v.field("log_validation_ppl_to_tensorboard", log_validation_ppl_to_tensorboard,
          "validation perplexity in TensorBoard");
  v.field("log_memory_to_tensorboard", log_memory_to_tensorboard, "memory in TensorBoard");
  v.field("log_world_size_to_tensorboard", log_world_size_to_tensorboard,
          "number of ranks in TensorBoard");
  v.field("wandb_project", wandb_project,
          "project of Weights & Biases: the run is written to a file that wandb sync uploads; "
          "empty: none");
  v.field("wandb_exp_name", wandb_exp_name, "name of the run in Weights & Biases");
  v.field("wandb_entity", wandb_entity, "team or user of Weights & Biases that owns the project");
  v.field("wandb_save_dir", wandb_save_dir,
          "folder in which wandb/offline-run-... is written; default: the folder of the run");
  v.field(
      "prometheus_textfile", prometheus_textfile,
      "file, ending in .prom, of the latest numbers for the textfile collector of node_exporter");
  v.field("run_dir", run_dir,
          "folder of metrics.jsonl and of the resolved config.yaml; default: --save");
  v.group("profiling");
  v.field("profile", profile,
          "profile some steps: a CUDA profiler range on a GPU, trace.json in the run's folder on a "
          "CPU");
  v.field("profile_step_start", profile_step_start, "first profiled iteration");
  v.field("profile_step_end", profile_step_end, "iteration before which profiling ends");
  v.field("profile_ranks", profile_ranks, "ranks of the job that --profile covers");
}

void TrainingConfig::checkpoint_fields(FieldVisitor& v) {
  v.group("checkpointing");
  v.field("save", save, "folder of checkpoints that is written");
  v.field({"save_interval", "--save-interval --persistent-save-interval"}, save_interval,
          "iterations between checkpoints; default: only at the end");
  v.field("save_retain_interval", save_retain_interval,
          "keep checkpoints whose iteration is a multiple of this, and the newest one");
  v.field("keep_last_checkpoints", keep_last_checkpoints,
          "keep the newest K checkpoints; default: all");
  v.field("async_save", async_save,
          "write checkpoints in the background; a step pays only for the copy to host memory");
  v.choice("save_failure", save_failure, kSaveFailures,
           "what to do when a checkpoint cannot be written");
  v.field(
      {"save_frozen", "--no-save-frozen", true}, save_frozen,
      "leave frozen weights out of checkpoints (adapters alone with --lora-rank); a resume takes "
      "them from --pretrained-checkpoint");
  v.field("no_save_optim", no_save_optim, "leave the optimizer's state out of checkpoints");
  v.field("load", load, "folder of checkpoints, or one checkpoint, to start from");
  v.choice(
      {"start", "--start-mode --start"}, start, kStarts,
      "resume: a checkpoint must be there; resume-or-fresh: or begin anew; fresh: load nothing; "
      "auto: resume with --load, else fresh");
  v.field("ckpt_step", ckpt_step, "load this iteration and no other");
  v.field("no_load_optim", no_load_optim, "do not load the optimizer's state");
  v.field("finetune", finetune,
          "load the weights only; iterations, samples and the optimizer start anew");
  v.field("pretrained_checkpoint", pretrained_checkpoint,
          "checkpoint whose weights to start from when --load holds none");
  v.field("use_checkpoint_args", use_checkpoint_args,
          "take what the flags leave open of the model and the tokenizer from the configuration in "
          "the checkpoint");
  v.field(
      "use_mp_args_from_checkpoint_args", use_mp_args_from_checkpoint_args,
      "take what the flags leave open of tensor and pipeline parallelism from the configuration "
      "in the checkpoint");
  v.field("accept_new_data_order", accept_new_data_order,
          "resume although the order of the training samples is not that of the checkpoint");
}

void TrainingConfig::validate(Violations& violations) const {
  if (micro_batch_size <= 0)
    violations.add(cat("--micro-batch-size is ", micro_batch_size),
                   "give how many samples a rank takes per pass, at least 1");
  at_least(violations, "--global-batch-size", global_batch_size, 1);
  at_least(violations, "--train-iters", train_iters, 0);
  at_least(violations, "--check-weight-hash-across-dp-replicas-interval",
           check_weight_hash_across_dp_replicas_interval, 0);
  at_least(violations, "--train-samples", train_samples, 0);
  at_least(violations, "--num-threads", num_threads, 0);
  at_least(violations, "--cuda-graph-warmup-steps", cuda_graph_warmup_steps, 1);
  at_least(violations, "--exit-interval", exit_interval, 1);
  at_least(violations, "--exit-duration-in-mins", exit_duration_in_mins, 0);
  at_least(violations, "--exit-signal-grace-seconds", exit_signal_grace_seconds, 1);
  check_stopped_exit_code(violations, stopped_exit_code);
  at_least(violations, "--eval-iters", eval_iters, 0);
  at_least(violations, "--eval-interval", eval_interval, 1);
  at_least(violations, "--eval-global-batch-size", eval_global_batch_size, 1);
  at_least(violations, "--eval-micro-batch-size", eval_micro_batch_size, 1);
  at_least(violations, "--log-interval", log_interval, 1);
  at_least(violations, "--log-memory-interval", log_memory_interval, 1);
  at_least(violations, "--tensorboard-log-interval", tensorboard_log_interval, 1);
  at_least(violations, "--tensorboard-queue-size", tensorboard_queue_size, 1);
  if (wandb_project.empty() && !(wandb_exp_name + wandb_entity + wandb_save_dir).empty())
    violations.add(
        "--wandb-exp-name, --wandb-entity and --wandb-save-dir have no effect without "
        "--wandb-project");
  if (!wandb_project.empty() && wandb_folder().empty())
    violations.add("--wandb-project has no folder to write to",
                   "give --wandb-save-dir, --run-dir or --save");
  if (!prometheus_textfile.empty() && !prometheus_textfile.ends_with(".prom"))
    violations.add(cat("--prometheus-textfile ", prometheus_textfile, " does not end in .prom"),
                   "node_exporter reads no other files");
  at_least(violations, "--save-interval", save_interval, 1);
  at_least(violations, "--save-retain-interval", save_retain_interval, 1);
  at_least(violations, "--keep-last-checkpoints", keep_last_checkpoints, 1);
  at_least(violations, "--ckpt-step", ckpt_step, 0);
  if (timing_log_level < 0 || timing_log_level > 2)
    violations.add(cat("--timing-log-level is ", timing_log_level), "give 0, 1 or 2");
  if (train_iters.has_value() == train_samples.has_value())
    violations.add(train_iters ? "--train-iters and --train-samples are both given"
                               : "neither --train-iters nor --train-samples is given",
                   "give one of them");
  if (!step_batch_size_schedule.empty() && global_batch_size)
    violations.add("--step-batch-size-schedule and --global-batch-size are both given",
                   "give one of them");
  if (!step_batch_size_schedule.empty() && decrease_batch_size_if_needed)
    violations.add("--step-batch-size-schedule and --decrease-batch-size-if-needed are both given",
                   "drop the latter");
  if (save_retain_interval && save_interval && *save_retain_interval % *save_interval != 0)
    violations.add(cat("--save-retain-interval ", *save_retain_interval,
                       " is no multiple of --save-interval ", *save_interval));
  if (log_memory_interval && *log_memory_interval % log_interval != 0)
    violations.add(cat("--log-memory-interval ", *log_memory_interval,
                       " is no multiple of --log-interval ", log_interval));
  if (int(!freeze.empty()) + int(!freeze_except.empty()) + int(freeze_all_layers) > 1)
    violations.add("several of --freeze, --freeze-except and --freeze-all-layers are given",
                   "give one of them");
  if (profile && profile_step_end <= profile_step_start)
    violations.add(cat("--profile-step-end ", profile_step_end,
                       " is not after --profile-step-start ", profile_step_start));
  if (profile && run_folder().empty() && device == DeviceChoice::kCpu)
    violations.add("--profile has no folder to write its trace to", "give --run-dir or --save");
  const bool asks_for_load = ckpt_step || no_load_optim || finetune || use_checkpoint_args ||
                             use_mp_args_from_checkpoint_args || start == StartChoice::kResume ||
                             start == StartChoice::kResumeOrFresh;
  if (load.empty() && pretrained_checkpoint.empty() && asks_for_load)
    violations.add(
        "--start-mode resume, --ckpt-step, --no-load-optim, --finetune, --use-checkpoint-args or "
        "--use-mp-args-from-checkpoint-args is given without --load",
        "give the folder of checkpoints with --load");
}

bool TrainingConfig::freezes(std::string_view name) const {
  if (freeze_all_layers) return true;
  return freeze_except.empty() ? any_stands_for(freeze, name)
                               : !any_stands_for(freeze_except, name);
}

void TrainingConfig::check_freezing(const std::vector<std::string>& names) const {
  const bool except = !freeze_except.empty();
  for (const std::string& pattern : except ? freeze_except : freeze) {
    const bool found = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return stands_for(pattern, name);
    });
    if (!found)
      throw UsageError(cat(except ? "--freeze-except " : "--freeze ", pattern,
                           " matches no parameter\nhint: the names of this model run from ",
                           names.front(), " to ", names.back()));
  }
  const bool all = std::all_of(names.begin(), names.end(),
                               [&](const std::string& name) { return freezes(name); });
  if (all && !freeze_all_layers)
    throw UsageError(
        "--freeze leaves nothing to train\nhint: if that is wanted, say --freeze-all-layers");
}

int TrainingConfig::exit_signal_number() const {
  static constexpr int kNumbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2};
  return kNumbers[static_cast<int>(exit_signal)];
}

}  // namespace megatron
