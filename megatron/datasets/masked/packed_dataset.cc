#include "megatron/datasets/masked/packed_dataset.h"

#include <algorithm>

#include "megatron/datasets/masked/bert_dataset.h"

namespace megatron {

Columns packed_columns(int64_t sequence_length, int64_t most_masked) {
  const std::vector<int64_t> shape = {sequence_length};
  return Columns({{.name = "text", .shape = shape},
                  {.name = "labels", .shape = shape, .padding = -1},
                  {.name = "loss_mask",
                   .type = ElementType::kFloat32,
                   .shape = shape,
                   .is_loss_weight = true,
                   .most_counted = most_masked},
                  {.name = "position_ids", .shape = shape}});
}

PackedDataset::PackedDataset(std::unique_ptr<const PackedText> text,
                             std::shared_ptr<const MaskedTokens> tokens,
                             const MaskingOptions& masking, const PackedTextOptions& options)
    : Dataset(
          packed_columns(options.sequence_length, most_masked(masking, options.sequence_length))),
      text_(std::move(text)),
      tokens_(std::move(tokens)),
      options_(masking),
      masking_(masking, *tokens_),
      seed_(options.seed) {
  check_bert_tokens(*tokens_);
}

void PackedDataset::read(int64_t index, const SampleSpans& sample,
                         std::vector<int32_t>& document_starts) const {
  const auto text = sample.get<int64_t>("text"), labels = sample.get<int64_t>("labels"),
             positions = sample.get<int64_t>("position_ids");
  const auto loss_mask = sample.get<float>("loss_mask");
  text_->read(index, text, document_starts);
  NumpyRandom random(sample_seed(seed_, index));
  MaskedPositions masked;
  masking_.mask(text, std::ssize(text), random, masked);
  write_labels(masked, labels, loss_mask);
  int64_t start = 0;
  auto next = document_starts.begin();
  for (int64_t i = 0; i < std::ssize(text); ++i) {
    if (next != document_starts.end() && *next == i) start = *next++;
    positions[static_cast<size_t>(i)] = i - start;
  }
}

std::string PackedDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "PackedDataset");
  text_->describe(json);
  describe_masking(options_, *tokens_, json);
  json.end_object();
  return json.text();
}

}  // namespace megatron
