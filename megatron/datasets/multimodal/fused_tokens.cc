#include "megatron/datasets/multimodal/fused_tokens.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Expanded ids before a token of the sample.
int64_t rows_before(const EncodedSample& sample, int64_t token) {
  int64_t out = token;
  for (const MediaRun& run : sample.runs)
    if (run.token < token) out += run.rows - 1;
  return out;
}

}  // namespace

std::vector<int32_t> expanded_ids(const EncodedSample& sample) {
  std::vector<int32_t> out;
  out.reserve(static_cast<size_t>(rows_before(sample, std::ssize(sample.ids))));
  auto run = sample.runs.begin();
  for (int64_t i = 0; i < std::ssize(sample.ids); ++i) {
    const bool is_run = run != sample.runs.end() && run->token == i;
    out.insert(out.end(), is_run ? static_cast<size_t>((run++)->rows) : 1,
               sample.ids[static_cast<size_t>(i)]);
  }
  return out;
}

int64_t sample_positions(const EncodedSample& sample) {
  return rows_before(sample, std::ssize(sample.ids)) - 1;
}

int64_t kept_positions(const EncodedSample& sample, int64_t room, LongSamples rule) {
  const int64_t positions = sample_positions(sample);
  if (positions <= room) return positions;
  if (rule != LongSamples::kCut) return 0;
  const int64_t media = sample.runs.empty() ? 0 : rows_before(sample, sample.runs.back().token + 1);
  return media <= room ? room : 0;
}

void fuse(const EncodedSample& sample, const FusionOptions& options, std::span<int64_t> tokens,
          std::span<int64_t> labels, std::span<float> loss_mask) {
  const std::vector<int32_t> ids = expanded_ids(sample);
  MEGATRON_ASSERT(tokens.size() < ids.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto id = [&](size_t k) { return int64_t{ids[k] < 0 ? ~ids[k] : ids[k]}; };
    tokens[i] = id(i);
    labels[i] = id(i + 1);
    loss_mask[i] = ids[i + 1] >= 0 ? 1.0F : 0.0F;
  }
  if (options.loss_at_media) return;
  for (const MediaRun& run : sample.runs) {
    const auto first = static_cast<size_t>(rows_before(sample, run.token));
    for (size_t i = first; i < std::min(tokens.size(), first + static_cast<size_t>(run.rows)); ++i)
      loss_mask[i] = 0.0F;
  }
}

}  // namespace megatron
