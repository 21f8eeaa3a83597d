#include "megatron/datasets/masked/t5_dataset.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

struct T5Dataset::Texts {
  std::vector<int64_t> encoder;
  std::vector<int64_t> spans;  // sentinels and what they stand for
};

SentenceSourceOptions t5_sentences(int64_t sequence_length, SentenceSourceOptions options) {
  MEGATRON_CHECK(sequence_length >= kT5MinSequenceLength, "sequence length of the encoder is ",
                 sequence_length, ", expected at least ", kT5MinSequenceLength);
  options.max_length = sequence_length - 2;
  options.min_sentences = 1;
  return options;
}

Columns t5_columns(int64_t sequence_length, int64_t decoder_sequence_length) {
  const std::vector<int64_t> encoder = {sequence_length}, decoder = {decoder_sequence_length};
  return Columns({{.name = "text_enc", .shape = encoder},
                  {.name = "text_dec", .shape = decoder},
                  {.name = "labels", .shape = decoder, .padding = -1},
                  {.name = "loss_mask",
                   .type = ElementType::kFloat32,
                   .shape = decoder,
                   .is_loss_weight = true,
                   .extends = "dec_mask"},
                  {.name = "enc_mask",
                   .type = ElementType::kUInt8,
                   .shape = encoder,
                   .split = false,
                   .marks_text = true},
                  {.name = "dec_mask",
                   .type = ElementType::kUInt8,
                   .shape = decoder,
                   .split = false,
                   .marks_text = true},
                  {.name = "truncated", .shape = {1}, .split = false}});
}

T5Needs t5_needs(int64_t sequence_length, double mask_probability) {
  const auto most = static_cast<int64_t>(
      std::nearbyint(mask_probability * static_cast<double>(sequence_length - 2)));
  return {.sentinels = std::max<int64_t>(most, 1),
          .decoder_positions = 1 + 2 * std::max<int64_t>(most, 1)};
}

std::string t5_warning(const T5DatasetConfig& config, const MaskedTokens& tokens) {
  const T5Needs needs = t5_needs(config.sequence_length, config.masking.probability);
  const auto sentinels = static_cast<int64_t>(tokens.sentinels.size());
  if (sentinels >= needs.sentinels && config.decoder_sequence_length >= needs.decoder_positions)
    return {};
  return cat("samples of ", config.sequence_length, " tokens with --mask-prob ",
             config.masking.probability, " may need up to ", needs.sentinels, " sentinels and ",
             needs.decoder_positions, " positions of the decoder; there are ", sentinels, " and ",
             config.decoder_sequence_length,
             ", and the first sample that needs more ends the run\nhint: safe are ",
             sentinels < needs.sentinels ? cat("--vocab-extra-ids ", needs.sentinels) : "",
             sentinels < needs.sentinels && config.decoder_sequence_length < needs.decoder_positions
                 ? " and "
                 : "",
             config.decoder_sequence_length < needs.decoder_positions
                 ? cat("--decoder-seq-length ", needs.decoder_positions)
                 : "");
}

T5Dataset::T5Dataset(std::unique_ptr<const SentenceSource> sentences,
                     std::shared_ptr<const MaskedTokens> tokens, const T5DatasetConfig& config)
    : Dataset(t5_columns(config.sequence_length, config.decoder_sequence_length)),
      sentences_(std::move(sentences)),
      tokens_(std::move(tokens)),
      config_(config),
      masking_(config.masking, *tokens_) {
  MEGATRON_CHECK(!tokens_->sentinels.empty(), tokens_->identity.name,
                 " has no sentinels <extra_id_0>, <extra_id_1>, ..., which samples of T5 need",
                 "\nhint: give a tokenizer of T5, BertWordPieceCase, or --vocab-extra-ids with a "
                 "vocabulary of BERT");
  MEGATRON_CHECK(tokens_->decoder_start >= 0 && tokens_->eos >= 0, tokens_->identity.name, " has ",
                 tokens_->decoder_start < 0 ? "neither a first token nor a padding token"
                                            : "no end-of-document token",
                 ", which samples of T5 need");
}

