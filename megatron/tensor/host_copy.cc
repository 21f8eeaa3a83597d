#include "megatron/tensor/host_copy.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "megatron/base/threads.h"
#include "megatron/tensor/detail/pinned_memory.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kUploadBuffer = int64_t{64} << 20;
constexpr size_t kUploadBuffers = 4;

}  // namespace

struct HostCopies::Mark::Event {
  explicit Event(c10::DeviceType type) : event(type) {}
  c10::Event event;
};

struct HostCopies::Impl {
  explicit Impl(c10::Device d) : device(d) {
    if (!device.is_cuda()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    to_host = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    from_host = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  bool asynchronous() const { return to_host.has_value(); }
  c10::Stream get(Stream stream) const {
    if (stream == Stream::kToHost) return *to_host;
    if (stream == Stream::kFromHost) return *from_host;
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }
  const c10::Device device;
  std::optional<c10::Stream> to_host, from_host;
};

HostCopies::HostCopies(c10::Device device) : impl_(std::make_unique<Impl>(device)) {}
HostCopies::~HostCopies() = default;

c10::Device HostCopies::device() const { return impl_->device; }

at::Tensor to_device(const at::Tensor& host, c10::Device device) {
  return device.is_cuda() ? host.pin_memory().to(device, /*non_blocking=*/true) : host;
}

at::Tensor host_zeros(at::IntArrayRef sizes, at::ScalarType type) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const at::TensorOptions options = at::TensorOptions().dtype(type).device(at::kCPU);
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  if (bytes < kHugePage) return at::zeros(sizes, options);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // where they are not to be had, small ones serve
  return at::from_blob(memory, sizes, [bytes](void* p) { ::munmap(p, bytes); }, options);
}

void upload(const std::vector<at::Tensor*>& values, c10::Device device) {
  if (!device.is_cuda()) return;
  const HostCopies copies(device);
  // The allocator gives memory that was freed while work on it is still to come.
  copies.wait(HostCopies::Stream::kFromHost, copies.mark(HostCopies::Stream::kComputing));
  struct Buffer {
    at::Tensor memory;
    HostCopies::Mark sent;
  };
  std::array<Buffer, kUploadBuffers> buffers;
  size_t next = 0;
  for (at::Tensor* value : values) {
    const at::Tensor host = value->contiguous();
    const at::Tensor there = at::empty(host.sizes(), host.options().device(device));
    const auto bytes = static_cast<int64_t>(host.nbytes());
    const auto* from = static_cast<const char*>(host.const_data_ptr());
    for (int64_t begin = 0; begin < bytes; begin += kUploadBuffer) {
      Buffer& buffer = buffers[next++ % kUploadBuffers];
      if (!buffer.memory.defined()) buffer.memory = copies.host_empty({kUploadBuffer}, at::kByte);
      buffer.sent.synchronize();
      const int64_t count = std::min(kUploadBuffer, bytes - begin);
      auto* to = static_cast<char*>(buffer.memory.mutable_data_ptr());
      parallel_for(count, int64_t{4} << 20, [&](int64_t first, int64_t last) {
        std::memcpy(to + first, from + begin + first, static_cast<size_t>(last - first));
      });
      copies.copy(HostCopies::Stream::kFromHost,
                  there.flatten().view(at::kByte).narrow(0, begin, count),
                  buffer.memory.narrow(0, 0, count));
      buffer.sent = copies.mark(HostCopies::Stream::kFromHost);
    }
    *value = there;
  }
  for (const Buffer& buffer : buffers) buffer.sent.synchronize();
}

HostCopies::Mark HostCopies::mark(Stream stream) const {
  Mark mark;
  if (!impl_->asynchronous()) return mark;
  mark.event_ = std::make_shared<Mark::Event>(impl_->device.type());
  mark.event_->event.record(impl_->get(stream));
  return mark;
}

void HostCopies::wait(Stream stream, const Mark& mark) const {
  if (mark.event_) mark.event_->event.block(impl_->get(stream));
}

void HostCopies::Mark::synchronize() const {
  if (event_) event_->event.synchronize();
}

bool HostCopies::Mark::reached() const { return !event_ || event_->event.query(); }

void HostCopies::copy(Stream stream, const at::Tensor& to, const at::Tensor& from) const {
  const at::NoGradGuard no_grad;
  if (!impl_->asynchronous()) {
    to.copy_(from);
    return;
  }
  const c10::StreamGuard guard(impl_->get(stream));
  to.copy_(from, /*non_blocking=*/true);
}

at::Tensor HostCopies::host_empty(at::IntArrayRef sizes, at::ScalarType type) const {
  const at::TensorOptions options = at::TensorOptions().dtype(type).device(at::kCPU);
  if (impl_->asynchronous()) return at::empty(sizes, options.pinned_memory(true));
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  constexpr std::align_val_t kAlignment{64};
  void* memory = ::operator new(std::max<size_t>(1, bytes), kAlignment);
  return at::from_blob(memory, sizes, [](void* p) { ::operator delete(p, kAlignment); }, options);
}

at::Tensor HostCopies::host_lasting(at::IntArrayRef sizes, at::ScalarType type) const {
  const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  if (!impl_->asynchronous() || bytes == 0) return host_empty(sizes, type);
  const std::shared_ptr<void> memory = pinned_memory(bytes);
  return at::from_blob(
      memory.get(), sizes, [memory](void*) {}, at::TensorOptions().dtype(type).device(at::kCPU));
}

}  // namespace megatron
