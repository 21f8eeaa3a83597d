#include "megatron/models/vision/picture_graphs.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/models/vision/vision_encoder.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {

PictureGraphs::Captured PictureGraphs::capture(const PackedImages& images) {
  PackedImages own = images;
  own.patches = images.patches.clone();
  own.pixel_values = images.pixel_values.clone();
  // Libraries choose their kernels and make their workspaces, and weights arrive.
  encoder_.forward(own, {});
  if (!memory_) memory_ = std::make_unique<DeviceGraphPool>(own.patches.device());
  at::Tensor features;
  DeviceGraph graph(*memory_, [&] { features = encoder_.forward(own, {}); });
  return {std::move(own), std::move(features), std::move(graph)};
}

at::Tensor PictureGraphs::forward(const PackedImages& images) {
  const bool one_size = !images.patch_places.defined();
  if (cannot_ || !one_size || images.ranks > 1 || images.pictures < 1 ||
      images.pictures > kMostPictures || !images.patches.is_cuda() ||
      images.patches.scalar_type() != at::kByte)
    return {};
  const at::NoGradGuard no_grad;
  auto found = captured_.find(images.pictures);
  if (found == captured_.end()) {
    try {
      found = captured_.emplace(images.pictures, capture(images)).first;
    } catch (const InternalError&) {
      throw;
    } catch (const std::exception& error) {
      const std::string what = error.what();
      log_warning(
          cat("pictures are encoded without CUDA graphs, which this encoder cannot be "
              "captured in: ",
              what.substr(0, what.find('\n'))));
      cannot_ = true;
      clear();
      return {};
    }
  }
  Captured& own = found->second;
  MEGATRON_ASSERT(own.images.patches.sizes() == images.patches.sizes(), "patches of ",
                  images.patches.sizes(), ", a graph's are ", own.images.patches.sizes());
  own.images.patches.copy_(images.patches, /*non_blocking=*/true);
  own.images.pixel_values.copy_(images.pixel_values, /*non_blocking=*/true);
  own.graph.launch();
  return own.features;
}

void PictureGraphs::clear() {
  captured_.clear();
  memory_.reset();
}

}  // namespace megatron