T5Dataset::Texts T5Dataset::split_at_spans(int64_t index, std::span<const int64_t> ids,
                                           const MaskedPositions& masked) const {
  struct Span {
    size_t begin, end;  // in `masked`
    int64_t first, last;
  };
  std::vector<Span> spans;
  size_t begin = 0;
  for (const size_t end : masked.ends) {
    spans.push_back({begin, end, masked.positions[begin], masked.positions[end - 1]});
    begin = end;
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.first < b.first; });
  MEGATRON_CHECK(spans.size() <= tokens_->sentinels.size(), sentences_->name(), ": sample ", index,
                 " of ", ids.size(), " tokens has ", spans.size(), " masked spans, ",
                 tokens_->identity.name, " has ", tokens_->sentinels.size(),
                 " sentinels\nhint: give --vocab-extra-ids ",
                 t5_needs(config_.sequence_length, config_.masking.probability).sentinels);
  Texts texts;
  int64_t at = 0;
  for (size_t k = 0; k < spans.size(); ++k) {
    const Span& span = spans[k];
    texts.encoder.insert(texts.encoder.end(), ids.begin() + at, ids.begin() + span.first);
    texts.encoder.push_back(tokens_->sentinels[k]);
    at = span.last + 1;
    texts.spans.push_back(tokens_->sentinels[k]);
    texts.spans.insert(texts.spans.end(), masked.originals.begin() + span.begin,
                       masked.originals.begin() + span.end);
  }
  texts.encoder.insert(texts.encoder.end(), ids.begin() + at, ids.end());
  return texts;
}

void T5Dataset::read(int64_t index, const SampleSpans& sample,
                     std::vector<int32_t>& document_starts) const {
  SentenceRun run;
  sentences_->read(index, run);
  const bool truncated = run.tokens.size() > static_cast<size_t>(run.target);
  if (truncated) run.tokens.resize(static_cast<size_t>(run.target));
  NumpyRandom random(sample_seed(config_.sentences.seed, index));
  MaskedPositions masked;
  masking_.draw_positions(run.tokens, run.target, random, masked);
  const Texts texts = split_at_spans(index, run.tokens, masked);
  const size_t decoder_length = texts.spans.size() + 1;
  MEGATRON_CHECK(static_cast<int64_t>(decoder_length) <= config_.decoder_sequence_length,
                 sentences_->name(), ": sample ", index, " of ", run.tokens.size(), " tokens has ",
                 masked.ends.size(), " masked spans, which with ", masked.positions.size(),
                 " tokens take ", decoder_length, " positions of the decoder, it has ",
                 config_.decoder_sequence_length, "\nhint: give --decoder-seq-length ",
                 t5_needs(config_.sequence_length, config_.masking.probability).decoder_positions);

  const auto fill = [](std::span<int64_t> out, std::span<const int64_t> ids, size_t from,
                       int64_t rest) {
    std::copy(ids.begin(), ids.end(), out.begin() + from);
    std::fill(out.begin() + from + ids.size(), out.end(), rest);
  };
  const int64_t nothing = std::max<int64_t>(tokens_->pad, 0);
  const auto text_enc = sample.get<int64_t>("text_enc"), text_dec = sample.get<int64_t>("text_dec"),
             labels = sample.get<int64_t>("labels");
  fill(text_enc, texts.encoder, 0, nothing);
  text_dec[0] = tokens_->decoder_start;
  fill(text_dec, texts.spans, 1, nothing);
  fill(labels, texts.spans, 0, -1);
  labels[texts.spans.size()] = tokens_->eos;
  const auto loss_mask = sample.get<float>("loss_mask");
  std::fill(loss_mask.begin(), loss_mask.end(), 0.0F);
  std::fill_n(loss_mask.begin(), decoder_length, 1.0F);
  const auto mask = [&](std::span<uint8_t> out, std::span<const int64_t> ids, size_t length,
                        bool starts) {
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = i < length && (ids[i] != tokens_->pad || (i == 0 && starts)) ? 1 : 0;
  };
  mask(sample.get<uint8_t>("enc_mask"), text_enc, texts.encoder.size(), false);
  mask(sample.get<uint8_t>("dec_mask"), text_dec, decoder_length, true);
  sample.get<int64_t>("truncated")[0] = truncated ? 1 : 0;
  document_starts.assign(1, 0);
}

std::string T5Dataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "T5Dataset");
  sentences_->describe(json);
  json.member("sequence_length", config_.sequence_length)
      .member("decoder_sequence_length", config_.decoder_sequence_length);
  describe_masking(config_.masking, *tokens_, json);
  json.end_object();
  return json.text();
}

}  // namespace megatron
