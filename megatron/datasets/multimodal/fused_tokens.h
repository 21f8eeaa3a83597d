// Tokens of a sample in which every medium takes the rows of its features: labels, and what counts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megatron {

// The rows that a medium, or a picture of it, takes one after the other.
struct MediaRun {
  int64_t token = 0;  // in EncodedSample::ids
  int64_t rows = 0;   // of features
  int64_t medium = 0;
};

// A sample with one id for each run. Ids that are not trained on as ~id; those of runs always are.
struct EncodedSample {
  std::vector<int32_t> ids;
  std::vector<MediaRun> runs;  // ascending
};

struct FusionOptions {
  // Whether the last row of a medium is trained to predict the text behind it (as in transformers);
  // false: rows of media never count (as in Megatron-LM).
  bool loss_at_media = true;
};

// The ids with those of a run as often as it has rows.
std::vector<int32_t> expanded_ids(const EncodedSample& sample);

// Positions that a sample takes: the expanded ids without the last one, which is only a label.
int64_t sample_positions(const EncodedSample& sample);

// What becomes of a sample that takes more than `room` positions.
enum class LongSamples { kDrop, kCut, kError };
// The positions that are kept: all, or, if cutting is asked for and takes only text behind the last
// medium, `room`. 0: the sample is dropped.
int64_t kept_positions(const EncodedSample& sample, int64_t room, LongSamples rule);

// Position i has the expanded id i as token and the id i + 1 as label, which counts if it is a text
// token that is trained on. Writes as many positions as the spans have, at most those of the
// sample.
void fuse(const EncodedSample& sample, const FusionOptions& options, std::span<int64_t> tokens,
          std::span<int64_t> labels, std::span<float> loss_mask);

}  // namespace megatron
