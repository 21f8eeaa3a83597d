#include "megatron/training/train_step.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <deque>

#include "megatron/base/check.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

// What backward starts from: the loss sum times the scale, divided by the micro-batch's own weight for the mean of means.
at::Tensor backward_root(const Loss& loss, const at::Tensor& scale, bool per_token) {
  const at::Tensor factor = scale.to(loss.sum.scalar_type());
  if (per_token) return loss.sum * factor;
  return loss.sum * (factor / at::clamp_min(loss.weight.to(factor.scalar_type()), 1));
}

}  // namespace

StepOutcome train_step(TrainedModel& model, const PretrainTask& task, const StepOptions& options,
                       const std::function<Batch()>& next_batch, Timers& timers) {
  const ParallelGroups& groups = model.store->groups();
  const at::Tensor scale = model.optimizer->loss_scale_tensor();
  at::Tensor totals = at::zeros({2}, scale.options().dtype(at::kDouble));
  {
    const Region region(timers, "forward-backward", 1);
    model.store->zero_grad(options.num_microbatches);
    for (int64_t i = 0; i < options.num_microbatches; ++i) {
      Batch batch;
      {
        const Region part(timers, "batch-generator", 2);
        batch = next_batch();
      }
      RecomputeTape tape;
      ForwardContext context;
      context.training = true;
      context.place = batch.place;
      context.position_ids = batch.position_ids;
      context.attention_mask = batch.attention_mask;
      context.tape = options.full_recomputation ? &tape : nullptr;
      Loss loss;
      {
        const Region part(timers, "forward-compute", 2);
        loss = task.forward_step(*model.module, batch, context);
      }
      totals += at::stack({loss.sum.detach().to(at::kDouble), loss.weight.detach().to(at::kDouble)});
      const Region part(timers, "backward-compute", 2);
      tape.backward(backward_root(loss, scale, options.per_token_loss));
    }
    model.store->finish_grad_sync();
    groups.dp_cp.all_reduce(totals)->wait();
  }
  const Region region(timers, "optimizer", 1);
  if (options.per_token_loss) {
    model.optimizer->step(totals[1], options.global_batch_size);
  } else {
    model.optimizer->step(static_cast<double>(options.num_microbatches * groups.dp_cp.size()), options.global_batch_size);
  }
  return {totals, model.optimizer->state_tensor()};
}

struct OutcomeReader::Impl {
  struct Entry {
    at::Tensor loss, state;              // on the host
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
  Impl::Entry entry{to_host(outcome.loss), to_host(outcome.state), nullptr};
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
  numbers.loss = loss[0] / (loss[1] == 0 ? 1 : loss[1]);
  MEGATRON_ASSERT(entry.state.nbytes() == sizeof(StepState));
  std::memcpy(static_cast<void*>(&numbers.state), entry.state.const_data_ptr(), sizeof(StepState));
  return true;
}

}  // namespace megatron
