#include "megatron/inference/text_classifier.h"

#include "megatron/base/check.h"
#include "megatron/inference/encoder_batches.h"
#include "megatron/inference/generator.h"
#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor classify_texts(Model& model, const Tokenizer& tokenizer,
                          std::span<const LabelledText> texts, const ClassifyOptions& options) {
  const at::NoGradGuard no_grad;
  BertModel& encoder = encoder_of(model);
  const int64_t outputs = text_head_outputs(model.config()), limit = max_positions(model.config());
  MEGATRON_CHECK(outputs > 0, "the model has no classification head and no multiple-choice head",
                 "\nhint: finetune --task classify or multichoice gives it one");
  MEGATRON_CHECK(limit < 0 || options.max_length <= limit, "--max-length ", options.max_length,
                 " is beyond the model's ", limit, " positions");
  std::vector<PairTokens> pairs;
  for (const LabelledText& text : texts)
    pairs.push_back(encode_pair(tokenizer, text, options.max_length));
  at::Tensor all = at::empty({std::ssize(pairs), outputs}, at::kFloat);
  for_each_batch(encoder, pairs, options.batch_tokens, [&](const EncodedTexts& batch) {
    const std::vector<int64_t> rows(batch.rows.begin(), batch.rows.end());
    all.index_copy_(0, at::tensor(rows, at::kLong),
                    encoder.class_logits(batch.hidden, batch.text).to(at::kFloat).to(at::kCPU));
  });
  return all;
}

}  // namespace megatron
