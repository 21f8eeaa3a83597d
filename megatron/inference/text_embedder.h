// Vectors of texts from the hidden states of an encoder.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megatron/inference/encoder_batches.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Which vector of a text [CLS] x_1 ... x_n [SEP]: the mean of its own tokens, as Megatron-LM's; the
// mean of all, as sentence-transformers'; that of [CLS]; or the pooler's output.
enum class Pooling { kMean, kMeanAll, kCls, kPooler };

struct EmbedOptions {
  Pooling pooling = Pooling::kMean;
  bool normalize = false;       // to length 1
  int64_t max_length = 256;     // tokens of a text with [CLS] and [SEP]; the rest is cut
  int64_t batch_tokens = 8192;  // of a forward, with padding
};

// Keeps references to the model and its tokenizer, which must outlive it.
class TextEmbedder {
 public:
  // Throws Error for a model without an encoder or a pooler that is asked for, for a tokenizer that
  // puts nothing around a text and has no [CLS] and [SEP], and for more positions than the model
  // has.
  TextEmbedder(Model& model, const Tokenizer& tokenizer, const EmbedOptions& options);

  // [texts, h] fp32 on the CPU, in the order of the texts. A text without a token has a row of
  // zeros with kMean. Texts of similar length share a forward.
  at::Tensor embed(std::span<const std::string> texts);
  // Texts of which a part was cut so far.
  int64_t num_cut() const { return num_cut_; }

 private:
  void add_usual_ids();
  std::vector<PairTokens> ids_of(std::span<const std::string> texts);
  at::Tensor pool(const EncodedTexts& batch);  // [b, h]

  Model& model_;
  const Tokenizer& tokenizer_;
  const EmbedOptions options_;
  std::vector<int32_t> prefix_, suffix_;
  int64_t num_cut_ = 0;
};

}  // namespace megatron
