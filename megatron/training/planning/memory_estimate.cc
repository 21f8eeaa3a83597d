#include "megatron/training/planning/memory_estimate.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/distributed/shard_reduce.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/kernels/adamw.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/runtime/device_models.h"
#include "megatron/training/planning/sharded_stores.h"
#include "megatron/transformer/moe/moe_cost.h"

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

// Bytes of the elements of a shard's trained buckets: of its values, and of their states.
struct TrainedBytes {
  int64_t values = 0, states = 0;
};

TrainedBytes trained_bytes(const LayoutPlan& plan, const PlannedBuffer& buffer) {
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  TrainedBytes bytes;
  for (const BufferBucket& bucket : buffer.layout.buckets) {
    if (bucket.frozen) continue;
    const bool half = plan.bytes.model == 2 && !bucket.wide;
    bytes.values += bucket.value_elements * plan.bytes.model / buffer.sharding.shards;
    bytes.states += optimizer_state_bytes(optimizer, half) * (bucket.end - bucket.begin) /
                    buffer.sharding.shards;
  }
  return bytes;
}

void add_optimizer(const LayoutPlan& plan, const PlannedBuffer& buffer, StageMemory& memory) {
  const int64_t shards = buffer.sharding.shards;
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  const TrainedBytes bytes = trained_bytes(plan, buffer);
  const double offloaded =
      optimizer.optimizer_cpu_offload ? optimizer.optimizer_offload_fraction : 0.0;
  const auto in_host_memory = [&](int64_t all) {
    return static_cast<int64_t>(offloaded * static_cast<double>(all));
  };
  memory.optimizer_states +=
      bytes.states - in_host_memory(bytes.states) + matrix_state_bytes(plan, buffer);
  // In host memory, values have a copy or are the master weights.
  memory.host_optimizer_states += in_host_memory(bytes.states + bytes.values);
  int64_t blocks = 0;  // per block a record and a partial sum; a shard has its part of them
  for (const Parameter* p : buffer.parameters)
    if (p->trainable)
      blocks += (num_elements(*p) + kUpdateBlockElements - 1) / kUpdateBlockElements;
  const int64_t records =
      (blocks + shards - 1) / shards * static_cast<int64_t>(sizeof(UpdateBlock) + sizeof(double));
  memory.optimizer_states += records;
  // The norm and the update then each have their own blocks; those of an update in host memory are
  // in host memory.
  const double more = offloaded == 0 ? 0.0 : plan.on_gpu ? 1.0 - offloaded : 1.0;
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

// Of the modules besides the language model, without the alignment of buffers.
void add_modules(const LayoutPlan& plan, const PlannedBuffer& planned, StageMemory& memory) {
  const DataSharding& sharding = planned.sharding;
  memory.modules.resize(plan.ends.modules.size());
  for (size_t i = 0; i < memory.modules.size(); ++i) {
    ModuleMemory& module = memory.modules[i];
    module.name = plan.ends.modules[i].name;
    for (const Parameter* p : planned.parameters) {
      if (!p->name.starts_with(module.name)) continue;
      const int64_t elements = num_elements(*p);
      module.weights += plan.bytes.model * elements / (sharding.values ? sharding.shards : 1);
      if (!p->trainable) continue;
      module.gradients += plan.bytes.sum * elements / (sharding.gradients ? sharding.shards : 1);
      module.states += optimizer_state_bytes(plan.arguments.optimizer, plan.bytes.model == 2) *
                       elements / sharding.shards;
    }
  }
}

void add_buffer(const LayoutPlan& plan, const PlannedBuffer& planned, StageMemory& memory) {
  const BufferLayout& buffer = planned.layout;
  const DataSharding& sharding = planned.sharding;
  const int64_t all = buffer.num_value_elements, own = all / sharding.shards;
  const int64_t trained = buffer.num_trained_elements, own_trained = trained / sharding.shards;
  for (const Parameter* p : planned.parameters) memory.parameters += num_elements(*p);
  add_modules(plan, planned, memory);
  memory.weights += plan.bytes.model * (sharding.values ? own : all);
  if (!sharding.values) memory.weights += code_bytes(planned.parameters);
  memory.gradients += plan.bytes.sum * (sharding.gradients ? own_trained : trained);
  const DistributedDataParallelConfig& ddp = plan.arguments.ddp;
  // Reductions by peer-to-peer copies need staging buffers, but none for a result.
  if (ddp.peer_copies && ddp.overlap_grad_reduce) {
    int64_t largest = 0;
    for (const BufferBucket& bucket : buffer.buckets)
      if (!bucket.frozen) largest = std::max(largest, bucket.end - bucket.begin);
    memory.gradients += staging_elements(sharding.shards, largest / sharding.shards) *
                        (ddp.grad_reduce_in_bf16 ? 2 : plan.bytes.sum);
  }
  add_optimizer(plan, planned, memory);
}

// -- memory that varies within a step

// Of a micro-batch that the stage encodes, or a part of it.
int64_t media_bytes(const LayoutPlan& plan, int stage) {
  int64_t most = 0;
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    const StageSlice slice = plan.stages.slice(stage, chunk);
    if (slice.embedding || slice.num_parts > 0)
      most = std::max(most, plan.ends_of(stage, chunk).media);
  }
  return most;
}

