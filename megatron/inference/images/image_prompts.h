// Prompts with images or sounds: their ids, and the rows that a decoder reads in the place of
// these.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_encoder.h"
#include "megatron/inference/chat.h"
#include "megatron/inference/generator.h"
#include "megatron/media/media_source.h"
#include "megatron/models/audio/packed_sounds.h"
#include "megatron/models/vision/packed_images.h"

namespace megatron {

// Whether a model reads media of this kind.
bool reads_media(const ModelConfig& config, MediaKind kind);
bool reads_both_media(const ModelConfig& config);

// Folders of Hugging Face whose config.json and image processor say what media become.
struct MediaFolders {
  std::filesystem::path media;        // of the images or the sounds, and of the chat template
  std::filesystem::path sounds = {};  // of a model that reads both: of the sounds; else empty

  std::string text() const;  // for messages
};

struct ImagePrompt {
  std::string text;          // with placeholders
  std::vector<int32_t> ids;  // a token of images or sounds for each feature
  PromptMedia media;         // on the device of the model
  int64_t images = 0, sounds = 0, media_tokens = 0;

  std::string counts() const;      // "2 images and 1 sound"
  std::string_view kinds() const;  // "images and sounds"
};

// The media of rows hold their bytes, and a name as their path.
class ImagePrompts {
 public:
  // `tokenizer` outlives this. Throws Error if the model reads other media than those of the
  // folders, or none.
  ImagePrompts(Model& model, const Tokenizer& tokenizer, const MediaFolders& folders,
               const std::string& chat_template, bool escape_literals, MediaLimits limits = {});
  ImagePrompts(const ImagePrompts&) = delete;  // its parts refer to each other

  // start() encodes few pictures of one size by CUDA graphs, if the model is on a GPU.
  void use_graphs();
  // Before the model's weights move.
  void forget_graphs();

  // Of the row's caption, which has the placeholder of each medium, or none: then media come first,
  // in the row's order. Placeholders of images take the row's images in order, those of sounds its
  // sounds.
  // Throws Error that begins with `where`, also for a medium that cannot be decoded.
  ImagePrompt of_text(const MultimodalRow& row, const std::string& where) const;
  // Of the row's messages, for the model's next one. Throws Error, also for texts that hold the
  // spelling of a special token.
  ImagePrompt of_conversation(const MultimodalRow& row, const Chat& chat,
                              const std::string& where) const;
  // The same without `media`, from their headers.
  ImagePrompt ids_of_conversation(const MultimodalRow& row, const Chat& chat,
                                  const std::string& where) const;

  // As generate() takes it: ids up to the last token of a medium as rows. Throws Error that begins
  // with `where` if prompt and text are longer than the model's sequences (seq_length).
  Generation start(const ImagePrompt& prompt, int64_t tokens_to_generate,
                   const std::string& where) const;

 private:
  std::vector<MediumFacts> facts_of(const MultimodalRow& row, const std::string& where) const;
  // Without its media.
  ImagePrompt ids_of(const std::string& text, const MultimodalRow& row,
                     const std::vector<MediumFacts>& media, const std::string& where) const;
  ImagePrompt prompt_of(const std::string& text, const MultimodalRow& row,
                        const std::string& where) const;
  // Throws Error unless the prompt and so many tokens are within the model's sequences.
  void check_length(const ImagePrompt& prompt, int64_t tokens_to_generate,
                    const std::string& where) const;
  PackedImages packed_images(const MultimodalRow& row, const std::vector<MediumFacts>& media,
                             const std::vector<int64_t>& ids, const std::string& where) const;
  PackedSounds packed_sounds(const MultimodalRow& row, const std::vector<MediumFacts>& media,
                             const std::vector<int64_t>& ids, const std::string& where) const;
  bool is_medium(int32_t id) const;  // its features stand in the place of this id

  Model& model_;
  ConversationEncoder conversations_;
  MultimodalEncoder encoder_;
  const MediaLimits limits_;
  const at::Device device_;  // of the model
};

}  // namespace megatron
