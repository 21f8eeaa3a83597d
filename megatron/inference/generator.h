// Text generation: batched decoding with the states of a model's layers.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "megatron/inference/config/speculation_config.h"
#include "megatron/inference/config/states_config.h"
#include "megatron/inference/sampling.h"
#include "megatron/models/model.h"
#include "megatron/scheduling/request.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct GenerateOptions {
  SamplingConfig sampling;
  SequenceStatesConfig states;
  SpeculationConfig speculation;
  Model* draft = nullptr;  // guesses tokens where speculation names a model; of the same vocabulary
  int64_t tokens_to_generate = 64;
  std::vector<std::string> stop;  // text ends before the first of these
  bool stop_at_eod = true;
  std::vector<int32_t> stop_tokens;  // each ends the text, as the end of document does
  bool rendered = false;             // prompts are a chat template's (tokenizers/rendered_text.h)
  bool skip_special_tokens = false;  // special tokens are generated, but not in the text
  // Of an encoder-decoder: what its text begins with, and what ends the encoder's input and its
  // text; none: as in training, a first token of the tokenizer's or that of padding, and its end of
  // document
  std::optional<int32_t> decoder_start, end_of_input;
  bool cut_input = false;  // longer inputs of its encoder lose their end; else an error
};

struct Generation {
  std::vector<int32_t> prompt_tokens;  // of an encoder-decoder those of its encoder
  // What the decoder reads in the place of the first prompt tokens; null: nothing
  std::shared_ptr<const GivenRows> rows;
  std::vector<int32_t> tokens;  // generated, without the end of document or a stop token
  std::string text;             // of `tokens`, cut before a stop string
  FinishReason finish_reason = FinishReason::kLength;  // kLength, kStopText or kEndToken
};

// Called with each new piece of text of a prompt, in order; the pieces concatenate to
// Generation::text.
using StreamCallback = std::function<void(size_t prompt, std::string_view piece)>;

// Generates for all prompts by an engine of its own, up to 64 at a time. A prompt without tokens
// starts from the end-of-document token. Row i draws with (seed, i), so its text does not depend on
// the other prompts (but for rounding in the batch). Throws Error when a prompt is too long for the
// model's positions. The model is whole: one rank.
//
// An encoder-decoder reads a prompt and the token that ends it in its encoder; its text does not
// continue the prompt.
std::vector<Generation> generate(Model& model, const Tokenizer& tokenizer,
                                 std::span<const std::string> prompts,
                                 const GenerateOptions& options, const StreamCallback& stream = {});

// The same of prompts as ids, which may have rows.
std::vector<Generation> generate(Model& model, const Tokenizer& tokenizer,
                                 std::vector<Generation> prompts, const GenerateOptions& options,
                                 const StreamCallback& stream = {});

// The prompts as ids, each as generate() takes it. Throws Error as it does.
std::vector<Generation> encode_prompts(const ModelConfig& config, const Tokenizer& tokenizer,
                                       std::span<const std::string> prompts,
                                       const GenerateOptions& options);

// Media whose features stand in the place of an id, and the flag that gives one; empty: of none.
struct MediumOfToken {
  std::string_view name, hint;
};
MediumOfToken medium_of(const ModelConfig& config, int64_t id);

// What a prompt has beside ids; null: nothing.
struct PromptMedia {
  std::shared_ptr<const PackedImages> images;
  std::shared_ptr<const PackedSounds> sounds;
};

// Logits of one row of ids by the full forward, without a cache.   return [s, vocab_size] fp32 on
// the CPU
// `input`: of an encoder-decoder, whose decoder reads `ids`, what its encoder reads. `media`: on
// the model's device, those whose tokens are in `ids`; null: there are none.
at::Tensor full_logits(Model& model, std::span<const int32_t> ids,
                       std::span<const int32_t> input = {}, const PromptMedia& media = {});

// The longest run of positions the model can hold; -1: no limit.
int64_t max_positions(const ModelConfig& config);

}  // namespace megatron
