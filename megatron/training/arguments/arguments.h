// All configuration of a training run, and the rules that join its parts.
#pragma once

#include <string>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/datasets/sft_config.h"
#include "megatron/distributed/distributed_data_parallel_config.h"
#include "megatron/optimizer/optimizer_config.h"
#include "megatron/pipeline_parallel/pipeline_config.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/training/arguments/task_config.h"
#include "megatron/training/arguments/training_config.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

class MicrobatchCalculator;

struct Arguments {
  TransformerConfig transformer;
  TokenizerConfig tokenizer;
  DataConfig data;
  SftConfig sft;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  PipelineConfig pipeline;
  DistributedDataParallelConfig ddp;
  CommConfig comm;
  TrainingConfig training;
  DpoConfig dpo;
  int64_t world_size = 1;  // ranks of the job; the launcher says

  // Flags that were accepted but change nothing, with the reason.
  std::vector<std::pair<std::string, std::string>> already_so;
  std::vector<std::string> notes;  // on the command line; see ParseResult
  bool help = false;               // --help was given; nothing else is set
  std::string help_topic;

  // In the order of --help and of config.yaml.
  std::vector<Config*> configs();
  // Derives what follows from other values. Idempotent.
  void finalize();
  // Rules across structs: adds one violation per broken rule.
  void validate(Violations& violations) const;

  // The parts that a checkpoint's configuration decides with --use-checkpoint-args.
  std::vector<Config*> model_configs();

  // -- derived, valid after validation
  MicrobatchCalculator microbatches() const;
  // Ranks that read different samples; 1 where the world does not divide, which validate() reports.
  int64_t data_parallel_size() const;
  // Whether the stages divide the output layer.
  bool splits_vocabulary() const {
    return pipeline.pipeline_vocab_parallel && parallel.pipeline_model_parallel_size > 1;
  }
  // Ranks that divide the rows of the vocabulary, which is padded for them.
  int64_t vocabulary_ranks() const {
    return parallel.tensor_model_parallel_size *
           (splits_vocabulary() ? parallel.pipeline_model_parallel_size : 1);
  }
  // Bytes of the rows between layers that a tensor rank has of one micro-batch, in a type of so
  // many bytes; 0 where they do not travel by copies between the ranks (comm/peer_mailbox.h).
  int64_t mailbox_part_bytes(int64_t type_bytes) const;
  int64_t train_iters() const;
  int64_t eval_global_batch_size() const;
  int64_t eval_micro_batch_size() const;
};

// Parses the command line of a run of `world_size` ranks (argv[0] is the command). Throws
// UsageError with every violation.
Arguments parse_arguments(int argc, const char* const* argv, int64_t world_size = 1);

// The same for `finetune`: the task is sft; the model's and tokenizer's flags are taken from the
// model that --load names; the run starts from its weights, or goes on where --save holds
// checkpoints.
Arguments parse_finetune_arguments(int argc, const char* const* argv, int64_t world_size = 1);

// What --help prints for a command that takes these flags, with some of its own in the fields of
// `own`.
std::string run_help(std::string_view usage, std::span<Config* const> configs,
                     std::string_view topic, Config* own = nullptr);

// The resolved configuration as YAML that --config reads.
std::string resolved_yaml(const Arguments& arguments);

// The same as one JSON object.
std::string resolved_json(const Arguments& arguments);

}  // namespace megatron
