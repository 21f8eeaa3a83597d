// Ranks that train, or compute as training does: run_job with what the flags of training say.
#pragma once

#include <functional>
#include <span>

#include "megatron/runtime/job.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

// `arguments` were parsed for launch.world_size ranks; `more`: flags of the command that are not
// part of them. Refuses what contradicts the launcher.
int run_job(const Launch& launch, const Arguments& arguments,
            const std::function<int(const Job&)>& body, std::span<Config* const> more = {});

}  // namespace megatron
