// Between encoders of media on ranks of their own (comm/modules/encoder_ranks.h) and the stage of
// the language model's embedding: features of a micro-batch go there, their gradients come back.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <vector>

#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/comm/process_group.h"
#include "megatron/pipeline_parallel/executor.h"
#include "megatron/pipeline_parallel/schedule.h"
#include "megatron/pipeline_parallel/stage_tensors.h"
#include "megatron/pipeline_parallel/transfers.h"

namespace megatron {

// A rank's partners are the data-parallel replicas of the language model, or on a rank of these the
// ranks that divide images and sounds. Tensors of a border are, by medium and then by partner, the
// rows that go there or come from there; those without rows are not sent. With e ranks that divide
// the encoders' layers and t tensor ranks of the embedding, tensor rank j has its features of rank
// j mod e, and rank i the gradients of tensor rank i mod t: they are copies. A group of two ranks
// for each pair and direction, as in PipelineLinks.
class EncoderLinks {
 public:
  // Every rank calls it with the same sizes. One element is sent over each link, so that
  // communicators which connect at their first message do so here, in the same order on all ranks.
  EncoderLinks(const ProcessGroup& world, const EncoderRanks& encoder, const Mesh& language,
               at::Device device);

  bool encodes() const { return encodes_; }
  // Whether this rank has an encoder, or reads features.
  bool any() const { return !partners_.empty(); }

  // Sends tensors of these formats to the partners; keeps them until settle().
  void send(const StageTensors& tensors, const TensorFormats& formats);
  StageTensors receive(const TensorFormats& formats) const;
  // Waits for what was sent, but for the last `most` calls of send().
  void settle(size_t most = 0);

 private:
  struct Partner {
    std::vector<ProcessGroup> to;
    ProcessGroup from;
  };
  struct Sent {
    StageTensors tensors;
    std::vector<std::shared_ptr<Work>> works;
  };
  bool encodes_;
  at::Device device_;
  std::vector<Partner> partners_;
  std::deque<Sent> sent_;
};

// Of a border those that have a gradient.
TensorFormats gradients_of(TensorFormats formats);

// What ranks of encoders do in a step whose language model runs `schedule`: of its one stage and
// chunk. Features go out in the order in which the stage of the embedding uses them, one
// micro-batch ahead of the gradients that it needs first.
Schedule encoder_schedule(const Schedule& schedule);
// Of such a schedule: to stage 1, which stands for the language model, and from there.
std::vector<ActionTransfers> encoder_transfers(const Schedule& schedule);
// Runs it: `compute` has one chunk, which starts.
void run_encoders(const Schedule& schedule, StageCompute& compute, EncoderLinks& links);

// The segment with the embedding takes its input from the encoders' ranks: all that `compute` does
// is the same, but of chunk 0.
class BehindEncoders final : public StageCompute {
 public:
  BehindEncoders(StageCompute& compute, EncoderLinks& links) : compute_(compute), links_(links) {}
  TensorFormats format(int chunk, Border border, int microbatch) override;
  StageTensors forward(int chunk, int microbatch, const StageTensors& input) override;
  StageTensors backward(int chunk, int microbatch, const StageTensors& grad_output,
                        bool defer_weights) override;
  void weight_backward(int chunk, int microbatch) override;

 private:
  StageCompute& compute_;
  EncoderLinks& links_;
};

}  // namespace megatron
