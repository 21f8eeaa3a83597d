// Goldens of models that read images or sounds (tests/golden/multimodal).
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"

namespace megatron {

inline std::filesystem::path media_golden_folder(const std::string& name) {
  return std::filesystem::path(MEGATRON_SOURCE_DIR "/tests/golden/multimodal") / name;
}

// A golden, and the model of its folder with its weights and gradients in fp32.
struct MediaGolden {
  // `divided`: whether tensor ranks divide the encoder.
  MediaGolden(const std::string& name, const ParallelGroups& groups, bool sequence_parallel,
              bool divided = false)
      : golden(
            read_golden_tensors(SafetensorsFile(media_golden_folder(name) / "golden.safetensors"))),
        folder(open_hf_folder(media_golden_folder(name))),
        own(*folder.model.config.own.as<MimoConfig>()),
        whole{0, folder.model.config.transformer.num_layers, true, true},
        model(with_ranks(folder.model.config, sequence_parallel, divided ? groups.tp.size() : 1),
              groups, whole, {}),
        store(model, at::kFloat, at::kCPU, /*gradients=*/true) {
    load_hf_values(folder, groups, whole, model);
    const at::Tensor labels = golden.at("labels").to(at::kLong);
    set_tokens(golden.at("tokens").to(at::kLong));
    batch.set("labels", labels.clamp_min(0));
    batch.set("loss_mask", (labels >= 0).to(at::kFloat));
  }
  static ModelConfig with_ranks(ModelConfig config, bool sequence_parallel, int of_encoder) {
    config.sequence_parallel = sequence_parallel;
    config.own.ensure<MimoConfig>().encoder_tensor_model_parallel_size = of_encoder;
    return config;
  }
  void set_tokens(const at::Tensor& tokens) {
    batch.set("tokens", tokens);
    context = context_for(tokens, /*training=*/true);
    batch.place = context.place;
  }

  std::map<std::string, at::Tensor> golden;
  const HfFolder folder;
  const MimoConfig own;
  const StageSlice whole;
  MimoModel model;
  PlainParameterStore store;
  Batch batch;
  ForwardContext context;
};

}  // namespace megatron
