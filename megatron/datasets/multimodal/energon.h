// Folders that Megatron-Energon prepared: shards of WebDataset beside .nv-meta, which says what the
// members of a sample are and which shards are of which part.
//
//   dataset.yaml   sample_type.__class__ (or the older __class__) and field_map: of the type's
//                  fields where they lie, "jpg", "jpg,png" (the first that there is),
//                  "json[0][value]"
//   split.yaml     split_parts: shards of train, val and test, with braces; exclude: shards, and
//                  samples as SHARD/KEY
//   .info.json     shard_counts: samples of each shard, which are compared
//
// Built are CaptioningSample (image, caption) and VQASample (image, context, answers,
// answer_weights): an image and its question, with the answer of most weight, the first of equals.
// Programs that load samples (sample_loader, CrudeWebdataset) are not run.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_source.h"

namespace megatron {

// One place of a field: a member by its extension, and within its JSON what follows.
using FieldPath = std::vector<std::string>;

struct EnergonFolder {
  std::string path;
  std::string sample_type;                               // "CaptioningSample"
  std::map<std::string, std::vector<FieldPath>> fields;  // by name the places that are tried
  std::vector<std::string> shards;                       // of the part, in its order
  std::map<std::string, int64_t> counts;                 // samples by shard
  std::set<std::string> excluded;                        // shard, "/" and key
  std::string description;                               // JSON of what decides rows
};

bool is_energon_folder(const std::string& path);

// `part`: "train", "val" or "test". Throws Error naming the file and what is wrong in it, also for
// what is not built.
std::shared_ptr<const EnergonFolder> read_energon_folder(const std::string& path,
                                                         const std::string& part);

// Calls emit for each sample of a shard in order. Throws Error naming shard, key and field.
void read_energon_shard(const EnergonFolder& folder, const std::string& shard,
                        const std::function<void(SourceRow)>& emit);

// A blend of folders (MetadatasetV2), whose paths are relative to the file.
bool is_energon_blend(const std::string& path);
// "WEIGHT", "PATH", ... of a part, blends within blends multiplied out; a single folder alone.
// Empty: the blend has no such part. Throws Error naming the file.
std::vector<std::string> read_energon_blend(const std::string& path, const std::string& part);

// "a_{00..02}.tar" -> a_00.tar, a_01.tar, a_02.tar; "{a,b}" -> a, b. Of one range or list without a
// comma the text itself.
std::vector<std::string> expanded_braces(const std::string& text);

}  // namespace megatron
