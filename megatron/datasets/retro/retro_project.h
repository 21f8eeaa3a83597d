// The folder of a retrieval database and of the neighbours of samples (--retro-project-dir):
//
//   manifest.json     what the project was made from and with, and which steps are done
//   db/chunks.npy     the database (chunk_database.h)
//   embeddings/       vectors of its chunks
//   index/<string>/   an index of them
//   query/<split>-<fingerprint of the samples>/    neighbours of samples (neighbors.h)
//
// A project is of one set of facts: a run whose data, tokenizer, embedder, split, chunk length or
// seed are others is refused, with the differences by name.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace megatron {

class RetroProject {
 public:
  // Reads the manifest, if there is one. Throws Error if it is damaged or of a later version.
  // `writes_manifest`: false on all ranks of a job but the first.
  explicit RetroProject(std::filesystem::path folder, bool writes_manifest = true);

  const std::filesystem::path& folder() const { return folder_; }
  std::filesystem::path manifest() const { return folder_ / "manifest.json"; }
  std::filesystem::path chunks_file() const { return folder_ / "db" / "chunks.npy"; }
  std::filesystem::path embeddings_folder() const { return folder_ / "embeddings"; }
  std::filesystem::path index_file(const std::string& index, const std::string& name) const {
    return folder_ / "index" / index / name;
  }
  std::filesystem::path query_folder(const std::string& split,
                                     const std::string& fingerprint) const {
    return folder_ / "query" / (split + "-" + fingerprint);
  }

  // Throws Error that names every fact of which the project has another value. Those that it does
  // not know yet become its own, in the manifest; a rank that does not write it waits for them.
  void agree(const nlohmann::json& facts);
  // A fact that the project has. Throws Error that names it if it has none.
  nlohmann::json fact(const std::string& name) const;

  // What a step that is done counted; nullopt: it is not done.
  std::optional<nlohmann::json> done(const std::string& step) const;
  // Throws Error that names the step and the command that does it, unless it is done.
  nlohmann::json require(const std::string& step) const;
  void mark_done(const std::string& step, const nlohmann::json& counts);
  // Returns when the rank that writes the manifest has marked the step.
  void wait_for(const std::string& step);

 private:
  void read();
  void write() const;
  std::filesystem::path folder_;
  bool writes_manifest_;
  std::string text_;  // of the manifest, a JSON object
};

// "seed is 7, here 1234; ...": where two JSON objects differ, with the path of each; "" if nowhere.
std::string json_differences(const nlohmann::json& there, const nlohmann::json& here);

}  // namespace megatron
