// Samples of consecutive tokens for a language model, drawn from one indexed dataset in shuffled
// order.
//
// The order is Megatron-LM's: documents are repeated for as many epochs as the number of samples
// needs and shuffled, the resulting token stream is cut every sequence_length tokens, and the
// samples are shuffled.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/dataset_description.h"
#include "megatron/datasets/indexed_dataset.h"

namespace megatron {

enum class Split { kTrain, kValid, kTest };
inline constexpr int kNumSplits = 3;
std::string to_string(Split split);  // "train", "valid", "test"

// What a dataset needs to know about the tokenizer.
struct TokenizerFacts {
  int64_t vocab_size = 0;  // ids are in [0, vocab_size); 0: not checked
  int64_t eod = -1;        // -1: none
  int64_t bos = -1;
  int64_t pad = -1;            // -1: none
  TokenizerIdentity identity;  // compared with that of the data; default: not compared
};

struct GPTDatasetConfig {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  TokenizerFacts tokenizer;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool inter_document_masking = false;
  bool eod_mask_loss = false;
  bool allow_ambiguous_pad_tokens = false;
  bool add_extra_token = true;  // false: labels are the tokens rolled by one
  bool drop_last_partial_validation_sequence = true;
  std::string cache_path;  // empty: a folder next to the data
  bool use_cache = true;   // false: indices are only kept in memory
  int threads = 0;         // for index building; 0: all cores

  bool own_positions() const { return reset_position_ids || inter_document_masking; }
};

// Folders for index files derived from the data set `prefix`, best first: `cache_path` if given,
// else `own_folder` next to the data, else in the user's cache.
std::vector<std::filesystem::path> index_folders(
    const std::string& prefix, const std::string& cache_path,
    const std::string& own_folder = "GPTDataset_indices");

class GPTDataset : public Dataset {
 public:
  // Samples over sequences [first, last) of `data`. `num_samples`: the number wanted (epochs are
  // added until there are that many; size() may be larger); nullopt: one epoch. Throws Error if the
  // sequences hold too few tokens for one sample.
  GPTDataset(std::shared_ptr<const IndexedDataset> data, int64_t first, int64_t last, Split split,
             std::optional<int64_t> num_samples, const GPTDatasetConfig& config);
  ~GPTDataset() override;

  int64_t size() const override;
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

  int64_t num_epochs() const;
  const IndexedDataset& data() const;
  // The sequences that sample `index` reads from, its last label included, in order.
  std::vector<int64_t> sequences(int64_t index) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
