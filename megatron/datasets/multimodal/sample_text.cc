#include "megatron/datasets/multimodal/sample_text.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// `picture`: from 1, of `pictures` that the medium becomes.
std::string run_text(const MediaRun& run, const MediumFacts& medium, int64_t picture,
                     int64_t pictures) {
  const std::string what = medium.kind == MediaKind::kImage
                               ? cat("image ", medium.size.height, "x", medium.size.width)
                               : cat("sound of ", medium.samples, " samples");
  const std::string part = pictures == 1 ? "" : cat(", picture ", picture, " of ", pictures);
  return cat("[", what, part, " -> ", run.rows, run.rows == 1 ? " token]" : " tokens]");
}

}  // namespace

SampleText sample_text(const EncodedSample& sample, const std::vector<MediumFacts>& media,
                       const Tokenizer& tokenizer) {
  SampleText out;
  out.tokens = sample_positions(sample) + 1;
  auto run = sample.runs.begin();
  int64_t picture = 0;
  bool was_counted = false;
  for (int64_t i = 0; i < std::ssize(sample.ids); ++i) {
    const int32_t id = sample.ids[static_cast<size_t>(i)];
    if (run != sample.runs.end() && run->token == i) {
      picture = run != sample.runs.begin() && (run - 1)->medium == run->medium ? picture + 1 : 1;
      const auto pictures =
          std::count_if(sample.runs.begin(), sample.runs.end(),
                        [&](const MediaRun& other) { return other.medium == run->medium; });
      out.text += run_text(*run, media.at(static_cast<size_t>(run->medium)), picture, pictures);
      ++run;
      was_counted = false;
      continue;
    }
    const std::string bytes = tokenizer.token_bytes(id < 0 ? ~id : id);
    out.text += bytes;
    if (id >= 0) {
      if (!was_counted) out.counted.emplace_back();
      out.counted.back() += bytes;
      ++out.counted_tokens;
    }
    was_counted = id >= 0;
  }
  return out;
}

}  // namespace megatron
