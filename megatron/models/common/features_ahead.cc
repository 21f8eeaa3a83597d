#include "megatron/models/common/features_ahead.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/module.h"
#include "megatron/tensor/torch.h"

namespace megatron {

struct FeaturesAhead::Event {
  explicit Event(c10::DeviceType type) : event(type) {}
  c10::Event event;
};

struct EncoderStream::Impl {
  explicit Impl(c10::Device device)
      : guard(device.type()), stream(guard.getStreamFromGlobalPool(device)) {}
  const c10::impl::VirtualGuardImpl guard;
  const c10::Stream stream;
};

EncoderStream::EncoderStream() = default;
EncoderStream::~EncoderStream() = default;

at::Tensor FeaturesAhead::take() const {
  if (!ready_) return features_;
  const c10::Stream computing =
      c10::impl::VirtualGuardImpl(features_.device().type()).getStream(features_.device());
  ready_->event.block(computing);
  features_.record_stream(computing);
  return features_;
}

std::shared_ptr<const FeaturesAhead> FeaturesAhead::of(at::Tensor features) {
  const auto out = std::make_shared<FeaturesAhead>();
  out->features_ = std::move(features);
  return out;
}

std::shared_ptr<const FeaturesAhead> EncoderStream::run(
    Module& encoder, const std::function<at::Tensor()>& forward) {
  const at::NoGradGuard no_grad;
  const auto out = std::make_shared<FeaturesAhead>();
  // Values may be on their way: the stream that computes waits for them, whoever reads them first.
  c10::Device device = c10::kCPU;
  encoder.visit([&](const std::string&, Parameter& parameter) {
    device = parameter.value.device();
    if (parameter.store == nullptr) return;
    parameter.store->acquire(parameter);
    parameter.store->release(parameter);
  });
  if (!device.is_cuda()) {
    out->features_ = forward();
    return out;
  }
  if (!impl_) impl_ = std::make_unique<Impl>(device);
  c10::Event written(device.type());
  written.record(impl_->guard.getStream(device));
  written.block(impl_->stream);
  const c10::StreamGuard guard(impl_->stream);
  out->features_ = forward();
  out->ready_ = std::make_shared<FeaturesAhead::Event>(device.type());
  out->ready_->event.record(impl_->stream);
  return out;
}

}  // namespace megatron
