// Prompts with images: their ids, and the rows that a decoder reads in the place of these.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_encoder.h"
#include "megatron/inference/chat.h"
#include "megatron/inference/generator.h"
#include "megatron/models/vision/packed_images.h"

namespace megatron {

// Whether a model reads images.
bool reads_images(const ModelConfig& config);

struct ImagePrompt {
  std::string text;                            // with placeholders
  std::vector<int32_t> ids;                    // an image token for each feature
  std::shared_ptr<const PackedImages> images;  // on the device of the model
  int64_t image_count = 0, image_tokens = 0;
};

// The media of rows hold their bytes, and a name as their path.
class ImagePrompts {
 public:
  // `folder`: of a model of Hugging Face, whose config.json and image processor say what an image
  // becomes. `tokenizer` outlives this. Throws Error if the model reads other pictures, or none.
  ImagePrompts(Model& model, const Tokenizer& tokenizer, const std::filesystem::path& folder,
               const std::string& chat_template, bool escape_literals);
  ImagePrompts(const ImagePrompts&) = delete;  // its parts refer to each other

  // Of the row's caption, which has the placeholder of each image, or none: then images come first.
  // Throws Error that begins with `where`, also for an image that cannot be decoded.
  ImagePrompt of_text(const MultimodalRow& row, const std::string& where) const;
  // Of the row's messages, for the model's next one. Throws Error, also for texts that hold the
  // spelling of a special token.
  ImagePrompt of_conversation(const MultimodalRow& row, const Chat& chat,
                              const std::string& where) const;

  // As generate() takes it: ids up to the last image token as rows. Throws Error that begins with
  // `where` if prompt and text are longer than the model's sequences (seq_length).
  Generation start(const ImagePrompt& prompt, int64_t tokens_to_generate,
                   const std::string& where) const;

 private:
  ImagePrompt prompt_of(const std::string& text, const MultimodalRow& row,
                        const std::string& where) const;
  std::shared_ptr<const PackedImages> packed(const MultimodalRow& row,
                                             const std::vector<MediumFacts>& media,
                                             const std::vector<int32_t>& ids,
                                             const std::string& where) const;

  Model& model_;
  ConversationEncoder conversations_;
  MultimodalEncoder encoder_;
};

}  // namespace megatron
