#include "megatron/datasets/tuning/sft_dataset.h"

#include <algorithm>
#include <filesystem>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/detail/encoder.h"
#include "megatron/datasets/detail/once_per_node.h"
#include "megatron/datasets/gpt/mock_dataset.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/datasets/sampler.h"
#include "megatron/datasets/sources/document_source.h"
#include "megatron/datasets/tuning/first_fit.h"

namespace megatron {
namespace {

// A row of a file, as JSON, with its position.
struct Row {
  std::string json;
  const DocumentFile* file = nullptr;
  int64_t number = 0;  // number of the line or table row
};

std::vector<Row> read_rows(const std::vector<DocumentFile>& files) {
  std::vector<Row> rows;
  ChunkOptions options;
  options.keys = {kAllColumns};
  read_chunks(files, options, [&](const Chunk& chunk) {
    if (chunk.file->format == InputFormat::kParquet) {
      int64_t begin = 0;
      for (size_t r = 0; r < chunk.ends.at(0).size(); ++r) {
        const int64_t end = chunk.ends[0][r];
        rows.push_back(
            {chunk.text.substr(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
             chunk.file, chunk.first_line + static_cast<int64_t>(r)});
        begin = end;
      }
      return true;
    }
    int64_t line = chunk.first_line;
    for (size_t at = 0; at < chunk.text.size(); ++line) {
      const size_t end = std::min(chunk.text.find('\n', at), chunk.text.size());
      if (!is_blank(std::string_view(chunk.text).substr(at, end - at)))
        rows.push_back({chunk.text.substr(at, end - at), chunk.file, line});
      at = end + 1;
    }
    return true;
  });
  return rows;
}

std::vector<DocumentFile> list_files(const std::string& path) {
  MEGATRON_CHECK(std::filesystem::exists(path), path,
                 ": there is no such file or folder of conversations",
                 "\nhint: --data-path, --train-data-path and --valid-data-path take JSON lines or "
                 "Parquet files here");
  const std::string inputs[] = {path};
  std::vector<DocumentFile> files = list_input_files(inputs, InputFormat::kAuto);
  for (const DocumentFile& file : files)
    MEGATRON_CHECK(file.format != InputFormat::kText, file.path,
                   ": is neither JSON lines (.jsonl, .json) nor Parquet (.parquet)",
                   "\nhint: fine-tuning reads conversations; indexed datasets are for pretraining");
  return files;
}

}  // namespace

struct SftTokens::Impl {
  std::string path, description;
  std::vector<NpyArray> cached;
  std::vector<int32_t> own_tokens;  // used if the cache cannot be written
  std::vector<int64_t> own_ends;
  std::span<const int32_t> tokens;
  std::span<const int64_t> ends;

