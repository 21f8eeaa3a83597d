#include "megatron/models/mimo/image_blocks.h"

#include <vector>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Bool [b, s, s]: whether two tokens have the same number in x [b, s].
at::Tensor equal_pairs(const at::Tensor& x) { return x.unsqueeze(2).eq(x.unsqueeze(1)); }

}  // namespace

TokenBlocks image_blocks(std::span<const int64_t> tokens, int64_t samples, int64_t image_token,
                         std::span<const DocumentPlace> documents) {
  const int64_t s = std::ssize(tokens) / samples;
  std::vector<TokenRun> runs;
  const auto find_runs = [&](const DocumentPlace& one) {
    bool goes_on = false;
    for (int64_t at = one.begin; at < one.begin + one.length; ++at) {
      const bool of_image = tokens[static_cast<size_t>(one.sample * s + at)] == image_token;
      if (of_image && goes_on) {
        ++runs.back().count;
      } else if (of_image) {
        runs.push_back({one.sample, at, 1});
      }
      goes_on = of_image;
    }
  };
  for (const DocumentPlace& one : documents) find_runs(one);
  for (int64_t sample = 0; documents.empty() && sample < samples; ++sample)
    find_runs({sample, 0, s});
  return make_token_blocks(runs, samples, s, documents);
}

at::Tensor image_block_mask(const at::Tensor& tokens, int64_t image_token,
                            const at::Tensor& document_ids) {
  const int64_t s = tokens.size(1);
  const at::Tensor of_image = tokens.eq(image_token);
  const at::Tensor begins =
      of_image.logical_and(at::constant_pad_nd(of_image, {1, 0}).narrow(1, 0, s).logical_not());
  // Of image tokens the number of their run, of others no number twice.
  const at::Tensor place = at::arange(s, tokens.options());
  const at::Tensor run = at::where(of_image, begins.cumsum(1), place.add(s));
  at::Tensor sees = equal_pairs(run).logical_or_(place.unsqueeze(0).le(place.unsqueeze(1)));
  if (document_ids.defined()) sees.logical_and_(equal_pairs(document_ids));
  return sees.logical_not_().unsqueeze(1);
}

}  // namespace megatron
