// The steps that make a project of retrieval, one after the other; each may be stopped and goes on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/datasets/retro/neighbors.h"
#include "megatron/runtime/job.h"
#include "megatron/training/arguments/arguments.h"
#include "tools/support/retro_embedder.h"

namespace megatron {

enum class EmbeddingType { kFloat32, kFloat16 };

struct RetroBuildConfig : Config {
  std::string retro_tasks = "build";
  std::string retro_embedder;
  EmbeddingType retro_embedding_type = EmbeddingType::kFloat32;
  int64_t retro_embedder_max_length = 256;
  int64_t retro_embedder_batch_tokens = 8192;
  int64_t retro_block_size = 100000;
  std::string retro_index_str = "Flat";
  int64_t retro_index_ntrain = 0;
  int64_t retro_query_nprobe = 65536;
  int64_t retro_query_ef_search = 256;
  int64_t retro_query_num_neighbors_query = 200;
  int64_t retro_query_num_neighbors_save = 20;
  std::string show;  // SPLIT:SAMPLE

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// The steps of --retro-tasks, in order. Throws UsageError that names one that is unknown.
std::vector<std::string> retro_steps(const std::string& tasks);

class RetroBuild {
 public:
  // Opens the project, which must be of these flags. Throws Error that says what differs. Keeps
  // references to all three.
  RetroBuild(const Arguments& arguments, const RetroBuildConfig& config, const Job& job);
  // Returns when all ranks have done their share of it.
  void run(const std::string& step);
  // Prints each chunk of a sample, what was found for it, and how far it is.
  void show(const std::string& split, int64_t sample);

 private:
  void build_database();
  void train_index();
  void add_to_index();
  void query();
  void make_vectors();
  bool is_exact() const { return config_.retro_index_str == "Flat"; }
  void train_faiss(const std::filesystem::path& file);
  void add_to_faiss(const std::filesystem::path& file);
  // The first rank writes the manifest, the others wait until it says that the step is done.
  void mark_done(const std::string& step, const nlohmann::json& counts);
  std::unique_ptr<VectorIndex> open_index() const;
  void open_embedder();  // once
  RetroEmbedderOptions embedder_options() const;
  std::shared_ptr<const ChunkDatabase> database() const;
  BlockFiles vectors() const;
  std::string text_of(std::span<const int64_t> ids) const;
  std::vector<float> embed(std::span<const std::string> texts);
  TextOfIds text_function() const;

  const Arguments& arguments_;
  const RetroBuildConfig& config_;
  const Job& job_;
  const RankShare share_;
  const int64_t chunk_length_;
  RetroProject project_;
  std::unique_ptr<Tokenizer> tokenizer_, embedder_tokenizer_;
  std::vector<DocumentRange> documents_;
  std::unique_ptr<RetroEmbedder> embedder_;
};

}  // namespace megatron
