// What training reads: numbered samples of fixed length. Sample i is a function of the dataset's
// description and of i.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace megatron {

// The output of read(): four arrays of sequence_length elements.
struct SampleSpans {
  std::span<int64_t> tokens;
  // the next token; positions that are not trained on have loss_mask 0
  std::span<int64_t> labels;
  std::span<int64_t> position_ids;
  std::span<float> loss_mask;
};

// A sample that owns its arrays.
struct Sample {
  std::vector<int64_t> tokens, labels, position_ids;
  std::vector<float> loss_mask;
  // First position of each document (a piece that attends only to itself), ascending, the first
  // being 0. One entry if attention crosses documents (the default). Together with the sequence
  // length this is cu_seqlens.
  std::vector<int32_t> document_starts;
  int64_t dataset_id = 0;  // member of a blend

  explicit Sample(int64_t sequence_length = 0);
  SampleSpans spans() { return {tokens, labels, position_ids, loss_mask}; }
};

// Const functions may be called from several threads.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // number of samples
  virtual int64_t sequence_length() const = 0;
  // Writes sample `index`, 0 <= index < size(), and its document_starts (see Sample).
  virtual void read(int64_t index, const SampleSpans& out,
                    std::vector<int32_t>& document_starts) const = 0;
  // Maps sample `index` to (member of the blend, index within it); a plain dataset is its own
  // member 0.
  virtual std::pair<int64_t, int64_t> locate(int64_t index) const { return {0, index}; }
  // Everything that order and content of the samples depend on (files, split, blend, sequence
  // length, number of samples, seed, ...), as one JSON object on one line.
  virtual std::string description() const = 0;

  Sample sample(int64_t index) const;
  // 32 hexadecimal digits of a hash of description(). Equal fingerprints: equal samples in equal
  // order.
  std::string fingerprint() const;
};

// Document starts followed by the sequence length, as variable-length attention kernels take it.
std::vector<int32_t> cu_seqlens(std::span<const int32_t> document_starts, int64_t sequence_length);

// For each of the s tokens, the index of its document, from 0.
std::vector<int64_t> document_ids(std::span<const int32_t> document_starts,
                                  int64_t sequence_length);

// The equivalent attention mask [s, s]: true where row i may not attend to column j.
std::vector<bool> attention_mask(std::span<const int32_t> document_starts, int64_t sequence_length);

}  // namespace megatron
