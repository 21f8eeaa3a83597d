#include "megatron/training/planning/memory_estimate.h"

#include <algorithm>
#include <map>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/distributed/shard_reduce.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/kernels/adamw.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Workspace of one cuBLAS handle on Hopper; weight gradients have a handle of their own
constexpr int64_t kBlasWorkspace = 32 * kMiB;

// -- persistent memory

// What the states of whole matrices need beyond those of other weights, on the shard where that is
// most; negative: less.
int64_t matrix_state_bytes(const LayoutPlan& plan, const PlannedBuffer& buffer) {
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  const auto bytes_of = [&](UpdateKind kind) {
    return optimizer_state_bytes(optimizer, plan.bytes.model == 2, kind);
  };
  const UpdateRule& rule = update_rule(optimizer);
  std::vector<int64_t> elements(static_cast<size_t>(buffer.sharding.shards));
  for (size_t i = 0; i < buffer.parameters.size(); ++i) {
    const Parameter& parameter = *buffer.parameters[i];
    if (!parameter.trainable || rule.kind_of(is_hidden_matrix(parameter)) != UpdateKind::kMatrix)
      continue;
    const BufferSlot& slot = buffer.layout.slots[i];
    const BufferBucket& bucket = buffer.layout.buckets[static_cast<size_t>(slot.bucket)];
    const int64_t part = (bucket.end - bucket.begin) / buffer.sharding.shards;
    elements[static_cast<size_t>((slot.begin - bucket.begin) / part)] += num_elements(parameter);
  }
  const int64_t more = bytes_of(UpdateKind::kMatrix) - bytes_of(UpdateKind::kElementwise);
  const auto [least, most] = std::minmax_element(elements.begin(), elements.end());
  return more * (more > 0 ? *most : *least);
}

void add_optimizer(const LayoutPlan& plan, const PlannedBuffer& buffer, StageMemory& memory) {
  const int64_t shards = buffer.sharding.shards,
                elements = buffer.layout.num_trained_elements / shards;
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  const int64_t per_element = optimizer_state_bytes(optimizer, plan.bytes.model == 2);
  const double offloaded =
      optimizer.optimizer_cpu_offload ? optimizer.optimizer_offload_fraction : 0.0;
  const auto in_host_memory = static_cast<int64_t>(offloaded * static_cast<double>(elements));
  memory.optimizer_states +=
      per_element * (elements - in_host_memory) + matrix_state_bytes(plan, buffer);
  // In host memory, values have a copy or are the master weights.
  memory.host_optimizer_states += (per_element + plan.bytes.model) * in_host_memory;
  int64_t blocks = 0;  // per block a record and a partial sum; a shard has its part of them
  for (const Parameter* p : buffer.parameters)
    if (p->trainable)
      blocks += (num_elements(*p) + kUpdateBlockElements - 1) / kUpdateBlockElements;
  const int64_t records =
      (blocks + shards - 1) / shards * static_cast<int64_t>(sizeof(UpdateBlock) + sizeof(double));
  memory.optimizer_states += records;
  // The norm and the update then each have their own blocks; those of an update in host memory are
  // in host memory.
  const double more = in_host_memory == 0 ? 0.0 : plan.on_gpu ? 1.0 - offloaded : 1.0;
  memory.optimizer_states += static_cast<int64_t>(more * static_cast<double>(records));
}

// Quantised copies of weights, in both orientations, kept as long as the values.
int64_t code_bytes(const std::vector<Parameter*>& parameters) {
  int64_t bytes = 0;
  for (const Parameter* p : parameters) {
    if (p->quantization == QuantizationRecipe::kNone) continue;
    bytes += 2 * num_elements(*p) * (p->quantization == QuantizationRecipe::kNvfp4 ? 2 : 1);
  }
  return bytes;
}

// What a chunk holds for a while, beside its buffers.
struct PassingBytes {
  int64_t gathered_weights = 0, filling_gradients = 0;
};

