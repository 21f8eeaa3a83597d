#include "megatron/datasets/masked/bert_dataset.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

// Bounds in the tokens of the run.
struct BertDataset::Pair {
  size_t begin_a = 0, end_a = 0, begin_b = 0, end_b = 0;
  bool swapped = false, truncated = false;
};

SentenceSourceOptions bert_sentences(int64_t sequence_length, bool binary_head,
                                     SentenceSourceOptions options) {
  MEGATRON_CHECK(sequence_length >= 5, "sequence length is ", sequence_length,
                 ", [CLS] A [SEP] B [SEP] needs at least 5");
  options.max_length = sequence_length - 3;
  options.min_sentences = binary_head ? 2 : 1;
  return options;
}

Columns bert_columns(int64_t sequence_length, int64_t most_masked) {
  const std::vector<int64_t> shape = {sequence_length};
  return Columns({{.name = "text", .shape = shape},
                  {.name = "types", .shape = shape},
                  {.name = "labels", .shape = shape, .padding = -1},
                  {.name = "loss_mask",
                   .type = ElementType::kFloat32,
                   .shape = shape,
                   .is_loss_weight = true,
                   .most_counted = most_masked},
                  {.name = "padding_mask",
                   .type = ElementType::kUInt8,
                   .shape = shape,
                   .split = false,
                   .marks_text = true},
                  {.name = "is_random", .shape = {1}, .split = false},
                  {.name = "truncated", .shape = {1}, .split = false},
                  {.name = "sample_weight",
                   .type = ElementType::kFloat32,
                   .shape = {1},
                   .split = false,
                   .is_loss_weight = true}});
}

int64_t most_masked_by_bert(const MaskingOptions& masking, int64_t sequence_length) {
  return most_masked(masking, sequence_length - 3);  // [CLS] and two [SEP]
}

void check_bert_tokens(const MaskedTokens& tokens) {
  std::vector<std::string> missing;
  if (tokens.cls < 0) missing.emplace_back("[CLS]");
  if (tokens.sep < 0) missing.emplace_back("[SEP]");
  if (tokens.mask < 0) missing.emplace_back("[MASK]");
  MEGATRON_CHECK(
      missing.empty(), tokens.identity.name, " has no ", listed(missing),
      ", which samples of BERT need\nhint: give a vocabulary of BERT, or the folder of a "
      "Hugging Face model whose tokenizer_config.json names cls_token, sep_token and "
      "mask_token");
}

void write_labels(const MaskedPositions& masked, std::span<int64_t> labels,
                  std::span<float> loss_mask) {
  std::fill(labels.begin(), labels.end(), -1);
  std::fill(loss_mask.begin(), loss_mask.end(), 0.0F);
  for (size_t i = 0; i < masked.positions.size(); ++i) {
    const auto at = static_cast<size_t>(masked.positions[i]);
    labels[at] = masked.originals[i];
    loss_mask[at] = 1.0F;
  }
}

BertDataset::BertDataset(std::unique_ptr<const SentenceSource> sentences,
                         std::shared_ptr<const MaskedTokens> tokens,
                         const BertDatasetConfig& config)
    : Dataset(bert_columns(config.sequence_length,
                           most_masked_by_bert(config.masking, config.sequence_length))),
      sentences_(std::move(sentences)),
      tokens_(std::move(tokens)),
      config_(config),
      masking_(config.masking, *tokens_) {
  check_bert_tokens(*tokens_);
}

BertDataset::Pair BertDataset::pair_of(const SentenceRun& run, NumpyRandom& random) const {
  Pair pair;
  pair.end_a = run.tokens.size();
  if (config_.binary_head) {
    const auto count = static_cast<int64_t>(run.ends.size());
    MEGATRON_ASSERT(count >= 2);
    const int64_t pivot = count >= 3 ? random.randint(1, count) : 1;
    pair.end_a = pair.begin_b = run.ends[static_cast<size_t>(pivot) - 1];
    pair.end_b = run.tokens.size();
    pair.swapped = random.uniform() < 0.5;
    if (pair.swapped) {
      std::swap(pair.begin_a, pair.begin_b);
      std::swap(pair.end_a, pair.end_b);
    }
  }
  const auto length = [&] { return pair.end_a - pair.begin_a + pair.end_b - pair.begin_b; };
  pair.truncated = length() > static_cast<size_t>(run.target);
  while (length() > static_cast<size_t>(run.target)) {
    const bool a = pair.end_a - pair.begin_a > pair.end_b - pair.begin_b;
    if (random.uniform() < 0.5)
      ++(a ? pair.begin_a : pair.begin_b);
    else
      --(a ? pair.end_a : pair.end_b);
  }
  return pair;
}

void BertDataset::read(int64_t index, const SampleSpans& sample,
                       std::vector<int32_t>& document_starts) const {
  const auto text = sample.get<int64_t>("text"), types = sample.get<int64_t>("types"),
             labels = sample.get<int64_t>("labels");
  const auto loss_mask = sample.get<float>("loss_mask");
  const auto padding_mask = sample.get<uint8_t>("padding_mask");
  SentenceRun run;
  sentences_->read(index, run);
  NumpyRandom random(sample_seed(config_.sentences.seed, index));
  const Pair pair = pair_of(run, random);

  size_t size = 0;
  const auto append = [&](std::span<const int64_t> ids, int64_t type) {
    for (const int64_t id : ids) text[size] = id, types[size++] = type;
  };
  const auto part = [&](size_t begin, size_t end) {
    return std::span<const int64_t>(run.tokens).subspan(begin, end - begin);
  };
  append({&tokens_->cls, 1}, 0);
  append(part(pair.begin_a, pair.end_a), 0);
  append({&tokens_->sep, 1}, 0);
  append(part(pair.begin_b, pair.end_b), 1);
  if (pair.begin_b < pair.end_b) append({&tokens_->sep, 1}, 1);

  MaskedPositions masked;
  masking_.mask(text.first(size), run.target, random, masked);
  std::fill(text.begin() + size, text.end(), std::max<int64_t>(tokens_->pad, 0));
  std::fill(types.begin() + size, types.end(), 0);
  write_labels(masked, labels, loss_mask);
  for (size_t i = 0; i < text.size(); ++i)
    padding_mask[i] = i < size && text[i] != tokens_->pad ? 1 : 0;
  sample.get<int64_t>("is_random")[0] = pair.swapped ? 1 : 0;
  sample.get<int64_t>("truncated")[0] = pair.truncated ? 1 : 0;
  sample.get<float>("sample_weight")[0] = 1.0F;
  document_starts.assign(1, 0);
}

std::string BertDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "BertDataset");
  sentences_->describe(json);
  json.member("sequence_length", config_.sequence_length)
      .member("binary_head", config_.binary_head);
  describe_masking(config_.masking, *tokens_, json);
  json.end_object();
  return json.text();
}

}  // namespace megatron
