// Rows with media from the files of a data set: WebDataset shards, JSON, JSON lines, Parquet.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/media_files.h"
#include "megatron/datasets/multimodal/multimodal_row.h"

namespace megatron {

class EnergonSource;

enum class SourceKind { kTar, kJson, kParquet };

// Files up to `end` whose rows an epoch of training has so often; of a part of a time it has some,
// others in each epoch.
struct RepeatedFiles {
  size_t end = 0;
  double times = 1;
};

// The files that are read, in order.
struct SourceFiles {
  SourceKind kind = SourceKind::kTar;
  std::vector<std::string> paths;
  std::shared_ptr<const EnergonSource> energon;  // whose shards they are; null: of none
};

// `path`: a file; a folder or a blend of Megatron-Energon (energon/energon_source.h), of which
// `part` says the shards; or a folder that is searched for .tar, else .parquet, else .jsonl and
// .json, in the order of their paths. Throws Error for anything else.
SourceFiles list_source_files(const std::string& path, const std::string& part = "train");

// A row as it lies in its file.
struct SourceRow {
  std::string name;                    // "a.tar: cats/12", "data.json: row 3"
  std::string json;                    // empty: a caption
  std::optional<std::string> caption;  // of all that comes with the row
  // What comes with the row, and where it lies.
  std::vector<RowMedium> container;
  std::vector<FileRange> places;
};

// Calls emit for each row of files.paths[file] in order. Throws Error.
void read_source_file(const SourceFiles& files, size_t file,
                      const std::function<void(SourceRow)>& emit);
void read_source_file(SourceKind kind, const std::string& path,
                      const std::function<void(SourceRow)>& emit);

struct SourceSample {
  std::string name;
  MultimodalRow row;
  // Of the media, in the order of their places. Empty path: the row has the bytes.
  std::vector<FileRange> places;
};

// Reads the row, and finds its media: members of an archive, or files below `media_root`. Throws
// Error that begins with the row's name.
SourceSample read_sample(const SourceRow& row, const std::filesystem::path& media_root);

}  // namespace megatron
