#include "megatron/training/train_step.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>

#include "megatron/base/check.h"
#include "megatron/models/common/routers.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/passes.h"

namespace megatron {

void MediaCounts::add(const MicroBatch& batch) {
  if (batch.images)
    for (const BatchImages::One& one : batch.images->all) {
      ++images;
      patches += one.image.patches();
    }
  if (batch.sounds)
    for (const BatchSounds::One& one : batch.sounds->all) {
      ++sounds;
      frames += one.sound.rows();
    }
}

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

std::vector<std::string> TrainedModel::auxiliary_losses() const {
  return chunks.front().module->auxiliary_losses();
}

bool TrainedModel::divides_rows() const {
  return chunks.front().module->config().sequence_parallel && groups().tp.size() > 1;
}

at::Tensor accumulate_gradients(TrainedModel& model, const PretrainTask& task,
                                const StepOptions& options,
                                const std::function<Batch()>& next_batch, Timers& timers) {
  {
    const SectionScope section(timers.sections(), Section::kBackward);
    for (ModelChunk& chunk : model.chunks) chunk.store->zero_grad(options.num_microbatches);
  }
  PassOptions pass;
  pass.num_microbatches = static_cast<int>(options.num_microbatches);
  pass.training = true;
  pass.per_token_loss = options.per_token_loss;
  pass.loss_scale = model.optimizer->loss_scale_tensor();
  pass.routing = options.routing;
  const at::Tensor totals = run_passes(model, task, pass, next_batch, timers);
  const SectionScope section(timers.sections(), Section::kBackward);
  DistributedDataParallel::finish_grad_sync(model.stores());
  for (ModelChunk& chunk : model.chunks) chunk.store->update_delayed_scales();
  return totals;
}

StepCounts update_weights(TrainedModel& model, const StepOptions& options,
                          const at::Tensor& totals) {
  if (options.per_token_loss) {
    model.optimizer->step(totals[1], options.global_batch_size);
  } else {
    model.optimizer->step(static_cast<double>(options.num_microbatches * options.replicas),
                          options.global_batch_size);
  }
  constexpr int64_t kSkip = offsetof(StepState, skip) / sizeof(int64_t);
  const at::Tensor skipped = model.optimizer->state_tensor().view(at::kLong)[kSkip];
  std::vector<Module*> modules;
  for (ModelChunk& chunk : model.chunks) modules.push_back(chunk.module.get());
  return end_step(modules, skipped, model.groups(), options.keeps_tokens_per_expert);
}

namespace {

constexpr int64_t kReportHead = 3;
constexpr int64_t kMediaCounts = sizeof(MediaCounts) / sizeof(int64_t);

// Of the routers of all stages.
at::Tensor tokens_per_expert(const TrainedModel& model, const StepCounts& counts) {
  const auto [names, experts] = routers_of(model.chunks.front().module->config().transformer);
  const at::Tensor all = at::zeros({static_cast<int64_t>(names.size()), experts},
                                   at::TensorOptions().dtype(at::kInt).device(model.device()));
  for (const auto& [name, one] : counts.of_modules) {
    const auto found = std::find(names.begin(), names.end(), name);
    MEGATRON_ASSERT(found != names.end(), name, " counts tokens of experts");
    all[found - names.begin()].copy_(one);
  }
  model.groups().pp.all_reduce(all)->wait();
  return all;
}

// Fills outcome.report with this rank's values and all-reduces it.
void report(const TrainedModel& model, const StepOptions& options, const at::Tensor& differs,
            const at::Tensor& count_over_mean, SectionClock* clock, StepOutcome& outcome) {
  const ProcessGroup &world = model.groups().world, &dp = model.groups().dp;
  outcome.media_replicas = options.media != nullptr ? options.replicas : 0;
  const int64_t head = kReportHead + kMediaCounts * outcome.media_replicas;
  int reported = 0;
  if (clock != nullptr && world.size() > 1) {
    const int turn = static_cast<int>(clock->next_report() % steps_per_report(world.size()));
    outcome.first_reported = turn * kReportedRanks;
    reported = std::min(kReportedRanks, world.size() - outcome.first_reported);
  }
  const at::Device device = model.device();
  const at::Tensor host =
      at::zeros({head + kPackedTimes * reported},
                at::TensorOptions().dtype(at::kLong).pinned_memory(device.is_cuda()));
  auto* numbers = host.data_ptr<int64_t>();
  numbers[0] = options.stop;
  if (options.media != nullptr && !model.pipeline->encodes())
    std::memcpy(numbers + kReportHead + kMediaCounts * dp.rank(), options.media,
                sizeof(MediaCounts));
  const int place = world.rank() - outcome.first_reported;
  if (0 <= place && place < reported) {
    if (const std::optional<SectionTimes> times = clock->take()) {
      const auto packed = pack_times(*times);
      std::copy(packed.begin(), packed.end(), numbers + head + kPackedTimes * place);
    }
  }
  outcome.report = host.to(device, /*non_blocking=*/true);
  if (differs.defined()) outcome.report.narrow(0, 1, 1).copy_(differs);
  // The bits of positive numbers are in their order.
  if (count_over_mean.defined())
    outcome.report.narrow(0, 2, 1).copy_(count_over_mean.view(at::kLong));
  world.all_reduce(outcome.report, ReduceOp::kMax)->wait();
}

}  // namespace

StepOutcome train_step(TrainedModel& model, const PretrainTask& task, const StepOptions& options,
                       const std::function<Batch()>& next_batch, Timers& timers) {
  SectionClock* clock = timers.sections();
  if (clock != nullptr) clock->begin_step();
  at::Tensor totals;
  {
    const Region region(timers, "forward-backward", 1);
    totals = accumulate_gradients(model, task, options, next_batch, timers);
  }
  const Region region(timers, "optimizer", 1, Section::kOptimizer);
  const bool compares = options.compare_replicas && model.replicas;
  if (compares) model.replicas->before_update();
  const StepCounts counts = update_weights(model, options, totals);
  StepOutcome outcome{totals,
                      static_cast<int64_t>(model.auxiliary_losses().size()),
                      model.optimizer->state_tensor(),
                      {}};
  if (options.keeps_tokens_per_expert) outcome.tokens_per_expert = tokens_per_expert(model, counts);
  outcome.squared_norms = model.optimizer->squared_norms();
  report(model, options,
         compares ? model.replicas->after_update(*options.compare_replicas) : at::Tensor(),
         counts.largest_over_mean, clock, outcome);
  return outcome;
}

struct OutcomeReader::Impl {
  struct Entry {
    at::Tensor loss, state, report, tokens_per_expert, squared_norms;  // on the host
    int first_reported = 0;
    int64_t media_replicas = 0;
    int64_t num_auxiliary = 0;
    std::unique_ptr<c10::Event> copied;  // null: no copy in flight
  };
  c10::Device device;
  std::deque<Entry> entries;
};

OutcomeReader::OutcomeReader(c10::Device device)
    : impl_(std::make_unique<Impl>(Impl{device, {}})) {}
OutcomeReader::~OutcomeReader() = default;

void OutcomeReader::push(const StepOutcome& outcome) {
  const auto to_host = [&](const at::Tensor& from) {
    at::Tensor host = at::empty(
        from.sizes(), from.options().device(at::kCPU).pinned_memory(impl_->device.is_cuda()));
    host.copy_(from, /*non_blocking=*/true);
    return host;
  };
  Impl::Entry entry{
      to_host(outcome.loss),  to_host(outcome.state), to_host(outcome.report), {},     {},
      outcome.first_reported, outcome.media_replicas, outcome.num_auxiliary,   nullptr};
  if (outcome.tokens_per_expert.defined())
    entry.tokens_per_expert = to_host(outcome.tokens_per_expert);
  if (outcome.squared_norms.defined()) entry.squared_norms = to_host(outcome.squared_norms);
  if (impl_->device.is_cuda()) {
    entry.copied = std::make_unique<c10::Event>(impl_->device.type());
    entry.copied->record(
        c10::impl::VirtualGuardImpl(impl_->device.type()).getStream(impl_->device));
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
  const int64_t auxiliary = entry.loss.numel() - 2 * entry.num_auxiliary;
  for (int64_t i = 2; i < auxiliary; ++i) numbers.metrics.push_back(loss[i] / weight);
  numbers.auxiliary.clear();
  for (int64_t i = auxiliary; i < entry.loss.numel(); i += 2)
    numbers.auxiliary.push_back(loss[i] / (loss[i + 1] == 0 ? 1 : loss[i + 1]));
  const auto* report = entry.report.const_data_ptr<int64_t>();
  numbers.stop = report[0];
  numbers.replicas_differ = report[1] != 0;
  numbers.count_over_mean = std::bit_cast<double>(report[2]);
  numbers.tokens_per_expert.clear();
  for (int64_t row = 0; entry.tokens_per_expert.defined() && row < entry.tokens_per_expert.size(0);
       ++row) {
    const at::Tensor one = entry.tokens_per_expert[row];
    const auto* first = one.const_data_ptr<int32_t>();
    numbers.tokens_per_expert.emplace_back(first, first + one.numel());
  }
  const int64_t head = kReportHead + kMediaCounts * entry.media_replicas;
  numbers.media.resize(static_cast<size_t>(entry.media_replicas));
  std::memcpy(static_cast<void*>(numbers.media.data()), report + kReportHead,
              numbers.media.size() * sizeof(MediaCounts));
  numbers.times.clear();
  for (int64_t at = head; at < entry.report.numel(); at += kPackedTimes) {
    const int rank = entry.first_reported + static_cast<int>((at - head) / kPackedTimes);
    if (SectionTimes times; unpack_times(report + at, times))
      numbers.times.emplace_back(rank, times);
  }
  MEGATRON_ASSERT(entry.state.nbytes() == sizeof(StepState));
  std::memcpy(static_cast<void*>(&numbers.state), entry.state.const_data_ptr(), sizeof(StepState));
  numbers.module_norms.clear();
  for (int64_t i = 1; entry.squared_norms.defined() && i < entry.squared_norms.numel(); ++i) {
    const auto* squares = entry.squared_norms.const_data_ptr<double>();
    const double share = squares[0] > 0 ? squares[i] / squares[0] : 0.0;
    numbers.module_norms.push_back(numbers.state.grad_norm * std::sqrt(share));
  }
  return true;
}

}  // namespace megatron
