#include "megatron/inference/model_runner.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/images/held_rows.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/scheduling/token_grammar.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {
namespace {

// Maximum memory for logits at one time, in fp32.
constexpr int64_t kScoredLogitsBytes = int64_t{256} << 20;
// Graphs read the keys of each row by itself. Up to so many pairs of a key and one of several rows
// of a text, that takes less time than the launches of a step without a graph.
constexpr int64_t kGraphPairs = int64_t{1} << 16;
// Graphs of up to so many rows compute the logits of all of them, whose product reads the weights
// just as long for one row. Behind larger ones those of the rows that are asked for are computed.
constexpr int64_t kGraphLogits = 16;
// The range of an FP8 cache over what calibration saw: E4M3 is a floating type, so that room costs
// no precision but that of the smallest values.
constexpr double kFp8Room = 2.0;

// While a GPU computes. With the kernel's usual slack of timers it would be 70 us.
void sleep_briefly() {
  constexpr unsigned long kSlackNs = 1000;
  thread_local const int set = prctl(PR_SET_TIMERSLACK, kSlackNs);
  static_cast<void>(set);
  std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// Given rows of a request that follow each other.
struct GivenPiece {
  const GivenRows* rows;
  int64_t first, count;
  int64_t end() const { return first + count; }
};

// [rows of all pieces, width] on the device.
at::Tensor values_of(const std::vector<GivenPiece>& pieces, at::Device device) {
  std::vector<at::Tensor> values;
  for (const auto& [rows, first, count] : pieces) {
    if (rows->held != nullptr) {
      values.push_back(
          rows->held->values.narrow(0, first, count).to(device, /*non_blocking=*/true));
      continue;
    }
    auto* from = const_cast<float*>(rows->values.data()) + first * rows->width;
    values.push_back(at::from_blob(from, {count, rows->width}, at::kFloat).to(device));
  }
  return at::cat(values);
}

// RaggedPart::ends of a part of a request with given rows.
std::vector<int64_t> ends_of(const GivenRows& rows, const PlanPart& part) {
  std::vector<int64_t> ends;
  bool ahead = false;
  for (int64_t i = part.first; i < part.first + part.count; ++i) {
    ends.push_back(i < std::ssize(rows.ends) ? rows.ends[static_cast<size_t>(i)] : i + 1);
    ahead = ahead || ends.back() > i + 1;
  }
  return ahead ? ends : std::vector<int64_t>();
}

StateBuffer::Rows rows_of(const std::vector<Swap>& swaps, bool to_host) {
  StateBuffer::Rows rows;
  for (const Swap& swap : swaps) {
    rows.from.push_back(to_host ? swap.device : swap.host);
    rows.to.push_back(to_host ? swap.host : swap.device);
  }
  return rows;
}

at::Tensor longs(const std::vector<int64_t>& values, at::Device device) {
  return to_device(at::tensor(values, at::kLong), device);
}

// Whether a graph of `rows` ends with logits.
bool computes_logits(int64_t rows) { return rows <= kGraphLogits; }

// Whether rows are 0, 1, ...
bool counts_up(const std::vector<int64_t>& rows) {
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i] != static_cast<int64_t>(i)) return false;
  return true;
}

// Positions that the widest layer sees; 0: all.
int64_t widest_window(const TransformerConfig& config) {
  int64_t widest = 0;
  for (int64_t layer = 1; layer <= config.num_layers; ++layer) {
    const std::vector<int64_t> window = config.window(layer);
    if (window.empty() || window[0] < 0) return 0;
    widest = std::max(widest, window[0] + 1);
  }
  return widest;
}

}  // namespace

ModelRunner::ModelRunner(Model& model, ServedWeights& weights, const RunnerOptions& options)
    : ModelRunner(model, &weights, weights.device(), options) {}

ModelRunner::ModelRunner(Model& model, const RunnerOptions& options)
    : ModelRunner(model, nullptr, model.parameters().front()->value.device(), options) {}

