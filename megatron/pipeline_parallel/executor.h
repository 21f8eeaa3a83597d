// Runs one rank's list of actions: what is computed is the caller's (StageCompute), when and what
// moves is derived from the schedule (transfers.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// What a stage computes; implemented by the trainer. Tensors that it is given are its own: nobody
// else changes them, and they carry no autograd history. Tensors that it returns must not be
// changed before the run is over; the executor keeps their storage no longer than the transfer
// needs, so a stage that keeps only the autograd node of its output frees the memory.
class StageCompute {
 public:
  virtual ~StageCompute() = default;
  // input: activation from the previous segment, undefined on the first. Returns the activation for
  // the next segment (undefined on the last).
  virtual at::Tensor forward(int chunk, int microbatch, const at::Tensor& input) = 0;
  // grad_output: gradient from the next segment, undefined on the last. Returns the gradient for
  // the previous segment (undefined on the first). With defer_weights the weight gradients wait for
  // weight_backward().
  virtual at::Tensor backward(int chunk, int microbatch, const at::Tensor& grad_output,
                              bool defer_weights) = 0;
  virtual void weight_backward(int chunk, int microbatch) = 0;
  // Of schedules with the vocabulary over the stages; see Note [The vocabulary over the stages] in
  // schedule.cc. The last stage's forward returns the hidden states instead of nothing, and its
  // backward takes their gradient.
  //   hidden   as activations between stages; every stage has its own
  //   returns  [...] any shape, which is alike on all stages: what the loss needs to know of this
  //   stage's logits
  virtual at::Tensor head(int microbatch, const at::Tensor& hidden);
  // statistics: [ranks, ...] of all ranks that share the vocabulary. Returns this stage's part of
  // the gradient of the hidden states; undefined in forward-only schedules.
  virtual at::Tensor loss(int microbatch, const at::Tensor& statistics);
};

// Every activation between segments, and its gradient.
struct TransferFormat {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  // Shapes that differ from micro-batch to micro-batch; replaces `shape`. All stages must agree.
  std::function<std::vector<int64_t>(int microbatch)> shape_of = nullptr;
};

// One one-directional group of two ranks for each ordered pair of stages that exchange tensors. A
// direction of its own keeps a send from waiting behind a receive, whatever the backend's rules;
// within it messages keep their order.
class PipelineLinks {
 public:
  // Every stage calls it with an equal schedule; schedules with the same placement and as many
  // stages and chunks can use the links. With `device`, one element travels over each link, so that
  // communicators that connect at their first message do so here, in one order on all ranks.
  // `overlap`: receives are posted before the computation that precedes their use, so that
  // transfers run beside it; otherwise when nothing is left to do but to wait. With the vocabulary
  // over the stages, `vocabulary` are the ranks that share it: those of `pp`, or of several
  // pipelines and their stages.
  PipelineLinks(const ProcessGroup& pp, const Schedule& schedule, at::Device device,
                bool overlap = true, const ProcessGroup* vocabulary = nullptr);

  int stage() const { return stage_; }
  bool overlap() const { return overlap_; }
  // The link between this stage and `peer`, in one direction.
  const ProcessGroup& to(int peer) const;
  const ProcessGroup& from(int peer) const;
  // The calls of all stages; groups of their own, so that none waits for another kind.
  struct Joint {
    ProcessGroup hidden, statistics, hidden_grad;
  };
  const Joint& joint() const { return joint_; }
  // Makes the calls of all stages once, in the order and with the shapes of a step. Returns the
  // statistics of all ranks that share the vocabulary, [ranks, ...]. All stages call it together.
  at::Tensor meet(const at::Tensor& hidden, const at::Tensor& statistics) const;

 private:
  int stage_;
  bool overlap_;
  std::map<int, ProcessGroup> to_, from_;
  Joint joint_;
};

// Runs this stage's actions in order. Nothing waits but an action for its own input: sends are
// asynchronous, and a sent tensor is kept until something arrives that its receiver made after
// using it. With overlap one receive is posted ahead. Memory: one receive buffer beyond the running
// action's (more only where the sender's order differs from this stage's). Free of deadlock with
// backends that buffer nothing, see replay.h.
//
// Throws what the stage throws; the peers' waits then fail through the backend.
void run_pipeline(const Schedule& schedule, StageCompute& stage, const PipelineLinks& links,
                  const TransferFormat& format);

}  // namespace megatron
