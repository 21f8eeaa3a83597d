// The first thing that the ranks of a job do together: they arrive at the store, compare what must
// be alike, and start or leave together.
//
// Cost: each rank makes some ten calls to the store and then waits in one; what the ranks compare
// is a digest, of which the last one to arrive looks at a count. Texts are sent only when digests
// differ, one for each digest. No collective is made.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/rank_settings.h"
#include "megatron/comm/store.h"

namespace megatron {

// A rank on the same machine, and its process.
struct Neighbour {
  int rank = 0;
  int pid = 0;
};

// The job does not start, and another rank says why: this one leaves quietly with that exit code.
class StartRefused : public Error {
 public:
  explicit StartRefused(int exit_code)
      : Error("the job does not start; another rank says why"), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// Returns the other ranks of this machine when every rank has arrived and all have the same
// settings. Otherwise throws, on one rank, UsageError that names what differs, RetryError that
// names the ranks that are missing at the deadline, or Error for ranks that were started twice or
// as part of another number of ranks; and StartRefused on all others.
std::vector<Neighbour> meet(const Launch& launch, Store& store, const RankSettings& settings,
                            double timeout_seconds);

// For a rank that cannot take part, because its own flags are wrong: ends the meeting of the
// others. Returns whether this rank is the one to say why.
bool call_off(Store& store, int exit_code);

// For the holder of a store whose job was called off: waits until `world_size` ranks know it, for
// so many seconds at most.
void wait_until_all_left(Store& store, int world_size, double timeout_seconds);

}  // namespace megatron
