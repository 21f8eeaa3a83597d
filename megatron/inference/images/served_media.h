// Images and sounds of the requests of a server: encoded by the thread that reads a request, before
// the engine gets it.
#pragma once

#include <optional>
#include <string>

#include "megatron/inference/images/image_prompts.h"
#include "megatron/inference/served_weights.h"
#include "megatron/serving/media_prompts.h"

namespace megatron {

class ServedMedia final : public MediaPrompts {
 public:
  // Reads none, and says why.
  ServedMedia(const ModelConfig& config, std::string why_not)
      : config_(config), why_not_(std::move(why_not)) {}
  // As ImagePrompts; `weights` of the model. All of them outlive this.
  ServedMedia(Model& model, ServedWeights& weights, const Tokenizer& tokenizer, const Chat& chat,
              const MediaFolders& folders, const std::string& chat_template,
              const MediaLimits& limits)
      : config_(model.config()),
        weights_(&weights),
        chat_(&chat),
        prompts_(std::in_place, model, tokenizer, folders, chat_template, /*escape_literals=*/false,
                 limits) {}

  // Few pictures of one size are encoded by CUDA graphs, if the model is on a GPU.
  void use_graphs();

  ~ServedMedia() override;

  bool renders() const override { return prompts_.has_value(); }
  std::string refusal(MediaKind kind) const override;
  std::string_view medium_of(int32_t id) const override;
  // One thread encodes at a time.
  MediaPrompt prompt(const MultimodalRow& row, bool encode) override;

 private:
  const ModelConfig& config_;
  const std::string why_not_;
  ServedWeights* weights_ = nullptr;
  const Chat* chat_ = nullptr;
  std::optional<ImagePrompts> prompts_;
};

}  // namespace megatron
