// Where packed samples come from: documents, each between the tokens that stand around a text,
// one after the other and cut every sequence_length tokens; from a file or made up.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/base/json_writer.h"
#include "megatron/datasets/gpt/gpt_dataset.h"
#include "megatron/datasets/indexed_dataset.h"
#include "megatron/datasets/masked/sentence_source.h"

namespace megatron {

struct PackedTextOptions {
  int64_t sequence_length = 0;
  std::vector<int64_t> prefix, suffix;  // around each document: [CLS] and [SEP]
  int64_t seed = 1234;
  int64_t vocab_size = 0;  // ids are in [0, vocab_size)
  std::string cache_path;  // folder of the cached order; empty: next to the data
  int threads = 0;         // for building the order; 0: all cores
};

class PackedText {
 public:
  virtual ~PackedText() = default;
  virtual int64_t size() const = 0;
  // Any 0 <= index < size(), from several threads. Fills all of `tokens`; `starts`: where the first
  // tokens of documents, or of what is left of the one that the sample begins in, stand.
  virtual void read(int64_t index, std::span<int64_t> tokens,
                    std::vector<int32_t>& starts) const = 0;
  // Members of a JSON object from which order and content follow.
  virtual void describe(JsonWriter& json) const = 0;
};

// The documents of `data` within `bounds` (fractions of their number) in the order of the GPT
// datasets, without a token beyond a sample; the sentences of a document are joined, and one
// without tokens is left out. A document that does not end in a sample goes on in another one. The
// last tokens that fill no sample are not read. Throws Error if the split fills none.
std::unique_ptr<const PackedText> packed_text_of_file(std::shared_ptr<const IndexedDataset> data,
                                                      std::pair<double, double> bounds, Split split,
                                                      std::optional<int64_t> num_samples,
                                                      const PackedTextOptions& options);

// Documents of mock_sentences().
std::unique_ptr<const PackedText> mock_packed_text(Split split, int64_t num_samples,
                                                   const MockSentenceIds& ids,
                                                   const PackedTextOptions& options);

}  // namespace megatron