// Most elements of sharded weights that a chunk has gathered at once. `units`: those gathered
// together, by their place in a forward; a tied table (0: none) comes before and after them. With
// gathers in advance there are two: the next unit arrives while one is in use. In a forward and in
// a backward that is a neighbour; where forwards follow each other (in evaluations, at the start of
// a pipeline) the first one arrives during the last.
int64_t gathered_elements(const LayoutPlan& plan, const std::map<int, int64_t>& units,
                          int64_t tied_table) {
  const bool forwards = plan.arguments.training.eval_iters > 0 || plan.pipeline > 1;
  int64_t largest = 0, pair = 0, last = forwards && units.size() > 1 ? units.rbegin()->second : 0;
  for (const auto& [place, size] : units) {
    largest = std::max(largest, size);
    pair = std::max(pair, std::exchange(last, size) + size);
  }
  if (!plan.arguments.ddp.overlap_param_gather) return std::max(largest, tied_table);
  return std::max(pair, largest + tied_table);
}

PassingBytes add_buffer(const LayoutPlan& plan, const PlannedBuffer& planned, StageMemory& memory) {
  const BufferLayout& buffer = planned.layout;
  const DataSharding& sharding = planned.sharding;
  PassingBytes passing;
  const int64_t all = buffer.num_elements, own = all / sharding.shards;
  const int64_t trained = buffer.num_trained_elements, own_trained = trained / sharding.shards;
  // Largest bucket: of layers, which fill one after the other, and of tied tables, which accumulate
  // during the whole backward.
  int64_t largest = 0, largest_shared = 0;
  int64_t tables = 0;            // other embeddings, which do so with sharded gradients
  std::vector<int64_t> filled;   // buckets filled one after the other
  std::map<int, int64_t> units;  // elements gathered together
  for (const BufferBucket& bucket : buffer.buckets) {
    const int64_t size = bucket.end - bucket.begin;
    if (!bucket.own) units[bucket.unit] += size;
    if (bucket.frozen) continue;
    int64_t& most = bucket.own ? largest_shared : largest;
    most = std::max(most, size);
    if (bucket.own) continue;
    if (plan.num_microbatches > 1 && bucket.table)
      tables += size;
    else
      filled.push_back(size);
  }
  for (const Parameter* p : planned.parameters) memory.parameters += num_elements(*p);
  memory.weights += plan.bytes.model * (sharding.values ? own : all);
  if (!sharding.values) memory.weights += code_bytes(planned.parameters);
  memory.gradients += plan.bytes.sum * (sharding.gradients ? own_trained : trained);
  const DistributedDataParallelConfig& ddp = plan.arguments.ddp;
  if (sharding.values)
    passing.gathered_weights = gathered_elements(plan, units, largest_shared) * plan.bytes.model;
  // Reductions by peer-to-peer copies need staging buffers, but none for a result.
  int64_t staged = 0;
  if (ddp.peer_copies && ddp.overlap_grad_reduce)
    staged = staging_elements(sharding.shards, std::max(largest, largest_shared) / sharding.shards);
  memory.gradients += staged * (ddp.grad_reduce_in_bf16 ? 2 : plan.bytes.sum);
  if (sharding.gradients) {
    // With overlapped reductions one bucket is held while the next one fills; in bf16 with a
    // rounded copy.
    int64_t held = 0;
    // The first bucket of a pass follows the last one of another pass
    for (size_t i = 0; i < filled.size(); ++i) {
      const int64_t next =
          ddp.overlap_grad_reduce && filled.size() > 1 ? filled[(i + 1) % filled.size()] : 0;
      held = std::max(held, filled[i] + next);
    }
    held += tables + largest_shared;
    const int64_t summed = std::max(largest, largest_shared);
    const bool early =
        buffer.num_trained_buckets > 2;  // the only bucket is reduced after activations are freed
    const int64_t arriving = early && staged == 0 ? summed * plan.bytes.sum / sharding.shards : 0;
    passing.filling_gradients =
        held * plan.bytes.sum + arriving + (early && ddp.grad_reduce_in_bf16 ? 2 : 0) * summed;
  }
  add_optimizer(plan, planned, memory);
  return passing;
}

void add_chunk(const LayoutPlan& plan, int stage, int chunk, StageMemory& memory) {
  PassingBytes passing;
  for (const PlannedBuffer& buffer : plan.buffers(stage, chunk)) {
    const PassingBytes more = add_buffer(plan, buffer, memory);
    passing.gathered_weights += more.gathered_weights;
    passing.filling_gradients += more.filling_gradients;
  }
  // Every chunk keeps what it gathered last while another one runs.
  memory.gathered_weights += passing.gathered_weights;
  memory.filling_gradients = std::max(memory.filling_gradients, passing.filling_gradients);
}

