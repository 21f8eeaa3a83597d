#include "megatron/datasets/tuning/text_to_text.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/masked/t5_dataset.h"
#include "megatron/datasets/tuning/epoch_order.h"

namespace megatron {
namespace {

using nlohmann::json;

TextToText text_of_line(std::string_view line, const std::string& where) {
  const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(object.is_object(), where,
                 ": expected a JSON object\nhint: {\"input\": \"...\", \"target\": \"...\"}");
  const auto string_of = [&](const char* name) {
    MEGATRON_CHECK(object[name].is_string(), where, ": \"", name, "\" is no string");
    return object[name].get<std::string>();
  };
  MEGATRON_CHECK(object.contains("input"), where,
                 ": nothing under \"input\"\nhint: {\"input\": \"...\", \"target\": \"...\"}");
  TextToText text{string_of("input"), {}, 0};
  if (object.contains("target") && !object["target"].is_null()) text.target = string_of("target");
  return text;
}

}  // namespace

std::vector<TextToText> read_text_to_text(const std::string& path) {
  std::vector<TextToText> texts;
  for_each_line_of(read_file(path), [&](std::string_view line, int64_t number) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    texts.push_back(text_of_line(line, cat(path, ":", number)));
    texts.back().line = number;
  });
  MEGATRON_CHECK(!texts.empty(), path, ": holds no texts");
  return texts;
}

TextToTextFile encode_text_to_text(const std::string& path, const Tokenizer& tokenizer,
                                   const TextToTextLengths& lengths) {
  const std::optional<int32_t> end = tokenizer.eod();
  MEGATRON_CHECK(end, path, ": the tokenizer has no end-of-document token, which ends both texts");
  const auto ids_of = [&](const std::string& text) {
    std::vector<int32_t> ids = tokenizer.encode(text);
    ids.push_back(*end);
    return ids;
  };
  // Whether there is more than `most`, which then goes.
  const auto cut = [](std::vector<int32_t>& ids, int64_t most) {
    if (std::ssize(ids) <= most) return false;
    ids.resize(static_cast<size_t>(most));
    return true;
  };
  TextToTextFile file;
  for (const TextToText& text : read_text_to_text(path)) {
    MEGATRON_CHECK(text.target, path, ":", text.line, ": no \"target\" to train on");
    TextToTextTokens& row = file.rows.emplace_back();
    row.input = ids_of(text.input);
    if (cut(row.input, lengths.encoder)) {
      row.input.back() = *end;
      ++file.inputs_cut;
    }
    row.target = ids_of(*text.target);
    if (cut(row.target, lengths.decoder)) ++file.targets_cut;
  }
  return file;
}

int32_t decoder_start_of(const Tokenizer& tokenizer) {
  const std::optional<int32_t> start = tokenizer.bos() ? tokenizer.bos() : tokenizer.pad();
  MEGATRON_CHECK(start,
                 "the tokenizer has neither a first token nor a padding token for the decoder to "
                 "start from");
  return *start;
}

std::vector<TextToTextTokens> mock_text_to_text(const DatasetRequest& request, Split split,
                                                int64_t count, const TextToTextLengths& lengths) {
  std::mt19937_64 random(static_cast<uint64_t>(3 * request.seed + static_cast<int64_t>(split)));
  const auto draw = [&](int64_t below) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(std::max<int64_t>(1, below)));
  };
  const auto text = [&](int64_t most) {
    std::vector<int32_t> ids(static_cast<size_t>(1 + draw(most)));
    for (int32_t& id : ids) id = static_cast<int32_t>(draw(request.tokenizer.vocab_size));
    return ids;
  };
  std::vector<TextToTextTokens> rows(static_cast<size_t>(std::max<int64_t>(1, count)));
  for (TextToTextTokens& row : rows) {
    row.input = text(lengths.encoder);
    row.target = text(lengths.decoder);
  }
  return rows;
}

TextToTextDataset::TextToTextDataset(std::vector<TextToTextTokens> rows, int64_t num_samples,
                                     TextToTextConfig config)
    : Dataset(t5_columns(config.lengths.encoder, config.lengths.decoder)),
      rows_(std::move(rows)),
      in_order_(num_samples == 0),
      config_(std::move(config)),
      order_(epoch_order(std::ssize(rows_), num_samples, config_.seed)) {}

void TextToTextDataset::read(int64_t index, const SampleSpans& sample,
                             std::vector<int32_t>& document_starts) const {
  MEGATRON_CHECK(index >= 0 && index < size(), "there is no sample ", index, " of ", size());
  const TextToTextTokens& row = rows_[static_cast<size_t>(order_[static_cast<size_t>(index)])];
  const auto text_enc = sample.get<int64_t>("text_enc"), text_dec = sample.get<int64_t>("text_dec"),
             labels = sample.get<int64_t>("labels");
  const auto enc_mask = sample.get<uint8_t>("enc_mask"), dec_mask = sample.get<uint8_t>("dec_mask");
  const auto loss_mask = sample.get<float>("loss_mask");
  for (size_t i = 0; i < text_enc.size(); ++i) {
    const bool inside = i < row.input.size();
    text_enc[i] = inside ? row.input[i] : config_.pad;
    enc_mask[i] = inside ? 1 : 0;
  }
  for (size_t i = 0; i < text_dec.size(); ++i) {
    const bool inside = i < row.target.size();
    text_dec[i] = !inside ? config_.pad : i == 0 ? config_.decoder_start : row.target[i - 1];
    labels[i] = inside ? row.target[i] : -1;
    loss_mask[i] = inside ? 1.0F : 0.0F;
    dec_mask[i] = inside ? 1 : 0;
  }
  sample.get<int64_t>("truncated")[0] = 0;
  document_starts.assign(1, 0);
}

std::string TextToTextDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "TextToTextDataset");
  json.member("texts", std::ssize(rows_)).member("num_samples", size());
  json.member("in_order", in_order_).member("sequence_length", config_.lengths.encoder);
  json.member("decoder_sequence_length", config_.lengths.decoder).member("seed", config_.seed);
  json.member("decoder_start", config_.decoder_start).member("pad", config_.pad);
  json.member("source", config_.description).end_object();
  return json.text();
}

}  // namespace megatron
