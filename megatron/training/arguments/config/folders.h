// Where a run writes: its folders, and its metrics for TensorBoard, Weights & Biases, Prometheus.
#pragma once

#include <cstdint>
#include <string>

#include "megatron/base/fields.h"

namespace megatron {

struct FoldersConfig {
  std::string tensorboard_dir;
  int64_t tensorboard_log_interval = 1, tensorboard_queue_size = 1000;
  bool log_timers_to_tensorboard = false;
  bool log_loss_scale_to_tensorboard = true;
  bool log_validation_ppl_to_tensorboard = false;
  bool log_memory_to_tensorboard = false, log_world_size_to_tensorboard = false;
  std::string wandb_project, wandb_exp_name, wandb_entity;
  std::string wandb_save_dir;  // empty: the run's folder
  std::string prometheus_textfile;
  std::string run_dir;  // empty: --save
  std::string save;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;

  // The folder of metrics.jsonl and config.yaml; empty: neither is written.
  const std::string& run_folder() const { return run_dir.empty() ? save : run_dir; }
  const std::string& wandb_folder() const {
    return wandb_save_dir.empty() ? run_folder() : wandb_save_dir;
  }
};

}  // namespace megatron
