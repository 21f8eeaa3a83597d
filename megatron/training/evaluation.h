// The loss over validation or test samples, without gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "megatron/datasets/data_loader.h"
#include "megatron/training/train_step.h"

namespace megatron {

// Evaluates one dataset. With full validation each evaluation reads the whole set from its
// beginning; otherwise each takes the next samples, so that `consumed` is part of a run's state.
class Evaluator {
 public:
  struct Options {
    int64_t micro_batch_size = 1;
    int64_t global_batch_size = 1;
    int64_t eval_iters = 1;
    bool full = false;
    int64_t data_parallel_rank = 0;
    int64_t data_parallel_size = 1;
    int64_t num_workers = 2;
    int64_t consumed_samples = 0;
    int64_t row_multiple = 0;  // as for BatchMaker
    ImageRanks image_ranks = {};
    MediaCosts media_costs = {};
  };
  Evaluator(std::shared_ptr<const Dataset> dataset, Options options, c10::Device device);

  struct Result {
    double loss = 0;              // per token
    std::vector<double> metrics;  // metrics of the task, per token
  };
  // Result over all ranks; nothing if `stop` (called before each micro-batch) returned true. Throws
  // Error if no token of the set has weight.
  std::optional<Result> run(const PretrainTask& task, TrainedModel& model,
                            const std::function<bool()>& stop = {});
  int64_t consumed_samples() const { return options_.consumed_samples; }

 private:
  std::unique_ptr<DataLoader> make_loader(int64_t consumed) const;
  Batch next_batch(BatchMaker& maker);
  std::shared_ptr<const Dataset> dataset_;
  Options options_;
  c10::Device device_;
  std::unique_ptr<DataLoader> loader_;
};

// What the arguments say of evaluations of this rank: of validation sets, or of the test set, which
// is never read whole.
Evaluator::Options evaluation_options(const Arguments& arguments, const ParallelGroups& groups,
                                      bool of_test_set = false);

}  // namespace megatron