ModelRunner::ModelRunner(Model& model, ServedWeights* weights, at::Device device,
                         const RunnerOptions& options)
    : model_(model),
      weights_(weights),
      adapters_(options.adapters),
      tp_(model.groups().tp),
      pp_(model.groups().pp),
      device_(device),
      dtype_(model.parameters().front()->value.scalar_type()),
      copies_(device_),
      tables_(options.slots),
      slots_(static_cast<size_t>(options.slots)) {
  check_model();
  const at::NoGradGuard no_grad;
  share_sums(options);
  divide_rows(options.most_rows);
  if (is_last())
    sampler_.emplace(model.config().vocab_size, model.config().padded_vocab_size / tp_.size(), tp_,
                     device_);
  last_sampled_ = at::zeros({options.slots}, at::dtype(at::kLong).device(device_));
  facts_.slots = options.slots;
  facts_.block_size = options.block_size;
  state_.keep_as(options.keeping);
  if (options.fp8_cache) calibrate(options.calibration);
  allocate(options);
  make_facts(options);
  if (options.graph_sizes.empty() || !device_.is_cuda() || facts_.owns_state || pp_.size() > 1 ||
      (sums_ && !sums_->is_open()))
    return;
  const int64_t blocks = facts_.device_blocks, size = facts_.block_size,
                positions = facts_.max_positions;
  const int64_t most = positions > 0 ? std::min(blocks, (positions + size - 1) / size) : blocks;
  graphs_ = std::make_unique<DecodeGraphs>(
      options.graph_sizes, DecodeGraphs::Pool{blocks, size, most, facts_.slots}, last_sampled_,
      [this](const at::Tensor& tokens, const RaggedBatch& batch) {
        const at::Tensor hidden =
            forward(tokens, batch.rows.positions.unsqueeze(0), batch, /*captured=*/true);
        return computes_logits(tokens.size(1)) ? model_.logits(hidden).squeeze(1) : hidden;
      });
}

ModelRunner::~ModelRunner() = default;

void ModelRunner::check_model() const {
  const ParallelGroups& groups = model_.groups();
  MEGATRON_CHECK(!model_.config().sequence_parallel,
                 "a batch of decoding has any number of tokens, which --sequence-parallel cannot "
                 "divide\nhint: serve without it");
  MEGATRON_CHECK(groups.cp.size() == 1, "decoding over ", groups.cp.size(),
                 " context-parallel ranks is not built");
  MEGATRON_CHECK(!model_.config().pipeline_vocab_parallel,
                 "decoding with a vocabulary divided over pipeline stages is not built");
}

// Sums over tensor ranks of steps that decode are kernels that write into the peers' memory.
void ModelRunner::share_sums(const RunnerOptions& options) {
  sums_ = tp_.peer_collectives();
  if (!sums_) return;
  const int64_t rows = options.graph_sizes.empty()
                           ? options.slots
                           : std::max<int64_t>(options.slots, options.graph_sizes.back());
  sums_->open(device_, served_sum_bytes(model_.config(), rows,
                                        static_cast<int64_t>(c10::elementSize(dtype_))));
  if (is_batch_invariant() && !device_.is_cpu() && (tp_.size() > 2 || sums_->is_open()))
    sums_->take_all_reductions();
  if (!device_.is_cpu() && !sums_->is_open())
    log_warning(cat("sums over tensor ranks are NCCL's, and decoding runs without CUDA graphs: ",
                    sums_->obstacle()));
}

// Steps with many rows, which products take longer for than exchanges.
void ModelRunner::divide_rows(int64_t most_rows) {
  divided_from_ = divided_rows_from(model_, device_.is_cuda(), most_rows);
  if (divided_from_ == 0) return;
  mailbox_ = tp_.mailbox();
  mailbox_->open(device_, divided_part_bytes(model_, most_rows,
                                             static_cast<int64_t>(c10::elementSize(dtype_))));
  if (device_.is_cuda() && !mailbox_->obstacle().empty())
    mailbox_ = nullptr;  // share_sums() said so
}

// A forward of one token allocates every buffer at its full size.
void ModelRunner::allocate(const RunnerOptions& options) {
  const RaggedBatch batch{
      PagedRows({{0, 1, {0}}}, options.device_blocks, options.block_size, device_),
      {0},
      options.slots};
  forward(at::zeros({1, 1}, at::dtype(at::kLong).device(device_)),
          batch.rows.positions.unsqueeze(0), batch);
  facts_.device_blocks = options.device_blocks;
  facts_.host_blocks = options.host_blocks;
  facts_.host_states = options.host_states;
}

