#include "tools/support/inspect_media.h"

#include <algorithm>
#include <filesystem>
#include <memory>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/multimodal/medium_facts.h"
#include "megatron/datasets/multimodal/multimodal_encoder.h"
#include "megatron/datasets/multimodal/multimodal_source.h"
#include "megatron/datasets/multimodal/png_file.h"
#include "megatron/datasets/multimodal/sample_text.h"
#include "megatron/media/decode.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBatch = 256;  // rows that are read before they are encoded side by side

// The name of a medium in messages.
std::string medium_name(const SourceSample& sample, size_t medium) {
  const std::string& path = sample.row.media[medium].path;
  return cat(sample.name, ": ", path.empty() ? cat("medium ", medium + 1) : path);
}

std::string medium_bytes(const SourceSample& sample, size_t medium) {
  const FileRange& place = sample.places[medium];
  return place.path.empty() ? sample.row.media[medium].bytes
                            : read_range(place, medium_name(sample, medium));
}

std::span<const uint8_t> as_bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

struct ReadSample {
  SourceSample source;
  std::vector<MediumFacts> media;
  EncodedSample encoded;
};

class Inspector {
 public:
  Inspector(const InspectMediaConfig& config, const TokenizerConfig& tokenizer)
      : config_(config),
        tokenizer_(make_tokenizer(
            tokenizer.tokenizer_type.empty() ? find_tokenizer(config.media_model) : tokenizer)),
        conversations_(*tokenizer_, config.media_model, template_config()),
        encoder_(*tokenizer_, conversations_,
                 read_media_rules(config.media_model, config.audio_media_model, *tokenizer_),
                 config.escape_modality_text) {}

  ReadSample read(const SourceRow& row, const std::string& file) const {
    const fs::path root =
        config_.media_root.empty() ? fs::path(file).parent_path() : fs::path(config_.media_root);
    ReadSample out{read_sample(row, root.empty() ? fs::path(".") : root), {}, {}};
    for (size_t i = 0; i < out.source.row.media.size(); ++i)
      out.media.push_back(read_medium_facts(out.source.row.media[i].kind,
                                            as_bytes(medium_bytes(out.source, i)),
                                            medium_name(out.source, i)));
    out.encoded = encoder_.encode(out.source.row, out.media, out.source.name);
    return out;
  }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const MediaRules& rules() const { return encoder_.rules(); }

 private:
  SftConfig template_config() const {
    SftConfig out;
    out.chat_template = config_.chat_template;
    return out;
  }
  const InspectMediaConfig& config_;
  std::unique_ptr<Tokenizer> tokenizer_;
  ConversationEncoder conversations_;
  MultimodalEncoder encoder_;
};

// Calls use(row, file) for each row of all files, until it returns false.
template <class Use>
void for_each_row(const std::vector<std::string>& paths, Use&& use) {
  bool go_on = true;
  for (const std::string& path : paths) {
    const SourceFiles files = list_source_files(path);
    for (size_t i = 0; i < files.paths.size(); ++i) {
      if (go_on)
        read_source_file(
            files, i, [&](SourceRow row) { go_on = go_on && use(std::move(row), files.paths[i]); });
    }
  }
}

struct Counts {
  int64_t samples = 0, images = 0, sounds = 0, tokens = 0, rows = 0, counted = 0, longest = 0;
  int64_t bad_orientations = 0;

  void add(const ReadSample& sample) {
    ++samples;
    for (const MediumFacts& medium : sample.media) {
      ++(medium.kind == MediaKind::kImage ? images : sounds);
      bad_orientations += medium.bad_orientation;
    }
    for (const MediaRun& run : sample.encoded.runs) rows += run.rows;
    counted += std::count_if(sample.encoded.ids.begin(), sample.encoded.ids.end(),
                             [](int32_t id) { return id >= 0; });
    const int64_t length = sample_positions(sample.encoded) + 1;
    tokens += length;
    longest = std::max(longest, length);
  }
};

Counts count_all(const Inspector& inspector, const std::vector<std::string>& paths) {
  Counts out;
  std::vector<std::pair<SourceRow, std::string>> rows;
  const auto encode = [&] {
    std::vector<ReadSample> samples(rows.size());
    parallel_for(std::ssize(rows), 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        samples[static_cast<size_t>(i)] =
            inspector.read(rows[static_cast<size_t>(i)].first, rows[static_cast<size_t>(i)].second);
    });
    for (const ReadSample& sample : samples) out.add(sample);
    rows.clear();
  };
  for_each_row(paths, [&](SourceRow row, const std::string& file) {
    rows.emplace_back(std::move(row), file);
    if (rows.size() == kBatch) encode();
    return true;
  });
  encode();
  return out;
}

