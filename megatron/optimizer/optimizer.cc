#include "megatron/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/reduction.h"
#include "megatron/optimizer/host_states.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/optimizer/whole_matrices.h"
#include "megatron/tensor/optimizer_ops.h"
#include "megatron/tensor/random.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// As in Megatron, embedding and output weights decay; one-dimensional parameters and biases do not.
float weight_decay_mult(const Parameter& parameter, const OptimizerConfig& config) {
  if (parameter.role == ParameterRole::kQKNorm && config.apply_wd_to_qk_layernorm) return 1.0f;
  const bool exempt = parameter.global_shape.size() <= 1 ||
                      parameter.role == ParameterRole::kBias || ends_with(parameter.name, ".bias");
  return exempt ? 0.0f : 1.0f;
}

int lr_group(const Parameter& parameter) {
  const bool decoupled = parameter.role == ParameterRole::kOutput ||
                         (parameter.role == ParameterRole::kEmbedding &&
                          !ends_with(parameter.name, "position_embeddings.weight"));
  return decoupled ? 1 : 0;
}

at::ScalarType scalar_type(StateType type) {
  return type == StateType::kBf16 ? at::kBFloat16 : at::kFloat;
}

// Whether states are narrow, so that their rounding depends on the places of the elements.
bool is_narrow(const UpdateRule& rule, const OptimizerConfig& config) {
  const std::vector<OptimizerState> states = optimizer_states(rule, config, /*half_model=*/true);
  return config.main_params_dtype != StateType::kFp32 ||
         std::any_of(states.begin(), states.end(),
                     [](const OptimizerState& state) { return state.type != StateType::kFp32; });
}

int64_t num_local_elements(const Parameter& parameter) {
  return std::accumulate(parameter.local_shape.begin(), parameter.local_shape.end(), int64_t{1},
                         std::multiplies<>());
}

// Whether the rule updates the parameter as a whole matrix.
bool is_whole_matrix(const UpdateRule& rule, const Parameter& parameter) {
  return rule.needs_whole_matrices() && is_hidden_matrix(parameter);
}

// A range of a flattened local tensor that is also contiguous in the flattened global tensor.
struct PlacedRun {
  int64_t begin, end;   // in the local tensor
  int64_t first_place;  // in the flattened global tensor
};

// The runs of a parameter without vocabulary padding. Only its first two dimensions may be sharded.
std::vector<PlacedRun> placed_runs(const Parameter& parameter, const ParallelGroups& groups) {
  int64_t inner = 1;
  for (size_t dim = 2; dim < parameter.local_shape.size(); ++dim)
    inner *= parameter.local_shape[dim];
  const bool matrix = parameter.local_shape.size() > 1;
  const int64_t local_row = matrix ? parameter.local_shape[1] * inner : 1;
  const int64_t global_row = matrix ? parameter.global_shape[1] * inner : 1;
  std::vector<PlacedRun> runs;
  for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
    if (piece.local_offset.empty()) return {{0, 1, 0}};
    const int64_t width = matrix ? piece.global.shape[1] * inner : 1;
    const bool whole_rows = width == local_row && width == global_row;
    const int64_t rows_at_once = whole_rows ? piece.global.shape[0] : 1;
    for (int64_t row = 0; row < piece.global.shape[0]; row += rows_at_once) {
      const int64_t begin =
          (piece.local_offset[0] + row) * local_row + (matrix ? piece.local_offset[1] * inner : 0);
      const int64_t place = (piece.global.offset[0] + row) * global_row +
                            (matrix ? piece.global.offset[1] * inner : 0);
      runs.push_back({begin, begin + rows_at_once * width, place});
    }
  }
  return runs;
}

// The blocks of the slots that `wanted` chooses.
std::vector<UpdateBlock> make_blocks(const FlatShard& shard, const ParallelGroups& groups,
                                     const OptimizerConfig& config, bool narrow,
                                     const std::function<bool(const Parameter&)>& wanted) {
  std::vector<UpdateBlock> blocks;
  for (const FlatSlot& slot : shard.slots) {
    const Parameter& parameter = *slot.parameter;
    if (!wanted(parameter)) continue;
    UpdateBlock block;
    block.lr_group = lr_group(parameter);
    block.weight_decay_mult = weight_decay_mult(parameter, config);
    block.counts_in_norm = counts_in_norm(parameter, groups) ? 1 : 0;
    std::vector<PlacedRun> runs = {{0, slot.flat_end, 0}};
    if (narrow) {
      block.key = random_key(0, "rounding of " + parameter.name).value;
      runs = placed_runs(parameter, groups);
    }
    for (const PlacedRun& run : runs) {
      const int64_t end = std::min(run.end, slot.flat_end);
      for (int64_t at = std::max(run.begin, slot.flat_begin); at < end;
           at += kUpdateBlockElements) {
        block.begin = slot.begin + at - slot.flat_begin;
        block.first_place = run.first_place + at - run.begin;
        block.count = static_cast<int32_t>(std::min(kUpdateBlockElements, end - at));
        blocks.push_back(block);
      }
    }
  }
  return blocks;
}

