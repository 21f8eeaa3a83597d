// The layout of a configured model over ranks: the basis of the estimates of memory and
// communication. The model is the one that ranks train, built for one rank of each stage over
// groups without a backend; its parameters have no memory. Nothing is stored per rank: all ranks of
// one stage are alike.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/distributed/buffer_layout.h"
#include "megatron/models/model_table.h"
#include "megatron/pipeline_parallel/schedule.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/pipeline_parallel/transfers.h"
#include "megatron/training/arguments/model_provider.h"

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
  int64_t model = 4;     // weights and most activations; weights that keep fp32 take `sum`
  int64_t residual = 4;  // residual stream; fp32 with --fp32-residual-connection
  int64_t sum = 4;       // main gradients, master weights, statistics
};

// Parameters of one chunk whose gradients are summed over the same ranks (a reduction domain of
// nn/reduction.h), and where they lie in their flat buffers.
struct PlannedBuffer {
  Placement domain;                    // a placement of it
  std::vector<Parameter*> parameters;  // in model order, like layout.slots
  BufferLayout layout;
  DataSharding sharding;
};

// What one rank of a stage holds.
struct PlannedStage {
  ParallelGroups groups;  // without a backend
  std::vector<std::unique_ptr<Model>> chunks;
  std::vector<std::vector<PlannedBuffer>> buffers;  // by chunk
};

struct LayoutPlan {
  Arguments arguments;
  Vocabulary vocabulary;
  Mesh mesh;
  int64_t tensor = 1, context = 1, pipeline = 1, data = 1, expert = 1;  // sizes of the axes
  int64_t num_microbatches = 1;
  bool sequence_parallel = false;
  bool on_gpu = true;  // GPU kernels save other tensors than CPU ones
  ElementBytes bytes;
  DataSharding sharding;  // of dense weights
  StageLayout stages = StageLayout(0);
  Schedule schedule;
  std::vector<std::vector<ActionTransfers>> transfers;    // by stage, by action
  std::vector<std::shared_ptr<const PlannedStage>> held;  // by stage, by its first rank
  int64_t model_elements = 0;  // of the whole model, with vocabulary padding, each counted once
  EndsCost ends;
  std::vector<EndsCost> segment_ends;  // with the encoders of media of each segment; empty: `ends`
  double expert_load = 1.0;            // LayerShape::expert_load of the ranks that are counted
  // Where encoders have ranks of their own: these, one stage without the rest of the model; the
  // ranks above are those of the language model. Null: there are none
  std::shared_ptr<LayoutPlan> encoders = nullptr;

  const TransformerConfig& model() const { return arguments.transformer; }
  const EndsCost& ends_of(int stage, int chunk) const {
    return segment_ends.empty()
               ? ends
               : segment_ends.at(static_cast<size_t>(schedule.segment(stage, chunk)));
  }
  bool splits_vocabulary() const { return schedule.vocab_parallel; }
  const PlannedStage& held_by(int stage) const { return *held.at(static_cast<size_t>(stage)); }
  const std::vector<PlannedBuffer>& buffers(int stage, int chunk) const {
    return held_by(stage).buffers.at(static_cast<size_t>(chunk));
  }
  // Tokens of one micro-batch on a rank: in attention, and between layers (`rows`).
  int64_t tokens() const {
    return model().seq_length / context * arguments.training.micro_batch_size;
  }
  int64_t rows() const { return tokens() / (sequence_parallel ? tensor : 1); }
  // The same for the costs of layers and of the model's ends.
  LayerShape layer_shape() const;
  // Plans for ranks whose experts have this multiple of a balanced share of rows.
  void set_expert_load(double load);
  // Bytes of one activation between layers or stages: R h x.
  int64_t stream_bytes() const { return rows() * model().hidden_size * bytes.residual; }
  // Bytes of what crosses the border after so many layers, and the most over the borders of a stage
  // and over all.
  int64_t border_bytes(int64_t layers_before) const;
  int64_t transfer_bytes(int stage) const;
  int64_t transfer_bytes() const;
  // The whole model, with what plans change of it.
  ModelConfig model_config() const;
  // Layers count from 1; `offloaded`: its saved activations go to host memory.
  LayerCost layer_cost(int64_t layer_number, bool offloaded = false) const;
};

// Throws UsageError if the arguments are not valid, and what the model's constructor throws.
LayoutPlan make_layout_plan(const Arguments& arguments, const Vocabulary& vocabulary,
                            bool on_gpu = true, const ModelProvider& provider = provide_model());

// The groups of a rank of the job, without a backend.
ParallelGroups planned_groups(const LayoutPlan& plan, int rank);

// Axes whose ranks hold the parameters of one stage, one copy of each part.
AxisSet stage_axes(const Placement& placement);

// Elements of the logical model that the ranks of one stage hold of a parameter; a copy of a table
// of another stage counts there.
int64_t stage_elements(const LayoutPlan& plan, int stage, const Parameter& parameter);

}  // namespace megatron
