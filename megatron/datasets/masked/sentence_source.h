// Where the sentences of samples come from: runs of sentences of one document, cut to about a
// target length, from a file or made up.
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
#include "megatron/datasets/masked/sentence_index.h"

namespace megatron {

// Consecutive sentences of a document.
struct SentenceRun {
  std::vector<int64_t> tokens;
  std::vector<size_t> ends;  // by sentence: end in `tokens`
  int64_t target = 0;        // tokens that the sample should have, special tokens left out
};

struct SentenceSourceOptions {
  int64_t max_length = 0;          // largest target
  int64_t min_sentences = 1;       // of a run
  double short_probability = 0.1;  // share of runs with a shorter target
  int64_t seed = 1234;
  int64_t vocab_size = 0;  // ids are in [0, vocab_size)
  std::string cache_path;  // folder of the cached order; empty: next to the data
};

class SentenceSource {
 public:
  virtual ~SentenceSource() = default;
  virtual int64_t size() const = 0;
  // Any 0 <= index < size(), from several threads. Replaces `out`.
  virtual void read(int64_t index, SentenceRun& out) const = 0;
  // For messages: "data_text_sentence".
  virtual std::string name() const = 0;
  // Members of a JSON object from which order and content follow.
  virtual void describe(JsonWriter& json) const = 0;
};

// The documents of `data` within `bounds` (fractions of their number), in the order of
// build_sentence_index(). Throws Error if they give no run, with the reason.
std::unique_ptr<const SentenceSource> sentences_of_file(std::shared_ptr<const IndexedDataset> data,
                                                        std::pair<double, double> bounds,
                                                        Split split,
                                                        std::optional<int64_t> num_samples,
                                                        const SentenceSourceOptions& options);

// Documents that are made up for --mock-data, a function of (seed, split, index): sentences that
// count upwards through the ids [first_id, last_id), runs that are shorter than their target, and
// with `hole` >= 0 that id here and there in the text. With `most` > 0 runs have `least` to `most`
// tokens, each number as often, but no more than the largest target.
struct MockSentenceIds {
  int64_t first = 0, last = 0, hole = -1;
  int64_t least = 0, most = 0;
};
std::unique_ptr<const SentenceSource> mock_sentences(Split split, int64_t num_samples,
                                                     const MockSentenceIds& ids,
                                                     const SentenceSourceOptions& options);

}  // namespace megatron
