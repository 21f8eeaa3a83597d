// Asynchronous copies between a device and host memory, overlapping with compute; the basis of
// activation offloading and of optimizer states in host memory. On a CPU: plain, synchronous
// copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace megatron {

// Copies a host tensor to a GPU asynchronously, through page-locked memory; on a CPU returns it.
at::Tensor to_device(const at::Tensor& host, c10::Device device);

// Zeros in host memory of whole (huge) pages that become real when they are first written, by
// whichever thread writes them: for gigabytes that are read from files and then copied to a device.
at::Tensor host_zeros(at::IntArrayRef sizes, at::ScalarType type);

// Replaces host tensors by copies on a GPU, at the rate of its link: several threads fill a ring of
// page-locked buffers of together 256 MiB. Waits for the copies. On a CPU nothing happens.
void upload(const std::vector<at::Tensor*>& values, c10::Device device);

// Uses the compute stream, that is the current stream, and two streams of its own, one per
// direction.
class HostCopies {
 public:
  enum class Stream { kComputing, kToHost, kFromHost };

  // A point in a stream (an event); empty on a CPU.
  class Mark {
   public:
    // Blocks the calling thread until the stream has reached it.
    void synchronize() const;
    bool reached() const;  // without blocking

   private:
    friend class HostCopies;
    struct Event;
    std::shared_ptr<Event> event_;
  };

  explicit HostCopies(c10::Device device);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  c10::Device device() const;
  Mark mark(Stream stream) const;
  // Work submitted to `stream` from now on starts after the mark.
  void wait(Stream stream, const Mark& mark) const;
  // Tensors of equal size; the host's must come from host_empty() or host_lasting(). Callers must
  // order later accesses themselves.
  void copy(Stream stream, const at::Tensor& to, const at::Tensor& from) const;
  // Host memory: pinned, from a caching allocator; on a CPU from outside of libtorch, so that it is
  // not counted as device memory.
  at::Tensor host_empty(at::IntArrayRef sizes, at::ScalarType type) const;
  // The same for what is large and stays: on a GPU of exactly its size, and not from that
  // allocator.
  at::Tensor host_lasting(at::IntArrayRef sizes, at::ScalarType type) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