// Of the chunk that encodes before the turn of micro-batches.
EndsCost::Ahead work_ahead(const LayoutPlan& plan, int stage) {
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    const StageSlice slice = plan.stages.slice(stage, chunk);
    const EndsCost::Ahead& ahead = plan.ends_of(stage, chunk).ahead;
    if ((slice.embedding || slice.num_parts > 0) && ahead.microbatches > 0) return ahead;
  }
  return {};
}

// Walks the schedule of one stage and records the moment of peak memory.
class Walk {
 public:
  Walk(const LayoutPlan& plan, int stage, ShardedStores& stores, StageMemory& memory)
      : plan_(plan),
        stage_(stage),
        stores_(stores),
        out_(memory),
        in_flight_(memory.passes.size(), 0),
        transfer_(plan.transfer_bytes(stage)),
        batch_(plan.ends.batch + media_bytes(plan, stage)),
        ahead_(work_ahead(plan, stage)),
        vocabulary_(plan.ends.split_head),
        hidden_calls_(
            hidden_calls(plan.schedule, stage, plan.arguments.pipeline.overlap_p2p_communication)),
        reads_(plan.stages.num_chunks() + (plan.splits_vocabulary() ? 1 : 0)),
        reads_left_(static_cast<size_t>(plan.num_microbatches), reads_) {}

