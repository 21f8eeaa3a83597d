#include "tools/support/neighbor_lookup.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/datasets/retro/chunk_database.h"
#include "megatron/datasets/retro/retro_project.h"
#include "megatron/inference/retrieval/device_flat_index.h"
#include "megatron/inference/retrieval/faiss_index.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/runtime/device.h"
#include "tools/support/retro_embedder.h"

namespace megatron {
namespace {

using nlohmann::json;

NeighborIds ids_of_texts(const json& texts, const Tokenizer& tokenizer, const std::string& where) {
  MEGATRON_CHECK(texts.is_array(), where, ": the neighbours of a chunk are no list of texts");
  NeighborIds all;
  for (const json& text : texts) {
    MEGATRON_CHECK(text.is_string(), where, ": a neighbour is no text");
    all.push_back(tokenizer.encode(text.get<std::string>()));
    MEGATRON_CHECK(!all.back().empty(), where, ": a neighbour is an empty text");
  }
  return all;
}

// By text and chunk.
std::vector<std::vector<NeighborIds>> read_neighbors(const std::string& path,
                                                     const Tokenizer& tokenizer) {
  std::vector<std::vector<NeighborIds>> all;
  size_t number = 0;
  for (const std::string& line : split(read_file(path), '\n')) {
    const std::string where = cat(path, ":", ++number);
    const json chunks = json::parse(line, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(chunks.is_array(), where,
                   ": expected a list that has the list of neighbours of each chunk");
    all.emplace_back();
    for (const json& texts : chunks) all.back().push_back(ids_of_texts(texts, tokenizer, where));
  }
  MEGATRON_CHECK(!all.empty(), path, " holds no neighbours");
  return all;
}

FindNeighbors given_neighbors(const std::string& path, const Tokenizer& tokenizer) {
  return [path, all = read_neighbors(path, tokenizer)](std::span<const WholeChunk> chunks) {
    std::vector<NeighborIds> found;
    for (const WholeChunk& chunk : chunks) {
      MEGATRON_CHECK(chunk.text < std::ssize(all), path, " has ", all.size(),
                     " lines, none for text ", chunk.text + 1);
      const auto& own = all[static_cast<size_t>(chunk.text)];
      // Chunks behind the last that is given have none.
      found.push_back(chunk.chunk < std::ssize(own) ? own[static_cast<size_t>(chunk.chunk)]
                                                    : NeighborIds());
    }
    return found;
  };
}

// A project, opened for texts that it was not made for.
class ProjectLookup {
 public:
  ProjectLookup(const ProjectLookupConfig& config, const LoadedModel& model, DeviceChoice device)
      : project_(config.retro_project_dir),
        tokenizer_(*model.tokenizer),
        own_(model.config.own.as_or_default<RetroConfig>()),
        embedder_({config.retro_embedder, device, project_.fact("embedder_max_length")}) {
    project_.require("index-add");
    json facts = embedder_.facts();
    facts["chunk_length"] = own_.retro_chunk_length;
    facts["tokenizer"] = tokenizer_.fingerprint();
    project_.agree(facts);
    database_ = std::make_unique<const ChunkDatabase>(
        project_.chunks_file(), data_sets(config.data_path), own_.retro_chunk_length, eod());
    index_ = open_index(config, device);
  }

  std::vector<NeighborIds> find(std::span<const WholeChunk> chunks) {
    std::vector<NeighborIds> found(chunks.size());
    std::vector<std::string> texts;
    std::vector<size_t> asked;  // those with text
    for (size_t i = 0; i < chunks.size(); ++i) {
      std::vector<int32_t> ids;
      for (const int32_t id : chunks[i].ids)
        if (id != tokenizer_.eod().value_or(-1)) ids.push_back(id);
      std::string text = tokenizer_.decode(ids);
      if (text.empty()) continue;
      texts.push_back(std::move(text));
      asked.push_back(i);
    }
    const int64_t k = own_.retro_num_neighbors;
    const std::vector<int64_t> nearest = index_->search(embedder_.embed(texts), k);
    for (size_t i = 0; i < asked.size(); ++i)
      for (int64_t j = 0; j < k; ++j)
        if (const int64_t id = nearest[i * static_cast<size_t>(k) + static_cast<size_t>(j)];
            id >= 0)
          found[asked[i]].push_back(retrieved(id));
    return found;
  }

 private:
  int64_t eod() const { return tokenizer_.eod().value_or(0); }

  std::unique_ptr<const VectorIndex> open_index(const ProjectLookupConfig& config,
                                                DeviceChoice device) const {
    const std::string kind = project_.require("index-train")["index"];
    if (kind == "Flat")
      return open_flat_index(
          BlockFiles(project_.embeddings_folder(),
                     {database_->size(), project_.fact("embedding_block_size"), embedder_.width(),
                      project_.fact("embedding_type") == "float16" ? "<f2" : "<f4"}),
          choose_device(device));
    auto index = std::make_unique<FaissIndex>(FaissIndex::read(project_.index_file(kind, "added")));
    index->set_search(config.retro_query_nprobe, config.retro_query_ef_search);
    return index;
  }

  std::vector<int32_t> retrieved(int64_t id) const {
    std::vector<int64_t> ids(static_cast<size_t>(database_->retrieved_length()));
    database_->retrieved(id, ids);
    return {ids.begin(), ids.end()};
  }

  std::vector<std::shared_ptr<const IndexedDataset>> data_sets(
      const std::vector<std::string>& prefixes) const {
    const json stored = project_.fact("data_sets");
    MEGATRON_CHECK(stored.size() == prefixes.size(), "--data-path names ", prefixes.size(),
                   " data sets, the project has ", stored.size(),
                   "\nhint: the prefixes that it was made from, in their order");
    std::vector<std::shared_ptr<const IndexedDataset>> all;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      all.push_back(std::make_shared<const IndexedDataset>(prefixes[i], IndexedDatasetOptions{}));
      MEGATRON_CHECK(stored[i]["index_hash"] == all.back()->index_hash(), "--data-path ",
                     prefixes[i], " is not the data of the project, ", stored[i]["file"].dump());
    }
    return all;
  }

  RetroProject project_;
  const Tokenizer& tokenizer_;
  const RetroConfig own_;
  RetroEmbedder embedder_;
  std::unique_ptr<const ChunkDatabase> database_;
  std::unique_ptr<const VectorIndex> index_;
};

}  // namespace

void ProjectLookupConfig::fields(FieldVisitor& v) {
  v.group("retrieval");
  v.field("retro_project_dir", retro_project_dir,
          "folder of megatron retro in which neighbours of whole chunks are looked up");
  v.field("retro_embedder", retro_embedder, "the encoder that the project was made with");
  v.field("data_path", data_path, "prefixes of the data sets that the project was made from");
  v.field("retro_query_nprobe", retro_query_nprobe,
          "lists that a search in an index of Faiss looks into, at most all");
  v.field("retro_query_ef_search", retro_query_ef_search,
          "how far a search in a graph of Faiss (HNSW) looks");
}

void ProjectLookupConfig::validate(Violations& v) const {
  v.require(retro_project_dir.empty() == retro_embedder.empty() &&
                retro_project_dir.empty() == data_path.empty(),
            "--retro-project-dir, --retro-embedder and --data-path are needed together",
            "all of them, or none");
}

void NeighborLookupConfig::fields(FieldVisitor& v) {
  ProjectLookupConfig::fields(v);
  v.field("neighbors", neighbors,
          "neighbours of the chunks of each text, JSON lines: a list that has for each chunk the "
          "list of its neighbours' texts");
}

void NeighborLookupConfig::validate(Violations& v) const {
  ProjectLookupConfig::validate(v);
  v.require(neighbors.empty() || retro_project_dir.empty(),
            "--neighbors and --retro-project-dir are both given", "one of them");
}

FindNeighbors open_project(const ProjectLookupConfig& config, const LoadedModel& model,
                           DeviceChoice device) {
  MEGATRON_CHECK(model.config.type == "retro", "the model is of type ", model.config.type,
                 ", which reads no neighbours\nhint: leave out the flags of retrieval");
  if (config.retro_project_dir.empty())
    return
        [](std::span<const WholeChunk> chunks) { return std::vector<NeighborIds>(chunks.size()); };
  const auto lookup = std::make_shared<ProjectLookup>(config, model, device);
  return [lookup](std::span<const WholeChunk> chunks) { return lookup->find(chunks); };
}

FindNeighbors open_neighbors(const NeighborLookupConfig& config, const LoadedModel& model,
                             DeviceChoice device) {
  if (config.neighbors.empty() || model.config.type != "retro")
    return open_project(config, model, device);
  return given_neighbors(config.neighbors, *model.tokenizer);
}

}  // namespace megatron