// -- memory that varies within a step

// Walks the schedule of one stage and records the moment of peak memory.
class Walk {
 public:
  Walk(const LayoutPlan& plan, int stage, StageMemory& memory)
      : plan_(plan),
        stage_(stage),
        out_(memory),
        in_flight_(memory.passes.size(), 0),
        transfer_(plan.stream_bytes()),
        batch_(plan.ends.batch),
        vocabulary_(plan.ends.split_head),
        hidden_calls_(
            hidden_calls(plan.schedule, stage, plan.arguments.pipeline.overlap_p2p_communication)),
        reads_(plan.stages.num_chunks() + (plan.splits_vocabulary() ? 1 : 0)),
        reads_left_(static_cast<size_t>(plan.num_microbatches), reads_) {}

  void run() {
    const std::vector<ActionTransfers>& transfers = plan_.transfers[static_cast<size_t>(stage_)];
    const std::vector<Action>& actions = plan_.schedule.stages[static_cast<size_t>(stage_)];
    size_t next_receiver = 0;
    for (size_t i = 0; i < actions.size(); ++i) {
      next_receiver = std::max(next_receiver, i + 1);
      while (next_receiver < actions.size() && !crosses(transfers[next_receiver].receive))
        ++next_receiver;
      early_ = plan_.arguments.pipeline.overlap_p2p_communication && next_receiver < actions.size()
                   ? transfer_
                   : 0;
      if (transfers[i].receive.any()) release_sends(transfers[i].receive);
      step(i, actions[i], transfers[i]);
      if (crosses(transfers[i].send)) sent_.push_back({transfers[i].send, transfer_});
    }
  }

 private:
  struct Sent {
    Transfer to;
    int64_t bytes;
  };

  bool is_last() const { return stage_ + 1 == static_cast<int>(plan_.pipeline); }
  bool crosses(const Transfer& transfer) const { return transfer.any() && transfer.peer != stage_; }

  void release_sends(const Transfer& received) {
    std::erase_if(sent_, [&](const Sent& sent) {
      return sent.to.peer == received.peer && sent.to.peer_action <= received.peer_action;
    });
  }

  void step(size_t index, const Action& action, const ActionTransfers& transfers) {
    const PassBytes& pass = out_.passes[static_cast<size_t>(action.chunk)];
    int& in_flight = in_flight_[static_cast<size_t>(action.chunk)];
    switch (action.kind) {
      case Action::Kind::kForward: {
        int& left = reads_left_[static_cast<size_t>(action.microbatch)];
        if (left == reads_) batches_ += batch_;
        activations_ += pass.saved.total();
        ++in_flight;
        record(pass.forward_extra, 0);
        leaving_ = pass.leaving;
        if (--left == 0) batches_ -= batch_;
        if (plan_.splits_vocabulary() && is_last()) joint_ += vocabulary_.hidden;
        break;
      }
      case Action::Kind::kHead:
        if (!is_last())
          joint_ += vocabulary_.hidden * static_cast<int64_t>(hidden_calls_[index].size());
        record(vocabulary_.head_extra, 0);
        joint_ -= vocabulary_.hidden;
        activations_ += vocabulary_.held;
        if (--reads_left_[static_cast<size_t>(action.microbatch)] == 0) batches_ -= batch_;
        break;
      case Action::Kind::kLoss:
        if (!is_last()) joint_ -= std::exchange(given_, 0);  // gradients of earlier micro-batches
        record(vocabulary_.loss_extra, 0);
        activations_ -= vocabulary_.held;
        joint_ += vocabulary_.hidden;
        given_ += vocabulary_.hidden;
        break;
      case Action::Kind::kBackward:
        if (plan_.splits_vocabulary() && is_last()) joint_ -= vocabulary_.hidden;
        record(backward_most(pass),
               transfers.receive.any() || (plan_.splits_vocabulary() && is_last()) ? transfer_ : 0);
        leaving_ = 0;
        activations_ -= pass.saved.total();
        --in_flight;
        break;
      case Action::Kind::kBackwardInput:
        // Peak at its start, or at its end, when everything for the weight gradients is held.
        record(
            std::max(backward_most(pass), pass.pending + pass.deferred_extra - pass.saved.total()),
            transfers.receive.any() ? transfer_ : 0);
        leaving_ = 0;
        activations_ -= pass.saved.total();
        --in_flight;
        pending_ += pass.pending;
        break;
      case Action::Kind::kBackwardWeight:
        record(0, 0);
        pending_ -= pass.pending;
        break;
    }
  }

