// What a recurrent sublayer saves and sends.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>

#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/layer/layer_cost.h"
#include "megatron/transformer/layer/sublayer.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/forwarding_backend.h"
#include "tests/unit/transformer/block_pass.h"

namespace megatron {

inline LayerShape mixer_shape(int64_t s, int64_t tensor, int64_t context) {
  LayerShape shape;
  shape.samples = 2;
  shape.tokens = 2 * s / context;
  shape.rows = shape.tokens;
  shape.element = shape.residual = shape.sum = 8;
  shape.tensor = tensor;
  shape.context = context;
  shape.on_gpu = false;
  return shape;
}

// Counts the bytes that a ring sends.
class RingBytesBackend : public ForwardingBackend {
 public:
  RingBytesBackend(std::shared_ptr<Backend> inner, double* bytes)
      : ForwardingBackend(std::move(inner)), bytes_(bytes) {}
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    *bytes_ += 2 * scatter_bytes(size(), static_cast<double>(tensor.nbytes()));
    return ForwardingBackend::all_reduce(tensor, op);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    *bytes_ += scatter_bytes(size(), static_cast<double>(output.nbytes()));
    return ForwardingBackend::all_gather(output, input);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    *bytes_ += scatter_bytes(size(), static_cast<double>(input.nbytes()));
    return ForwardingBackend::reduce_scatter(output, input, op);
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<RingBytesBackend>(ForwardingBackend::subgroup(ranks, name, use),
                                              bytes_);
  }

 private:
  double* bytes_;
};

struct MeasuredMixer {
  int64_t saved = 0;  // allocated by the forward and kept, with the output
  double forward = 0, backward = 0;
};

template <class Mixer>
MeasuredMixer measure_mixer(const TransformerConfig& config, const ParallelGroups& groups,
                            const LayerShape& shape, const double& bytes) {
  Mixer mixer(config, 1, /*sequence_parallel=*/false, groups);
  PlainParameterStore store(mixer, at::kDouble, at::kCPU, true);
  initialize_parameters(mixer, 3, groups);
  const at::Tensor x = draw({shape.rows / shape.samples, shape.samples, config.hidden_size}, 1)
                           .set_requires_grad(true);
  const ForwardContext pass = context_of(shape.tokens / shape.samples * shape.context, 2);
  MeasuredMixer measured;
  const double before = bytes;
  const auto meter = std::make_shared<Meter>();
  at::Tensor y;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    y = mixer.forward(x, LayerContext{pass, {}}, /*add=*/false).output;
  }
  measured.saved = meter->live;
  measured.forward = bytes - before;
  y.backward(at::ones_like(y));
  measured.backward = bytes - before - measured.forward;
  return measured;
}

}  // namespace megatron
