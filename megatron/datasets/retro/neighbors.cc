#include "megatron/datasets/retro/neighbors.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/progress.h"
#include "megatron/datasets/blended_dataset.h"
#include "megatron/datasets/gpt/gpt_dataset.h"

namespace megatron {
namespace {

using nlohmann::json;

constexpr const char* kDescription = "description.json";

const GPTDataset& gpt_member(const Dataset& samples, int64_t member) {
  const auto* blend = dynamic_cast<const BlendedDataset*>(&samples);
  const Dataset& part = blend == nullptr ? samples : *blend->members()[static_cast<size_t>(member)];
  const auto* gpt = dynamic_cast<const GPTDataset*>(&part);
  MEGATRON_CHECK(gpt != nullptr, "samples with neighbours are of indexed data, with --data-path",
                 "\nhint: without --mock-data");
  return *gpt;
}

int64_t num_members(const Dataset& samples) {
  const auto* blend = dynamic_cast<const BlendedDataset*>(&samples);
  return blend == nullptr ? 1 : std::ssize(blend->members());
}

bool same_file(const IndexedDataset& a, const IndexedDataset& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(idx_path(a.prefix()), idx_path(b.prefix()), ignored);
}

int64_t chunks_of_sample(const Dataset& samples, int64_t chunk_length) {
  const int64_t s = samples.sequence_length();
  MEGATRON_CHECK(s % chunk_length == 0, "a sample has ", s, " tokens, which is no multiple of the ",
                 chunk_length, " of a chunk\nhint: another --seq-length or --retro-chunk-length");
  return s / chunk_length;
}

json description_of(const Dataset& samples) { return json::parse(samples.description()); }

// Neighbours of the chunks of samples [first, last) of a block of rows.
class BlockQuery {
 public:
  BlockQuery(const RetroSamples& samples, const ChunkDatabase& database, const TextOfIds& text_of,
             const EmbedTexts& embed, const VectorIndex& index, const NeighborSearch& search)
      : samples_(samples),
        database_(database),
        text_of_(text_of),
        embed_(embed),
        index_(index),
        search_(search) {}

  std::vector<int32_t> rows(const RowBlock& block, int64_t chunks) const {
    const int64_t m = database_.chunk_length();
    std::vector<RetroSample> samples;
    const int64_t first = block.begin / chunks;
    for (int64_t s = first; s * chunks < block.end; ++s) samples.push_back(samples_.read(s));
    std::vector<std::string> texts;
    std::vector<int64_t> asked;  // rows with text
    for (int64_t row = block.begin; row < block.end; ++row) {
      const RetroSample& sample = samples[static_cast<size_t>(row / chunks - first)];
      std::string text =
          text_of_(std::span(sample.ids).subspan(static_cast<size_t>(row % chunks * m), m));
      if (text.empty()) continue;
      texts.push_back(std::move(text));
      asked.push_back(row);
    }
    const std::vector<float> vectors = embed_(texts);
    check_finite(vectors, index_.width(), 0, [&](int64_t i) {
      return cat("sample ", asked[static_cast<size_t>(i)] / chunks, ", \"",
                 texts[static_cast<size_t>(i)], "\",");
    });
    const std::vector<int64_t> found = index_.search(vectors, search_.found);
    std::vector<int32_t> out(static_cast<size_t>(block.size() * search_.saved), -1);
    for (size_t i = 0; i < asked.size(); ++i)
      keep_neighbors(
          std::span(found).subspan(i * static_cast<size_t>(search_.found), search_.found),
          database_, samples[static_cast<size_t>(asked[i] / chunks - first)],
          std::span(out).subspan(static_cast<size_t>((asked[i] - block.begin) * search_.saved),
                                 search_.saved));
    return out;
  }

