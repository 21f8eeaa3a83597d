#include "megatron/datasets/gpt/mock_dataset.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"

namespace megatron {
namespace {

// SplitMix64: a hash of a counter.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

MockGPTDataset::MockGPTDataset(Split split, int64_t num_samples, const GPTDatasetConfig& config)
    : Dataset(gpt_columns(config.sequence_length, config.own_positions())),
      split_(split),
      num_samples_(num_samples),
      config_(config) {
  MEGATRON_CHECK(config.tokenizer.vocab_size >= 2,
                 "--mock-data needs a vocabulary of at least 2 tokens, got ",
                 config.tokenizer.vocab_size);
  MEGATRON_CHECK(config.sequence_length > 0, "sequence length is ", config.sequence_length,
                 ", expected at least 1");
}

void MockGPTDataset::read(int64_t index, const SampleSpans& sample,
                          std::vector<int32_t>& document_starts) const {
  const GPTSpans out(sample);
  MEGATRON_CHECK(index >= 0 && index < num_samples_, "there is no sample ", index, " of ",
                 num_samples_);
  const int64_t eod = config_.tokenizer.eod;
  const auto vocab = static_cast<uint64_t>(config_.tokenizer.vocab_size);
  uint64_t state =
      mix(mix(static_cast<uint64_t>(config_.seed) * kNumSplits + static_cast<uint64_t>(split_)) +
          static_cast<uint64_t>(index));
  // Most samples have several documents, however short they are.
  const auto longest = static_cast<uint64_t>(std::min<int64_t>(255, config_.sequence_length));
  const bool new_pieces = config_.reset_attention_mask || config_.inter_document_masking;
  const bool new_positions = config_.reset_position_ids || config_.inter_document_masking;
  document_starts.assign(1, 0);
  int64_t left = 0, position = 0;
  uint64_t token = 0;
  bool ended = false;  // the last token closed a document
  for (int64_t i = 0; i <= config_.sequence_length; ++i) {
    if (left == 0) {
      state = mix(state);
      left = 1 + static_cast<int64_t>(state % longest);
      token = (state >> 16) % vocab;
    }
    const int64_t id = --left == 0 && eod >= 0 ? eod : static_cast<int64_t>(token);
    token = (token + 1) % vocab;
    if (i > 0) out.labels[i - 1] = id;
    if (i == config_.sequence_length) break;
    if (ended && new_pieces) document_starts.push_back(static_cast<int32_t>(i));
    if (ended && new_positions) position = 0;
    out.tokens[i] = id;
    out.position_ids[i] = position++;
    ended = id == eod && eod >= 0;
    out.loss_mask[i] = ended && config_.eod_mask_loss ? 0.0F : 1.0F;
  }
}

std::string MockGPTDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "MockGPTDataset").member("split", to_string(split_));
  json.member("num_samples", num_samples_).member("sequence_length", config_.sequence_length);
  json.member("vocab_size", config_.tokenizer.vocab_size)
      .member("random_seed", config_.seed)
      .end_object();
  return json.text();
}

}  // namespace megatron
