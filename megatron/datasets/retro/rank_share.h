// How the ranks of a job divide the files of a project: each makes every size-th one. They meet at
// the files themselves, which appear complete or not at all, so a rank may be hours behind; that it
// lives is for the job to watch.
#pragma once

#include <cstdint>
#include <functional>

namespace megatron {

struct RankShare {
  int rank = 0, size = 1;
  bool is_first() const { return rank == 0; }
  bool takes(int64_t index) const { return index % size == rank; }
};

// Returns when `there` is true, which is asked for some times a second.
void wait_until(const std::function<bool()>& there);

}  // namespace megatron
