#include "megatron/optimizer/optimizer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/optimizer_ops.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

bool is_sharded_over(const Parameter& parameter, Axis axis) {
  return std::any_of(parameter.placement.shards.begin(), parameter.placement.shards.end(),
                     [&](const Shard& shard) { return shard.axis == axis; });
}

// Each logical parameter counts once in the norm: what is whole on every tensor rank, on the first of them.
bool counts_in_norm(const Parameter& parameter, const ParallelGroups& groups) {
  return is_sharded_over(parameter, Axis::kTensor) || groups.tp.rank() == 0;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Embedding and output weights decay; one-dimensional parameters and biases do not (contracts e).
float weight_decay_mult(const Parameter& parameter, const OptimizerConfig& config) {
  if (parameter.role == ParameterRole::kQKNorm && config.apply_wd_to_qk_layernorm) return 1.0f;
  const bool exempt = parameter.global_shape.size() <= 1 || parameter.role == ParameterRole::kBias ||
                      ends_with(parameter.name, ".bias");
  return exempt ? 0.0f : 1.0f;
}

int lr_group(const Parameter& parameter) {
  const bool decoupled =
      parameter.role == ParameterRole::kOutput ||
      (parameter.role == ParameterRole::kEmbedding && !ends_with(parameter.name, "position_embeddings.weight"));
  return decoupled ? 1 : 0;
}

std::vector<UpdateBlock> make_blocks(const DistributedDataParallel& model, const OptimizerConfig& config) {
  std::vector<UpdateBlock> blocks;
  const GradBuffer& buffer = model.buffer();
  for (size_t i = 0; i < buffer.parameters().size(); ++i) {
    const Parameter& parameter = *buffer.parameters()[i];
    if (!parameter.trainable) continue;
    const BufferSlot& slot = buffer.layout().slots[i];
    UpdateBlock block;
    block.lr_group = lr_group(parameter);
    block.weight_decay_mult = weight_decay_mult(parameter, config);
    block.counts_in_norm = counts_in_norm(parameter, model.groups()) ? 1 : 0;
    for (int64_t begin = slot.begin; begin < slot.end; begin += kUpdateBlockElements) {
      block.begin = begin;
      block.count = static_cast<int32_t>(std::min(kUpdateBlockElements, slot.end - begin));
      blocks.push_back(block);
    }
  }
  return blocks;
}

}  // namespace

struct Optimizer::Impl {
  Impl(const OptimizerConfig& config, const ParameterSchedule& schedule, DistributedDataParallel& model);
  void step(const at::Tensor& weight, int64_t samples);
  double norm_of(const at::Tensor& flat);
  double sum_over_model(double value) const;
  bool has_masters() const { return update.value.defined(); }

  const OptimizerConfig config;
  ParameterSchedule schedule;
  const StepRules rules;
  DistributedDataParallel& model;
  FlatUpdate update;
  at::Tensor state;  // the record, on the device
  at::Tensor sum;    // [1] fp64
};

Optimizer::Impl::Impl(const OptimizerConfig& config, const ParameterSchedule& schedule,
                      DistributedDataParallel& model)
    : config(config), schedule(schedule), rules(make_step_rules(config)), model(model) {
  const GradBuffer& buffer = model.buffer();
  update.grad = buffer.grads();
  if (model.dtype() == at::kDouble || model.dtype() == at::kFloat) {
    update.master = buffer.values();
  } else {
    MEGATRON_CHECK(model.dtype() == at::kBFloat16 || model.dtype() == at::kHalf,
                   "the optimizer does not support a model in ", at::toString(model.dtype()),
                   ", expected fp64, fp32, bf16 or fp16");
    update.value = buffer.values();
    update.master = buffer.values().to(at::kFloat);
  }
  update.exp_avg = at::zeros_like(update.master);
  if (config.optimizer == OptimizerType::kAdam) update.exp_avg_sq = at::zeros_like(update.master);
  upload_blocks(update, make_blocks(model, config));
  sum = at::zeros({1}, update.grad.options().dtype(at::kDouble));
  state = at::empty({static_cast<int64_t>(sizeof(StepState))}, update.grad.options().dtype(at::kByte));
}