// Number of elements, over all chunks, that may keep their states on the device.
int64_t resident_elements(const std::vector<DistributedDataParallel*>& models,
                          const OptimizerConfig& config) {
  int64_t all = 0;
  for (const DistributedDataParallel* model : models)
    for (const FlatShard& shard : model->shards())
      if (shard.trained()) all += shard.values.numel();
  if (!config.optimizer_cpu_offload) return all;
  return std::llround((1.0 - config.optimizer_offload_fraction) * static_cast<double>(all));
}

// The same for this shard: at most `allowed`, rounded down to whole parameters.
int64_t resident_part(const FlatShard& shard, int64_t allowed) {
  if (allowed >= shard.values.numel()) return shard.values.numel();
  int64_t border = 0;
  for (const FlatSlot& slot : shard.slots)
    if (slot.begin <= allowed) border = std::max(border, slot.begin);
  return border;
}

// The rows of the local tensor without vocabulary padding, as ranges of the flattened tensor.
std::vector<std::pair<int64_t, int64_t>> valid_ranges(const Parameter& parameter,
                                                      const ParallelGroups& groups) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  int64_t row = 1;
  for (size_t dim = 1; dim < parameter.local_shape.size(); ++dim) row *= parameter.local_shape[dim];
  for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
    if (piece.local_offset.empty()) return {{0, 1}};
    const int64_t begin = piece.local_offset[0] * row;
    ranges.emplace_back(begin, begin + piece.global.shape[0] * row);
  }
  std::sort(ranges.begin(), ranges.end());
  ranges.erase(std::unique(ranges.begin(), ranges.end()), ranges.end());
  return ranges;
}

}  // namespace

struct Optimizer::Impl {
  // One piece of a model's buffers and its states.
  struct Part {
    const FlatShard* shard;
    FlatUpdate norm;                        // all its gradients and blocks, for the gradient norm
    FlatUpdate update;                      // elements [0, resident), with states on the device
    std::vector<const FlatSlot*> matrices;  // updated as a whole, not by the blocks of `update`
    int64_t resident = 0;
    size_t run = 0;  // index in `host`, for elements [resident, n)
    bool on_host() const { return resident < shard->values.numel(); }
  };

  Impl(const UpdateRule& rule, const OptimizerConfig& config, const ParameterSchedule& schedule,
       std::vector<DistributedDataParallel*> models);
  void add_part(const FlatShard& shard, int64_t resident);
  void step(const at::Tensor& weight, int64_t samples);
  void update(FlatUpdate& part, const at::Tensor& record) const;
  void update_matrices(Part& part) const;
  at::ScalarType scalar_type_of(const OptimizerState& state) const;
  // The elements of a slot in kept[index] of its part.
  at::Tensor state_of(const Part& part, size_t index, const FlatSlot& slot) const;
  // The sum of the parts' sums, over every rank that holds other elements.
  void add_sums();
  // The same of values by reduction domain, [domains].
  at::Tensor sum_over_ranks(const at::Tensor& by_domain) const;
  const ParallelGroups& groups() const { return models.front()->groups(); }

  const UpdateRule& rule;
  const OptimizerConfig config;
  ParameterSchedule schedule;
  const StepRules rules;
  const std::vector<DistributedDataParallel*> models;
  bool masters = false;              // master weights beside the values
  std::vector<OptimizerState> kept;  // master weights if these are, then the states of the rule
  std::vector<Part> parts;           // of all models, in their order
  HostStates host;
  at::Tensor state;      // the record (StepState), on the device
  at::Tensor part_sums;  // [parts] fp64
  at::Tensor domains;    // [domains, parts] fp64: 1 where a part is of a domain; of one: undefined
  at::Tensor sum;        // [1] fp64
};

