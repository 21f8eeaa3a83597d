// Pairs of texts, of which an encoder-decoder reads one and learns to write the other: files and
// samples.
//
// Files: JSON lines, {"input", "target"}; without "target" it is a line to predict.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct TextToText {
  std::string input;
  std::optional<std::string> target;
  int64_t line = 0;  // of the file, from 1
};

// Throws Error naming file and line: a line that is no such object.
std::vector<TextToText> read_text_to_text(const std::string& path);

struct TextToTextTokens {
  std::vector<int32_t> input;   // with the end of document
  std::vector<int32_t> target;  // with the end of document, unless it was cut
};

// Longest input, with its end, and target, without the start that the decoder reads.
struct TextToTextLengths {
  int64_t encoder = 0, decoder = 0;
};

struct TextToTextFile {
  std::vector<TextToTextTokens> rows;
  int64_t inputs_cut = 0;   // lost their end, and got an end of document
  int64_t targets_cut = 0;  // lost their end: that the text ends there is not learned
};

// The rows of a file to train on. Throws Error naming file and line for a line without a target,
// and for a tokenizer without an end of document.
TextToTextFile encode_text_to_text(const std::string& path, const Tokenizer& tokenizer,
                                   const TextToTextLengths& lengths);

// What the decoder's inputs begin with: the tokenizer's first token, else its padding token. Throws
// Error if it has neither.
int32_t decoder_start_of(const Tokenizer& tokenizer);

// Random tokens of many lengths; other rows for each split.
std::vector<TextToTextTokens> mock_text_to_text(const DatasetRequest& request, Split split,
                                                int64_t count, const TextToTextLengths& lengths);

struct TextToTextConfig {
  TextToTextLengths lengths;
  int64_t seed = 1234;
  int64_t decoder_start = 0, pad = 0;
  std::string description;  // one JSON object on one line: files, tokenizer
};

// The columns of T5 (masked/t5_dataset.h): text_enc is the input, text_dec the start and the target
// without its last token, labels the target; all of its tokens count in the loss. The masks have 1
// where there is text, truncated is 0. Order: epoch_order.h.
class TextToTextDataset final : public Dataset {
 public:
  // `num_samples`, 0: one epoch in the order given. Throws Error for no rows.
  TextToTextDataset(std::vector<TextToTextTokens> rows, int64_t num_samples,
                    TextToTextConfig config);
  int64_t size() const override { return std::ssize(order_); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  const std::vector<TextToTextTokens> rows_;
  const bool in_order_;
  const TextToTextConfig config_;
  const std::vector<int32_t> order_;  // rows, epoch after epoch
};

}  // namespace megatron
