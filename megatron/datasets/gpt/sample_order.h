// The order of samples that are cut from a stream of sequences: the arrays of gpt_indices.h, from a
// cache or built, and which parts of which sequences a sample takes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/gpt/gpt_indices.h"

namespace megatron {

// The part of a sample within one sequence.
struct SequencePiece {
  int64_t sequence, offset, count;
};

struct SampleOrderOptions {
  std::string data;              // for messages: where the sequences are from
  std::filesystem::path folder;  // of the cached arrays
  std::string name;              // their names begin so: "GPTDataset-train"
  std::string description;       // determines them
  bool use_cache = true;         // false: they are only kept in memory
};

class SampleOrder {
 public:
  // `inputs.lengths` must outlive it. Throws Error for cached arrays that do not fit together.
  SampleOrder(const GPTIndexInputs& inputs, const SampleOrderOptions& options);
  ~SampleOrder();

  int64_t size() const;  // number of samples
  int64_t num_epochs() const;
  // In order, none of them empty; together at most sequence_length + extra tokens. From several
  // threads. Throws Error for an index outside [0, size()) and for a cache that points outside the
  // sequences.
  std::vector<SequencePiece> pieces(int64_t index) const;

 private:
  struct Impl;
  const std::unique_ptr<const Impl> impl_;
};

}  // namespace megatron
