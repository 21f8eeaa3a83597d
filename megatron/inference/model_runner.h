// Executes the engine's plans on one rank: a ragged row of tokens through this rank's segment of a
// model, over a paged cache and states in slots; then draws.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/inference/adapters.h"
#include "megatron/inference/graphs/decode_graphs.h"
#include "megatron/inference/sampling.h"
#include "megatron/inference/served_weights.h"
#include "megatron/inference/step_runner.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/transformer/layer/layer_state.h"

namespace megatron {

struct RunnerOptions {
  int32_t slots = 1;  // sequences that run at a time
  int64_t block_size = 64;
  int32_t device_blocks = 1;
  int32_t host_blocks = 0, host_states = 0;  // for swapping
  int64_t max_positions = 0;                 // of a sequence; 0: what the model can
  StateKeeping keeping = {};
  // Keys and values are held in E4M3, with a scale per layer and head. The scales follow from the
  // largest values over `calibration`, ids of one text, and do not change afterwards.
  bool fp8_cache = false;
  std::vector<int32_t> calibration = {};
  const AdapterList* adapters = nullptr;  // outlives the runner; null: none
  int64_t most_rows = 0;  // of a step; 0: not known, and steps divide no rows over tensor ranks
  // Rows of steps that run as CUDA graphs, rising; empty: none do. Not used on a CPU, by
  // several stages, and for models that keep more of a sequence than keys and values; by tensor
  // ranks where they reach each other's memory.
  std::vector<int64_t> graph_sizes = {};
};

// On rank 0 of the model, the first of the first stage, take() gives what was drawn. The first
// stage reads drawn tokens from the last one when they are needed.
class ModelRunner final : public StepRunner {
 public:
  // `weights` holds the model, with its values on their device; it outlives the runner. Allocates
  // the cache. Throws Error if the model cannot be decoded in this layout.
  //
  // Communication: over tp and pp; all ranks of the model make their runners at the same time.
  ModelRunner(Model& model, ServedWeights& weights, const RunnerOptions& options);
  // Weights stay as they are: transitions that move or exchange them are refused.
  ModelRunner(Model& model, const RunnerOptions& options);
  ~ModelRunner() override;

  // On a GPU with graphs there is work that requests need not wait for: capturing all graphs, and
  // running steps of up to `most_rows` rows that do nothing, for which libraries choose and load
  // their kernels. Seconds for a large model. Called once, before the first step; does a small part
  // of it and leaves the rest to warm_up_some(), also whenever memory of graphs moves.
  void plan_warm_up(int64_t most_rows);
  // Two tokens in a block that nobody holds yet: afterwards what a model makes at its first forward
  // is there. Communication: over the ranks of the model.
  void run_first_forward();
  // A piece, of tens of milliseconds, between two steps. Returns whether there was one.
  //
  // Communication: over tp; all ranks call it alike.
  bool warm_up_some();

  const RunnerFacts& facts() const override { return facts_; }
  // Communication: over tp; from stage to stage; draws from the last stage to the first.
  void launch(const StepPlan& plan) override;
  std::optional<StepResult> take(int64_t wait_ns) override;
  void begin(const RunnerTransition& transition) override;
  std::optional<std::string> poll(int64_t wait_ns) override;

  int64_t cache_bytes() const { return state_.bytes(); }    // blocks and states on the device
  int64_t graph_steps() const { return graph_steps_; }      // that ran as graphs
  int64_t divided_steps() const { return divided_steps_; }  // whose rows tensor ranks divided

