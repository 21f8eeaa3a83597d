#include "megatron/tensor/host_copy.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <new>

#include "megatron/tensor/detail/pinned_memory.h"
#include "megatron/tensor/torch.h"

namespace megatron {

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