void ModelRunner::calibrate(const std::vector<int32_t>& ids) {
  MEGATRON_CHECK(!is_batch_invariant(),
                 "an FP8 cache rounds keys and values, which training does not: it cannot be used "
                 "in batch-invariant mode");
  MEGATRON_CHECK(!ids.empty(), "an FP8 cache needs ids to calibrate its scales with");
  const auto count = static_cast<int64_t>(ids.size());
  const int64_t blocks = (count + facts_.block_size - 1) / facts_.block_size;
  std::vector<int32_t> all(static_cast<size_t>(blocks));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
  const RaggedBatch batch{
      PagedRows({{0, count, std::move(all)}}, blocks, facts_.block_size, device_),
      {0},
      facts_.slots};
  const std::vector<int64_t> wide(ids.begin(), ids.end());
  state_.measure_paged();
  forward(longs(wide, device_).unsqueeze(0), batch.rows.positions.unsqueeze(0), batch);
  state_.for_each_paged([](PagedBuffer& buffer) { buffer.quantize(kFp8Room); });
  state_.for_each_slots([](SlotBuffer& buffer) { buffer.clear(); });
}

void ModelRunner::make_facts(const RunnerOptions& options) {
  const ModelConfig& config = model_.config();
  const TransformerConfig& t = config.transformer;
  facts_.vocab_size = config.vocab_size;
  facts_.hidden_size = t.hidden_size;
  facts_.max_positions = options.max_positions;
  if (t.position_embedding_type == PositionEmbedding::kLearnedAbsolute)
    facts_.max_positions = facts_.max_positions > 0
                               ? std::min(facts_.max_positions, t.max_position_embeddings)
                               : t.max_position_embeddings;
  facts_.window = widest_window(t);
  facts_.num_adapters = adapters_ != nullptr ? static_cast<int32_t>(adapters_->size()) : 0;
  if (t.position_embedding_type == PositionEmbedding::kRope &&
      t.rope_scaling_type == RopeScaling::kLongRope)
    facts_.rope_border = t.rope_original_max_position_embeddings;
  facts_.takes_state_input = model_.sequence_input() != SequenceInputUse::kNone;
  facts_.needs_state_input = model_.sequence_input() == SequenceInputUse::kRequired;
  // Equal on all stages: one may have attention alone.
  bool owns_state = false;
  state_.for_each_slots([&](SlotBuffer&) { owns_state = true; });
  const at::Tensor any = at::zeros({2}, at::dtype(at::kInt).device(device_));
  any[0] = owns_state ? 1 : 0;
  any[1] = state_.takes_back() ? 0 : 1;
  pp_.all_reduce(any, ReduceOp::kMax)->wait();
  facts_.owns_state = any[0].item<int32_t>() != 0;
  if (any[1].item<int32_t>() == 0)
    facts_.state_drafts = static_cast<int32_t>(options.keeping.drafts);
  facts_.draw_latency = pp_.size();
  facts_.launch_waits = device_.is_cpu();
  facts_.weights_version = weights_ != nullptr ? weights_->version() : 0;
}

void ModelRunner::launch(const StepPlan& plan) {
  const at::NoGradGuard no_grad;
  MEGATRON_ASSERT(plan.step == last_step_ + 1, "step ", plan.step, " after ", last_step_);
  last_step_ = plan.step;
  for (Flight& flight : flights_)
    if (flight.step <= plan.step - pp_.size()) settle(flight);
  move_blocks(plan);
  start(plan);
  Flight& flight = flights_.emplace_back(flight_of(plan));
  if (plan.parts.empty()) return;
  if (const auto computed = run_graph(plan)) {
    if (flight.size() > 0) finish(plan, *computed, flight);
    return;
  }
  std::vector<RaggedPart> parts;
  std::vector<int64_t> slots;
  std::vector<PartDrafts> drafts;
  for (const PlanPart& part : plan.parts) {
    const auto blocks = tables_.blocks(part.slot);
    parts.push_back({part.first, part.count, {blocks.begin(), blocks.end()}, part.known});
    if (const auto& rows = slots_[static_cast<size_t>(part.slot)].rows)
      parts.back().ends = ends_of(*rows, part);
    slots.push_back(part.slot);
    drafts.push_back({part.drafts, part.stood});
  }
  RaggedBatch batch{PagedRows(std::move(parts), facts_.device_blocks, facts_.block_size, device_),
                    std::move(slots), facts_.slots, std::move(drafts)};
  const at::Tensor tokens = tokens_of(plan, batch);
  const RowAdapters adapters(adapter_groups(plan));
  const at::Tensor hidden = forward(tokens, positions_of(plan, batch), batch);
  if (flight.size() > 0) finish(plan, {hidden, {}}, flight);
}

