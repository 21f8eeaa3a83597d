#include "tools/support/training_run.h"

#include "megatron/training/pretrain.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/training/training_job.h"
#include "tools/support/torch_version.h"

namespace megatron {

int run_training(const Launch& launch, const Arguments& arguments) {
  return run_job(launch, arguments, [&](const Job& job) {
    Versions libraries;
    megatron_torch_versions(libraries);
    return pretrain(find_task(arguments), arguments, job, libraries);
  });
}

}  // namespace megatron
