// Pipeline schedules as data: which rank runs which pass of which micro-batch, in order.
//
// A schedule contains no tensors and no communication: transfers.h derives every send and receive
// from it, replay.h proves it free of deadlock before any tensor exists, executor.h runs it. Pure
// arithmetic, without libtorch.
//
// Terms: a *stage* is a rank's position in the pipeline, a *chunk* is one of its model slices
// (virtual stages), and the *segments* are all slices of the model in the order in which an
// activation passes through them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

struct Action {
  enum class Kind : uint8_t {
    kForward,         // F
    kBackward,        // B: gradients of inputs and weights
    kBackwardInput,   // I: input gradients, which the previous segment waits for
    kBackwardWeight,  // W: weight gradients, off the critical path; some time after I
    // Only with the vocabulary split over the stages, where the last stage's F gives the hidden
    // states to all stages:
    kHead,  // H: logits of this stage's vocabulary shard, and their statistics
    kLoss,  // L: loss from all stages' statistics; gradients of shard and hidden states
  };
  Kind kind = Kind::kForward;
  int chunk = 0;
  int microbatch = 0;
  bool operator==(const Action&) const = default;
};

// Which segment a chunk holds.
//   kLooped   segment = chunk * stages + stage: the activation runs down the stages once per chunk
//   kVShaped  two chunks: down the stages and back up, so that the first stage holds both ends of
//             the model
enum class ChunkPlacement : uint8_t { kLooped, kVShaped };

struct SegmentPlace {
  int stage = 0;
  int chunk = 0;
  bool operator==(const SegmentPlace&) const = default;
};

int segment_of(ChunkPlacement placement, int num_stages, SegmentPlace place);
SegmentPlace place_of(ChunkPlacement placement, int num_stages, int segment);

// The work of all ranks of one pipeline in one step. Every rank computes the same schedule. Passes
// of one kind take the micro-batches of a chunk in ascending order, so a chunk's gradients are
// complete after its last micro-batch.
struct Schedule {
  std::string name;
  int num_stages = 1;
  int num_chunks = 1;
  int num_microbatches = 1;
  ChunkPlacement placement = ChunkPlacement::kLooped;
  bool forward_only = false;  // evaluation: no backward passes
  // every stage runs H and L for every micro-batch; one chunk per stage
  bool vocab_parallel = false;
  std::vector<std::vector<Action>> stages;  // by stage

  int num_segments() const { return num_stages * num_chunks; }
  int segment(int stage, int chunk) const {
    return segment_of(placement, num_stages, {stage, chunk});
  }
  SegmentPlace place(int segment) const { return place_of(placement, num_stages, segment); }
};

enum class ScheduleKind : uint8_t { k1F1B, kGPipe, kZeroBubbleH1, kZeroBubbleAuto, kZeroBubbleV };

// Spellings of --pipeline-schedule, in the order of ScheduleKind.
std::span<const std::string_view> schedule_names();
ChunkPlacement schedule_placement(ScheduleKind kind);

// Time of each pass of one chunk of one stage, in any unit.
struct PassCosts {
  double forward = 1.0;
  double backward_input = 1.0;
  double backward_weight = 1.0;
  double of(Action::Kind kind) const;
};

// Costs for planning (zero-bubble) and replaying a step.
struct ScheduleCosts {
  PassCosts whole_stage;                       // for every stage, divided evenly over its chunks
  std::vector<std::vector<PassCosts>> passes;  // by stage and chunk; empty: whole_stage
  // Time from the end of a pass until its result can be used on another stage
  double transfer = 0.0;
  double head = 0.0, loss = 0.0;  // H and L on every stage

  double of(int stage, int num_chunks, const Action& action) const;
};

struct ScheduleShape {
  int num_stages = 1;
  int num_chunks = 1;
  int num_microbatches = 1;
  // consecutive micro-batches per chunk; 0: num_stages
  int group_size = 0;
  bool vocab_parallel = false;  // only for k1F1B with one chunk
  // kZeroBubbleAuto: limit of passes of one chunk whose activations a stage holds; 0: twice 1F1B's
  int max_in_flight = 0;
  ScheduleCosts costs;  // kZeroBubbleAuto plans with them
};

// The schedule of one training step. Throws UsageError that names the nearest legal values if the
// kind does not support this shape.
//
// Source: Huang et al. 2019 (arXiv:1811.06965) GPipe; Narayanan et al. 2021 (arXiv:2104.04473) 1F1B
// and interleaved; Qi et al. 2023 (arXiv:2401.10241) ZB-H1 and the automatic schedule; Qi et al.
// 2024 (arXiv:2405.15362) ZB-V; Yeung et al. 2024 (arXiv:2411.05288) vocabulary split over the
// stages.
Schedule make_schedule(ScheduleKind kind, const ScheduleShape& shape);

// Forward passes only, with the placement of `kind`: evaluation. Any number of micro-batches.
Schedule make_forward_schedule(ScheduleKind kind, const ScheduleShape& shape);

char letter(Action::Kind kind);               // F, B, I, W, H, L
std::string to_string(const Action& action);  // "F0.3": chunk 0, micro-batch 3
std::string to_string(std::span<const Action> actions);

}  // namespace megatron
