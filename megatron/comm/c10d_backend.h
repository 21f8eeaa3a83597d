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
  std::string interface;  // Gloo: the network interface to use; empty: the one of this host's name
  bool loopback = false;  // Gloo: all ranks are on this machine
};

// Processes on CPUs. Connections are made with the first call of a group, so that making groups
// never waits for a peer.
//
// Gloo moves bytes; the reductions are our own and run in rank order (detail/reduce_in_order.h):
// all_reduce is a reduce_scatter followed by an all_gather, or for few bytes one all_gather; bf16
// and fp16 are summed in fp32. Every call first compares what it is with the peers (32 bytes each),
// so that ranks which make different calls all throw a CollectiveError that names both. A send is
// over when the receiver has posted its receive. Work::wait() blocks the thread.
std::shared_ptr<Backend> make_gloo_backend(const std::shared_ptr<Store>& store,
                                           const C10dOptions& options);

// Processes with one GPU each. Work::wait() makes the current stream wait, not the thread. c10d's
// own watchdog ends the process some seconds after timeout_seconds if a FailureMonitor has not done
// so before. Throws Error in a build without CUDA.
std::shared_ptr<Backend> make_nccl_backend(const std::shared_ptr<Store>& store,
                                           const C10dOptions& options);

}  // namespace megatron
