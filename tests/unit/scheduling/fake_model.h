// A model without tensors: the content of a position is a hash of everything that a transformer's
// keys would depend on, so that a wrong block, position, copy or state changes the tokens. It
// checks plans as it applies them.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "megatron/scheduling/request.h"
#include "megatron/scheduling/runner_facts.h"
#include "megatron/scheduling/step_plan.h"

namespace megatron {

// A request with this id among its forbidden ones gets logits that are not finite at its fourth
// token.
constexpr int32_t kBreaksLogits = 1;

struct FakeOptions {
  RunnerFacts facts;
  // Whether keys depend on the version of the weights that computed them, as those of a model do;
  // otherwise tokens depend on the current version alone.
  bool keys_depend_on_weights = true;
};

class FakeModel {
 public:
  explicit FakeModel(const FakeOptions& options);

  // Throws InternalError for a plan that reads what was not written, writes what others hold, or
  // contradicts the plans before.
  StepResult apply(const StepPlan& plan);

  // What the cache held is lost.
  void drop_cache();
  int64_t rows() const { return rows_; }  // computed so far
  int64_t steps() const { return last_step_; }

 private:
  struct Cell {
    bool written = false;
    int64_t position = 0;
    uint64_t content = 0;
  };
  using Block = std::vector<Cell>;
  struct Held {
    uint64_t state = 0;            // of what counts
    std::vector<uint64_t> drafts;  // behind it
  };
  struct Slot {
    bool used = false;
    SlotStart start;
    int64_t next = -1;  // position that must come next; -1: the first part says
    Held held;
    int32_t last_drawn = -1;
    int64_t drawn_for = -1, drawn_in = -1;  // position and step
    std::vector<int32_t> ids;
  };

  void move_blocks(const StepPlan& plan);
  void start_slots(const StepPlan& plan);
  void check_holders() const;
  // What the parts so far took of the plan's lists.
  struct Place {
    size_t token = 0, target = 0, mask = 0;
  };
  void compute(const StepPlan& plan, const PlanPart& part, Place& at, StepResult& result);
  Cell& cell(int32_t slot, int64_t position);

  FakeOptions options_;
  BlockTables tables_;
  std::vector<Block> device_, host_;
  std::vector<Slot> slots_;
  std::vector<Held> host_states_;
  int64_t last_step_ = 0, rows_ = 0;
  uint64_t last_hash_ = 0;
};

// A prompt of the ids first, first + 1, ..., which seed the draws as well.
RequestSpec counted_request(int64_t prompt, int64_t output, int32_t first = 1);

// What a request gives by itself.
struct AloneOutput {
  std::vector<int32_t> ids;  // an end or stop token included
  std::vector<PositionLogProbabilities> log_probabilities;
  std::vector<PositionLogProbabilities> prompt;
  bool finite = true;  // false: the logits after `ids` were not
};
// `versions[i]`: of the weights that give the i-th token (their last one for those beyond).
AloneOutput run_alone(const FakeOptions& options, const RequestSpec& spec, int32_t choice,
                      std::span<const int64_t> versions = {});

}  // namespace megatron