Optimizer::Impl::Impl(const UpdateRule& rule, const OptimizerConfig& config,
                      const ParameterSchedule& schedule,
                      std::vector<DistributedDataParallel*> chunks)
    : rule(rule),
      config(config),
      schedule(schedule),
      rules(make_step_rules(config)),
      models(std::move(chunks)),
      host(models.front()->flat_values().device()) {
  MEGATRON_ASSERT(!models.empty(), "an optimizer without a model");
  const at::ScalarType dtype = models.front()->dtype();
  const bool wide = dtype == at::kDouble || dtype == at::kFloat;
  masters = keeps_masters(config, /*half_model=*/!wide);
  kept = optimizer_states(rule, config, /*half_model=*/!wide);
  MEGATRON_CHECK(!is_narrow(rule, config) || dtype != at::kDouble,
                 "optimizer states of a model in fp64 are fp64");
  MEGATRON_CHECK(config.main_params_dtype == StateType::kFp32 || dtype == at::kBFloat16,
                 "--main-params-dtype bf16 needs a model in bf16");
  MEGATRON_CHECK(wide || dtype == at::kBFloat16 || dtype == at::kHalf,
                 "the optimizer does not support a model in ", at::toString(dtype),
                 ", expected fp64, fp32, bf16 or fp16");
  MEGATRON_CHECK(!rule.needs_whole_matrices() || !config.optimizer_cpu_offload,
                 "--optimizer-cpu-offload is not built for --optimizer ", rule.name,
                 ", which needs whole matrices on the device");
  int64_t resident = resident_elements(models, config);
  for (const DistributedDataParallel* model : models) {
    MEGATRON_ASSERT(model->dtype() == dtype, "model chunks of one rank differ in type");
    for (const FlatShard& shard : model->shards()) {
      if (!shard.trained()) continue;
      const int64_t here = resident_part(shard, resident);
      add_part(shard, here);
      resident -= here;
    }
  }
  const at::TensorOptions options = models.front()->flat_grads().options();
  part_sums = at::zeros({static_cast<int64_t>(parts.size())}, options.dtype(at::kDouble));
  sum = at::zeros({1}, options.dtype(at::kDouble));
  const auto count = static_cast<int64_t>(models.front()->data_groups().size());
  if (count > 1) {
    at::Tensor chosen = at::zeros({count, part_sums.numel()}, at::kDouble);
    for (size_t k = 0; k < parts.size(); ++k)
      chosen[parts[k].shard->domain][static_cast<int64_t>(k)] = 1.0;
    domains = chosen.to(part_sums.device());
  }
  state = at::empty({static_cast<int64_t>(sizeof(StepState))}, options.dtype(at::kByte));
}

at::ScalarType Optimizer::Impl::scalar_type_of(const OptimizerState& state) const {
  return models.front()->dtype() == at::kDouble ? at::kDouble : scalar_type(state.type);
}

void Optimizer::Impl::add_part(const FlatShard& shard, int64_t resident) {
  Part part;
  part.shard = &shard;
  part.resident = resident;
  const bool narrow = is_narrow(rule, config);
  const std::vector<UpdateBlock> blocks =
      make_blocks(shard, groups(), config, narrow, [](const Parameter&) { return true; });
  part.norm.grad = shard.grads;
  upload_blocks(part.norm, blocks);
  FlatUpdate& update = part.update;
  const at::Tensor values = shard.values.narrow(0, 0, resident);
  update.grad = shard.grads.narrow(0, 0, resident);
  update.master = masters ? values.to(at::kFloat) : values;
  if (masters) update.value = values;
  std::vector<at::ScalarType> types;
  for (size_t i = masters ? 1 : 0; i < kept.size(); ++i) types.push_back(scalar_type_of(kept[i]));
  for (const at::ScalarType type : types)
    update.states.push_back(at::zeros({resident}, update.grad.options().dtype(type)));
  for (const FlatSlot& slot : shard.slots) {
    if (!is_whole_matrix(rule, *slot.parameter)) continue;
    MEGATRON_ASSERT(slot.flat_begin == 0 && slot.flat_end == num_local_elements(*slot.parameter),
                    "a shard border cuts ", slot.parameter->name, ", which --optimizer ", rule.name,
                    " needs whole");
    part.matrices.push_back(&slot);
  }
  if (!part.on_host() && part.matrices.empty()) {
    update.blocks = part.norm.blocks;
    update.partials = part.norm.partials;
  } else if (!part.on_host()) {
    upload_blocks(update, make_blocks(shard, groups(), config, narrow, [&](const Parameter& p) {
                    return !is_whole_matrix(rule, p);
                  }));
  }
  if (!part.on_host()) {
    parts.push_back(std::move(part));
    return;
  }
  std::vector<UpdateBlock> here, there;
  for (UpdateBlock block : blocks) {
    const bool stays = block.begin < resident;
    if (!stays) block.begin -= resident;
    (stays ? here : there).push_back(block);
  }
  upload_blocks(update, here);
  const int64_t count = shard.values.numel() - resident;
  part.run = host.size();
  host.add(shard.values.narrow(0, resident, count), shard.grads.narrow(0, resident, count),
           {masters ? at::kFloat : shard.values.scalar_type(), std::move(types)}, std::move(there));
  parts.push_back(std::move(part));
}

