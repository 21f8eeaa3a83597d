// Copies between a device and host memory beside the computation: what activations and optimizer
// states in host memory are built on. On a CPU everything is done at once, by plain copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace megatron {

// The computing stream, which is whatever stream is current, and two streams of its own, one for
// each direction.
class HostCopies {
 public:
  enum class Stream { kComputing, kToHost, kFromHost };

  // A place in a stream; none on a CPU.
  class Mark {
   public:
    // The calling thread waits until the stream has got there.
    void synchronize() const;

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
  // What is put into `stream` from now on starts after the mark.
  void wait(Stream stream, const Mark& mark) const;
  // Tensors of equal size; the host's must come from host_empty(). Whoever reads or changes them
  // waits by himself.
  void copy(Stream stream, const at::Tensor& to, const at::Tensor& from) const;
  // Host memory: pinned, from the allocator that uses buffers again, or on a CPU from outside of
  // libtorch, so that it does not count as the device's.
  at::Tensor host_empty(at::IntArrayRef sizes, at::ScalarType type) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
