#include "megatron/training/rank_reports.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/process.h"
#include "megatron/comm/gather_texts.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {}  // namespace

RankTimers gather_timers(const ProcessGroup& world, c10::Device device, const Timers& timers) {
  return timers_from_texts(gather_texts(world, device, timers_to_text(timers)));
}

std::vector<MemoryUse> gather_memory(const ProcessGroup& world, c10::Device device) {
  const MemoryUse own = memory_use(device);
  std::vector<MemoryUse> all;
  for (const std::string& text :
       gather_texts(world, device,
                    cat(own.reserved, " ", own.allocated, " ", own.max_allocated, " ",
                        own.num_allocations, " ", own.resident))) {
    MemoryUse& use = all.emplace_back();
    std::istringstream(text) >> use.reserved >> use.allocated >> use.max_allocated >>
        use.num_allocations >> use.resident;
  }
  return all;
}

SlowRankWatch::SlowRankWatch(const ParallelGroups& groups, c10::Device device, int64_t interval,
                             bool encodes)
    : interval_(interval) {
  constexpr int kEncoders = -1;  // no stage
  std::vector<int> stages;
  for (const std::string& text :
       gather_texts(groups.world, device,
                    cat(encodes ? kEncoders : groups.pp.rank(), " ", machine_name()))) {
    std::istringstream words(text);
    words >> stages.emplace_back() >> hosts_.emplace_back();
  }
  if (std::all_of(hosts_.begin(), hosts_.end(),
                  [&](const std::string& host) { return host == hosts_.front(); }))
    hosts_.clear();
  if (groups.world.rank() == 0) ranks_.emplace(std::move(stages));
}

std::optional<std::string> SlowRankWatch::step(int64_t iteration, const StepNumbers& numbers) {
  if (!ranks_) return std::nullopt;
  for (const auto& [rank, times] : numbers.times) ranks_->add(iteration, rank, times);
  if (named_ && iteration < *named_ + interval_) return std::nullopt;
  const std::optional<SlowRank> slow = ranks_->find(iteration);
  if (!slow) return std::nullopt;
  named_ = iteration;
  const std::string host =
      hosts_.empty() ? "" : cat(" (", hosts_[static_cast<size_t>(slow->rank)], ")");
  return cat("iteration ", iteration, ": ", to_string(*slow), host);
}

}  // namespace megatron