void print_counts(const Counts& counts, bool json) {
  const std::pair<const char*, int64_t> facts[] = {
      {"samples", counts.samples},        {"images", counts.images},
      {"sounds", counts.sounds},          {"tokens", counts.tokens},
      {"media_tokens", counts.rows},      {"counted_tokens", counts.counted},
      {"longest_sample", counts.longest}, {"bad_orientations", counts.bad_orientations}};
  JsonWriter writer;
  writer.begin_object();
  for (const auto& [name, value] : facts) {
    if (name == std::string_view("bad_orientations") && value == 0) continue;  // rare
    writer.member(name, value);
    if (!json) print_line(cat(replaced(name, "_", " "), " ", format_count(value)));
  }
  writer.end_object();
  if (json) print_line(writer.text());
}

// Writes the pictures of all images; their files.
std::vector<std::string> save_pictures(const ReadSample& sample, const MediaRules& rules,
                                       const fs::path& folder, int64_t number) {
  std::vector<std::string> out;
  fs::create_directories(folder);
  for (size_t i = 0; i < sample.media.size(); ++i) {
    if (sample.media[i].kind != MediaKind::kImage) continue;
    const std::string bytes = medium_bytes(sample.source, i);
    const Image image = decode_image({as_bytes(bytes), medium_name(sample.source, i)});
    const std::vector<Image> pictures = process_image(rules.processor, image);
    for (size_t p = 0; p < pictures.size(); ++p) {
      out.push_back((folder / cat("sample-", number, "-medium-", i + 1, "-picture-", p + 1, ".png"))
                        .string());
      write_file_atomically(out.back(), png_bytes(pictures[p]));
    }
  }
  return out;
}

void print_sample(const InspectMediaConfig& config, const Inspector& inspector,
                  const ReadSample& sample, int64_t number, bool json) {
  const SampleText text = sample_text(sample.encoded, sample.media, inspector.tokenizer());
  std::vector<std::string> files;
  if (!config.save_media.empty())
    files = save_pictures(sample, inspector.rules(), config.save_media, number);
  if (json) {
    JsonWriter writer;
    writer.begin_object().member("sample", number).member("name", sample.source.name);
    writer.member("text", text.text).member("counted", text.counted);
    writer.member("tokens", text.tokens).member("counted_tokens", text.counted_tokens);
    writer.member("files", files).end_object();
    return print_line(writer.text());
  }
  print_line(cat("sample ", number, ", ", sample.source.name));
  print_line(text.text);
  print_line(cat(text.tokens, " tokens, of which ", text.counted_tokens, " count:"));
  for (const std::string& piece : text.counted) print_line(cat("  ", json_quote(piece)));
  for (const std::string& file : files) print_line(cat("wrote ", file));
}

}  // namespace

void InspectMediaConfig::fields(FieldVisitor& v) {
  v.group("inspect-dataset: text with media");
  v.field(
      "media_model", media_model,
      "folder of a Hugging Face model, whose config.json, image processor and tokenizer say what "
      "images and sound become; the input is rows of text with media (.tar, .json, .jsonl, "
      ".parquet)");
  v.field("audio_media_model", audio_media_model,
          "folder of a Hugging Face model that hears, which says what sounds become; --media-model "
          "then says what images become");
  v.field("media_root", media_root,
          "folder of the media that rows name; empty: the folder of the row's file");
  v.field("save_media", save_media,
          "write what the model sees of the images of --sample into this folder, as PNG files");
  v.field("chat_template", chat_template,
          "a file, or the template itself; empty: that of the tokenizer");
  v.field(
      "escape_modality_text", escape_modality_text,
      "encode spellings of special tokens in texts as ordinary text; without it they are errors");
}

void InspectMediaConfig::validate(Violations& violations) const {
  if (!media_model.empty()) return;
  violations.require(audio_media_model.empty(), "--audio-media-model needs --media-model");
  violations.require(media_root.empty(), "--media-root needs --media-model");
  violations.require(save_media.empty(), "--save-media needs --media-model");
  violations.require(chat_template.empty(), "--chat-template needs --media-model");
  violations.require(!escape_modality_text, "--escape-modality-text needs --media-model");
}

void inspect_media(const InspectMediaConfig& config, const TokenizerConfig& tokenizer,
                   const std::vector<std::string>& paths, std::optional<int64_t> sample,
                   bool json) {
  const Inspector inspector(config, tokenizer);
  if (!sample) return print_counts(count_all(inspector, paths), json);
  int64_t rows = 0;
  bool found = false;
  for_each_row(paths, [&](const SourceRow& row, const std::string& file) {
    if (rows++ != *sample) return true;
    found = true;
    print_sample(config, inspector, inspector.read(row, file), *sample, json);
    return false;
  });
  MEGATRON_CHECK(found, "--sample ", *sample, ": there are ", rows, " rows");
}

}  // namespace megatron
