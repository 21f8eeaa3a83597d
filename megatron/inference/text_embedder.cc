#include "megatron/inference/text_embedder.h"

#include <atomic>

#include "megatron/base/check.h"
#include "megatron/inference/generator.h"
#include "megatron/models/t5/t5_model.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kHeldVectors = 16384;    // on the device, at least so many
constexpr double kSmallestLength = 1e-12;  // as torch.nn.functional.normalize

}  // namespace

TextEmbedder::TextEmbedder(Model& model, const Tokenizer& tokenizer, const EmbedOptions& options)
    : model_(model), tokenizer_(tokenizer), options_(options) {
  check_reads_texts(model);
  prefix_ = tokenizer.prefix_ids();
  suffix_ = tokenizer.suffix_ids();
  if (prefix_.empty() && suffix_.empty()) add_usual_ids();
  MEGATRON_CHECK(options.pooling != Pooling::kPooler ||
                     (dynamic_cast<BertModel*>(&model) != nullptr && has_pooler(model.config())),
                 "the model has no pooler\nhint: --pooling mean or cls");
  const int64_t limit = max_positions(model.config());
  MEGATRON_CHECK(limit < 0 || options.max_length <= limit, "--max-length ", options.max_length,
                 " is beyond the model's ", limit, " positions");
  const auto specials = static_cast<int64_t>(prefix_.size() + suffix_.size());
  MEGATRON_CHECK(options.max_length > specials, "--max-length ", options.max_length,
                 " leaves no room between the ", specials, " tokens around a text");
}

// Where the tokenizer does not say what stands around a text: the token that ends it behind that of
// a T5, [CLS] and [SEP] around others.
void TextEmbedder::add_usual_ids() {
  if (dynamic_cast<T5Model*>(&model_) != nullptr) {
    if (tokenizer_.eod()) suffix_ = {*tokenizer_.eod()};
    return;
  }
  const auto required = [](std::optional<int32_t> id, const char* name) {
    MEGATRON_CHECK(id.has_value(), "the tokenizer has no ", name,
                   ", which stands around a text of an encoder");
    return *id;
  };
  prefix_ = {required(tokenizer_.cls(), "[CLS]")};
  suffix_ = {required(tokenizer_.sep(), "[SEP]")};
}

std::vector<PairTokens> TextEmbedder::ids_of(std::span<const std::string> texts) {
  std::vector<PairTokens> all(texts.size());
  std::atomic<int64_t> cut = 0;
  const auto most = static_cast<size_t>(options_.max_length) - suffix_.size();
  parallel_tasks(std::ssize(texts), 64, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      std::vector<int32_t>& ids = all[i].ids = prefix_;
      tokenizer_.encode_append(texts[i], ids);
      if (ids.size() > most) {
        ids.resize(most);
        ++cut;
      }
      ids.insert(ids.end(), suffix_.begin(), suffix_.end());
      all[i].first_of_b = std::ssize(ids);
    }
  });
  num_cut_ += cut;
  return all;
}

at::Tensor TextEmbedder::pool(const EncodedTexts& batch) {
  const at::Tensor &hidden = batch.hidden, &lengths = batch.lengths;
  if (options_.pooling == Pooling::kPooler)
    return encoder_of(model_).pooled(hidden, batch.text).to(at::kFloat);
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
  const std::vector<PairTokens> ids = ids_of(texts);
  const int64_t h = model_.config().transformer.hidden_size;
  at::Tensor all = at::zeros({std::ssize(ids), h}, at::kFloat);
  // Vectors stay on the device for a while: a copy waits for what was submitted before it.
  std::vector<int64_t> rows;
  std::vector<at::Tensor> vectors;
  const auto copy = [&] {
    if (!rows.empty()) all.index_copy_(0, at::tensor(rows, at::kLong), at::cat(vectors).cpu());
    rows.clear();
    vectors.clear();
  };
  for_each_batch(model_, ids, options_.batch_tokens, [&](const EncodedTexts& batch) {
    rows.insert(rows.end(), batch.rows.begin(), batch.rows.end());
    vectors.push_back(pool(batch));
    if (std::ssize(rows) >= kHeldVectors) copy();
  });
  copy();
  if (options_.normalize) all /= all.norm(2, 1, /*keepdim=*/true).clamp_min(kSmallestLength);
  return all;
}

}  // namespace megatron
