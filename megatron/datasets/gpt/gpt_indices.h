// The three arrays that order the samples of a GPTDataset. Pure functions: bit-equal to
// Megatron-LM's.
//
//   document index  sequence ids, one epoch after the other, shuffled
//   sample index    row k: where sample k starts: (position in the document index, offset in that
//                   sequence)
//   shuffle index   sample i is row shuffle_index[i]
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace megatron {

// An array of int32 or int64, as its values require (also the element type of the cached files).
struct IndexArray {
  std::vector<int32_t> narrow;
  std::vector<int64_t> wide;
  bool is_wide = false;

  void resize(int64_t count, bool use_wide);
  int64_t size() const { return is_wide ? wide.size() : narrow.size(); }
  int64_t operator[](int64_t i) const { return is_wide ? wide[i] : narrow[i]; }
};

struct GPTIndices {
  IndexArray document_index;  // int32; int64 beyond 2^31 sequences
  IndexArray sample_index;    // rows of two
  std::vector<uint32_t> shuffle_narrow;
  std::vector<int64_t> shuffle_wide;  // used from 2^32 - 2 samples on
  int64_t num_epochs = 0;
  bool separate_final_epoch = false;
};

struct GPTIndexInputs {
  int64_t first = 0, last = 0;       // sequences of the split
  std::span<const int32_t> lengths;  // of all sequences of the file
  int64_t sequence_length = 0;
  int64_t extra = 1;                   // tokens of a sample beyond sequence_length
  std::optional<int64_t> num_samples;  // nullopt: one epoch
  uint32_t seed = 0;
  bool drop_last = true;
  int threads = 0;
};

// The smallest number of epochs >= 1 whose tokens suffice.
int64_t num_epochs_for(int64_t tokens_per_epoch, int64_t sequence_length, int64_t extra,
                       std::optional<int64_t> num_samples);

// Rows of the sample index over `documents` (sequence ids); `total_tokens` is the sum of their
// lengths.
IndexArray build_sample_index(const IndexArray& documents, std::span<const int32_t> lengths,
                              int64_t sequence_length, int64_t extra, bool drop_last, int threads);

GPTIndices build_gpt_indices(const GPTIndexInputs& inputs);

}  // namespace megatron
