// The start-up barrier of a job: ranks arrive at the store, compare the settings that must be
// equal, and start or exit together.
//
// Cost: each rank makes some ten calls to the store and then waits in one. Ranks compare a digest;
// the last one to arrive counts the distinct ones. Texts are sent only if digests differ, one for
// each digest. No collective is involved.
#pragma once

#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/rank_settings.h"
#include "megatron/comm/store.h"

namespace megatron {

// Another rank on the same machine, and its process.
struct Neighbour {
  int rank = 0;
  int pid = 0;
};

// The job does not start, and another rank says why: this one exits silently with that exit code.
class StartRefused : public Error {
 public:
  explicit StartRefused(int exit_code)
      : Error("the job does not start; another rank says why"), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// Returns the other ranks of this machine once every rank has arrived with the same settings.
// Otherwise throws on one rank: UsageError that names the differing settings, RetryError that names
// the ranks missing at the deadline, or Error for ranks that were started twice or with another
// world size; and StartRefused on all others.
std::vector<Neighbour> meet(const Launch& launch, Store& store, const RankSettings& settings,
                            double timeout_seconds);

// For a rank that cannot start because its own flags are wrong: makes the other ranks exit. Returns
// whether this rank is the one to print its error.
bool call_off(Store& store, int exit_code);

// For the host of a store whose job was called off: waits until `world_size` ranks have read that,
// but at most `timeout_seconds`.
void wait_until_all_left(Store& store, int world_size, double timeout_seconds);

}  // namespace megatron