 private:
  const RetroSamples& samples_;
  const ChunkDatabase& database_;
  const TextOfIds& text_of_;
  const EmbedTexts& embed_;
  const VectorIndex& index_;
  const NeighborSearch& search_;
};

// Of which samples the project has neighbours of this split, and how they differ from these.
std::string others_of_split(const RetroProject& project, const std::string& split,
                            const Dataset& samples) {
  std::string text;
  std::error_code ignored;
  for (const auto& folder :
       std::filesystem::directory_iterator(project.folder() / "query", ignored)) {
    const std::string name = folder.path().filename();
    const std::filesystem::path file = folder.path() / kDescription;
    if (!name.starts_with(split + "-") || !std::filesystem::exists(file)) continue;
    const json there = json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
    if (!there.is_object() || !there.contains("samples")) continue;
    text += cat("\ndetail: of the samples of ", name, " ",
                json_differences(there["samples"], description_of(samples)));
  }
  return text;
}

struct StoredNeighbors {
  std::filesystem::path folder;
  int64_t samples = 0;
  BlockShape shape;
};

StoredNeighbors open_neighbors(const RetroProject& project, const std::string& split,
                               const Dataset& samples, int64_t chunk_length) {
  StoredNeighbors out;
  out.folder = project.query_folder(split, samples.fingerprint());
  const std::filesystem::path file = out.folder / kDescription;
  MEGATRON_CHECK(std::filesystem::exists(file), project.folder().string(),
                 " has no neighbours of these ", split, " samples",
                 others_of_split(project, split, samples),
                 "\nhint: megatron retro --retro-tasks query-neighbors with the flags of this run");
  const json about = json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  const auto number = [&](const char* name) {
    const json value = about.is_object() ? about.value(name, json()) : json();
    MEGATRON_CHECK(value.is_number_integer() && value > 0, file.string(), " has no \"", name, "\"",
                   "\nhint: remove the folder and query again");
    return value.get<int64_t>();
  };
  out.samples = number("num_samples");
  out.shape = {out.samples * chunks_of_sample(samples, chunk_length), number("block_rows"),
               number("saved"), "<i4"};
  return out;
}

}  // namespace

RetroSamples::RetroSamples(std::shared_ptr<const Dataset> samples, const ChunkDatabase& database,
                           int64_t count)
    : samples_(std::move(samples)),
      size_(count > 0 ? std::min(count, samples_->size()) : samples_->size()) {
  for (int64_t m = 0; m < num_members(*samples_); ++m) {
    const IndexedDataset& data = gpt_member(*samples_, m).data();
    int64_t found = -1;
    for (int64_t d = 0; d < database.num_data_sets() && found < 0; ++d)
      if (same_file(data, database.data(d))) found = d;
    data_sets_.push_back(found);
  }
}

RetroSample RetroSamples::read(int64_t index) const {
  const auto [member, place] = samples_->locate(index);
  RetroSample out;
  out.ids = samples_->sample(index).get<int64_t>("tokens");
  out.data_set = data_sets_[static_cast<size_t>(member)];
  out.documents = gpt_member(*samples_, member).sequences(place);
  return out;
}

void keep_neighbors(std::span<const int64_t> found, const ChunkDatabase& database,
                    const RetroSample& sample, std::span<int32_t> out) {
  std::fill(out.begin(), out.end(), -1);
  size_t kept = 0;
  for (const int64_t id : found) {
    if (kept == out.size()) return;
    if (id < 0) continue;
    const DocumentChunk chunk = database.chunk(id);
    const bool own = chunk.data_set == sample.data_set &&
                     std::find(sample.documents.begin(), sample.documents.end(), chunk.document) !=
                         sample.documents.end();
    if (!own) out[kept++] = static_cast<int32_t>(id);
  }
}

void query_neighbors(const RetroProject& project, const std::string& split,
                     const RetroSamples& samples, const ChunkDatabase& database,
                     const TextOfIds& text_of, const EmbedTexts& embed, const VectorIndex& index,
                     const NeighborSearch& search, const RankShare& share) {
  const int64_t chunks = chunks_of_sample(samples.dataset(), database.chunk_length());
  const std::filesystem::path folder = project.query_folder(split, samples.dataset().fingerprint());
  const BlockFiles files(folder, {samples.size() * chunks, search.block_rows, search.saved, "<i4"});
  const std::filesystem::path description = folder / kDescription;
  const json about = {{"samples", description_of(samples.dataset())},
                      {"num_samples", samples.size()},
                      {"saved", search.saved},
                      {"found", search.found},
                      {"block_rows", search.block_rows}};
  std::filesystem::create_directories(folder);
  if (!share.is_first()) wait_until([&] { return std::filesystem::exists(description); });
  if (std::filesystem::exists(description)) {
    const json there = json::parse(read_file(description), nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(there == about, description.string(),
                   ": neighbours were begun with other flags: ",
                   there.is_object() ? json_differences(there, about) : "it is no object",
                   "\nhint: the flags of that run, or remove the folder");
  } else {
    write_file_atomically(description, about.dump(1) + "\n");
  }
  const BlockQuery query(samples, database, text_of, embed, index, search);
  const std::vector<RowBlock> missing = files.missing(share);
  ProgressBar progress(cat("finding neighbours of ", split, " samples"),
                       static_cast<uint64_t>(files.shape().rows), "chunks");
  uint64_t there = static_cast<uint64_t>(files.shape().rows);
  for (const RowBlock& block : missing) there -= static_cast<uint64_t>(block.size());
  progress.advance(there);
  for (const RowBlock& block : missing) {
    const std::vector<int32_t> rows = query.rows(block, chunks);
    files.write(block, std::as_bytes(std::span(rows)));
    progress.advance(static_cast<uint64_t>(block.size()));
  }
  files.wait_for_all();
}

Neighbors::Neighbors(const RetroProject& project, const std::string& split, const Dataset& samples,
                     int64_t chunk_length)
    : files_("", {0, 1, 1, "<i4"}) {
  const StoredNeighbors stored = open_neighbors(project, split, samples, chunk_length);
  num_samples_ = stored.samples;
  chunks_ = stored.shape.rows / stored.samples;
  files_ = BlockFiles(stored.folder, stored.shape);
  const std::vector<RowBlock> missing = files_.missing();
  MEGATRON_CHECK(missing.empty(), stored.folder.string(), ": the neighbours of ", missing.size(),
                 " blocks of ", split, " samples are not there yet, from sample ",
                 missing.empty() ? 0 : missing.front().begin / chunks_,
                 "\nhint: megatron retro --retro-tasks query-neighbors goes on with them");
  for (int64_t i = 0; i < files_.num_blocks(); ++i) blocks_.push_back(files_.read(files_.block(i)));
}

std::span<const int32_t> Neighbors::of_chunk(int64_t sample, int64_t chunk) const {
  MEGATRON_CHECK(sample >= 0 && sample < num_samples_, files_.folder().string(),
                 " has the neighbours of ", num_samples_, " samples, there is no ", sample);
  const int64_t row = sample * chunks_ + chunk, block = row / files_.shape().block_rows;
  return blocks_[static_cast<size_t>(block)].as<int32_t>("<i4").subspan(
      static_cast<size_t>((row - files_.block(block).begin) * saved()),
      static_cast<size_t>(saved()));
}

}  // namespace megatron