void Optimizer::Impl::update(FlatUpdate& part, const at::Tensor& record) const {
  if (part.blocks.numel() > 0) rule.update(config, part, record);
}

void Optimizer::Impl::update_matrices(Part& part) const {
  for (const FlatSlot* slot : part.matrices) {
    MatrixUpdate matrix = whole_matrix(part.update, *slot, groups());
    matrix.lr_group = lr_group(*slot->parameter);
    matrix.weight_decay_mult = weight_decay_mult(*slot->parameter, config);
    rule.update_matrix(config, matrix, state);
    store_matrix(matrix, part.update, *slot, groups());
  }
}

void Optimizer::Impl::step(const at::Tensor& weight, int64_t samples) {
  if (host.size() > 0) host.begin();
  for (size_t k = 0; k < parts.size(); ++k) {
    at::Tensor part_sum = part_sums.narrow(0, static_cast<int64_t>(k), 1);
    if (parts[k].norm.blocks.numel() > 0) sum_of_squares(parts[k].norm, part_sum);
  }
  add_sums();
  step_control(state, schedule, rules, sum, weight, samples);
  for (Part& part : parts) {
    update(part.update, state);
    update_matrices(part);
  }
  if (host.size() > 0)
    host.step(state,
              [this](FlatUpdate& piece, const at::Tensor& record) { update(piece, record); });
  for (DistributedDataParallel* model : models) model->trained_values_changed();
}

void Optimizer::Impl::add_sums() {
  if (!domains.defined()) {
    at::sum_out(sum, part_sums, {0}, /*keepdim=*/true);
    sum_over_ranks(sum);
  } else {
    sum.copy_(sum_over_ranks((domains * part_sums).sum(1)));
  }
}

at::Tensor Optimizer::Impl::state_of(const Part& part, size_t index, const FlatSlot& slot) const {
  const bool resident = slot.begin < part.resident;
  const FlatUpdate& flat = resident ? part.update : host.states(part.run);
  const size_t first_state = masters ? 1 : 0;
  const at::Tensor& all = index < first_state ? flat.master : flat.states[index - first_state];
  return all.narrow(0, slot.begin - (resident ? 0 : part.resident), slot.num_elements());
}

at::Tensor Optimizer::Impl::sum_over_ranks(const at::Tensor& by_domain) const {
  const std::vector<Placement> placements = reduction_domains(groups());
  for (size_t k = 0; k < placements.size(); ++k) {  // every rank, whatever it holds
    const at::Tensor value = by_domain.narrow(0, static_cast<int64_t>(k), 1);
    models.front()->data_groups()[k].shard.all_reduce(value)->wait();
    norm_group(placements[k], groups()).all_reduce(value)->wait();
  }
  return placements.size() == 1 ? by_domain : by_domain.sum(0, /*keepdim=*/true);
}

Optimizer::Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
                     std::vector<DistributedDataParallel*> models)
    : Optimizer(update_rule(config), config, schedule, std::move(models)) {}

Optimizer::Optimizer(const UpdateRule& rule, const OptimizerConfig& config,
                     const ParameterSchedule& schedule,
                     std::vector<DistributedDataParallel*> models)
    : impl_(std::make_unique<Impl>(rule, config, schedule, std::move(models))) {
  load_state(initial_step_state(config));
}

Optimizer::Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
                     DistributedDataParallel& model)
    : Optimizer(config, schedule, std::vector<DistributedDataParallel*>{&model}) {}

Optimizer::~Optimizer() = default;

at::Tensor Optimizer::loss_scale_tensor() const {
  constexpr int64_t kOffset = offsetof(StepState, loss_scale);
  const at::Tensor scale = impl_->state.narrow(0, kOffset, sizeof(double)).view(at::kDouble);
  return scale
      .to(impl_->models.front()->flat_grads().scalar_type(), /*non_blocking=*/false, /*copy=*/true)
      .reshape({});
}

void Optimizer::step(const at::Tensor& total_weight, int64_t samples) {
  MEGATRON_ASSERT(total_weight.numel() == 1, "total_weight has ", total_weight.numel(),
                  " elements");
  const at::NoGradGuard no_grad;
  impl_->step(total_weight.detach().reshape({1}).to(impl_->sum.options()), samples);
}

void Optimizer::step(double total_weight, int64_t samples) {
  step(at::full({1}, total_weight, impl_->sum.options()), samples);
}

