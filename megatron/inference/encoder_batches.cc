#include "megatron/inference/encoder_batches.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/models/t5/t5_model.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

std::shared_ptr<UnpaddedRows> rows_of_texts(const at::Tensor& lengths, int64_t s,
                                            at::Device device) {
  const at::Tensor mask =
      (at::arange(s, at::kLong) < lengths.unsqueeze(1)).to(at::kByte).contiguous();
  const std::vector<int64_t> samples(static_cast<size_t>(lengths.size(0)));
  auto rows = std::make_shared<UnpaddedRows>(make_unpadded_rows(
      {{mask.const_data_ptr<uint8_t>(), static_cast<size_t>(mask.numel())}}, samples, 1));
  for (at::Tensor* tensor : rows->tensors()) *tensor = to_device(*tensor, device);
  return rows;
}

// The length of samples for texts of up to `longest` tokens. Lengths are few, since each shape
// needs a plan of cuDNN; what is added is computed nowhere, unless experts see padding.
int64_t length_for(const Model& model, int64_t longest) {
  constexpr int64_t kUnit = 64;
  const TransformerConfig& t = model.config().transformer;
  if (t.has_moe()) return longest;
  const int64_t rounded = (longest + kUnit - 1) / kUnit * kUnit;
  if (t.position_embedding_type == PositionEmbedding::kRelative) return rounded;
  return std::max(longest, std::min(rounded, t.max_position_embeddings));
}

EncodedTexts encode_batch(Model& model, std::span<const PairTokens> texts, std::vector<size_t> rows,
                          int64_t s) {
  const int64_t vocabulary = model.config().vocab_size;
  const auto b = std::ssize(rows);
  const at::Tensor ids = at::zeros({b, s}, at::kLong), types = at::zeros_like(ids),
                   lengths = at::empty({b}, at::kLong);
  auto id = ids.accessor<int64_t, 2>(), type = types.accessor<int64_t, 2>();
  auto length = lengths.accessor<int64_t, 1>();
  for (int64_t r = 0; r < b; ++r) {
    const PairTokens& text = texts[rows[static_cast<size_t>(r)]];
    length[r] = std::ssize(text.ids);
    for (int64_t i = 0; i < length[r]; ++i) {
      id[r][i] = text.ids[static_cast<size_t>(i)];
      MEGATRON_CHECK(id[r][i] < vocabulary, "token id ", id[r][i],
                     " of the tokenizer is outside the model's vocabulary of ", vocabulary);
      type[r][i] = i < text.first_of_b ? 0 : 1;
    }
  }
  const at::Device device = model.parameters().front()->value.device();
  EncodedTexts out{std::move(rows), {}, to_device(lengths, device), {}};
  const at::Tensor position = at::arange(s, at::dtype(at::kLong).device(device));
  std::shared_ptr<UnpaddedRows> unpadded;  // null: all texts are as long, or experts see padding
  auto* const t5 = dynamic_cast<T5Model*>(&model);
  const char* const mask = t5 != nullptr ? "enc_mask" : "padding_mask";
  Batch batch;
  batch.set(t5 != nullptr ? "text_enc" : "text", to_device(ids, device));
  batch.set("types", to_device(types, device));
  if (lengths.min().item<int64_t>() < s) {
    out.text = position < out.lengths.unsqueeze(1);
    if (!model.config().transformer.has_moe()) unpadded = rows_of_texts(lengths, s, device);
  }
  if (out.text.defined() || t5 != nullptr)
    batch.set(mask, out.text.defined() ? out.text : at::ones_like(ids, device));
  if (unpadded != nullptr) batch.unpadded.emplace_back(mask, unpadded);
  ForwardContext context;
  context.place.position = position;
  context.place.sample = at::zeros({b}, position.options());
  batch.place = context.place;
  out.hidden =
      t5 != nullptr ? t5->encoded(batch, context) : model.hidden(batch, {}, context).front();
  if (unpadded != nullptr) out.hidden = unpadded->with_padding(out.hidden.squeeze(1));
  return out;
}

void check_encoder(bool is_one, const Model& model, const char* which) {
  MEGATRON_CHECK(
      is_one, "the model is of type ", model.config().type,
      ", whose tokens do not see those after them; this needs an encoder\nhint: ", which);
}

}  // namespace

BertModel& encoder_of(Model& model) {
  auto* bert = dynamic_cast<BertModel*>(&model);
  check_encoder(bert != nullptr, model,
                "a BERT, or a folder of Hugging Face of a model of type bert, roberta or "
                "modernbert");
  return *bert;
}

void check_reads_texts(const Model& model) {
  check_encoder(dynamic_cast<const T5Model*>(&model) != nullptr ||
                    dynamic_cast<const BertModel*>(&model) != nullptr,
                model,
                "a BERT or a T5, or a folder of Hugging Face of a model of type bert, roberta, "
                "modernbert or t5");
}

void for_each_batch(Model& model, std::span<const PairTokens> texts, int64_t batch_tokens,
                    const std::function<void(const EncodedTexts&)>& use) {
  const at::NoGradGuard no_grad;
  std::vector<size_t> order(texts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return texts[a].ids.size() > texts[b].ids.size(); });
  for (auto begin = order.begin(); begin != order.end();) {
    const int64_t s = length_for(model, std::ssize(texts[*begin].ids));
    const int64_t count = std::clamp<int64_t>(batch_tokens / s, 1, order.end() - begin);
    use(encode_batch(model, texts, {begin, begin + count}, s));
    begin += count;
  }
}

}  // namespace megatron