std::optional<ModelRunner::Computed> ModelRunner::run_graph(const StepPlan& plan) {
  if (!graphs_) return std::nullopt;
  std::vector<DecodeGraphs::Row> rows;
  int64_t pairs = 0;
  for (const PlanPart& part : plan.parts) {
    const Slot& slot = slots_[static_cast<size_t>(part.slot)];
    if (slot.adapter >= 0 || slot.rows) return std::nullopt;
    if (part.count > 1) pairs += part.count * (part.first + part.count);
    if (pairs > kGraphPairs || static_cast<int64_t>(rows.size()) + part.count > graphs_->most())
      return std::nullopt;
    for (int32_t i = 0; i < part.count; ++i) {
      const int32_t token = plan.tokens.at(rows.size());
      MEGATRON_ASSERT(token >= 0 || token == kLastSampled, "token ", token);
      rows.push_back({token, part.slot, part.first + i, part.known, tables_.blocks(part.slot)});
    }
  }
  if (!graphs_->fits(rows)) return std::nullopt;
  DecodeGraphs::Result result;
  if (!with_graphs(/*required=*/tp_.size() > 1, [&] { result = graphs_->run(rows); }))
    return std::nullopt;
  ++graph_steps_;
  return computes_logits(result.size) ? Computed{{}, result.rows} : Computed{result.rows, {}};
}

// Whether `work` could capture what it needs; if not, there are no graphs from now on, or, where
// they are required because other ranks may have them, it throws.
bool ModelRunner::with_graphs(bool required, const std::function<void()>& work) {
  try {
    work();
    return true;
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& error) {
    if (required) throw;
    const std::string what = error.what();
    log_warning(cat("decoding runs without CUDA graphs, which this model cannot be captured in: ",
                    what.substr(0, what.find('\n'))));
    graphs_.reset();
    return false;
  }
}

void ModelRunner::run_first_forward() {
  const at::NoGradGuard no_grad;
  const RaggedBatch chunk{
      PagedRows({{0, 2, {0}}}, facts_.device_blocks, facts_.block_size, device_),
      {0},
      facts_.slots};
  const at::Tensor hidden = forward(at::zeros({1, 2}, at::dtype(at::kLong).device(device_)),
                                    chunk.rows.positions.unsqueeze(0), chunk);
  if (model_.slice().head) model_.logits(hidden);
}

void ModelRunner::plan_warm_up(int64_t most_rows) {
  if (!graphs_) return;
  run_first_forward();
  for (int64_t rows = 0; rows < most_rows;) {
    rows = std::min(rows_of_choice(rows + 1), most_rows);
    idle_rows_.push_back(rows);
  }
}

bool ModelRunner::warm_up_some() {
  if (!graphs_) return false;
  const at::NoGradGuard no_grad;
  if (!graphs_->all_captured()) {
    capture_next_graph();
    return true;
  }
  if (idle_rows_.empty()) return false;
  run_idle_rows(idle_rows_.front());
  idle_rows_.pop_front();
  return true;
}

void ModelRunner::capture_next_graph() {
  const bool captured = with_graphs(/*required=*/false, [&] { graphs_->capture_next(); });
  if (tp_.size() == 1) return;
  const at::Tensor failed = at::full({1}, captured ? 0 : 1, at::dtype(at::kInt).device(device_));
  tp_.all_reduce(failed, ReduceOp::kMax)->wait();
  if (failed.item<int32_t>() != 0) graphs_.reset();
}

