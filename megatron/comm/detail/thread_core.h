// Collectives between threads of one process, on raw host memory; without libtorch, so that the
// thread sanitizer covers everything. See comm/thread_backend.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/base/dtype.h"
#include "megatron/comm/reduce_op.h"

namespace megatron {

// State that all threads of one run_threads() share: one lock, one condition, the first failure.
// Defined in the source.
struct ThreadJob;
// State that the ranks of one group share, and one call as a rank posts it. Defined in the source.
struct ThreadGroup;
struct ThreadCall;

// One rank of a group. Counts are in elements. Calls block until every rank of the group has made
// the same call; if calls differ, all ranks throw an error that names both. Reductions run in rank
// order and are therefore deterministic; bf16 and fp16 are summed in fp32 and rounded once.
class ThreadCore {
 public:
  ThreadCore(std::shared_ptr<ThreadGroup> group, int rank);

  int rank() const { return rank_; }
  int size() const;

  void all_reduce(void* data, int64_t count, DType dtype, ReduceOp op);
  void all_gather(void* output, const void* input, int64_t count_per_rank, DType dtype);
  void reduce_scatter(void* output, const void* input, int64_t count_per_rank, DType dtype,
                      ReduceOp op);
  void all_to_all(void* output, const std::vector<int64_t>& output_counts, const void* input,
                  const std::vector<int64_t>& input_counts, DType dtype);
  void broadcast(void* data, int64_t count, DType dtype, int root);
  // Buffered: does not wait for the receiver
  void send(const void* data, int64_t count, DType dtype, int peer);
  void recv(void* data, int64_t count, DType dtype, int peer);
  int64_t num_messages(int peer) const;  // that `peer` has sent and that were not received
  void barrier();
  // See Backend::subgroup.
  ThreadCore subgroup(const std::vector<int>& ranks, const std::string& name);

 private:
  void exchange(const ThreadCall& call, const std::function<void()>& read_peers);
  void check_calls() const;
  void reduce(void* output, const void* input, int64_t first, int64_t count, int64_t total,
              DType dtype, ReduceOp op, const char* name);
  void check_peer(const char* what, int peer) const;

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

// Runs body(rank) on `size` threads and rethrows the first error; see run_ranks().
void run_threads(int size, const std::function<void(ThreadCore&)>& body, double timeout_seconds);

}  // namespace megatron