  void run() {
    stores_.begin_step();
    const std::vector<ActionTransfers>& transfers = plan_.transfers[static_cast<size_t>(stage_)];
    const std::vector<Action>& actions = plan_.schedule.stages[static_cast<size_t>(stage_)];
    const bool overlaps = plan_.arguments.pipeline.overlap_p2p_communication;
    for (size_t i = 0; i < actions.size(); ++i) {
      early_ = overlaps && early_receiver(transfers, stage_, i) < actions.size() ? transfer_ : 0;
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
        const bool first = left == reads_;
        const int64_t end = std::min(action.microbatch + ahead_.microbatches + 1,
                                     static_cast<int64_t>(reads_left_.size()));
        for (; read_ < end; ++read_) batches_ += batch_, features_ += ahead_.features;
        if (first && ahead_.saved) features_ -= ahead_.features;
        activations_ += pass.saved.total();
        ++in_flight;
        for (size_t i = 0; i < pass.moments.size(); ++i)
          record(pass.moments[i].forward, 0, stores_.forward(action.chunk, i));
        leaving_ = pass.leaving;
        if (--left == 0) {
          batches_ -= batch_;
          if (!ahead_.saved) features_ -= ahead_.features;
        }
        if (plan_.splits_vocabulary() && is_last()) joint_ += vocabulary_.hidden;
        break;
      }
      case Action::Kind::kHead:
        if (!is_last())
          joint_ += vocabulary_.hidden * static_cast<int64_t>(hidden_calls_[index].size());
        record(vocabulary_.head_extra, 0, stores_.forward(action.chunk, pass.moments.size()));
        joint_ -= vocabulary_.hidden;
        activations_ += vocabulary_.held;
        if (--reads_left_[static_cast<size_t>(action.microbatch)] == 0) batches_ -= batch_;
        break;
      case Action::Kind::kLoss:
        if (!is_last()) joint_ -= std::exchange(given_, 0);  // gradients of earlier micro-batches
        record(vocabulary_.loss_extra, 0, stores_.backward(action.chunk, pass.moments.size()));
        activations_ -= vocabulary_.held;
        joint_ += vocabulary_.hidden;
        given_ += vocabulary_.hidden;
        break;
      case Action::Kind::kBackward:
        if (plan_.splits_vocabulary() && is_last()) joint_ -= vocabulary_.hidden;
        run_backward(action, GradientPass::kWhole,
                     transfers.receive.any() || (plan_.splits_vocabulary() && is_last()));
        leaving_ = 0;
        activations_ -= pass.saved.total();
        --in_flight;
        break;
      case Action::Kind::kBackwardInput:
        run_backward(action, GradientPass::kInput, transfers.receive.any());
        leaving_ = 0;
        activations_ -= pass.saved.total();
        --in_flight;
        pending_ += pass.pending;
        break;
      case Action::Kind::kBackwardWeight:
        for (size_t i = pass.moments.size(); i-- > 0;)
          record(0, 0, stores_.backward(action.chunk, i, GradientPass::kWeight));
        pending_ -= pass.pending;
        break;
    }
  }

  // `arrives`: its output gradient is a tensor of a transfer.
  void run_backward(const Action& action, GradientPass gradients, bool arrives) {
    const PassBytes& pass = out_.passes[static_cast<size_t>(action.chunk)];
    const int64_t arrived = arrives ? transfer_ : 0;
    PassingBytes passing;
    for (size_t i = pass.moments.size(); i-- > 0;) {
      const PassMoment& moment = pass.moments[i];
      passing = stores_.backward(action.chunk, i, gradients);
      const int64_t first = leaving_ > 0 ? moment.backward_first + leaving_ : moment.backward;
      record(std::max(moment.backward, first), arrived, passing);
    }
    // At its end everything for the weight gradients is held.
    if (gradients == GradientPass::kInput)
      record(pass.pending + pass.deferred_extra - pass.saved.total(), arrived, passing);
  }

  // `arrived`: the output gradient of the running pass; `passing`: held by the stores.
  void record(int64_t temporaries, int64_t arrived, const PassingBytes& passing) {
    int64_t transfers = early_ + arrived + joint_;
    for (const Sent& sent : sent_) transfers += sent.bytes;
    const int64_t total =
        activations_ + pending_ + transfers + batches_ + features_ + temporaries + passing.total();
    if (total <= most_) return;
    most_ = total;
    out_.activations = activations_;
    out_.weight_gradients = pending_;
    out_.transfers = transfers;
    out_.batches = batches_;
    out_.features_ahead = features_;
    out_.temporaries = temporaries;
    out_.gathered_weights = passing.weights;
    out_.filling_gradients = passing.gradients;
    out_.passes_in_flight = in_flight_;
    out_.host_activations = 0;
    for (size_t chunk = 0; chunk < in_flight_.size(); ++chunk)
      out_.host_activations += in_flight_[chunk] * out_.passes[chunk].offloaded;
  }

  const LayoutPlan& plan_;
  const int stage_;
  ShardedStores& stores_;
  StageMemory& out_;
  std::vector<int> in_flight_;  // by chunk
  const int64_t transfer_;      // what crosses a border of this stage, at most
  const int64_t batch_;
  const EndsCost::Ahead ahead_;
  const SplitHeadCost& vocabulary_;
  const std::vector<std::vector<int>> hidden_calls_;  // by action
  const int reads_;                                   // number of passes that read a micro-batch
  std::vector<int> reads_left_;                       // by micro-batch
  std::vector<Sent> sent_;
  int64_t given_ = 0;     // gradients of hidden states computed here for other stages
  int64_t read_ = 0;      // micro-batches that were
  int64_t features_ = 0;  // of micro-batches before their turn
  int64_t joint_ = 0;     // hidden states and their gradients in collectives over all stages
  int64_t early_ = 0, leaving_ = 0, activations_ = 0, pending_ = 0, batches_ = 0, most_ = -1;
};

}  // namespace

