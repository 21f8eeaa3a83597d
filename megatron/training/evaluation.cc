#include "megatron/training/evaluation.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/passes.h"
#include "megatron/training/setup.h"

namespace megatron {

Evaluator::Evaluator(std::shared_ptr<const Dataset> dataset, Options options, c10::Device device)
    : dataset_(std::move(dataset)), options_(std::move(options)), device_(device) {}

std::unique_ptr<DataLoader> Evaluator::make_loader(int64_t consumed) const {
  DataLoaderOptions options;
  options.sampler.total_samples = dataset_->size();
  options.sampler.micro_batch_size = options_.micro_batch_size;
  options.sampler.data_parallel_rank = options_.data_parallel_rank;
  options.sampler.data_parallel_size = options_.data_parallel_size;
  options.sampler.drop_last = !options_.full;
  options.consumed_samples = consumed;
  options.num_workers = options_.num_workers;
  options.allocator = host_allocator(device_);
  options.image_ranks = options_.image_ranks;
  options.media_costs = options_.media_costs;
  return std::make_unique<DataLoader>(dataset_, std::move(options));
}

Batch Evaluator::next_batch(BatchMaker& maker) {
  std::shared_ptr<const MicroBatch> source = loader_->next();
  if (!source) {
    // The set was built for fewer evaluations; start again at its beginning.
    MEGATRON_ASSERT(!options_.full, "the whole set gives every rank as many micro-batches");
    loader_ = make_loader(0);
    source = loader_->next();
  }
  return maker.make(source);
}

std::optional<Evaluator::Result> Evaluator::run(const PretrainTask& task, TrainedModel& model,
                                                const std::function<bool()>& stop) {
  if (options_.full) {
    loader_ = make_loader(0);
  } else if (!loader_) {
    loader_ = make_loader(options_.consumed_samples);
  }
  const int64_t per_pass = options_.micro_batch_size * options_.data_parallel_size;
  PassOptions pass;
  pass.num_microbatches =
      options_.full ? 1 : static_cast<int>(options_.global_batch_size / per_pass);
  const int64_t rounds =
      options_.full ? (dataset_->size() + per_pass - 1) / per_pass : options_.eval_iters;
  BatchMaker maker(device_, model.groups().cp, options_.row_multiple,
                   task.addition(model.chunks.front().module->config()));
  Timers timers(0);
  at::Tensor totals = at::zeros({2 + static_cast<int64_t>(task.metrics.size())},
                                at::TensorOptions().dtype(at::kDouble).device(device_));
  for (int64_t i = 0; i < rounds; ++i) {
    if (stop && stop()) return std::nullopt;
    totals += run_passes(model, task, pass, [&] { return next_batch(maker); }, timers);
    if (i % 16 != 15) continue;
    synchronize(device_);
    maker.take_held();
  }
  const at::Tensor host = totals.cpu();
  if (!options_.full) options_.consumed_samples = loader_->consumed();
  const double weight = host[1].item<double>();
  MEGATRON_CHECK(weight > 0, "no token of the evaluated samples has weight in the loss");
  Result result{host[0].item<double>() / weight, {}};
  for (int64_t i = 2; i < host.numel(); ++i)
    result.metrics.push_back(host[i].item<double>() / weight);
  return result;
}

Evaluator::Options evaluation_options(const Arguments& arguments, const ParallelGroups& groups,
                                      bool of_test_set) {
  Evaluator::Options options;
  options.micro_batch_size = arguments.eval_micro_batch_size();
  options.global_batch_size = arguments.eval_global_batch_size();
  options.eval_iters = arguments.training.eval_iters;
  options.full = arguments.data.full_validation && !of_test_set;
  options.data_parallel_rank = data_parallel_rank(arguments, groups);
  options.data_parallel_size = arguments.data_parallel_size();
  options.num_workers = std::min<int64_t>(arguments.data.num_workers, 1);
  options.row_multiple = unpadded_row_multiple(arguments);
  options.image_ranks = image_ranks(arguments, groups);
  options.media_costs = media_costs(arguments);
  return options;
}

}  // namespace megatron
