#include "megatron/training/arguments/config/folders.h"

#include "megatron/base/value_checks.h"

namespace megatron {

void FoldersConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("logging");
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
  v.group("checkpointing");
  v.field("save", save, "folder of checkpoints that is written");
}

void FoldersConfig::validate(Violations& v) const {
  at_least(v, "--tensorboard-log-interval", tensorboard_log_interval, 1);
  at_least(v, "--tensorboard-queue-size", tensorboard_queue_size, 1);
  v.require(!wandb_project.empty() || (wandb_exp_name + wandb_entity + wandb_save_dir).empty(),
            "--wandb-exp-name, --wandb-entity and --wandb-save-dir have no effect without "
            "--wandb-project");
  v.require(wandb_project.empty() || !wandb_folder().empty(),
            "--wandb-project has no folder to write to",
            "give --wandb-save-dir, --run-dir or --save");
  v.require(prometheus_textfile.empty() || prometheus_textfile.ends_with(".prom"),
            cat("--prometheus-textfile ", prometheus_textfile, " does not end in .prom"),
            "node_exporter reads no other files");
}

}  // namespace megatron
