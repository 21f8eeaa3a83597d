// An encoder of images alone on a GPU, forward and backward, in bf16 with gradients in fp32, beside
// benchmarks/peer_multimodal.py:
//
//   bench_vision clip 64 [20] [fast] [floor]    ViT-L/14-336, 24 layers, so many pictures
//   bench_vision qwen2_5 16                     the tower of Qwen2.5-VL, images of 224x224 to
//                                               1288x1288
//
// 20: so many of the longest kernels are listed. fast: as --fast of pretrain, whose attention is
// not deterministic. floor: beside a lower bound, which is the time of products and of attention
// by themselves and of the bytes that other kernels must move at the rate of a copy. Prints
// images/s, and TFLOP/s by the operations of products and scores within pictures (and windows), the
// backward counted twice.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/vision/vision_encoder.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/runtime/device.h"
#include "megatron/runtime/kernel_profile.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/benchmarking/ceilings.h"
#include "megatron/training/benchmarking/measured_attention.h"
#include "megatron/training/benchmarking/measured_linear.h"
#include "megatron/transformer/transformer_layer_cost.h"

namespace megatron {
namespace {

constexpr int kImageToken = 1;

VisionConfig vision_of(const std::string& kind) {
  VisionConfig config;
  if (kind == "clip") {
    config.vision_model_type = VisionModel::kClip;
    config.vision_num_layers = 24;
    return config;
  }
  MEGATRON_CHECK(kind == "qwen2_5", "clip or qwen2_5, not ", kind);
  config.vision_model_type = VisionModel::kQwen25;
  config.vision_num_layers = 32;
  config.vision_hidden_size = 1280;
  config.vision_ffn_hidden_size = 3420;
  config.vision_layernorm_epsilon = 1e-6;
  config.vision_activation = VisionActivation::kSilu;
  config.vision_class_token = false;
  config.pixel_shuffle = true;
  config.vision_window_size = 112;
  config.vision_whole_picture_layers = {7, 15, 23, 31};
  return config;
}

// Sides in patches: those of the model, or of squares from 224 to 1288 pixels.
std::vector<SeenImage> images_of(const VisionConfig& config, int64_t count) {
  std::vector<SeenImage> out;
  for (int64_t i = 0; i < count; ++i) {
    SeenImage image;
    image.rows = config.patch_rows();
    image.columns = config.patch_columns();
    if (config.has_own_sizes()) {
      const int64_t pixels = 224 + (1288 - 224) * i / std::max<int64_t>(1, count - 1);
      image.rows = image.columns = pixels / (2 * config.patch_dim) * 2;
    }
    out.push_back(image);
  }
  return out;
}

double operations(const VisionConfig& c, const std::vector<SeenImage>& images, int64_t elements) {
  const auto h = static_cast<double>(c.vision_hidden_size),
             f = static_cast<double>(c.vision_ffn_hidden_size);
  const double layer = 4 * h * h + (c.has_windows() ? 3 : 2) * h * f;
  double all = 0;
  for (const SeenImage& image : images) {
    const auto rows = static_cast<double>(image.rows * image.columns + (c.has_class_row() ? 1 : 0));
    const auto whole = static_cast<double>(c.has_windows() ? c.vision_whole_picture_layers.size()
                                                           : c.vision_num_layers);
    const double side = static_cast<double>(c.has_windows() ? 2 * c.window_side() : 0),
                 layers = static_cast<double>(c.vision_num_layers);
    all += 2 * rows * (layers * layer + static_cast<double>(elements) * h);
    all += 4 * rows * h * (whole * rows + (layers - whole) * side * side);
  }
  return 3 * all;
}

// Layers, and the product of the patches.
void print_floor(const TransformerConfig& layers, const PackedImages& images, int64_t elements,
                 double measured_ms) {
  constexpr double kLeast = 1.0;
  const at::Device device = images.patches.device();
  const at::NoGradGuard no_grad;
  LayerShape shape;
  shape.samples = images.segments->samples;
  shape.tokens = shape.rows = images.segments->rows;
  shape.element = shape.residual = 2;
  shape.unpadded = true;
  shape.padded = false;
  const LayerCost cost = transformer_layer_cost(layers, 1, shape, /*offloaded=*/false);
  std::vector<MeasuredLinear> products;
  for (const SublayerCost* half : {&cost.first, &cost.second})
    for (const LinearSize& size : half->linears)
      products.emplace_back(size.name, shape.rows, size.outputs, size.inputs, at::kBFloat16,
                            device);
  const MeasuredLinear begin("conv1", images.patches.size(0), layers.hidden_size, elements,
                             at::kBFloat16, device);
  const double product_ms =
      1e3 * seconds_per_run(device, kLeast, [&] {
        begin.forward();
        for (int64_t i = 0; i < layers.num_layers; ++i)
          for (const MeasuredLinear& product : products) product.forward();
        for (int64_t i = 0; i < layers.num_layers; ++i)
          for (auto product = products.rbegin(); product != products.rend(); ++product)
            product->backward();
        begin.weight_grad();
      });
  const int64_t whole = layers.whole_sample_layers
                            ? static_cast<int64_t>(layers.whole_sample_layers->size())
                            : layers.num_layers;
  double attention_ms = 0.0;
  const auto attend = [&](const std::shared_ptr<const UnpaddedRows>& rows, int64_t of_layers) {
    if (of_layers == 0) return;
    const MeasuredAttention attention(cost.first.attentions.front(), {rows}, at::kBFloat16, device);
    attention_ms += 1e3 * static_cast<double>(of_layers) *
                    device_seconds_per_run(device, kLeast, [&] { attention.both(); });
  };
  attend(images.segments, whole);
  attend(images.windows, layers.num_layers - whole);
  const double moved = static_cast<double>(shape.rows * layers.num_layers) *
                       (cost.first.moved_elements + cost.second.moved_elements) * 2.0;
  const double other_ms = 1e3 * moved / copy_ceiling(device, kLeast).byte_rate();
  const double floor_ms = product_ms + attention_ms + other_ms;
  std::printf("floor %.2f ms (products %.2f, attention %.2f, other memory %.2f): %.1f%%\n",
              floor_ms, product_ms, attention_ms, other_ms, 100.0 * floor_ms / measured_ms);
}

struct Wanted {
  size_t kernels = 0;
  bool fast = false, floor = false;
};

int main(const std::string& kind, int64_t count, const Wanted& wanted) {
  const VisionConfig config = vision_of(kind);
  TransformerConfig language;
  language.fast = wanted.fast;
  const at::Device gpu(at::kCUDA, 0);
  VisionEncoder encoder(config, language);
  PlainParameterStore store(encoder, at::kBFloat16, gpu, /*gradients=*/true);
  encoder.visit([&](const std::string& name, Parameter& parameter) {
    if (name.find("norm") == std::string::npos && name.find("ln_") == std::string::npos) {
      parameter.value.normal_(0.0, 0.02);
    } else {
      parameter.value.fill_(name.ends_with("weight") ? 1.0 : 0.0);
    }
  });
  const std::vector<SeenImage> images = images_of(config, count);
  int64_t patches = 0, features = 0;
  for (const SeenImage& image : images) {
    patches += image.rows * image.columns;
    features += config.has_own_sizes() ? image.rows * image.columns / 4 : config.features();
  }
  const int64_t elements = config.patch_elements();
  const at::Tensor pixels = at::randint(0, 256, {patches, elements}, at::kByte),
                   numbers = at::randn({3, 256});
  const std::vector<int64_t> tokens(static_cast<size_t>(features), kImageToken);
  // All images are those of one sample, which is nothing but images.
  const PackedImages packed =
      to_device(pack_images(config, images, pixels, numbers, tokens, 1, kImageToken), gpu);
  ForwardContext context;
  context.training = true;
  at::Tensor gradient;
  const auto step = [&] {
    const at::Tensor out = encoder.forward(packed, context);
    if (!gradient.defined()) gradient = at::randn_like(out);
    RecomputeTape().backward((out * gradient).sum());
  };
  constexpr int kWarmUp = 4, kSteps = 12;
  std::vector<double> times;
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    step();
    synchronize(gpu);
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin() + kWarmUp, times.end());
  const double seconds = times[kWarmUp + kSteps / 2];
  std::printf("%s, %ld images of %ld patches: %.2f ms, %.1f images/s, %.1f TFLOP/s\n", kind.c_str(),
              static_cast<long>(count), static_cast<long>(patches), 1e3 * seconds,
              static_cast<double>(count) / seconds,
              operations(config, images, elements) / seconds / 1e12);
  if (wanted.floor) print_floor(config.encoder(language), packed, elements, 1e3 * seconds);
  if (wanted.kernels == 0) return 0;
  const KernelProfile profile = summarize_kernels(profile_kernels([&] {
    step();
    synchronize(gpu);
  }));
  std::printf("waiting for the host %.2f ms\n", profile.span_ms - profile.busy_ms);
  for (size_t i = 0; i < std::min(wanted.kernels, profile.kernels.size()); ++i) {
    const KernelTime& kernel = profile.kernels[i];
    std::printf("%8.3f ms %5ld  %s\n", kernel.ms, static_cast<long>(kernel.calls),
                kernel.name.substr(0, 100).c_str());
  }
  return 0;
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: bench_vision clip|qwen2_5 IMAGES [KERNELS] [fast] [floor]\n");
    return 2;
  }
  megatron::Wanted wanted;
  for (int i = 3; i < argc; ++i) {
    const std::string_view word = argv[i];
    wanted.fast |= word == "fast";
    wanted.floor |= word == "floor";
    if (word != "fast" && word != "floor") wanted.kernels = std::strtoul(argv[i], nullptr, 10);
  }
  try {
    return megatron::main(argv[1], std::atoll(argv[2]), wanted);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