void ModelRunner::run_idle_rows(int64_t rows) {
  const at::TensorOptions wide = at::dtype(at::kLong).device(device_),
                          narrow = wide.dtype(at::kInt);
  PagedRows::Numbers idle{at::full({rows}, -1, wide), at::zeros({rows}, wide),
                          at::zeros({rows}, wide), at::zeros({rows}, narrow),
                          at::zeros({rows, 1}, narrow)};
  const RaggedBatch batch{PagedRows(std::move(idle), facts_.device_blocks, facts_.block_size),
                          std::vector<int64_t>(static_cast<size_t>(rows)), facts_.slots};
  const at::Tensor hidden =
      forward(at::zeros({1, rows}, wide), batch.rows.positions.unsqueeze(0), batch);
  if (rows <= rows_of_choice(facts_.slots)) model_.logits(hidden);
}

void ModelRunner::move_blocks(const StepPlan& plan) {
  for (const int32_t slot : plan.releases) {
    if (sampler_) sampler_->release(slot);
    slots_[static_cast<size_t>(slot)] = {};
  }
  state_.for_each_paged([&](PagedBuffer& buffer) {
    buffer.swap_out(rows_of(plan.swap_out, true), facts_.host_blocks);
    buffer.fill_with_nan({plan.poison.begin(), plan.poison.end()});
    buffer.swap_in(rows_of(plan.swap_in, false));
    for (const BlockCopy& copy : plan.copies) buffer.copy_row(copy.from, copy.to, copy.positions);
  });
  state_.for_each_slots([&](SlotBuffer& buffer) {
    buffer.swap_out(rows_of(plan.state_swap_out, true), facts_.host_states);
    buffer.swap_in(rows_of(plan.state_swap_in, false));
  });
  tables_.apply(plan);
}

void ModelRunner::start(const StepPlan& plan) {
  for (const SlotStart& start : plan.starts) {
    slots_[static_cast<size_t>(start.slot)] = {
        start.adapter, start.rows, start.log_probabilities,
        start.rows ? start.rows->next_position() - start.rows->count : 0};
    if (sampler_) sampler_->start(start);
    const bool swapped = std::ranges::any_of(
        plan.state_swap_in, [&](const Swap& swap) { return swap.device == start.slot; });
    if (!start.state_input || swapped) continue;
    const std::vector<int64_t> ids(start.state_input->ids.begin(), start.state_input->ids.end());
    SequenceInput input{longs(ids, device_), {}};
    if (!start.state_input->shape.empty())
      input.values = at::tensor(start.state_input->values, at::kFloat)
                         .view(start.state_input->shape)
                         .to(device_);
    StageTensors before;
    if (!is_first())
      before =
          from_previous_stage(model_.sequence_border(model_.slice().first_layer, input, dtype_));
    pass_on(model_.begin_sequence(input, before, state_, start.slot, facts_.slots));
  }
}

std::vector<RowAdapters::Group> ModelRunner::adapter_groups(const StepPlan& plan) const {
  std::map<int32_t, std::vector<int64_t>> rows;
  int64_t row = 0;
  for (const PlanPart& part : plan.parts)
    for (int32_t i = 0; i < part.count; ++i, ++row)
      if (const int32_t adapter = slots_[static_cast<size_t>(part.slot)].adapter; adapter >= 0)
        rows[adapter].push_back(row);
  std::vector<RowAdapters::Group> groups;
  for (const auto& [adapter, own] : rows)
    groups.push_back(
        {&adapters_->at(static_cast<size_t>(adapter))->linears(), longs(own, device_)});
  return groups;
}