StepState Optimizer::read_state() const {
  const at::Tensor host = impl_->state.cpu();
  StepState state;
  std::memcpy(&state, host.data_ptr(), sizeof(state));
  return state;
}

const at::Tensor& Optimizer::state_tensor() const { return impl_->state; }

bool Optimizer::must_stop(const StepState& state) const {
  return impl_->config.check_for_nan_in_loss_and_grad &&
         state.consecutive_bad >= impl_->config.max_consecutive_bad_steps;
}

const ParameterSchedule& Optimizer::schedule() const { return impl_->schedule; }

void Optimizer::set_schedule(const ParameterSchedule& schedule) { impl_->schedule = schedule; }

void Optimizer::load_state(const StepState& state) {
  at::Tensor host = at::empty({static_cast<int64_t>(sizeof(StepState))}, at::kByte);
  std::memcpy(host.data_ptr(), &state, sizeof(state));
  impl_->state.copy_(host);
}

std::vector<StateTensor> Optimizer::tensors() const {
  std::vector<StateTensor> all;
  const Impl& impl = *impl_;
  size_t first_part = 0;
  for (const DistributedDataParallel* model : impl.models) {
    std::vector<std::vector<StateTensor>> kinds;  // of equal length
    for (size_t index = 0; index < impl.kept.size(); ++index) {
      const OptimizerState& state = impl.kept[index];
      kinds.push_back(
          model->describe(cat("optimizer.state.", state.name, "."), impl.scalar_type_of(state),
                          /*trainable_only=*/true, [&](size_t shard, const FlatSlot& slot) {
                            return impl.state_of(impl.parts[first_part + shard], index, slot);
                          }));
    }
    for (size_t i = 0; !kinds.empty() && i < kinds.front().size(); ++i) {
      for (std::vector<StateTensor>& kind : kinds) all.push_back(std::move(kind[i]));
    }
    for (const FlatShard& shard : model->shards()) first_part += shard.trained();
  }
  return all;
}

void Optimizer::reload_masters() {
  impl_->host.load_values(/*masters_too=*/true);
  if (!impl_->masters) return;
  for (Impl::Part& part : impl_->parts) part.update.master.copy_(part.update.value);
}

void Optimizer::reload_values() { impl_->host.load_values(/*masters_too=*/false); }

void Optimizer::store_values() {
  for (DistributedDataParallel* model : impl_->models) model->values_will_change();
  impl_->host.store_values();
  if (impl_->masters)
    for (Impl::Part& part : impl_->parts) part.update.value.copy_(part.update.master);
  for (DistributedDataParallel* model : impl_->models) model->values_changed();
}

double Optimizer::num_zeros() const {
  const ParallelGroups& groups = impl_->groups();
  const auto domains = static_cast<int64_t>(impl_->models.front()->data_groups().size());
  const at::Tensor count = at::zeros({domains}, impl_->sum.options());
  for (const Impl::Part& part : impl_->parts) {
    for (const FlatSlot& slot : part.shard->slots) {
      if (!counts_in_norm(*slot.parameter, groups)) continue;
      // Without vocabulary padding
      for (const auto& [first, last] : valid_ranges(*slot.parameter, groups)) {
        const int64_t begin = std::max(first, slot.flat_begin), end = std::min(last, slot.flat_end);
        if (begin >= end) continue;
        const at::Tensor grad =
            part.shard->grads.narrow(0, slot.begin + begin - slot.flat_begin, end - begin);
        count.narrow(0, part.shard->domain, 1).add_(end - begin - at::count_nonzero(grad));
      }
    }
  }
  return impl_->sum_over_ranks(count).item<double>();
}

double Optimizer::params_norm() const {
  Impl& impl = *impl_;
  for (size_t k = 0; k < impl.parts.size(); ++k) {
    const Impl::Part& part = impl.parts[k];
    at::Tensor part_sum = impl.part_sums.narrow(0, static_cast<int64_t>(k), 1);
    FlatUpdate chosen = part.update;
    if (!part.on_host()) {  // of whole matrices, too
      chosen.blocks = part.norm.blocks;
      chosen.partials = part.norm.partials;
    }
    chosen.grad = part.update.master.to(part.update.grad.scalar_type());
    part_sum.zero_();
    if (chosen.blocks.numel() > 0) sum_of_squares(chosen, part_sum);
    if (part.on_host())
      part_sum.add_(impl.host.sum_of_squared_masters(part.run).to(part_sum.device()));
  }
  impl.add_sums();
  return std::sqrt(impl.sum.item<double>());
}

}  // namespace megatron