 private:
  struct Slot {
    int32_t adapter = -1;
    std::shared_ptr<const GivenRows> rows;
    LogProbabilityWishes wishes;
    int64_t shift = 0;  // of positions of ids behind rows with positions of their own
  };
  // A step whose result was not taken.
  struct Flight {
    int64_t step = 0;
    std::vector<int64_t> slots;  // of each draw
    DrawReport draws;
    LogProbabilityReport scores;
    std::vector<int32_t> targets;
    at::Tensor numbers;  // ids, then reports: on the device, then on the host
    std::shared_ptr<Work> receive;
    HostCopies::Mark copied;
    bool settled = false;
    int64_t size() const {
      return static_cast<int64_t>(slots.size()) + draws.size() + scores.size();
    }
  };
  struct Passed {  // to the next stage
    at::Tensor tensor;
    std::shared_ptr<Work> work;
  };

  ModelRunner(Model& model, ServedWeights* weights, at::Device device,
              const RunnerOptions& options);
  bool is_first() const { return pp_.rank() == 0; }
  bool is_last() const { return pp_.rank() + 1 == pp_.size(); }
  void check_model() const;
  void share_sums(const RunnerOptions& options);
  // Prepares for steps of up to so many rows that tensor ranks divide.
  void divide_rows(int64_t most_rows);
  void make_facts(const RunnerOptions& options);
  void allocate(const RunnerOptions& options);
  void calibrate(const std::vector<int32_t>& ids);

  // What a step has computed: hidden states, or logits of all rows.
  struct Computed {
    at::Tensor hidden, logits;
  };
  // If the step runs as a graph.
  std::optional<Computed> run_graph(const StepPlan& plan);
  bool with_graphs(bool required, const std::function<void()>& work);
  void capture_next_graph();
  void run_idle_rows(int64_t rows);
  void move_blocks(const StepPlan& plan);
  void start(const StepPlan& plan);
  std::vector<RowAdapters::Group> adapter_groups(const StepPlan& plan) const;
  at::Tensor tokens_of(const StepPlan& plan, RaggedBatch& batch);
  // [1, t], or [1, t, 3] where a request has rows with positions of their own
  at::Tensor positions_of(const StepPlan& plan, const RaggedBatch& batch) const;
  // Through this rank's segment: hidden states of the last one, else nothing. `captured`: in a
  // graph, where rows are not divided.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions,
                     const RaggedBatch& batch, bool captured = false);
  // Until at most so many tensors are on their way to other stages.
  void wait_for_passed(size_t most);
  StageTensors from_previous_stage(const TensorFormats& formats);
  void pass_on(const StageTensors& tensors);  // to the next one
  Flight flight_of(const StepPlan& plan) const;
  void finish(const StepPlan& plan, const Computed& computed, Flight& flight);
  at::Tensor score(const StepPlan& plan, const Computed& computed, const Flight& flight);
  at::Tensor logits_of(const Computed& computed, const std::vector<int64_t>& rows);
  void keep_ids(const Flight& flight, const at::Tensor& ids);
  void settle(Flight& flight);
  ServedWeights& weights() const;  // throws Error if they stay
  std::string transit(const RunnerTransition& transition);

  Model& model_;
  ServedWeights* const weights_;  // null: they stay
  const AdapterList* const adapters_;
  const ProcessGroup &tp_, &pp_;
  std::shared_ptr<PeerCollectives> sums_;  // over tp_
  std::shared_ptr<PeerMailbox> mailbox_;   // of tp_; null: rows are not divided
  int64_t divided_from_ = 0;               // rows
  const at::Device device_;
  const at::ScalarType dtype_;
  RunnerFacts facts_;
  HostCopies copies_;
  DecodingState state_;
  BlockTables tables_;
  std::vector<Slot> slots_;
  std::optional<TokenSampler> sampler_;  // on the last stage
  at::Tensor last_sampled_;              // [slots] int64 on the device
  std::unique_ptr<DecodeGraphs> graphs_;
  std::deque<int64_t> idle_rows_;  // numbers of rows that were not warmed up
  int64_t graph_steps_ = 0, divided_steps_ = 0;
  std::deque<Flight> flights_;
  std::deque<Passed> passed_;
  int64_t last_step_ = 0;
  bool staging_ = false;
  std::string outcome_;
};

}  // namespace megatron
