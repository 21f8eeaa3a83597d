#include "megatron/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/modules/encoder_ranks.h"
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

constexpr UpdateKind kUpdateKinds[] = {UpdateKind::kElementwise, UpdateKind::kMatrix};

bool is_half(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

UpdateKind kind_of(const UpdateRule& rule, const Parameter& parameter) {
  return rule.kind_of(is_hidden_matrix(parameter));
}

// Whether states are narrow, so that their rounding depends on the places of the elements.
bool is_narrow(const UpdateRule& rule, const OptimizerConfig& config) {
  bool narrow = config.main_params_dtype != StateType::kFp32;
  for (const UpdateKind kind : kUpdateKinds)
    for (const OptimizerState& state : optimizer_states(rule, config, /*half_model=*/true, kind))
      narrow |= state.type != StateType::kFp32;
  return narrow;
}

int64_t num_local_elements(const Parameter& parameter) {
  return std::accumulate(parameter.local_shape.begin(), parameter.local_shape.end(), int64_t{1},
                         std::multiplies<>());
}

// The blocks of the slots in elements [first, last) of a shard, as indices from `first`.
std::vector<UpdateBlock> make_blocks(const FlatShard& shard, int64_t first, int64_t last,
                                     const ParallelGroups& groups, const OptimizerConfig& config,
                                     bool narrow) {
  std::vector<UpdateBlock> blocks;
  for (const FlatSlot& slot : shard.slots) {
    const Parameter& parameter = *slot.parameter;
    if (slot.begin < first || slot.begin >= last) continue;
    UpdateBlock block;
    block.lr_group = lr_group(parameter);
    block.lr_factor = parameter.lr_factor;
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
        block.begin = slot.begin - first + at - slot.flat_begin;
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
  // Consecutive elements of a part that are updated in one way, and their states.
  struct Run {
    int64_t begin = 0;
    const Parameter* matrix = nullptr;  // updated as a whole; null: elementwise, by the blocks
    FlatUpdate update;
  };
  // One piece of a model's buffers and its states.
  struct Part {
    const FlatShard* shard;
    FlatUpdate norm;    // all its gradients and blocks, for the gradient norm
    FlatUpdate update;  // elements [0, resident), with master weights on the device
    // Their states: those of whole matrices, and of what lies between these
    std::vector<Run> runs;
    int64_t resident = 0;
    size_t run = 0;  // index in `host`, for elements [resident, n)
    bool on_host() const { return resident < shard->values.numel(); }
    bool half() const { return is_half(shard->values.scalar_type()); }
  };

  Impl(const UpdateRule& rule, const OptimizerConfig& config, const ParameterSchedule& schedule,
       std::vector<DistributedDataParallel*> models);
  void add_part(const FlatShard& shard, int64_t resident);
  void add_run(Part& part, int64_t begin, int64_t end, const Parameter* matrix) const;
  std::vector<at::ScalarType> state_types(UpdateKind kind) const;  // of the rule
  void step(const at::Tensor& weight, int64_t samples);
  void update(FlatUpdate& part, const at::Tensor& record) const;
  void update_matrix(Run& run) const;
  at::ScalarType scalar_type_of(const OptimizerState& state) const;
  // The states of parameters of a kind, with values of a half-precision type or not: master weights
  // if these are kept, then those of the rule.
  std::vector<OptimizerState> kept(UpdateKind kind, bool half) const {
    return optimizer_states(rule, config, half, kind);
  }
  // Whether there are master weights beside such values.
  bool keeps_masters(bool half) const { return megatron::keeps_masters(config, half); }
  // The elements of a slot in the state kept()[index].
  at::Tensor state_of(const Part& part, size_t index, const FlatSlot& slot) const;
  // The sum of the parts' sums, over every rank that holds other elements.
  void add_sums();
  // The same, and of the parts of the model that have norms of their own.
  void add_sums_of_modules();
  at::Tensor sums_by_domain() const;  // [domains], of this rank
  void divide_part(size_t index, const std::function<int64_t(const Parameter&)>& module_of);
  // The same of values by reduction domain, [domains] or [domains, n].
  at::Tensor sum_over_ranks(const at::Tensor& by_domain) const;
  const ParallelGroups& groups() const { return models.front()->groups(); }

  const UpdateRule& rule;
  const OptimizerConfig config;
  ParameterSchedule schedule;
  const StepRules rules;
  const std::vector<DistributedDataParallel*> models;
  std::vector<Part> parts;  // of all models, in their order
  HostStates host;
  at::Tensor state;      // the record (StepState), on the device
  at::Tensor part_sums;  // [parts] fp64
  at::Tensor domains;    // [domains, parts] bool: whether a part is of a domain; of one: undefined
  at::Tensor sum;        // [1] fp64
  // Blocks of a part that are of one module. Parts of one module alone have none: their sum is its.
  struct ModuleRun {
    size_t part = 0;
    int64_t begin = 0, count = 0;
  };
  std::vector<ModuleRun> module_runs;
  std::vector<std::pair<int64_t, int64_t>> modules;  // (domain, module) of parts, then of runs
  at::Tensor of_module;    // [domains, modules, parts + runs] bool; undefined: no norms of modules
  at::Tensor module_sums;  // [1 + modules] fp64
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
  MEGATRON_CHECK(!is_narrow(rule, config) || dtype != at::kDouble,
                 "optimizer states of a model in fp64 are fp64");
  MEGATRON_CHECK(config.main_params_dtype == StateType::kFp32 || dtype == at::kBFloat16,
                 "--main-params-dtype bf16 needs a model in bf16");
  MEGATRON_CHECK(is_half(dtype) || dtype == at::kFloat || dtype == at::kDouble,
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
    at::Tensor chosen = at::zeros({count, part_sums.numel()}, at::kBool);
    for (size_t k = 0; k < parts.size(); ++k)
      chosen[parts[k].shard->domain][static_cast<int64_t>(k)] = true;
    domains = chosen.to(part_sums.device());
  }
  state = at::empty({static_cast<int64_t>(sizeof(StepState))}, options.dtype(at::kByte));
}

at::ScalarType Optimizer::Impl::scalar_type_of(const OptimizerState& state) const {
  return models.front()->dtype() == at::kDouble ? at::kDouble : scalar_type(state.type);
}

std::vector<at::ScalarType> Optimizer::Impl::state_types(UpdateKind kind) const {
  std::vector<at::ScalarType> types;
  for (const OptimizerState& state : kept(kind, /*half=*/false))
    types.push_back(scalar_type_of(state));
  return types;
}

void Optimizer::Impl::add_part(const FlatShard& shard, int64_t resident) {
  Part part;
  part.shard = &shard;
  part.resident = resident;
  const int64_t all = shard.values.numel();
  const bool narrow = is_narrow(rule, config);
  part.norm.grad = shard.grads;
  upload_blocks(part.norm, make_blocks(shard, 0, all, groups(), config, narrow));
  const at::Tensor values = shard.values.narrow(0, 0, resident);
  part.update.grad = shard.grads.narrow(0, 0, resident);
  const bool masters = keeps_masters(part.half());
  part.update.master = masters ? values.to(at::kFloat) : values;
  if (masters) part.update.value = values;
  int64_t done = 0;
  bool others = false;  // since then
  for (const FlatSlot& slot : shard.slots) {
    if (kind_of(rule, *slot.parameter) != UpdateKind::kMatrix) {
      others = true;
      continue;
    }
    MEGATRON_ASSERT(slot.flat_begin == 0 && slot.flat_end == num_local_elements(*slot.parameter),
                    "a shard border cuts ", slot.parameter->name, ", which --optimizer ", rule.name,
                    " needs whole");
    if (others) add_run(part, done, slot.begin, nullptr);
    others = false;
    done = slot.begin + slot.num_elements();
    add_run(part, slot.begin, done, slot.parameter);
  }
  if (others || part.runs.empty()) add_run(part, done, resident, nullptr);
  if (part.on_host()) {
    part.run = host.size();
    host.add(
        shard.values.narrow(0, resident, all - resident),
        shard.grads.narrow(0, resident, all - resident),
        {masters ? at::kFloat : shard.values.scalar_type(), state_types(UpdateKind::kElementwise)},
        make_blocks(shard, resident, all, groups(), config, narrow));
  }
  parts.push_back(std::move(part));
}

void Optimizer::Impl::add_run(Part& part, int64_t begin, int64_t end,
                              const Parameter* matrix) const {
  Run run{begin, matrix, part.update};
  FlatUpdate& update = run.update;
  for (at::Tensor* tensor : {&update.grad, &update.master, &update.value})
    if (tensor->defined()) *tensor = tensor->narrow(0, begin, end - begin);
  const UpdateKind kind = matrix != nullptr ? UpdateKind::kMatrix : UpdateKind::kElementwise;
  for (const at::ScalarType type : state_types(kind))
    update.states.push_back(at::zeros({end - begin}, update.grad.options().dtype(type)));
  if (end - begin == part.shard->values.numel()) {
    update.blocks = part.norm.blocks;
    update.partials = part.norm.partials;
  } else if (matrix == nullptr) {
    upload_blocks(update,
                  make_blocks(*part.shard, begin, end, groups(), config, is_narrow(rule, config)));
  }
  part.runs.push_back(std::move(run));
}

void Optimizer::Impl::update(FlatUpdate& part, const at::Tensor& record) const {
  if (part.blocks.numel() > 0) rule.update(config, part, record);
}

void Optimizer::Impl::update_matrix(Run& run) const {
  MatrixUpdate matrix = whole_matrix(run.update, *run.matrix, groups());
  matrix.lr_group = lr_group(*run.matrix);
  matrix.lr_factor = run.matrix->lr_factor;
  matrix.weight_decay_mult = weight_decay_mult(*run.matrix, config);
  rule.update_matrix(config, matrix, state);
  store_matrix(matrix, run.update, *run.matrix, groups());
}

void Optimizer::Impl::step(const at::Tensor& weight, int64_t samples) {
  if (host.size() > 0) host.begin();
  for (size_t k = 0; k < parts.size(); ++k) {
    at::Tensor part_sum = part_sums.narrow(0, static_cast<int64_t>(k), 1);
    if (parts[k].norm.blocks.numel() > 0) sum_of_squares(parts[k].norm, part_sum);
  }
  of_module.defined() ? add_sums_of_modules() : add_sums();
  step_control(state, schedule, rules, sum, weight, samples);
  for (Part& part : parts)
    for (Run& run : part.runs)
      run.matrix != nullptr ? update_matrix(run) : update(run.update, state);
  if (host.size() > 0)
    host.step(state,
              [this](FlatUpdate& piece, const at::Tensor& record) { update(piece, record); });
  for (DistributedDataParallel* model : models) model->trained_values_changed();
}

at::Tensor Optimizer::Impl::sums_by_domain() const {
  return domains.defined() ? at::where(domains, part_sums, 0.0).sum(1)
                           : part_sums.sum(0, /*keepdim=*/true);
}

void Optimizer::Impl::add_sums() { sum.copy_(sum_over_ranks(sums_by_domain())); }

void Optimizer::Impl::divide_part(size_t index,
                                  const std::function<int64_t(const Parameter&)>& module_of) {
  const FlatShard& shard = *parts[index].shard;
  const std::vector<UpdateBlock> blocks =
      make_blocks(shard, 0, shard.values.numel(), groups(), config, is_narrow(rule, config));
  std::vector<std::pair<int64_t, int64_t>> runs;  // module, blocks
  size_t slot = 0;
  for (const UpdateBlock& block : blocks) {
    while (slot + 1 < shard.slots.size() && shard.slots[slot + 1].begin <= block.begin) ++slot;
    const int64_t module = module_of(*shard.slots[slot].parameter);
    if (runs.empty() || runs.back().first != module) runs.emplace_back(module, 0);
    ++runs.back().second;
  }
  modules[index] = {shard.domain, runs.size() == 1 ? runs[0].first : -1};
  if (runs.size() < 2) return;
  int64_t begin = 0;
  for (const auto& [module, count] : runs) {
    module_runs.push_back({index, begin, count});
    modules.emplace_back(shard.domain, module);
    begin += count;
  }
}

void Optimizer::Impl::add_sums_of_modules() {
  std::vector<at::Tensor> pieces = {part_sums};
  for (const ModuleRun& run : module_runs)
    pieces.push_back(parts[run.part].norm.partials.narrow(0, run.begin, run.count).sum(0, true));
  const at::Tensor by_module = at::where(of_module, at::cat(pieces), 0.0).sum(2);
  module_sums = sum_over_ranks(at::cat({sums_by_domain().unsqueeze(1), by_module}, 1)).squeeze(0);
  sum.copy_(module_sums.narrow(0, 0, 1));
}

at::Tensor Optimizer::Impl::state_of(const Part& part, size_t index, const FlatSlot& slot) const {
  const FlatUpdate* flat = nullptr;
  int64_t begin = part.resident;
  if (slot.begin >= part.resident) {
    flat = &host.states(part.run);
  } else {
    const auto after =
        std::upper_bound(part.runs.begin(), part.runs.end(), slot.begin,
                         [](int64_t place, const Run& run) { return place < run.begin; });
    flat = &std::prev(after)->update;
    begin = std::prev(after)->begin;
  }
  const size_t first_state = keeps_masters(part.half()) ? 1 : 0;
  const at::Tensor& all = index < first_state ? flat->master : flat->states[index - first_state];
  return all.narrow(0, slot.begin - begin, slot.num_elements());
}

at::Tensor Optimizer::Impl::sum_over_ranks(const at::Tensor& by_domain) const {
  const std::vector<Placement> placements = reduction_domains(groups());
  for (size_t k = 0; k < placements.size(); ++k) {  // every rank, whatever it holds
    const at::Tensor value = by_domain.narrow(0, static_cast<int64_t>(k), 1);
    models.front()->data_groups()[k].shard.all_reduce(value)->wait();
    norm_group(placements[k], groups()).all_reduce(value)->wait();
  }
  const at::Tensor sum = placements.size() == 1 ? by_domain : by_domain.sum(0, /*keepdim=*/true);
  sum_over_modules(sum, groups());
  return sum;
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

void Optimizer::keep_norms_of(const NormParts& prefixes) {
  Impl& impl = *impl_;
  const auto module_of = [&](const Parameter& parameter) {
    size_t module = 0;
    while (module + 1 < prefixes.size() &&
           std::ranges::none_of(prefixes[module], [&](const std::string& prefix) {
             return parameter.name.starts_with(prefix);
           }))
      ++module;
    return static_cast<int64_t>(module);
  };
  impl.module_runs.clear();
  impl.modules.assign(impl.parts.size(), {});
  for (size_t k = 0; k < impl.parts.size(); ++k) impl.divide_part(k, module_of);
  at::Tensor of = at::zeros({static_cast<int64_t>(impl.models.front()->data_groups().size()),
                             std::ssize(prefixes), std::ssize(impl.modules)},
                            at::kBool);
  for (size_t k = 0; k < impl.modules.size(); ++k)
    if (const auto [domain, module] = impl.modules[k]; module >= 0)
      of[domain][module][static_cast<int64_t>(k)] = true;
  impl.of_module = of.to(impl.sum.device());
}

at::Tensor Optimizer::squared_norms() const { return impl_->module_sums; }

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
    std::map<std::string, std::vector<StateTensor>> of;  // by the name of the parameter
    for (const UpdateKind kind : kUpdateKinds) {
      for (const bool half : {false, true}) {
        const std::vector<OptimizerState> kept = impl.kept(kind, half);
        for (size_t index = 0; index < kept.size(); ++index) {
          const std::string prefix = cat("optimizer.state.", kept[index].name, ".");
          std::vector<StateTensor> entries = model->describe(
              prefix,
              [&](const Parameter& p) {
                const bool chosen = p.trainable && kind_of(impl.rule, p) == kind &&
                                    is_half(value_type(p, model->dtype())) == half;
                return chosen ? std::optional(impl.scalar_type_of(kept[index])) : std::nullopt;
              },
              [&](size_t shard, const FlatSlot& slot) {
                return impl.state_of(impl.parts[first_part + shard], index, slot);
              });
          for (StateTensor& entry : entries)
            of[entry.description.key.substr(prefix.size())].push_back(std::move(entry));
        }
      }
    }
    for (const Parameter* parameter : model->parameters())
      for (StateTensor& entry : of[parameter->name]) all.push_back(std::move(entry));
    for (const FlatShard& shard : model->shards()) first_part += shard.trained();
  }
  return all;
}

void Optimizer::reload_masters() {
  impl_->host.load_values(/*masters_too=*/true);
  for (Impl::Part& part : impl_->parts)
    if (part.update.value.defined()) part.update.master.copy_(part.update.value);
}

void Optimizer::reload_values() { impl_->host.load_values(/*masters_too=*/false); }

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
    const FlatUpdate& counted = part.on_host() ? part.runs.front().update : part.norm;
    chosen.blocks = counted.blocks;
    chosen.partials = counted.partials;
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
