// Flags of the run itself: length, batches, evaluation, logging, saving, and what it starts from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/reporting/timers.h"
#include "megatron/runtime/device_choice.h"

namespace megatron {

// The last three: that model of GPU
enum class StartChoice {
  kAuto,
  kFresh,
  kResume,
  kResumeOrFresh
};  // kAuto: resume with --load, else fresh
enum class CudaGraphImpl { kNone, kLocal };
enum class SaveFailure { kStop, kContinue };
enum class ExitSignal { kTerm, kInt, kUsr1, kUsr2 };

inline constexpr int64_t kReplicaHashInterval = 100;  // iterations

struct TrainingConfig : Config {
  // -- training
  std::string task = "gpt";
  int64_t micro_batch_size = 0;
  std::optional<int64_t> global_batch_size;  // default: micro batch size times data-parallel size
  std::string step_batch_size_schedule;
  bool decrease_batch_size_if_needed = false;
  std::optional<int64_t> train_iters;
  std::optional<int64_t> train_samples;
  bool calculate_per_token_loss = true;
  // PEFT folder that adapters of a new run start from
  std::string adapter;
  std::vector<std::string> freeze;         // patterns, see freezes()
  std::vector<std::string> freeze_except;  // patterns
  bool freeze_all_layers = false;
  bool skip_train = false;
  DeviceChoice device = DeviceChoice::kAuto;
  int64_t num_threads = 0;  // 0: OMP_NUM_THREADS, else the rank's share of the cores
  bool gemm_tuning = true;
  CudaGraphImpl cuda_graph_impl = CudaGraphImpl::kNone;
  bool enable_cuda_graph = false;  // old spelling of --cuda-graph-impl local
  int64_t cuda_graph_warmup_steps = 3;
  // None: kReplicaHashInterval; 0: never
  std::optional<int64_t> check_weight_hash_across_dp_replicas_interval;
  std::optional<int64_t> exit_interval;
  std::optional<int64_t> exit_duration_in_mins;
  bool exit_signal_handler = true;
  ExitSignal exit_signal = ExitSignal::kTerm;
  // Time between a signal and the kill that follows it
  std::optional<int64_t> exit_signal_grace_seconds;
  // Exit code of a run that was stopped and can be resumed; default: 0
  std::optional<int64_t> stopped_exit_code;

  // -- validation
  int64_t eval_iters = 100;
  std::optional<int64_t> eval_interval;
  std::optional<int64_t> start_eval_at_iter;
  std::optional<int64_t> eval_global_batch_size;
  std::optional<int64_t> eval_micro_batch_size;

  // -- logging
  int64_t log_interval = 100;
  bool log_throughput = false;
  bool log_params_norm = false;
  bool log_num_zeros_in_grad = false;
  bool log_progress = false;
  std::optional<int64_t> log_memory_interval;
  int64_t timing_log_level = 0;
  TimingLogOption timing_log_option = TimingLogOption::kMinMax;
  std::string tensorboard_dir;
  int64_t tensorboard_log_interval = 1;
  int64_t tensorboard_queue_size = 1000;
  bool log_timers_to_tensorboard = false;
  bool log_loss_scale_to_tensorboard = true;
  bool log_validation_ppl_to_tensorboard = false;
  bool log_memory_to_tensorboard = false;
  bool log_world_size_to_tensorboard = false;
  std::string wandb_project;
  std::string wandb_exp_name;
  std::string wandb_entity;
  std::string wandb_save_dir;  // empty: the run's folder
  std::string prometheus_textfile;
  std::string run_dir;  // empty: --save

  // -- profiling
  bool profile = false;
  int64_t profile_step_start = 10;
  int64_t profile_step_end = 12;
  std::vector<int64_t> profile_ranks = {0};

  // -- checkpointing
  std::string save;
  std::optional<int64_t> save_interval;
  std::optional<int64_t> save_retain_interval;
  std::optional<int64_t> keep_last_checkpoints;
  bool async_save = false;
  SaveFailure save_failure = SaveFailure::kStop;
  bool save_frozen = true;  // false: checkpoints do not include frozen weights
  bool no_save_optim = false;
  std::string load;
  StartChoice start = StartChoice::kAuto;
  std::optional<int64_t> ckpt_step;
  bool no_load_optim = false;
  bool finetune = false;
  std::string pretrained_checkpoint;
  bool use_checkpoint_args = false;
  bool use_mp_args_from_checkpoint_args = false;
  bool accept_new_data_order = false;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  // The folder of metrics.jsonl and config.yaml; empty: neither is written.
  const std::string& run_folder() const { return run_dir.empty() ? save : run_dir; }
  const std::string& wandb_folder() const {
    return wandb_save_dir.empty() ? run_folder() : wandb_save_dir;
  }
  int exit_signal_number() const;
  // Iterations between comparisons of replicated tensors; 0: never.
  int64_t replica_hash_interval() const {
    return check_weight_hash_across_dp_replicas_interval.value_or(kReplicaHashInterval);
  }
  bool uses_cuda_graphs() const {
    return enable_cuda_graph || cuda_graph_impl == CudaGraphImpl::kLocal;
  }

  // Whether flags freeze the parameter of this name: it has no gradient and no optimizer state, and
  // keeps its bits. A pattern matches a whole name or a prefix of it that ends before a dot
  // ("decoder.layers.0"); *, ? and [...] are shell wildcards and match dots, too.
  bool freezes(std::string_view name) const;
  // Throws UsageError for patterns that match none of `names`, and if nothing is left to train
  // without --freeze-all-layers.
  void check_freezing(const std::vector<std::string>& names) const;

 private:
  void training_fields(FieldVisitor& visitor);
  void logging_fields(FieldVisitor& visitor);
  void checkpoint_fields(FieldVisitor& visitor);
};

}  // namespace megatron