  void encode(const std::vector<DocumentFile>& files, const ConversationEncoder& encoder);
};

void SftTokens::Impl::encode(const std::vector<DocumentFile>& files,
                             const ConversationEncoder& encoder) {
  const std::vector<Row> rows = read_rows(files);
  std::vector<std::vector<int32_t>> ids(rows.size());
  parallel_for(static_cast<int64_t>(rows.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Row& row = rows[static_cast<size_t>(i)];
      const std::string where =
          cat(row.file->path, row.file->format == InputFormat::kParquet ? ": row " : ": line ",
              row.number);
      encoder.encode_append(parse_conversation(row.json, where), where,
                            ids[static_cast<size_t>(i)]);
    }
  });
  for (std::vector<int32_t>& one : ids) {
    own_tokens.insert(own_tokens.end(), one.begin(), one.end());
    own_ends.push_back(static_cast<int64_t>(own_tokens.size()));
    one = {};
  }
}

SftTokens::SftTokens(const std::string& path, const ConversationEncoder& encoder,
                     const std::string& cache_path)
    : impl_(std::make_unique<Impl>()) {
  Impl& d = *impl_;
  d.path = path;
  const std::vector<DocumentFile> files = list_files(path);
  JsonWriter json;
  json.begin_object()
      .member("class", "SftTokens")
      .member("version", int64_t{1})
      .key("files")
      .begin_array();
  const std::filesystem::path folder =
      cache_path.empty() ? std::filesystem::path(path).parent_path() / "cache" / "SftDataset_tokens"
                         : std::filesystem::path(cache_path);
  for (const DocumentFile& file : files) {
    const std::filesystem::path name = file.path;
    const std::string key = cat(name.filename().string(), "-",
                                hash_text(std::filesystem::absolute(name).string()).substr(0, 16));
    json.begin_object().member("name", name.filename().string());
    json.member("hash", once_per_node({&folder, 1}, key, {&name, 1}, [&] {
                          return hash_text(read_file(name));
                        }).text);
    json.end_object();
  }
  json.end_array().member("encoding", encoder.description()).end_object();
  d.description = json.text();

  static const std::string kNames[] = {"tokens", "ends"};
  IndexCache cache(folder, "SftTokens", d.description);
  const auto build = [&](const std::function<void(std::span<const CacheArray>)>& store) {
    d.encode(files, encoder);
    const CacheArray arrays[] = {{"tokens",
                                  "<i4",
                                  {static_cast<int64_t>(d.own_tokens.size())},
                                  std::as_bytes(std::span(d.own_tokens))},
                                 {"ends",
                                  "<i8",
                                  {static_cast<int64_t>(d.own_ends.size())},
                                  std::as_bytes(std::span(d.own_ends))}};
    store(arrays);
    d.own_tokens = {};
    d.own_ends = {};
  };
  if (cache.get(kNames, build, d.cached)) {
    d.tokens = d.cached[0].as<int32_t>("<i4");
    d.ends = d.cached[1].as<int64_t>("<i8");
  } else {
    d.encode(files, encoder);
    d.tokens = d.own_tokens;
    d.ends = d.own_ends;
  }
  MEGATRON_CHECK(!d.ends.empty(), path, ": holds no conversations");
}

SftTokens::~SftTokens() = default;
int64_t SftTokens::size() const { return static_cast<int64_t>(impl_->ends.size()); }
const std::string& SftTokens::path() const { return impl_->path; }
const std::string& SftTokens::description() const { return impl_->description; }

std::span<const int32_t> SftTokens::operator[](int64_t conversation) const {
  const auto i = static_cast<size_t>(conversation);
  const int64_t begin = i == 0 ? 0 : impl_->ends[i - 1];
  return impl_->tokens.subspan(static_cast<size_t>(begin),
                               static_cast<size_t>(impl_->ends[i] - begin));
}

struct SftDataset::Impl {
  std::shared_ptr<const SftTokens> tokens;
  int64_t first = 0, last = 0;
  Split split;
  SftDatasetOptions options;
  SftCounts counts;
  std::vector<int64_t> usable;  // usable conversations
  PackedSequences sequences;    // of conversations

