#include "megatron/datasets/tuning/labelled_texts.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/utf8.h"
#include "megatron/chat/python_text.h"
#include "megatron/datasets/tuning/epoch_order.h"

namespace megatron {
namespace {

using nlohmann::json;

constexpr std::string_view kMnli[] = {"contradiction", "entailment", "neutral"};

std::vector<std::string_view> split_tabs(std::string_view line) {
  std::vector<std::string_view> cells;
  for (size_t begin = 0;;) {
    const size_t end = line.find('\t', begin);
    cells.push_back(line.substr(begin, end - begin));
    if (end == std::string_view::npos) return cells;
    begin = end + 1;
  }
}

std::optional<double> number_of(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The columns of a TSV file; -1: it has none.
struct TsvColumns {
  std::string_view text, text_b, label;
};
// Of several label columns the last counts, as in MNLI.
constexpr TsvColumns kKnownColumns[] = {{"sentence1", "sentence2", "gold_label"},
                                        {"sentence1", "sentence2", "score"},
                                        {"sentence1", "sentence2", "label"},
                                        {"question1", "question2", "is_duplicate"},
                                        {"question", "sentence", "label"},
                                        {"#1 String", "#2 String", "Quality"},
                                        {"sentence", "", "label"}};

class LabelledReader {
 public:
  LabelledReader(const std::string& path, const LabelOptions& options)
      : path_(path), options_(options) {}

  LabelledFile run() {
    const bool tsv = path_.ends_with(".tsv");
    for_each_line_of(read_file(path_), [&](std::string_view line, int64_t number) {
      number_ = number;
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (line.find_first_not_of(" \t") == std::string_view::npos) return;
      tsv ? add_row(line) : add_object(line);
    });
    MEGATRON_CHECK(!file_.texts.empty(), path_, ": holds no texts");
    return std::move(file_);
  }

 private:
  std::string where() const { return cat(path_, ":", number_); }

  // The label that a cell or a string spells.
  double label_of(std::string_view text) const {
    const int64_t classes = options_.classes;
    const auto named = [&](const auto& names) -> std::optional<double> {
      const auto found = std::find(std::begin(names), std::end(names), text);
      if (found == std::end(names)) return std::nullopt;
      return static_cast<double>(found - std::begin(names));
    };
    std::optional<double> label;
    if (!options_.labels.empty()) {
      label = named(options_.labels);
    } else {
      label = number_of(text);
      if (!label && classes == std::ssize(kMnli)) label = named(kMnli);
    }
    return within_classes(label, text);
  }

  double within_classes(std::optional<double> label, std::string_view text) const {
    if (options_.classes == 1) {
      MEGATRON_CHECK(label && std::isfinite(*label), where(), ": label \"", text,
                     "\" is no number, and --bert-classes 1 predicts one");
      return *label;
    }
    MEGATRON_CHECK(label && *label >= 0 && *label < static_cast<double>(options_.classes) &&
                       *label == std::floor(*label),
                   where(), ": label \"", text, "\" is none of the ", options_.classes, " classes",
                   options_.labels.empty()
                       ? cat("\nhint: 0 to ", options_.classes - 1, ", or name them with --labels")
                       : cat("\nhint: --labels names ", join(options_.labels)));
    return *label;
  }

  static std::string join(const std::vector<std::string>& names) {
    return std::accumulate(names.begin(), names.end(), std::string(),
                           [](const std::string& all, const std::string& name) {
                             return all.empty() ? name : cat(all, ", ", name);
                           });
  }

  void add_row(std::string_view line) {
    std::vector<std::string_view> cells = split_tabs(line);
    if (width_ == 0) {
      width_ = cells.size();
      if (read_header(cells)) return;
    }
    const auto skipped = [&] {
      return cells.size() != width_ || cells[text_].empty() || cells[*text_b_].empty();
    };
    if (skips_ && skipped()) {
      ++file_.num_skipped;
      return;
    }
    MEGATRON_CHECK(cells.size() == width_, where(), ": has ", cells.size(),
                   " columns, the first line has ", width_);
    LabelledText& row = file_.texts.emplace_back();
    row.text = clean_text(cells[text_]);
    if (text_b_) row.text_b = clean_text(cells[*text_b_]);
    if (label_) row.label = label_of(cells[*label_]);
  }

  // Whether the first line names columns, which are then known.
  bool read_header(std::vector<std::string_view> cells) {
    if (cells[0].starts_with("\xEF\xBB\xBF")) cells[0].remove_prefix(3);
    const auto column = [&](std::string_view name) -> std::optional<size_t> {
      const auto found = std::find(cells.begin(), cells.end(), name);
      if (found == cells.end()) return std::nullopt;
      return static_cast<size_t>(found - cells.begin());
    };
    for (const bool labelled : {true, false})
      for (const TsvColumns& known : kKnownColumns) {
        const auto text = column(known.text), text_b = column(known.text_b);
        const auto label = labelled ? column(known.label) : std::nullopt;
        if (!text || (!known.text_b.empty() && !text_b) || (labelled && !label)) continue;
        text_ = *text;
        text_b_ = text_b;
        label_ = label;
        skips_ = known.text == "question1";
        return true;
      }
    const bool cola = cells.size() == 4 && number_of(cells[1]).has_value();
    MEGATRON_CHECK(cola, where(), ": names no columns of GLUE: ", short_text(cells),
                   "\nhint: sentence1, sentence2 and label for example; other texts as JSON lines, "
                   "{\"text\", \"text_b\", \"label\"}");
    text_ = 3;
    label_ = 1;
    return false;
  }

  static std::string short_text(const std::vector<std::string_view>& cells) {
    std::string all;
    for (const std::string_view cell : cells) all += cat(all.empty() ? "" : ", ", cell);
    return json_quote(std::string_view(all).substr(0, 60));
  }

  void add_object(std::string_view line) {
    const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(object.is_object(), where(), ": expected a JSON object");
    MEGATRON_CHECK(object.contains("text") && object["text"].is_string(), where(),
                   ": no string under \"text\"");
    LabelledText row;
    row.text = clean_text(object["text"].get<std::string>());
    if (object.contains("text_b")) {
      MEGATRON_CHECK(object["text_b"].is_string(), where(), ": \"text_b\" is no string");
      row.text_b = clean_text(object["text_b"].get<std::string>());
    }
    if (object.contains("label") && !object["label"].is_null()) {
      const json& label = object["label"];
      MEGATRON_CHECK(label.is_number() || label.is_string(), where(),
                     ": \"label\" is neither a number nor a string");
      row.label = label.is_string() ? label_of(label.get<std::string>())
                                    : within_classes(label.get<double>(), label.dump());
    }
    file_.texts.push_back(std::move(row));
  }

  const std::string& path_;
  const LabelOptions& options_;
  LabelledFile file_;
  int64_t number_ = 0;
  size_t width_ = 0, text_ = 0;
  std::optional<size_t> text_b_, label_;
  bool skips_ = false;
};

}  // namespace

LabelledFile read_labelled_texts(const std::string& path, const LabelOptions& options) {
  return LabelledReader(path, options).run();
}

std::string clean_text(std::string_view text) {
  std::string out;
  bool in_space = false;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = decode_utf8(text, at);
    const bool space = c.valid && python_is_space(c.code);
    if (!space)
      out += text.substr(at, static_cast<size_t>(c.bytes));
    else if (!in_space)
      out += ' ';
    in_space = space;
    at += static_cast<size_t>(c.bytes);
  }
  for (int i = 0; i < 3; ++i) out = replaced(out, " . ", ". ");
  return out;
}

PairTokens encode_pair(const Tokenizer& tokenizer, const LabelledText& text, int64_t most) {
  const std::optional<int32_t> cls = tokenizer.cls(), sep = tokenizer.sep();
  MEGATRON_CHECK(cls && sep, "the tokenizer has no [CLS] or no [SEP], which stand around texts");
  PairTokens out;
  out.ids.push_back(*cls);
  tokenizer.encode_append(text.text, out.ids);
  if (std::ssize(out.ids) - 1 > text.most_of_text)
    out.ids.resize(static_cast<size_t>(text.most_of_text) + 1);
  out.ids.push_back(*sep);
  const size_t first = out.ids.size();
  if (text.text_b) tokenizer.encode_append(*text.text_b, out.ids);
  const bool cut = std::ssize(out.ids) >= most && (text.text_b || std::ssize(out.ids) > most);
  if (cut) out.ids.resize(static_cast<size_t>(most) - 1);
  if (text.text_b || cut) out.ids.push_back(*sep);
  out.first_of_b = static_cast<int64_t>(std::min(first, out.ids.size()));
  return out;
}

Columns labelled_columns(int64_t s) {
  return Columns({{.name = "text", .shape = {s}},
                  {.name = "types", .shape = {s}},
                  {.name = "padding_mask",
                   .type = ElementType::kUInt8,
                   .shape = {s},
                   .split = false,
                   .marks_text = true},
                  {.name = "target", .type = ElementType::kFloat32, .shape = {1}, .split = false},
                  {.name = "sample_weight",
                   .type = ElementType::kFloat32,
                   .shape = {1},
                   .split = false,
                   .is_loss_weight = true}});
}

std::vector<LabelledTokens> encode_labelled(const Tokenizer& tokenizer,
                                            const std::vector<LabelledText>& texts, int64_t most) {
  std::vector<LabelledTokens> rows;
  for (const LabelledText& text : texts) {
    MEGATRON_CHECK(text.label.has_value(), "text ", rows.size() + 1, " has no label to train on");
    rows.push_back({encode_pair(tokenizer, text, most), static_cast<float>(*text.label)});
  }
  return rows;
}

std::vector<LabelledTokens> mock_labelled(int64_t count, int64_t seed, int64_t vocab_size,
                                          int64_t classes, int64_t most) {
  std::vector<LabelledTokens> rows(static_cast<size_t>(count));
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  const auto draw = [&](int64_t below) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(std::max<int64_t>(1, below)));
  };
  for (int64_t i = 0; i < count; ++i) {
    auto& [tokens, label] = rows[static_cast<size_t>(i)];
    const int64_t length = 1 + draw(most);
    for (int64_t k = 0; k < length; ++k)
      tokens.ids.push_back(static_cast<int32_t>(draw(vocab_size)));
    tokens.first_of_b = 1 + draw(length);
    label = static_cast<float>(classes == 1 ? draw(100) : i % classes) / (classes == 1 ? 50.0F : 1);
  }
  return rows;
}

