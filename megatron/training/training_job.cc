#include "megatron/training/training_job.h"

#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/runtime/shared_settings.h"
#include "megatron/tensor/batch_invariant/mode.h"

namespace megatron {

int run_job(const Launch& launch, const Arguments& arguments,
            const std::function<int(const Job&)>& body, std::span<Config* const> more) {
  if (arguments.training.stopped_exit_code.value_or(0) != 0 && launch.under_torchrun()) {
    if (launch.rank != 0) return kExitUsage;  // the first rank says what is wrong
    throw UsageError(
        "--stopped-exit-code is given under torchrun, which starts the ranks again after any code "
        "but 0"
        "\nhint: drop it; outcome.json in the folder of the run tells stopped from finished");
  }
  set_batch_invariant(arguments.is_batch_invariant());
  RuntimeOptions options;
  options.comm = arguments.comm;
  options.parallel = arguments.parallel;
  options.encoder = arguments.encoder_ranks();
  options.device = arguments.training.device;
  options.gemm_tuning = arguments.training.gemm_tuning;
  options.settings = [&] {
    Arguments copy = arguments;
    std::vector<Config*> configs = copy.configs();
    configs.insert(configs.end(), more.begin(), more.end());
    return shared_settings(configs);
  };
  return run_job(launch, options, body);
}

}  // namespace megatron
