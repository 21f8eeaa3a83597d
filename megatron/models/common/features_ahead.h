// Features of a frozen encoder of media, computed before they are needed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace megatron {

class Module;

// Of one micro-batch.
class FeaturesAhead {
 public:
  // As the encoder's forward gives them, without a gradient. On a GPU the current stream waits for
  // them.
  at::Tensor take() const;
  // Those that the current stream computes.
  static std::shared_ptr<const FeaturesAhead> of(at::Tensor features);

 private:
  friend class EncoderStream;
  struct Event;
  at::Tensor features_;
  std::shared_ptr<Event> ready_;  // null: the current stream has them
};

// On a GPU a stream of its own, on which encoders run beside the current one. Elsewhere they run at
// once. Communication: none, unless values of the encoder are still being gathered.
class EncoderStream {
 public:
  EncoderStream();
  ~EncoderStream();
  EncoderStream(const EncoderStream&) = delete;
  EncoderStream& operator=(const EncoderStream&) = delete;

  // Starts `forward` of `encoder`, whose values are kept between uses (not gathered for each), on
  // tensors that the current stream has written. These must live until take().
  std::shared_ptr<const FeaturesAhead> run(Module& encoder,
                                           const std::function<at::Tensor()>& forward);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null: none was needed yet
};

}  // namespace megatron
