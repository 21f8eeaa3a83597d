// What is read of Megatron-Energon: a folder, or a member of a blend (energon_blend.h): a subset, a
// join, or, of blend_epochized, several folders. "FILE.yaml#2" names the third member.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/energon/braces.h"
#include "megatron/datasets/multimodal/energon/energon_blend.h"
#include "megatron/datasets/multimodal/multimodal_source.h"

namespace megatron {

class EnergonSource {
 public:
  explicit EnergonSource(const std::vector<EnergonEntry>& entries);
  ~EnergonSource();

  // Shards whose samples are read, in order.
  const std::vector<std::string>& shards() const { return shards_; }
  // Shards whose members are joined to those.
  const std::vector<std::string>& joined() const { return joined_; }
  // How often an epoch has the samples of the shards.
  const std::vector<RepeatedFiles>& repetitions() const { return repetitions_; }
  // JSON of what decides rows.
  const std::string& description() const { return description_; }

  // Calls emit for each sample of shards()[shard] in order. Throws Error naming shard, key and
  // field. The first shard of a join reads the keys of all. Thread safe.
  void read(size_t shard, const std::function<void(SourceRow)>& emit) const;

 private:
  struct Piece;
  std::vector<std::unique_ptr<Piece>> pieces_;
  std::vector<std::string> shards_, joined_;
  std::vector<RepeatedFiles> repetitions_;
  std::string description_;
};

// Whether open_energon() is for a path: a folder, a blend, a member of a blend.
bool is_energon(const std::string& path);

// `part`: "train", "val" or "test". Throws Error naming the file and what is wrong in it, also for
// what is not built, and for a blend by weights, of which only members are sources.
std::shared_ptr<const EnergonSource> open_energon(const std::string& path, const std::string& part);

// The sources of a part of a blend: "WEIGHT", "PATH", ...; a single one alone. Empty: the blend has
// no such part. Throws Error naming the file.
std::vector<std::string> read_energon_blend(const std::string& path, const std::string& part);

}  // namespace megatron
