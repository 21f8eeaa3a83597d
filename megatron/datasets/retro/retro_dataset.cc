#include "megatron/datasets/retro/retro_dataset.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"

namespace megatron {

Columns retro_columns(const Columns& samples, int64_t chunk_length, int64_t neighbors) {
  std::vector<Column> all(samples.begin(), samples.end());
  const int64_t chunks = samples.sequence_length() / chunk_length;
  Column tokens{"neighbor_tokens", ElementType::kInt64, {chunks, neighbors, 2 * chunk_length}};
  Column mask{"neighbor_mask", ElementType::kUInt8, {chunks, neighbors}};
  tokens.split = mask.split = false;
  all.push_back(std::move(tokens));
  all.push_back(std::move(mask));
  return Columns(std::move(all));
}

RetroDataset::RetroDataset(std::shared_ptr<const Dataset> samples,
                           std::shared_ptr<const ChunkDatabase> database, Neighbors neighbors,
                           int64_t num_neighbors)
    : Dataset(retro_columns(samples->columns(), database->chunk_length(), num_neighbors)),
      samples_(std::move(samples)),
      database_(std::move(database)),
      neighbors_(std::move(neighbors)),
      num_neighbors_(num_neighbors) {
  MEGATRON_CHECK(num_neighbors <= neighbors_.saved(), "--retro-num-neighbors is ", num_neighbors,
                 ", of each chunk ", neighbors_.saved(), " were saved",
                 "\nhint: query again with a larger --retro-query-num-neighbors-save");
}

int64_t RetroDataset::size() const { return std::min(samples_->size(), neighbors_.num_samples()); }

void RetroDataset::read(int64_t index, const SampleSpans& out,
                        std::vector<int32_t>& document_starts) const {
  samples_->read(index, out, document_starts);
  const auto tokens = out.get<int64_t>("neighbor_tokens");
  const auto mask = out.get<uint8_t>("neighbor_mask");
  const auto retrieved = static_cast<size_t>(database_->retrieved_length());
  for (size_t i = 0; i < mask.size(); ++i) {
    const auto neighbors = static_cast<size_t>(num_neighbors_);
    const int32_t id =
        neighbors_.of_chunk(index, static_cast<int64_t>(i / neighbors))[i % neighbors];
    MEGATRON_CHECK(id >= -1, "sample ", index, " has the neighbour ", id,
                   ", expected -1 or a chunk of the database");
    mask[i] = id >= 0 ? 1 : 0;
    database_->retrieved(id, tokens.subspan(i * retrieved, retrieved));
  }
}

std::pair<int64_t, int64_t> RetroDataset::locate(int64_t index) const {
  return samples_->locate(index);
}

std::string RetroDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "RetroDataset");
  json.member("num_neighbors", num_neighbors_)
      .member("chunk_length", database_->chunk_length())
      .member("chunks", database_->size());
  json.key("samples").raw(samples_->description()).end_object();
  return json.text();
}

}  // namespace megatron
