// A model that one rank serves, or several together under a launcher.
#pragma once

#include <memory>
#include <string_view>

#include "megatron/base/parse.h"
#include "megatron/runtime/job.h"
#include "tools/support/served_model_flags.h"

namespace megatron {

struct ServedJobFlags {
  ServedModelConfig load;
  EngineConfig engine;
  ServedRanksConfig ranks;
  CommConfig comm;
};

// How a command of that name takes part in such a job. Throws Error if the launcher has started
// other ranks.
RuntimeOptions served_job_options(const ServedJobFlags& flags, const Launch& launch,
                                  std::string_view command);

// Loads this rank's part of the model. Rank 0 returns the service, which is yet to be started; the
// others do what it decides until it ends, and return null. Communication: all ranks.
std::shared_ptr<ModelService> join_served_job(const ServedJobFlags& flags, const Job& job,
                                              const ServeConfig& serve, const ServeLimits& limits);

}  // namespace megatron
