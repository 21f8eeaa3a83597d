// Saved activations in host memory between a forward and its backward.
//
// What autograd saves inside an OffloadScope is copied to pinned host memory by a stream of its
// own, and its device memory is given up; the backward copies it back, one group ahead of where it
// is needed. Copies run under computation in both directions. Nothing is rounded and no stride
// changes that a kernel could see in its results: gradients keep their bits.
//
// Groups are what travels together: half a layer. At a tick (the start of each half layer in a
// forward, the first use of a group in a backward) the groups that were left before the last
// max_in_flight ticks give up their device memory: the computing stream waits for their copies,
// which as a rule are long over. So at most max_in_flight + 1 groups lie on the device that need
// not, whatever the host has queued, and memory never depends on timing.
//
// Everything works on a CPU as well, with plain copies.
// Source: Megatron Core's fine-grained activation offloading; Rhu et al. 2016 (arXiv:1602.08124)
// for the idea.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace megatron {

struct ActivationOffloadOptions {
  int64_t min_elements = int64_t{1} << 20;  // smaller tensors stay
  int64_t max_in_flight =
      1;  // groups that may be on their way to the host while another one is computed
};

// Since the start; host bytes are what is there now, and the most that was.
struct ActivationOffloadCounts {
  int64_t tensors = 0;
  int64_t bytes_to_host = 0;
  int64_t bytes_from_host = 0;  // groups that were still on the device come back without a copy
  int64_t late_groups = 0;      // groups that a backward needed before anything had asked for them
  int64_t host_bytes = 0;
  int64_t most_host_bytes = 0;
};

// The streams, and the groups of all passes that are on their way. One per rank; outlives its
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

// What one pass over one model chunk has in host memory.
class OffloadedPass {
 public:
  OffloadedPass();  // offloads nothing
  explicit OffloadedPass(ActivationOffload& offload);
  OffloadedPass(OffloadedPass&&) noexcept;
  OffloadedPass& operator=(OffloadedPass&&) noexcept;
  ~OffloadedPass();

  // The forward: what follows belongs to a new group.
  void begin_group();
  // Keeps one tensor as a scope would, and gives the way back to it. See RecomputeTape::Keeper.
  std::function<at::Tensor()> keep(const at::Tensor& x);
  // The backward is about to begin: the last group starts coming back.
  void begin_backward();

 private:
  friend class OffloadScope;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// While it lives, tensors that autograd saves on this thread and that `choose` accepts (and that
// are large enough) go to the host. `pass` may be null: nothing happens. Scopes may be nested; the
// innermost counts.
class OffloadScope {
 public:
  using Choose = std::function<bool(const at::Tensor&)>;
  OffloadScope(OffloadedPass* pass, Choose choose);
  ~OffloadScope();
  OffloadScope(const OffloadScope&) = delete;
  OffloadScope& operator=(const OffloadScope&) = delete;

  struct Current;

 private:
  std::unique_ptr<Current> current_;
};

}  // namespace megatron
