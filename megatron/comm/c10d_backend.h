// Groups of processes, over c10d of libtorch: NCCL between GPUs, Gloo between CPUs.
#pragma once

#include <memory>
#include <string>

#include "megatron/comm/process_group.h"
#include "megatron/comm/store.h"

namespace megatron {

struct C10dOptions {
  int rank = 0;
  int size = 1;
  double timeout_seconds = 600;
  // Gloo: the network interface to use; empty: the one that the host name resolves to
  std::string interface;
  bool loopback = false;  // Gloo: all ranks are on this machine
};

// Process groups on CPUs. Connections are made in the first call of a group, so that creating a
// group never waits for a peer.
//
// Gloo only moves bytes; reductions are our own and run in rank order (detail/reduce_in_order.h):
// all_reduce is a reduce_scatter followed by an all_gather, or one all_gather for small tensors;
// bf16 and fp16 are summed in fp32. Every call first exchanges a header of 32 bytes with its peers,
// so that ranks which make different calls all throw a CollectiveError that names both calls. A
// send completes when the receiver has posted its receive. Work::wait() blocks the thread.
std::shared_ptr<Backend> make_gloo_backend(const std::shared_ptr<Store>& store,
                                           const C10dOptions& options);

// Process groups with one GPU per process. Work::wait() makes the current stream wait, not the
// thread. c10d's own watchdog ends the process some seconds after timeout_seconds unless a
// FailureMonitor has done so before. Throws Error in a build without CUDA.
std::shared_ptr<Backend> make_nccl_backend(const std::shared_ptr<Store>& store,
                                           const C10dOptions& options);

}  // namespace megatron
