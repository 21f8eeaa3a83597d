#include "megatron/training/evaluation.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/device.h"

namespace megatron {

Evaluator::Evaluator(std::shared_ptr<const Dataset> dataset, Options options, c10::Device device)
    : dataset_(std::move(dataset)), options_(options), device_(device) {}

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
  return std::make_unique<DataLoader>(dataset_, std::move(options));
}

std::optional<double> Evaluator::run(const PretrainTask& task, Module& model, const ParallelGroups& groups,
                                     const std::function<bool()>& stop) {
  const at::NoGradGuard no_grad;
  if (options_.full) {
    loader_ = make_loader(0);
  } else if (!loader_) {
    loader_ = make_loader(options_.consumed_samples);
  }
  const int64_t per_pass = options_.micro_batch_size * options_.data_parallel_size;
  const int64_t passes = options_.full ? (dataset_->size() + per_pass - 1) / per_pass
                                       : options_.eval_iters * (options_.global_batch_size / per_pass);
  BatchMaker maker(device_, options_.own_positions);
  at::Tensor totals = at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device_));
  for (int64_t i = 0; i < passes; ++i) {
    if (stop && stop()) return std::nullopt;
    std::shared_ptr<const MicroBatch> source = loader_->next();
    if (!source && !options_.full) {
      // The set was built for fewer evaluations than were asked for; it starts again.
      loader_ = make_loader(0);
      source = loader_->next();
    }
    if (!source) break;
    const Batch batch = maker.make(source);
    ForwardContext context;
    context.place = batch.place;
    context.position_ids = batch.position_ids;
    context.attention_mask = batch.attention_mask;
    const Loss loss = task.forward_step(model, batch, context);
    totals += at::stack({loss.sum.to(at::kDouble), loss.weight.to(at::kDouble)});
    if (i % 16 != 15) continue;
    synchronize(device_);
    maker.take_held();
  }
  groups.dp_cp.all_reduce(totals)->wait();
  const at::Tensor host = totals.cpu();
  if (!options_.full) options_.consumed_samples = loader_->consumed();
  const double weight = host[1].item<double>();
  MEGATRON_CHECK(weight > 0, "no token of the evaluated samples has weight in the loss");
  return host[0].item<double>() / weight;
}

}  // namespace megatron
