// Executes one rank's list of actions. The caller defines what is computed (StageCompute); when to
// communicate and what is derived from the schedule (transfers.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

#include "megatron/comm/process_group.h"
#include "megatron/pipeline_parallel/schedule.h"
#include "megatron/pipeline_parallel/stage_tensors.h"
#include "megatron/pipeline_parallel/transfers.h"

namespace megatron {

// What a stage computes; implemented by the trainer. Input tensors belong to the stage: no other
// code modifies them, and they carry no autograd history. Returned tensors must not be modified
// before the run is over. The executor keeps their storage only as long as the transfer needs it,
// so a stage that keeps only the autograd node of its output frees the memory.
class StageCompute {
 public:
  virtual ~StageCompute() = default;
  // What crosses a border of the chunk's segment for a micro-batch; both sides state the same.
  virtual TensorFormats format(int chunk, Border border, int microbatch) = 0;
  // input: from the previous segment, empty on the first. Returns the tensors for the next segment
  // (none on the last).
  virtual StageTensors forward(int chunk, int microbatch, const StageTensors& input) = 0;
  // grad_output: gradients of the floating tensors that went to the next segment, in their order;
  // empty on the last. Returns those of the tensors from the previous segment (none on the first).
  // With defer_weights the weight gradients are left to weight_backward().
  virtual StageTensors backward(int chunk, int microbatch, const StageTensors& grad_output,
                                bool defer_weights) = 0;
  virtual void weight_backward(int chunk, int microbatch) = 0;
  // For schedules with the vocabulary split over the stages; see Note [Vocabulary split over
  // stages] in schedule.cc. There the last stage's forward returns the hidden states, one tensor,
  // and its backward takes their gradient.
  //   hidden   of format(chunk, Border::kHidden, microbatch); every stage has its own copy
  //   returns  [...] any shape, the same on all stages: softmax statistics of this stage's logits
  virtual at::Tensor head(int microbatch, const at::Tensor& hidden);
  // statistics: [ranks, ...] of all ranks that share the vocabulary. Returns this stage's partial
  // sum of the gradient of the hidden states; undefined in forward-only schedules.
  virtual at::Tensor loss(int microbatch, const at::Tensor& statistics);
};

// A one-directional group of two ranks for each ordered pair of stages that exchange tensors. With
// one communicator per direction a send never waits behind a receive, whatever the backend; within
// one, messages keep their order.
class PipelineLinks {
 public:
  // Every stage calls it with the same schedule; the links also serve other schedules with the same
  // placement and number of stages and chunks. With `device`, one element is sent over each link,
  // so that communicators which connect at their first message do so here, in the same order on all
  // ranks. `overlap`: receives are posted one action ahead, so that transfers overlap with compute;
  // otherwise right before the action that needs them. With the vocabulary split over the stages,
  // `vocabulary` is the group of ranks that share it: `pp`, or the stages of several pipelines.
  PipelineLinks(const ProcessGroup& pp, const Schedule& schedule, at::Device device,
                bool overlap = true, const ProcessGroup* vocabulary = nullptr);

  int stage() const { return stage_; }
  bool overlap() const { return overlap_; }
  // The link between this stage and `peer`, in one direction.
  const ProcessGroup& to(int peer) const;
  const ProcessGroup& from(int peer) const;
  // The collectives of vocabulary-parallel schedules; one group each, so that different kinds of
  // collectives never wait for each other.
  struct Joint {
    ProcessGroup hidden, statistics, hidden_grad;
  };
  const Joint& joint() const { return joint_; }
  // Runs these collectives once, in the order and with the shapes of a step. Returns the statistics
  // of all ranks that share the vocabulary, [ranks, ...]. All stages call it together.
  at::Tensor exchange(const at::Tensor& hidden, const at::Tensor& statistics) const;

 private:
  int stage_;
  bool overlap_;
  std::map<int, ProcessGroup> to_, from_;
  Joint joint_;
};

// Runs this stage's actions in order. An action waits only for its own input: sends are
// asynchronous, and a sent tensor is kept alive until a message arrives that the receiver produced
// after using it. With overlap one receive is posted ahead. Memory: one receive buffer besides the
// running action's (more only if the sender's order differs from this stage's). Free of deadlock
// even with backends that buffer nothing, see replay.h. A list of tensors is sent one by one, in
// its order.
//
// `transfers`: of this stage's actions, from plan_transfers(), which looks at all stages: runs that
// repeat a schedule plan once. Rethrows exceptions of the stage; the peers' waits then fail through
// the backend.
void run_pipeline(const Schedule& schedule, const std::vector<ActionTransfers>& transfers,
                  StageCompute& stage, const PipelineLinks& links, at::Device device);
// Plans the transfers, too.
void run_pipeline(const Schedule& schedule, StageCompute& stage, const PipelineLinks& links,
                  at::Device device);

}  // namespace megatron