std::vector<LabelledTokens> mock_labelled(const DatasetRequest& request, Split split, int64_t count,
                                          int64_t classes) {
  return mock_labelled(std::max<int64_t>(1, count), 3 * request.seed + static_cast<int64_t>(split),
                       request.tokenizer.vocab_size, classes, request.sequence_length);
}

LabelledDatasetConfig labelled_dataset_config(const DatasetRequest& request) {
  return {
      request.sequence_length, request.seed, std::max<int64_t>(0, request.tokenizer.pad), 1, {}};
}

LabelledTextDataset::LabelledTextDataset(std::vector<LabelledTokens> rows, int64_t num_samples,
                                         LabelledDatasetConfig config)
    : Dataset(labelled_columns(config.sequence_length)),
      rows_(std::move(rows)),
      in_order_(num_samples == 0),
      config_(std::move(config)),
      order_(epoch_order(std::ssize(rows_), num_samples, config_.seed, config_.group)) {}

void LabelledTextDataset::read(int64_t index, const SampleSpans& sample,
                               std::vector<int32_t>& document_starts) const {
  MEGATRON_CHECK(index >= 0 && index < size(), "there is no sample ", index, " of ", size());
  const LabelledTokens& row = rows_[static_cast<size_t>(order_[static_cast<size_t>(index)])];
  const auto text = sample.get<int64_t>("text"), types = sample.get<int64_t>("types");
  const auto mask = sample.get<uint8_t>("padding_mask");
  const size_t length = row.tokens.ids.size();
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = i < length ? row.tokens.ids[i] : config_.pad;
    types[i] = i < length && static_cast<int64_t>(i) >= row.tokens.first_of_b ? 1 : 0;
    mask[i] = i < length ? 1 : 0;
  }
  sample.get<float>("target")[0] = row.label;
  sample.get<float>("sample_weight")[0] = 1.0F;
  document_starts.assign(1, 0);
}

std::string LabelledTextDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "LabelledTextDataset");
  json.member("texts", std::ssize(rows_)).member("num_samples", size());
  json.member("in_order", in_order_).member("sequence_length", config_.sequence_length);
  json.member("seed", config_.seed).member("pad", config_.pad);
  if (config_.group > 1) json.member("group", config_.group);
  json.member("source", config_.description).end_object();
  return json.text();
}

}  // namespace megatron
