// Offloads saved activations to host memory between a forward and its backward.
//
// What autograd saves inside an OffloadScope is copied to pinned host memory on a separate stream,
// and its device memory is freed; the backward copies it back, one group ahead of its use. Copies
// overlap with compute in both directions. Nothing is rounded and no stride that affects a kernel's
// result changes: gradients keep their bits.
//
// A group is the unit of transfer: half a layer. At a tick (the start of each half layer in a
// forward, the first use of a group in a backward) groups that ended before the last max_in_flight
// ticks free their device memory: the compute stream waits for their copies, which usually finished
// long ago. So at most max_in_flight + 1 offloaded groups are on the device, no matter how far
// ahead the host is: memory does not depend on timing.
//
// Works on a CPU as well, with plain copies.
// Source: Megatron Core's fine-grained activation offloading; Rhu et al. 2016 (arXiv:1602.08124)
// for the idea.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace megatron {

class SavedTensorScope;

struct ActivationOffloadOptions {
  int64_t min_elements = int64_t{1} << 20;  // smaller tensors stay on the device
  // groups that may be in transfer to the host while another one is computed
  int64_t max_in_flight = 1;
};

// Counts since the start; host bytes are the current ones and the peak.
struct ActivationOffloadCounts {
  int64_t tensors = 0;
  int64_t bytes_to_host = 0;
  int64_t bytes_from_host = 0;  // not counted: groups still on the device
  int64_t late_groups = 0;      // groups needed by a backward before their prefetch was started
  int64_t host_bytes = 0;
  int64_t most_host_bytes = 0;
};

// The streams, and the groups of all passes that are in transfer. One per rank; must outlive its
// passes. Used by one thread at a time.
class ActivationOffload {
 public:
  ActivationOffload(c10::Device device, const ActivationOffloadOptions& options);
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;
  const ActivationOffloadCounts& counts() const;

 private:
  friend class OffloadedPass;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The offloaded activations of one pass over one model chunk.
class OffloadedPass {
 public:
  OffloadedPass();  // offloads nothing
  explicit OffloadedPass(ActivationOffload& offload);
  OffloadedPass(OffloadedPass&&) noexcept;
  OffloadedPass& operator=(OffloadedPass&&) noexcept;
  ~OffloadedPass();

  // In the forward: starts a new group.
  void begin_group();
  // Offloads one tensor as a scope would; the returned function reloads it. See
  // RecomputeTape::Keeper.
  std::function<at::Tensor()> keep(const at::Tensor& x);
  // Call before the backward: starts to reload the last group.
  void begin_backward();

 private:
  friend class OffloadScope;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// While it lives, tensors that autograd saves on this thread are offloaded if `choose` accepts them
// and they are large enough. `pass` may be null: nothing happens. Scopes may be nested; the
// innermost counts.
class OffloadScope {
 public:
  using Choose = std::function<bool(const at::Tensor&)>;
  OffloadScope(OffloadedPass* pass, Choose choose);
  ~OffloadScope();
  OffloadScope(const OffloadScope&) = delete;
  OffloadScope& operator=(const OffloadScope&) = delete;

 private:
  std::unique_ptr<SavedTensorScope> scope_;
};

}  // namespace megatron