at::Tensor ModelRunner::tokens_of(const StepPlan& plan, RaggedBatch& batch) {
  std::vector<int64_t> ids, drawn_rows, drawn_slots, given_rows;
  std::vector<GivenPiece> given;
  for (const PlanPart& part : plan.parts)
    for (int64_t position = part.first; position < part.first + part.count; ++position) {
      const auto row = static_cast<int64_t>(ids.size());
      const int32_t token = plan.tokens.at(ids.size());
      ids.push_back(std::max(token, 0));
      if (token == kLastSampled) {
        drawn_rows.push_back(row);
        drawn_slots.push_back(part.slot);
      } else if (token == kGivenRow) {
        const GivenRows& rows = *slots_[static_cast<size_t>(part.slot)].rows;
        if (const int32_t id = rows.id(position); id >= 0) {
          ids.back() = id;
          continue;
        }
        if (given.empty() || given.back().rows != &rows || given.back().end() != position)
          given.push_back({&rows, position, 0});
        ++given.back().count;
        given_rows.push_back(row);
      }
    }
  if (!is_first()) return longs(ids, device_).unsqueeze(0);
  at::Tensor tokens = longs(ids, device_);
  if (!drawn_rows.empty())
    tokens.index_copy_(0, longs(drawn_rows, device_),
                       last_sampled_.index_select(0, longs(drawn_slots, device_)));
  if (!given_rows.empty()) {
    batch.given_rows = longs(given_rows, device_);
    batch.given_values = values_of(given, device_);
  }
  return tokens.unsqueeze(0);
}

at::Tensor ModelRunner::positions_of(const StepPlan& plan, const RaggedBatch& batch) const {
  const auto own = [&](const PlanPart& part) -> const GivenRows* {
    const GivenRows* rows = slots_[static_cast<size_t>(part.slot)].rows.get();
    return rows != nullptr && !rows->positions.empty() ? rows : nullptr;
  };
  if (std::ranges::none_of(plan.parts, own)) return batch.rows.positions.unsqueeze(0);
  std::vector<int64_t> all;
  for (const PlanPart& part : plan.parts) {
    const GivenRows* rows = own(part);
    const int64_t given = rows != nullptr ? rows->count : 0,
                  shift = slots_[static_cast<size_t>(part.slot)].shift;
    for (int64_t i = part.first; i < part.first + part.count; ++i)
      if (i < given)
        all.insert(all.end(), rows->positions.begin() + 3 * i, rows->positions.begin() + 3 * i + 3);
      else
        all.insert(all.end(), 3, i + shift);
  }
  return longs(all, device_).view({1, -1, 3});
}

at::Tensor ModelRunner::forward(const at::Tensor& tokens, const at::Tensor& positions,
                                const RaggedBatch& batch, bool captured) {
  const bool divides = mailbox_ != nullptr && !captured && tokens.size(1) >= divided_from_;
  divided_steps_ += divides ? 1 : 0;
  const DecodingPass decoding{state_, batch, divides};
  ForwardContext context;
  context.decoding = &decoding;
  context.place = {at::zeros({1}, at::dtype(at::kLong).device(device_)), batch.rows.positions};
  context.position_ids = positions;
  Batch inputs;
  inputs.set("tokens", tokens);
  inputs.place = context.place;
  StageTensors input;
  const StageSlice& slice = model_.slice();
  if (!is_first()) input = from_previous_stage(model_.border(slice.first_layer, inputs, dtype_));
  StageTensors output = model_.hidden(inputs, input, context);
  if (is_last()) return output.front();
  pass_on(output);
  return {};
}

void ModelRunner::pass_on(const StageTensors& tensors) {
  if (tensors.empty()) return;
  wait_for_passed(static_cast<size_t>(pp_.size()) * tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor whole = tensor.contiguous();
    passed_.push_back({whole, pp_.send(whole, pp_.rank() + 1)});
  }
}

void ModelRunner::wait_for_passed(size_t most) {
  for (; passed_.size() > most; passed_.pop_front()) passed_.front().work->wait();
}

StageTensors ModelRunner::from_previous_stage(const TensorFormats& formats) {
  StageTensors tensors;
  std::vector<std::shared_ptr<Work>> works;
  for (const TensorFormat& format : formats) {
    tensors.push_back(at::empty(format.shape, at::dtype(format.dtype).device(device_)));
    works.push_back(pp_.recv(tensors.back(), pp_.rank() - 1));
  }
  for (const std::shared_ptr<Work>& work : works) work->wait();
  return tensors;
}