void Optimizer::Impl::step(const at::Tensor& weight, int64_t samples) {
  sum_of_squares(update, sum);
  model.groups().model_parallel.all_reduce(sum)->wait();
  step_control(state, schedule, rules, sum, weight, samples);
  if (config.optimizer == OptimizerType::kAdam) {
    adamw_update(update, state, {config.adam_beta1, config.adam_beta2, config.adam_eps});
  } else {
    sgd_update(update, state, config.sgd_momentum);
  }
}

double Optimizer::Impl::sum_over_model(double value) const {
  const at::Tensor total = at::full({1}, value, update.grad.options().dtype(at::kDouble));
  model.groups().model_parallel.all_reduce(total)->wait();
  return total.item<double>();
}

double Optimizer::Impl::norm_of(const at::Tensor& flat) {
  FlatUpdate other = update;
  other.grad = flat;
  at::Tensor result = at::zeros_like(sum);
  sum_of_squares(other, result);
  return std::sqrt(sum_over_model(result.item<double>()));
}

Optimizer::Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
                     DistributedDataParallel& model)
    : impl_(std::make_unique<Impl>(config, schedule, model)) {
  load_state(initial_step_state(config));
}

Optimizer::~Optimizer() = default;

at::Tensor Optimizer::loss_scale_tensor() const {
  constexpr int64_t kOffset = offsetof(StepState, loss_scale);
  const at::Tensor scale = impl_->state.narrow(0, kOffset, sizeof(double)).view(at::kDouble);
  return scale.to(impl_->update.grad.scalar_type(), /*non_blocking=*/false, /*copy=*/true).reshape({});
}

void Optimizer::step(const at::Tensor& total_weight, int64_t samples) {
  MEGATRON_ASSERT(total_weight.numel() == 1, "total_weight has ", total_weight.numel(), " elements");
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

std::vector<OptimizerTensor> Optimizer::tensors() const {
  std::vector<OptimizerTensor> all;
  const GradBuffer& buffer = impl_->model.buffer();
  const FlatUpdate& update = impl_->update;
  const bool adam = update.exp_avg_sq.defined();
  for (size_t i = 0; i < buffer.parameters().size(); ++i) {
    Parameter* parameter = buffer.parameters()[i];
    if (!parameter->trainable) continue;
    const auto add = [&](const char* kind, const at::Tensor& flat) {
      all.push_back({cat("optimizer.state.", kind, ".", parameter->name), parameter,
                     buffer.view(flat, static_cast<int>(i))});
    };
    if (impl_->has_masters()) add("fp32_param", update.master);
    add(adam ? "exp_avg" : "momentum_buffer", update.exp_avg);
    if (adam) add("exp_avg_sq", update.exp_avg_sq);
  }
  return all;
}

void Optimizer::reload_masters() {
  if (impl_->has_masters()) impl_->update.master.copy_(impl_->update.value);
}

void Optimizer::store_values() {
  if (impl_->has_masters()) impl_->update.value.copy_(impl_->update.master);
}

double Optimizer::num_zeros() const {
  const GradBuffer& buffer = impl_->model.buffer();
  const ParallelGroups& groups = impl_->model.groups();
  double count = 0;
  for (size_t i = 0; i < buffer.parameters().size(); ++i) {
    const Parameter& parameter = *buffer.parameters()[i];
    if (!parameter.trainable || !counts_in_norm(parameter, groups)) continue;
    const at::Tensor grad = buffer.view(buffer.grads(), static_cast<int>(i));
    for (const ShardPiece& piece : shard_pieces(parameter, groups)) {  // leaves vocabulary padding out
      at::Tensor part = grad;
      for (size_t dim = 0; dim < piece.local_offset.size(); ++dim) {
        part = part.narrow(static_cast<int64_t>(dim), piece.local_offset[dim], piece.global.shape[dim]);
      }
      count += static_cast<double>(part.numel()) - at::count_nonzero(part).item<double>();
    }
  }
  return impl_->sum_over_model(count);
}

double Optimizer::params_norm() const { return impl_->norm_of(impl_->update.master); }

}  // namespace megatron
