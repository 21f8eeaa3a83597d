// Plays the engine for tests of the runner: makes plans by random choices, and keeps the books of
// slots and blocks that these need.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/inference/step_runner.h"

namespace megatron {

// What a sequence asks for, and what it got.
struct DrivenSequence {
  SlotStart start;  // slot is given by the driver; ids: the prompt
  int64_t tokens = 0;
  std::vector<DrawnToken> drawn = {};
  std::vector<PositionLogProbabilities> scores = {};  // of the prompt, from position 1 on
};

// How often the driver does what; each a chance per step.
struct DriverChances {
  double whole_prompts = 0.0;  // else in chunks of random size
  double preempt = 0.0;        // half by swapping, half by computing again
  double share = 0.0;          // a sequence starts with blocks of another one of equal prompt
  double pause = 0.0;          // a decoding sequence sits a step out
  int64_t in_flight = 1;       // steps that are launched before the first is read
  // Decodes have up to `most_drafts` drafts: tokens that these sequences got, and wrong ones.
  const std::vector<DrivenSequence>* drafts = nullptr;
  int64_t most_drafts = 4;
};

class PlanDriver {
 public:
  // `launch` starts a plan on every rank, `take` waits for the oldest one.
  PlanDriver(const RunnerFacts& facts, const DriverChances& chances, uint32_t seed,
             std::function<void(const StepPlan&)> launch, std::function<StepResult()> take);
  // Drives one runner.
  PlanDriver(StepRunner& runner, const DriverChances& chances, uint32_t seed);

  // Runs all sequences to their end.
  void run(std::vector<DrivenSequence>& sequences);
  int64_t swaps() const { return swaps_; }
  int64_t shared() const { return shared_; }
  int64_t dropped() const { return dropped_; }  // blocks behind windows
  int64_t drafted() const { return drafted_; }
  int64_t accepted() const { return accepted_; }  // drafts that stand
  int64_t crossed() const { return crossed_; }    // sequences beyond the border of longrope

 private:
  struct Running {
    size_t sequence = 0;
    std::vector<int32_t> ids;  // known ones: the prompt's, then those that were read
    int64_t prompt = 0;        // positions, given rows included
    int64_t done = 0;          // positions in the cache
    int64_t stood = 0;         // the last of them: drafts of the last part
    int64_t drawn = 0;         // tokens, read or in flight
    int64_t free_at = 0;       // first step that may take the token of the last draw
    bool has_drafts = false;   // in flight
    std::vector<int32_t> blocks;
    int64_t dropped = 0;     // leading ones
    bool is_beyond = false;  // longrope: rotated for a sequence beyond the border
  };
  struct Swapped {
    Running running;
    std::vector<int32_t> blocks;  // on the host
    int32_t state = -1;
  };
  bool chance(double p) { return p > 0 && std::uniform_real_distribution<>()(random_) < p; }
  int64_t draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  int64_t known(const Running& r) const;  // positions of known or sampled tokens
  bool reserve(Running& r, int64_t positions, BlockChange& change);
  void release(int32_t block);
  void admit(StepPlan& plan);
  void begin(StepPlan& plan, int32_t slot, Running running);
  bool share(StepPlan& plan, Running& r, BlockChange& change);
  void preempt(StepPlan& plan);
  void drop_behind_window(StepPlan& plan);
  void compute_again_beyond_border();
  void add_parts(StepPlan& plan);
  void add_part(StepPlan& plan, int32_t slot, int64_t count, int64_t drafts);
  int64_t draw_drafts(const Running& r);
  void end_finished(StepPlan& plan);
  void read();

  const RunnerFacts facts_;
  const DriverChances chances_;
  std::mt19937 random_;
  std::function<void(const StepPlan&)> launch_;
  std::function<StepResult()> take_;
  std::vector<DrivenSequence>* sequences_ = nullptr;
  std::deque<size_t> waiting_;
  std::deque<Running> again_;  // preempted, to be computed again
  std::deque<Swapped> swapped_;
  std::map<int32_t, Running> running_;  // by slot
  std::vector<int32_t> free_, free_host_, free_states_, freed_;
  std::vector<int32_t> uses_;  // by block
  struct Flight {
    struct Draw {
      int32_t slot = 0;
      size_t sequence = 0;
      std::vector<int32_t> drafts = {};
    };
    std::vector<Draw> draws;
    size_t num_draws() const;
    std::vector<size_t> scores;  // sequence of each scored row
  };
  std::deque<Flight> flights_;
  int64_t step_ = 0, swaps_ = 0, shared_ = 0, dropped_ = 0, crossed_ = 0;
  int64_t drafted_ = 0, accepted_ = 0;
};

// Drives the runners of all ranks of `world`: the first one makes the plans and sends them to the
// others, through `device`. `sequences` get their results on the first.   return there: drafts that
// stand
int64_t drive_ranks(const ProcessGroup& world, StepRunner& runner, const DriverChances& chances,
                    uint32_t seed, std::vector<DrivenSequence>& sequences,
                    at::Device device = at::kCPU);

}  // namespace megatron