ModelRunner::Flight ModelRunner::flight_of(const StepPlan& plan) const {
  Flight flight;
  flight.step = plan.step;
  std::vector<int32_t> slots, tops;
  std::vector<LogProbabilityWishes> wishes;
  for (const PlanPart& part : plan.parts) {
    const Slot& slot = slots_[static_cast<size_t>(part.slot)];
    slots.insert(slots.end(), static_cast<size_t>(part.num_draws()), part.slot);
    wishes.insert(wishes.end(), static_cast<size_t>(part.num_draws()), slot.wishes);
    for (int32_t i = 0; i < part.score_count; ++i)
      tops.push_back(std::max(0, slot.wishes.prompt_top));
  }
  flight.slots.assign(slots.begin(), slots.end());
  flight.draws = DrawReport(std::move(slots), wishes);
  flight.scores = LogProbabilityReport(std::move(tops));
  flight.targets = plan.targets;
  return flight;
}

// The last stage computes the numbers of the step; the first one receives them.
void ModelRunner::finish(const StepPlan& plan, const Computed& computed, Flight& flight) {
  if (is_last()) {
    std::vector<TokenSampler::Row> rows;
    std::span<const uint32_t> masks = plan.masks;
    std::vector<int64_t> last;
    int64_t row = 0;
    for (const PlanPart& part : plan.parts) {
      row += part.count;
      const auto drafts = std::span(plan.tokens)
                              .first(static_cast<size_t>(row))
                              .last(static_cast<size_t>(part.drafts));
      for (int32_t behind = part.num_draws(); behind-- > 0;) {  // rows behind the one that draws
        rows.push_back({part.slot, part.first + part.count - behind});
        rows.back().drafts = drafts.first(static_cast<size_t>(part.drafts - behind));
        last.push_back(row - 1 - behind);
        if (!part.masked) continue;
        const auto words = static_cast<size_t>(token_mask_words(facts_.vocab_size));
        rows.back().mask = masks.first(words);
        masks = masks.subspan(words);
      }
    }
    std::vector<at::Tensor> numbers;
    if (!rows.empty()) {
      const TokenSampler::Draws draws =
          sampler_->draw(logits_of(computed, last), rows, flight.draws);
      keep_ids(flight, draws.ids);
      numbers = {draws.numbers};
    }
    if (flight.scores.rows() > 0) numbers.push_back(score(plan, computed, flight));
    flight.numbers = numbers.size() == 1 ? numbers.front() : at::cat(numbers);
    flight.settled = true;
    if (!is_first()) {
      passed_.push_back({flight.numbers, pp_.send(flight.numbers, 0)});
      wait_for_passed(static_cast<size_t>(pp_.size()));
    }
  } else if (is_first()) {
    flight.numbers = at::empty({flight.size()}, at::dtype(at::kDouble).device(device_));
    flight.receive = pp_.recv(flight.numbers, pp_.size() - 1);
    return;
  }
  if (is_first()) settle(flight);
}

at::Tensor ModelRunner::logits_of(const Computed& computed, const std::vector<int64_t>& rows) {
  if (!computed.logits.defined())
    return model_.logits(computed.hidden.index_select(0, longs(rows, device_))).squeeze(1);
  if (counts_up(rows)) return computed.logits.narrow(0, 0, static_cast<int64_t>(rows.size()));
  return computed.logits.index_select(0, longs(rows, device_));
}

at::Tensor ModelRunner::score(const StepPlan& plan, const Computed& computed,
                              const Flight& flight) {
  std::vector<int64_t> rows;
  int64_t row = 0;
  for (const PlanPart& part : plan.parts) {
    for (int32_t i = 0; i < part.score_count; ++i) rows.push_back(row + part.score_first + i);
    row += part.count;
  }
  const int64_t columns = model_.config().padded_vocab_size / tp_.size();
  const auto chunk = static_cast<size_t>(
      std::max<int64_t>(16, kScoredLogitsBytes / (int64_t{sizeof(float)} * columns)));
  std::vector<at::Tensor> parts;
  for (size_t begin = 0; begin < rows.size(); begin += chunk) {
    const auto first = static_cast<std::ptrdiff_t>(begin),
               last = static_cast<std::ptrdiff_t>(std::min(begin + chunk, rows.size()));
    parts.push_back(sampler_->score(
        logits_of(computed, {rows.begin() + first, rows.begin() + last}),
        {plan.targets.begin() + first, plan.targets.begin() + last}, flight.scores.most()));
  }
  return at::cat(parts);
}

