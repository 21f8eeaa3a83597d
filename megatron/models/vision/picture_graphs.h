// Forwards of an encoder of pictures as CUDA graphs: of few pictures the host takes longer to start
// the kernels than the GPU to run them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>

#include "megatron/models/vision/packed_images.h"
#include "megatron/tensor/device_graph.h"

namespace megatron {

class VisionEncoder;

// One for each number of pictures, of encoders whose pictures have one size. Not thread safe.
class PictureGraphs {
 public:
  // Each holds the memory of its largest forward.
  static constexpr int64_t kMostPictures = 4;

  // The encoder is a whole one, outlives this, and has its weights on a GPU.
  explicit PictureGraphs(VisionEncoder& encoder) : encoder_(encoder) {}

  // Its features, with the bits of VisionEncoder::forward, until the next call; undefined: there is
  // no graph for these. The first call for a number of pictures waits for the device and captures.
  // Runs on the current stream. Communication: none.
  at::Tensor forward(const PackedImages& images);
  // Before the encoder's weights move.
  void clear();

 private:
  struct Captured {
    PackedImages images;  // whose patches the graph reads
    at::Tensor features;
    DeviceGraph graph;
  };
  Captured capture(const PackedImages& images);

  VisionEncoder& encoder_;
  bool cannot_ = false;  // be captured
  std::unique_ptr<DeviceGraphPool> memory_;
  std::map<int64_t, Captured> captured_;  // by pictures
};

}  // namespace megatron
