// All configuration of a training run, and the rules across its parts.
#pragma once

#include <string>
#include <vector>

#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/datasets/masked/masked_data_config.h"
#include "megatron/datasets/tuning/sft_config.h"
#include "megatron/distributed/distributed_data_parallel_config.h"
#include "megatron/models/own_config.h"
#include "megatron/optimizer/optimizer_config.h"
#include "megatron/pipeline_parallel/pipeline_config.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/training/arguments/training_config.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

class MicrobatchCalculator;
struct TrainLength;

// The flags of each model type and of each task that has some: columns of their tables, in
// tasks/tasks.cc.
std::vector<OwnConfig> own_configs();

struct Arguments;
// TaskType::finalize and TaskType::validate of the task that the arguments name; as own_configs().
void finalize_task(Arguments& arguments);
void validate_task(const Arguments& arguments, Violations& violations);

struct Arguments {
  TransformerConfig transformer;
  TokenizerConfig tokenizer;
  DataConfig data;
  SftConfig sft;
  MaskedDataConfig masked;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  PipelineConfig pipeline;
  DistributedDataParallelConfig ddp;
  CommConfig comm;
  TrainingConfig training;
  std::vector<OwnConfig> own = own_configs();
  int64_t world_size = 1;  // ranks of the job; given by the launcher

  // Flags that were accepted without effect because the run does so anyway, with the reason.
  std::vector<std::pair<std::string, std::string>> already_so;
  std::vector<std::string> notes;  // about the command line; see ParseResult
  bool help = false;               // --help was given; no other field is set
  std::string help_topic;

  // In the order of --help and of config.yaml.
  std::vector<Config*> configs();
  // Derives values that follow from others. Idempotent.
  void finalize();
  // Checks the rules across structs, a table in arguments.cc: adds one violation per broken rule.
  // Rules of one struct are in its validate(); docs/design/configuration.md.
  void validate(Violations& violations) const;

  // The parts that --use-checkpoint-args takes from the checkpoint's configuration.
  std::vector<Config*> model_configs();

  // -- derived, valid after validation
  MicrobatchCalculator microbatches() const;
  // Ranks of the encoders' own; none: they are on ranks of the language model.
  EncoderRanks encoder_ranks() const;
  // Ranks that read different samples; 1 if the world size is not divisible, which validate()
  // reports.
  int64_t data_parallel_size() const;
  // Whether the output layer is split over the pipeline stages.
  bool splits_vocabulary() const {
    return pipeline.pipeline_vocab_parallel && parallel.pipeline_model_parallel_size > 1;
  }
  // Ranks that the vocabulary is split over; it is padded to a multiple of them.
  int64_t vocabulary_ranks() const {
    return parallel.tensor_model_parallel_size *
           (splits_vocabulary() ? parallel.pipeline_model_parallel_size : 1);
  }
  bool is_batch_invariant() const { return transformer.batch_invariant_mode; }
  // Bytes of one tensor rank's part of the activations between layers for one micro-batch, with
  // `type_bytes` per element; 0 if tensor parallelism does not use peer-to-peer copies
  // (comm/peer_mailbox.h).
  int64_t mailbox_part_bytes(int64_t type_bytes) const;
  // Whether samples of BERT are packed text.
  bool packs_masked_text() const;
  // Tokens of a sample of BERT that are masked at most.
  int64_t most_masked_by_bert() const;
  int64_t train_iters() const;
  TrainLength train_length() const;
  int64_t eval_global_batch_size() const;
  int64_t eval_micro_batch_size() const;
};

// Parses the command line of a run of `world_size` ranks (argv[0] is the command). Throws
// UsageError with every violation.
Arguments parse_arguments(int argc, const char* const* argv, int64_t world_size = 1);

// The same for `finetune`: the task is sft; flags of model and tokenizer are taken from the model
// that --load names; the run starts from its weights, or resumes if --save holds checkpoints.
Arguments parse_finetune_arguments(int argc, const char* const* argv, int64_t world_size = 1);

// Output of --help for a command that takes these flags, and those of `own`.
std::string run_help(std::string_view usage, std::span<Config* const> configs,
                     std::string_view topic, Config* own = nullptr);

// The resolved configuration as YAML that --config reads.
std::string resolved_yaml(const Arguments& arguments);

// The same as one JSON object.
std::string resolved_json(const Arguments& arguments);

}  // namespace megatron