int64_t StageMemory::before_training() const {
  return weights + gradients + optimizer_states + mailbox + expert_rows;
}

int64_t StageMemory::allocated() const {
  return before_training() + gathered_weights + filling_gradients + activations + weight_gradients +
         transfers + batches + features_ahead + temporaries + library_workspace;
}

StageMemory stage_memory(const LayoutPlan& plan, int stage) {
  StageMemory memory;
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    for (const PlannedBuffer& buffer : plan.buffers(stage, chunk)) add_buffer(plan, buffer, memory);
    memory.passes.push_back(pass_bytes(plan, stage, chunk));
  }
  // From the first step the stores know the order in which units follow each other. An evaluation
  // makes it another one for the step after it.
  const StageMemory constant = memory;
  ShardedStores stores(plan, stage, memory.passes);
  for (int step = 0; step < (plan.arguments.training.eval_iters > 0 ? 3 : 2); ++step) {
    if (step == 2) stores.evaluate();
    StageMemory one = constant;
    Walk(plan, stage, stores, one).run();
    if (one.allocated() > memory.allocated()) memory = std::move(one);
  }
  if (!plan.on_gpu) return memory;
  memory.library_workspace = 2 * kBlasWorkspace;
  memory.features_ahead += work_ahead(plan, stage).peak;  // from a stream of its own
  memory.expert_rows = flex_memory_bytes(plan.model(), plan.layer_shape());
  if (plan.arguments.is_batch_invariant() && plan.tensor > 2)
    memory.mailbox = PeerCollectives::memory_bytes(plan.tensor, PeerCollectives::kRoomForAll);
  // Processes on CPUs have no mailbox: they cannot reach each other's memory.
  if (const int64_t part = plan.arguments.mailbox_part_bytes(plan.bytes.model); part > 0) {
    memory.mailbox += PeerMailbox::memory_bytes(plan.tensor, part);
    int64_t postponed = 0;
    for (const PassBytes& pass : memory.passes) postponed = std::max(postponed, pass.postponed);
    memory.temporaries += postponed;
  }
  return memory;
}

OutsideMemory outside_memory(const LayoutPlan& plan) {
  OutsideMemory outside;
  if (!plan.on_gpu) return outside;
  outside.context = kCudaContextBytes;
  int64_t communicators = plan.arguments.world_size > 1 ? 1 : 0;  // the world
  for (const int64_t size :
       {plan.tensor, plan.context, plan.data * plan.context, plan.tensor * plan.pipeline})
    communicators += size > 1 ? 1 : 0;
  // Without expert parallelism the groups of experts are those of other weights.
  if (plan.expert > 1) communicators += 2 + (plan.mesh.group_size({Axis::kExpertData}) > 1 ? 1 : 0);
  int64_t links = plan.pipeline > 1 ? 4 : 0;  // to and from two neighbours
  if (plan.encoders != nullptr) {             // on ranks of their own: of the rank with most
    const auto copies = [](int64_t to, int64_t from) { return 1 + (to + from - 1) / from; };
    links += std::max(plan.encoders->data * copies(plan.encoders->tensor, plan.tensor),
                      plan.data * copies(plan.tensor, plan.encoders->tensor));
  }
  outside.communicators = communicators * kCommunicatorBytes + links * 32 * kMiB;
  return outside;
}

}  // namespace megatron
