#include "megatron/training/arguments/training_config.h"

#include "megatron/base/check.h"

namespace megatron {

void TrainingConfig::validate(Violations& v) const {
  validate_topics(v);
  // Between fields
  v.require(timing_log_level >= 0 && timing_log_level <= 2,
            cat("--timing-log-level is ", timing_log_level), "give 0, 1 or 2");
  v.require(train_iters.has_value() != train_samples.has_value(),
            train_iters ? "--train-iters and --train-samples are both given"
                        : "neither --train-iters nor --train-samples is given",
            "give one of them");
  v.require(step_batch_size_schedule.empty() || !global_batch_size,
            "--step-batch-size-schedule and --global-batch-size are both given",
            "give one of them");
  v.require(step_batch_size_schedule.empty() || !decrease_batch_size_if_needed,
            "--step-batch-size-schedule and --decrease-batch-size-if-needed are both given",
            "drop the latter");
  // An interval below 1 is its topic's violation, and no divisor.
  if (save_retain_interval && save_interval && *save_interval > 0 &&
      *save_retain_interval % *save_interval != 0)
    v.add(cat("--save-retain-interval ", *save_retain_interval,
              " is no multiple of --save-interval ", *save_interval));
  if (log_memory_interval && log_interval > 0 && *log_memory_interval % log_interval != 0)
    v.add(cat("--log-memory-interval ", *log_memory_interval, " is no multiple of --log-interval ",
              log_interval));
  v.require(int(!freeze.empty()) + int(!freeze_except.empty()) + int(freeze_all_layers) <= 1,
            "several of --freeze, --freeze-except and --freeze-all-layers are given",
            "give one of them");
  v.require(!profile || profile_step_end > profile_step_start,
            cat("--profile-step-end ", profile_step_end, " is not after --profile-step-start ",
                profile_step_start));
  v.require(!profile || !run_folder().empty() || device != DeviceChoice::kCpu,
            "--profile has no folder to write its trace to", "give --run-dir or --save");
  const bool asks_for_load = ckpt_step || no_load_optim || finetune || use_checkpoint_args ||
                             use_mp_args_from_checkpoint_args || start == StartChoice::kResume ||
                             start == StartChoice::kResumeOrFresh;
  v.require(!load.empty() || !pretrained_checkpoint.empty() || !asks_for_load,
            "--start-mode resume, --ckpt-step, --no-load-optim, --finetune, --use-checkpoint-args "
            "or --use-mp-args-from-checkpoint-args is given without --load",
            "give the folder of checkpoints with --load");
}

}  // namespace megatron
