// The layout of a configured model over ranks as plain numbers: the basis of the estimates of
// memory and communication. No tensors are created, and nothing is stored per rank: all ranks of
// one stage are alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/comm/mesh.h"
#include "megatron/distributed/buffer_layout.h"
#include "megatron/nn/parameter.h"
#include "megatron/pipeline_parallel/schedule.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/pipeline_parallel/transfers.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

// What is sharded over the ranks that hold the same weights.
struct DataSharding {
  int64_t ranks = 1;   // ranks with the same weights
  int64_t shards = 1;  // number of shards of everything that is sharded
  // Main gradients are sharded, as master weights and moments are
  bool gradients = false;
  bool values = false;                                 // values are sharded, too
  int64_t replicas() const { return ranks / shards; }  // ranks with the same shard
};

// Bytes of one element.
struct ElementBytes {
  int64_t model = 4;     // weights and most activations
  int64_t residual = 4;  // residual stream; fp32 with --fp32-residual-connection
  int64_t sum = 4;       // main gradients, master weights, statistics
};

struct LayoutPlan {
  Arguments arguments;
  int64_t padded_vocab_size = 0;
  Mesh mesh;
  int64_t tensor = 1, context = 1, pipeline = 1, data = 1;  // sizes of the axes
  int64_t num_microbatches = 1;
  bool sequence_parallel = false;
  bool on_gpu = true;  // GPU kernels save other tensors than CPU ones
  ElementBytes bytes;
  DataSharding sharding;
  StageLayout stages = StageLayout(0);
  Schedule schedule;
  std::vector<std::vector<ActionTransfers>> transfers;  // by stage, by action

  const TransformerConfig& model() const { return arguments.transformer; }
  bool splits_vocabulary() const { return schedule.vocab_parallel; }
  bool tied() const { return !model().untie_embeddings_and_output_weights; }
  // Tokens of one micro-batch on a rank: in attention, and between layers (`rows`).
  int64_t tokens() const {
    return model().seq_length / context * arguments.training.micro_batch_size;
  }
  int64_t rows() const { return tokens() / (sequence_parallel ? tensor : 1); }
};

// Throws UsageError if the arguments are not valid.
LayoutPlan make_layout_plan(const Arguments& arguments, int64_t padded_vocab_size,
                            bool on_gpu = true);

// One parameter as a rank of the stage holds it.
struct PlannedParameter {
  std::string name;  // as in the model
  int64_t local_elements = 0;
  int64_t global_elements = 0;  // of the logical tensor
  int64_t stages = 1;           // that divide it: the output layer with --pipeline-vocab-parallel
  Placement placement;          // as the model places it, by axes alone
  bool shared_over_stages = false;  // a tied table that another stage holds too
  bool is_copy = false;             // ... and counts there
  bool used_twice = false;          // a tied table whose embedding and head are on this stage
  bool frozen = false;              // by --freeze: values alone are kept
  bool hidden_matrix = false;       // see is_hidden_matrix()
};

// Parameters of one chunk of one stage, in the order of the model.
std::vector<PlannedParameter> chunk_parameters(const LayoutPlan& plan, int stage, int chunk);

// Elements of the logical model: each counted once, with vocabulary padding. Computed from the
// model's configuration, independent of its division into stages.
int64_t model_elements(const LayoutPlan& plan);

// The flat buffers of one chunk, as distributed/ lays them out.
BufferLayout chunk_buffer(const LayoutPlan& plan, const std::vector<PlannedParameter>& parameters);

}  // namespace megatron
