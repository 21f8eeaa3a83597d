// A folder that Megatron-Energon prepared: shards of WebDataset beside .nv-meta, which says what
// the members of a sample are and which shards are of which part.
//
//   dataset.yaml   sample_type.__class__ (or the older __class__) and field_map: of the type's
//                  fields where they lie, "jpg", "jpg,png" (the first that there is),
//                  "json[0][value]"
//   split.yaml     split_parts: shards of train, val and test, with braces; exclude: shards, and
//                  samples as SHARD/KEY
//   .info.json     shard_counts: samples of each shard, which are compared
//
// Programs that load samples (sample_loader, CrudeWebdataset) are not run.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/datasets/multimodal/webdataset.h"

namespace megatron {

// One place of a field: a member by its extension, and within its JSON what follows.
using FieldPath = std::vector<std::string>;

// A type of samples: the fields that are read, in the order of their names.
struct EnergonType {
  const char* name = nullptr;
  std::set<std::string> fields, optional;
  bool alone = true;  // false: only what others join
};
// Throws Error whose message starts with `where` for a type that is not built.
const EnergonType& energon_type(const std::string& name, const std::string& where);

// What is read of a folder. `dataset_file`, `split_file`: in .nv-meta; empty: the usual ones.
struct EnergonRequest {
  std::string path, part, dataset_file, split_file;
};

struct EnergonFolder {
  std::string path, part;
  const EnergonType* type = nullptr;
  std::map<std::string, std::vector<FieldPath>> fields;  // by name the places that are tried
  std::vector<std::string> shards;                       // of the part, in its order
  std::vector<int64_t> counts;                           // samples of each shard
  std::set<std::string> excluded;                        // shard, "/" and key
  std::string description;                               // JSON of what decides rows
};

bool is_energon_folder(const std::string& path);

// Throws Error naming the file and what is wrong in it, also for what is not built.
std::shared_ptr<const EnergonFolder> read_energon_folder(const EnergonRequest& request);

// A shard and its samples, also those that are excluded.
struct EnergonShard {
  MappedFile file;
  std::vector<ShardSample> samples;
};
// Throws Error if .info.json counts others.
EnergonShard read_energon_shard(const EnergonFolder& folder, size_t shard);
bool is_excluded(const EnergonFolder& folder, size_t shard, const std::string& key);

}  // namespace megatron
