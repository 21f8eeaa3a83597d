#include "megatron/training/train_step.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <deque>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/passes.h"

namespace megatron {

at::Device TrainedModel::device() const { return chunks.front().store->flat_values().device(); }

std::vector<DistributedDataParallel*> TrainedModel::stores() const {
  std::vector<DistributedDataParallel*> all;
  for (const ModelChunk& chunk : chunks) all.push_back(chunk.store.get());
  return all;
}

int64_t TrainedModel::num_parameters() const {
  int64_t count = 0;
  for (const ModelChunk& chunk : chunks) count += chunk.module->num_parameters();
  return count;
}

int64_t TrainedModel::num_frozen() const {
  int64_t count = 0;
  for (const ModelChunk& chunk : chunks) {
    for (const Parameter* parameter : chunk.module->parameters()) {
      if (parameter->trainable) continue;
      const int64_t elements = c10::multiply_integers(parameter->local_shape);
      const bool padded =
          parameter->valid_rows >= 0 && parameter->local_shape == parameter->global_shape;
      count += padded ? elements / parameter->global_shape[0] * parameter->valid_rows : elements;
    }
  }
  return count;
}

at::Tensor accumulate_gradients(TrainedModel& model, const PretrainTask& task, const StepOptions& options,
                                const std::function<Batch()>& next_batch, Timers& timers) {
  for (ModelChunk& chunk : model.chunks) chunk.store->zero_grad(options.num_microbatches);
  PassOptions pass;
  pass.num_microbatches = static_cast<int>(options.num_microbatches);
  pass.training = true;
  pass.per_token_loss = options.per_token_loss;
  pass.loss_scale = model.optimizer->loss_scale_tensor();
  const at::Tensor totals = run_passes(model, task, pass, next_batch, timers);
  for (ModelChunk& chunk : model.chunks) chunk.store->finish_grad_sync();
  for (ModelChunk& chunk : model.chunks) chunk.store->update_delayed_scales();
  return totals;
}

void update_weights(TrainedModel& model, const StepOptions& options, const at::Tensor& totals) {
  if (options.per_token_loss) {
    model.optimizer->step(totals[1], options.global_batch_size);
  } else {
    model.optimizer->step(static_cast<double>(options.num_microbatches * model.groups().dp.size()), options.global_batch_size);
  }
}

StepOutcome train_step(TrainedModel& model, const PretrainTask& task, const StepOptions& options,
                       const std::function<Batch()>& next_batch, Timers& timers) {
  at::Tensor totals;
  {
    const Region region(timers, "forward-backward", 1);
    totals = accumulate_gradients(model, task, options, next_batch, timers);
  }
  const Region region(timers, "optimizer", 1);
  update_weights(model, options, totals);
  const at::Tensor stop = at::full({1}, options.stop, totals.options().dtype(at::kLong));
  model.groups().world.all_reduce(stop, ReduceOp::kMax)->wait();
  return {totals, model.optimizer->state_tensor(), stop};
}

struct OutcomeReader::Impl {
  struct Entry {
    at::Tensor loss, state, stop;        // on the host
    std::unique_ptr<c10::Event> copied;  // null: already there
  };
  c10::Device device;
  std::deque<Entry> entries;
};

OutcomeReader::OutcomeReader(c10::Device device) : impl_(std::make_unique<Impl>(Impl{device, {}})) {}
OutcomeReader::~OutcomeReader() = default;

void OutcomeReader::push(const StepOutcome& outcome) {
  const auto to_host = [&](const at::Tensor& from) {
    at::Tensor host = at::empty(from.sizes(), from.options().device(at::kCPU).pinned_memory(impl_->device.is_cuda()));
    host.copy_(from, /*non_blocking=*/true);
    return host;
  };
  Impl::Entry entry{to_host(outcome.loss), to_host(outcome.state), to_host(outcome.stop), nullptr};
  if (impl_->device.is_cuda()) {
    entry.copied = std::make_unique<c10::Event>(impl_->device.type());
    entry.copied->record(c10::impl::VirtualGuardImpl(impl_->device.type()).getStream(impl_->device));
  }
  impl_->entries.push_back(std::move(entry));
}

bool OutcomeReader::pop(StepNumbers& numbers, bool all) {
  const size_t kept = !all && impl_->device.is_cuda() ? 1 : 0;
  if (impl_->entries.size() <= kept) return false;
  const Impl::Entry entry = std::move(impl_->entries.front());
  impl_->entries.pop_front();
  if (entry.copied) entry.copied->synchronize();
  const double* loss = entry.loss.const_data_ptr<double>();
  const double weight = loss[1] == 0 ? 1 : loss[1];
  numbers.loss = loss[0] / weight;
  numbers.metrics.clear();
  for (int64_t i = 2; i < entry.loss.numel(); ++i) numbers.metrics.push_back(loss[i] / weight);
  numbers.stop = *entry.stop.const_data_ptr<int64_t>();
  MEGATRON_ASSERT(entry.state.nbytes() == sizeof(StepState));
  std::memcpy(static_cast<void*>(&numbers.state), entry.state.const_data_ptr(), sizeof(StepState));
  return true;
}

}  // namespace megatron
