#include "megatron/inference/text_embedder.h"

#include "megatron/base/check.h"
#include "megatron/inference/generator.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kSmallestLength = 1e-12;  // as torch.nn.functional.normalize

// What stands around a text.
std::vector<int32_t> around(std::vector<int32_t> own, std::optional<int32_t> usual,
                            const char* name) {
  if (!own.empty()) return own;
  MEGATRON_CHECK(usual.has_value(), "the tokenizer has no ", name,
                 ", which stands around a text of an encoder");
  return {*usual};
}

}  // namespace

TextEmbedder::TextEmbedder(Model& model, const Tokenizer& tokenizer, const EmbedOptions& options)
    : model_(encoder_of(model)),
      tokenizer_(tokenizer),
      options_(options),
      prefix_(around(tokenizer.prefix_ids(), tokenizer.cls(), "[CLS]")),
      suffix_(around(tokenizer.suffix_ids(), tokenizer.sep(), "[SEP]")) {
  MEGATRON_CHECK(options.pooling != Pooling::kPooler || has_pooler(model.config()),
                 "the model has no pooler\nhint: --pooling mean or cls");
  const int64_t limit = max_positions(model.config());
  MEGATRON_CHECK(limit < 0 || options.max_length <= limit, "--max-length ", options.max_length,
                 " is beyond the model's ", limit, " positions");
  const auto specials = static_cast<int64_t>(prefix_.size() + suffix_.size());
  MEGATRON_CHECK(options.max_length > specials, "--max-length ", options.max_length,
                 " leaves no room between the ", specials, " tokens around a text");
}

PairTokens TextEmbedder::ids_of(const std::string& text) {
  PairTokens out{prefix_, 0};
  tokenizer_.encode_append(text, out.ids);
  const auto most = static_cast<size_t>(options_.max_length) - suffix_.size();
  if (out.ids.size() > most) {
    out.ids.resize(most);
    ++num_cut_;
  }
  out.ids.insert(out.ids.end(), suffix_.begin(), suffix_.end());
  out.first_of_b = std::ssize(out.ids);
  return out;
}

at::Tensor TextEmbedder::pool(const EncodedTexts& batch) {
  const at::Tensor &hidden = batch.hidden, &lengths = batch.lengths;
  if (options_.pooling == Pooling::kPooler) return model_.pooled(hidden, batch.text).to(at::kFloat);
  if (options_.pooling == Pooling::kCls) return hidden[0].to(at::kFloat);
  const at::Tensor position = at::arange(hidden.size(0), lengths.options()),
                   ends = lengths.unsqueeze(1);
  at::Tensor counted = position < ends;
  if (options_.pooling == Pooling::kMean)
    counted = (position >= std::ssize(prefix_)).logical_and(position < ends - std::ssize(suffix_));
  const at::Tensor weights = counted.to(at::kFloat).t().unsqueeze(2);  // [s, b, 1]
  return (hidden.to(at::kFloat) * weights).sum(0) / weights.sum(0).clamp_min(1);
}

at::Tensor TextEmbedder::embed(std::span<const std::string> texts) {
  const at::NoGradGuard no_grad;
  std::vector<PairTokens> ids;
  for (const std::string& text : texts) ids.push_back(ids_of(text));
  const int64_t h = model_.config().transformer.hidden_size;
  at::Tensor all = at::zeros({std::ssize(ids), h}, at::kFloat);
  for_each_batch(model_, ids, options_.batch_tokens, [&](const EncodedTexts& batch) {
    const std::vector<int64_t> rows(batch.rows.begin(), batch.rows.end());
    all.index_copy_(0, at::tensor(rows, at::kLong), pool(batch).to(at::kCPU));
  });
  if (options_.normalize) all /= all.norm(2, 1, /*keepdim=*/true).clamp_min(kSmallestLength);
  return all;
}

}  // namespace megatron