  int64_t backward_most(const PassBytes& pass) const {
    return std::max(pass.backward_extra, leaving_ > 0 ? pass.backward_first + leaving_ : 0);
  }

  // `arrived`: the output gradient of the running pass.
  void record(int64_t temporaries, int64_t arrived) {
    int64_t transfers = early_ + arrived + joint_;
    for (const Sent& sent : sent_) transfers += sent.bytes;
    const int64_t total = activations_ + pending_ + transfers + batches_ + temporaries;
    if (total <= most_) return;
    most_ = total;
    out_.activations = activations_;
    out_.weight_gradients = pending_;
    out_.transfers = transfers;
    out_.batches = batches_;
    out_.temporaries = temporaries;
    out_.passes_in_flight = in_flight_;
    out_.host_activations = 0;
    for (size_t chunk = 0; chunk < in_flight_.size(); ++chunk)
      out_.host_activations += in_flight_[chunk] * out_.passes[chunk].offloaded;
  }

  const LayoutPlan& plan_;
  const int stage_;
  StageMemory& out_;
  std::vector<int> in_flight_;  // by chunk
  const int64_t transfer_;      // one activation between stages
  const int64_t batch_;
  const SplitHeadCost& vocabulary_;
  const std::vector<std::vector<int>> hidden_calls_;  // by action
  const int reads_;                                   // number of passes that read a micro-batch
  std::vector<int> reads_left_;                       // by micro-batch
  std::vector<Sent> sent_;
  int64_t given_ = 0;  // gradients of hidden states computed here for other stages
  int64_t joint_ = 0;  // hidden states and their gradients in collectives over all stages
  int64_t early_ = 0, leaving_ = 0, activations_ = 0, pending_ = 0, batches_ = 0, most_ = -1;
};

}  // namespace

int64_t StageMemory::before_training() const {
  return weights + gradients + optimizer_states + mailbox;
}

int64_t StageMemory::allocated() const {
  return before_training() + gathered_weights + filling_gradients + activations + weight_gradients +
         transfers + batches + temporaries + library_workspace;
}

StageMemory stage_memory(const LayoutPlan& plan, int stage) {
  StageMemory memory;
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    add_chunk(plan, stage, chunk, memory);
    memory.passes.push_back(pass_bytes(plan, stage, chunk));
  }
  Walk(plan, stage, memory).run();
  if (!plan.on_gpu) return memory;
  memory.library_workspace = 2 * kBlasWorkspace;
  // Processes on CPUs have no mailbox: they cannot reach each other's memory.
  if (const int64_t part = plan.arguments.mailbox_part_bytes(plan.bytes.model); part > 0) {
    memory.mailbox = PeerMailbox::memory_bytes(plan.tensor, part);
    int64_t postponed = 0;
    for (const PassBytes& pass : memory.passes) postponed = std::max(postponed, pass.postponed);
    memory.temporaries += postponed;
  }
  return memory;
}

OutsideMemory outside_memory(const LayoutPlan& plan) {
  OutsideMemory outside;
  if (!plan.on_gpu) return outside;
  outside.context = 600 * kMiB;
  int64_t communicators = plan.arguments.world_size > 1 ? 1 : 0;  // the world
  for (const int64_t size :
       {plan.tensor, plan.context, plan.data * plan.context, plan.tensor * plan.pipeline})
    communicators += size > 1 ? 1 : 0;
  // Without expert parallelism the groups of experts are those of other weights.
  if (plan.expert > 1) communicators += 2 + (plan.mesh.group_size({Axis::kExpertData}) > 1 ? 1 : 0);
  const int64_t links = plan.pipeline > 1 ? 4 : 0;  // to and from two neighbours
  outside.communicators = communicators * 256 * kMiB + links * 32 * kMiB;
  return outside;
}

}  // namespace megatron