  // Positions that a conversation takes.
  int64_t places(int64_t conversation) const {
    return std::min(static_cast<int64_t>((*tokens)[conversation].size()) - 1,
                    options.sequence_length);
  }
  void choose();
  void pack(int64_t epoch);
};

void SftDataset::Impl::choose() {
  for (int64_t i = first; i < last; ++i) {
    const std::span<const int32_t> ids = (*tokens)[i];
    ++counts.conversations;
    const bool is_long = static_cast<int64_t>(ids.size()) - 1 > options.sequence_length;
    if (is_long && options.long_conversations == SftLongConversations::kDrop) {
      ++counts.dropped;
      continue;
    }
    const int64_t taken = ids.empty() ? 0 : places(i);
    const int64_t counted = taken == 0 ? 0
                                       : std::count_if(ids.begin() + 1, ids.begin() + 1 + taken,
                                                       [](int32_t id) { return id >= 0; });
    if (counted == 0) {
      ++counts.silent;
      continue;
    }
    counts.cut += is_long;
    counts.tokens += taken;
    counts.counted += counted;
    usable.push_back(i);
  }
}

void SftDataset::Impl::pack(int64_t epoch) {
  std::vector<int64_t> ordered = usable;
  if (split == Split::kTrain) {
    const std::vector<int64_t> order =
        torch_randperm(std::ssize(usable), static_cast<uint64_t>(options.seed + epoch));
    for (size_t i = 0; i < order.size(); ++i) ordered[i] = usable[static_cast<size_t>(order[i])];
  }
  sequences.pack(ordered,
                 [&](int64_t conversation) { return SequenceLoad{places(conversation), 0}; },
                 {options.sequence_length, 0});
}

SftDataset::SftDataset(std::shared_ptr<const SftTokens> tokens, std::pair<double, double> bounds,
                       Split split, std::optional<int64_t> num_samples,
                       const SftDatasetOptions& options)
    : Dataset(gpt_columns(options.sequence_length, /*own_positions=*/true)),
      impl_(std::make_unique<Impl>()) {
  Impl& d = *impl_;
  d.tokens = std::move(tokens);
  d.split = split;
  d.options = options;
  std::tie(d.first, d.last) = split_range(bounds, d.tokens->size());
  MEGATRON_CHECK(options.sequence_length > 0, "sequence length is ", options.sequence_length,
                 ", expected at least 1");
  MEGATRON_CHECK(
      d.first < d.last, d.tokens->path(), ": the ", to_string(split), " split holds none of the ",
      d.tokens->size(),
      " conversations\nhint: give a larger share of --split, or a file of its own with --",
      to_string(split), "-data-path");
  d.choose();
  MEGATRON_CHECK(!d.usable.empty(), d.tokens->path(), ": none of the ", d.counts.conversations,
                 " conversations of the ", to_string(split),
                 " split can be used: ", d.counts.dropped, " are longer than --seq-length, ",
                 d.counts.silent, " have no token that counts");
  for (int64_t epoch = 0; epoch == 0 || d.sequences.size() < num_samples.value_or(0); ++epoch) {
    d.pack(epoch);
    if (epoch == 0) d.counts.samples = d.sequences.size();
  }
}

SftDataset::~SftDataset() = default;
int64_t SftDataset::size() const { return impl_->sequences.size(); }
const SftCounts& SftDataset::counts() const { return impl_->counts; }

void SftDataset::read(int64_t index, const SampleSpans& sample,
                      std::vector<int32_t>& document_starts) const {
  const Impl& d = *impl_;
  const GPTSpans out(sample);
  MEGATRON_CHECK(index >= 0 && index < size(), d.tokens->path(), ": there is no sample ", index,
                 " of ", size());
  document_starts.clear();
  size_t at = 0, position = 0;
  for (const int64_t conversation : d.sequences[index]) {
    const std::span<const int32_t> ids = (*d.tokens)[conversation];
    const auto taken = static_cast<size_t>(d.places(conversation));
    document_starts.push_back(static_cast<int32_t>(at));
    for (position = 0; position < taken; ++position, ++at) {
      const auto id = [&](size_t i) { return int64_t{ids[i] < 0 ? ~ids[i] : ids[i]}; };
      out.tokens[at] = id(position);
      out.labels[at] = id(position + 1);
      out.position_ids[at] = static_cast<int64_t>(position);
      out.loss_mask[at] = ids[position + 1] >= 0 ? 1.0F : 0.0F;
    }
  }
  out.pad(at, static_cast<int64_t>(position));
}

std::string SftDataset::description() const {
  const Impl& d = *impl_;
  JsonWriter json;
  json.begin_object()
      .member("class", "SftDataset")
      .member("conversations", hash_text(d.tokens->description()));
  json.member("split", to_string(d.split)).member("first", d.first).member("last", d.last);
  json.member("sequence_length", d.options.sequence_length).member("random_seed", d.options.seed);
  json.member("long", d.options.long_conversations == SftLongConversations::kCut ? "cut" : "drop")
      .end_object();
  return json.text();
}

namespace {

class MockSftDataset final : public Dataset {
 public:
  MockSftDataset(Split split, int64_t num_samples, const GPTDatasetConfig& config)
      : Dataset(gpt_columns(config.sequence_length, config.own_positions())),
        documents_(split, num_samples, config) {}
  int64_t size() const override { return documents_.size(); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override {
    documents_.read(index, out, document_starts);
    const std::span<float> loss_mask = out.get<float>("loss_mask");
    const std::vector<int32_t> bounds = cu_seqlens(document_starts, sequence_length());
    for (size_t k = 0; k + 1 < bounds.size(); ++k) {
      const int32_t half = bounds[k] + (bounds[k + 1] - bounds[k]) / 2;
      for (int32_t i = bounds[k]; i < bounds[k + 1]; ++i)
        loss_mask[static_cast<size_t>(i)] = i >= half && i + 1 < bounds[k + 1] ? 1.0F : 0.0F;
    }
  }
  std::string description() const override {
    return "{\"class\": \"MockSftDataset\", \"of\": " + documents_.description() + "}";
  }

 private:
  MockGPTDataset documents_;
};

}  // namespace

std::shared_ptr<const Dataset> make_mock_sft_dataset(Split split, int64_t num_samples,
                                                     const GPTDatasetConfig& config) {
  GPTDatasetConfig apart = config;
  apart.inter_document_masking = true;
  return std::make_shared<const MockSftDataset>(split, num_samples, apart);
}

}  // namespace megatron