// Of a slot that draws several tokens one of them is kept: the host says which ones stand before
// the next is an input.
void ModelRunner::keep_ids(const Flight& flight, const at::Tensor& ids) {
  last_sampled_.index_copy_(0, longs(flight.slots, device_), ids);
}

// Numbers that were received become known to the next steps, and go to the host.
void ModelRunner::settle(Flight& flight) {
  if (!flight.numbers.defined()) return;
  if (flight.receive) {
    flight.receive->wait();
    flight.receive.reset();
    if (!flight.slots.empty())
      keep_ids(
          flight,
          flight.numbers.narrow(0, 0, static_cast<int64_t>(flight.slots.size())).to(at::kLong));
    flight.settled = true;
  } else if (flight.numbers.device().is_cpu()) {
    return;
  }
  if (!device_.is_cuda()) return;
  const at::Tensor host = copies_.host_empty(flight.numbers.sizes(), at::kDouble);
  host.copy_(flight.numbers, /*non_blocking=*/true);
  flight.copied = copies_.mark(HostCopies::Stream::kComputing);
  flight.numbers = host;
}

std::optional<StepResult> ModelRunner::take(int64_t wait_ns) {
  MEGATRON_ASSERT(!flights_.empty(), "no step was launched whose result was not taken");
  Flight& flight = flights_.front();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(wait_ns);
  const auto ready = [&] {
    if (flight.receive) {
      const auto progress = flight.receive->progress();
      if (progress && !progress->finished()) return false;
      settle(flight);
    }
    return flight.copied.reached();
  };
  while (!ready()) {
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    sleep_briefly();
  }
  StepResult result;
  result.step = flight.step;
  if (is_first() && tp_.rank() == 0 && flight.size() > 0) {
    const double* from = flight.numbers.const_data_ptr<double>() + flight.slots.size();
    result.draws = flight.draws.read(from);
    from += flight.draws.size();
    for (int64_t i = 0; i < flight.scores.rows(); ++i)
      result.scores.push_back(flight.scores.read(from, i, flight.targets[static_cast<size_t>(i)]));
  }
  flights_.pop_front();
  return result;
}

void ModelRunner::begin(const RunnerTransition& transition) {
  MEGATRON_ASSERT(flights_.empty(), flights_.size(), " steps are in flight");
  if (const auto* stage = std::get_if<StageWeights>(&transition); stage && weights_) {
    weights_->stage(stage->source);
    staging_ = true;
    return;
  }
  staging_ = false;
  outcome_ = transit(transition);
}

std::optional<std::string> ModelRunner::poll(int64_t wait_ns) {
  return staging_ ? weights_->staged(wait_ns) : outcome_;
}

ServedWeights& ModelRunner::weights() const {
  MEGATRON_CHECK(weights_, "the weights of this runner stay as they are");
  return *weights_;
}

std::string ModelRunner::transit(const RunnerTransition& transition) {
  const at::NoGradGuard no_grad;
  if (graphs_) graphs_->clear();
  try {
    if (const auto* suspend = std::get_if<SuspendRunner>(&transition)) {
      if (suspend->levels.weights != MemoryLevel::kKeep) weights().suspend(suspend->levels.weights);
      if (suspend->levels.cache != MemoryLevel::kKeep)
        state_.for_each([&](StateBuffer& buffer) {
          buffer.offload(/*keep=*/suspend->levels.cache == MemoryLevel::kOffload);
        });
    } else if (std::holds_alternative<ResumeRunner>(transition)) {
      if (weights_) weights_->resume();
      state_.for_each([&](StateBuffer& buffer) { buffer.reload(); });
    } else if (const auto* commit = std::get_if<CommitWeights>(&transition)) {
      weights().commit(commit->version);
      facts_.weights_version = commit->version;
    } else if (std::holds_alternative<DiscardWeights>(transition)) {
      if (weights_) weights_->discard();
    } else {
      weights();  // refuses to stage
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace megatron
