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

struct EnergonFolder;

enum class SourceKind { kTar, kJson, kParquet };

// The files that are read, in order.
struct SourceFiles {
  SourceKind kind = SourceKind::kTar;
  std::vector<std::string> paths;
  std::shared_ptr<const EnergonFolder> energon;  // whose shards they are; null: of none
};

// `path`: a file; a folder of Megatron-Energon (energon.h), of which `part` says the shards; or a
// folder that is searched for .tar, else .parquet, else .jsonl and .json, in the order of their
// paths. Throws Error for anything else.
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

// Calls emit for each row of one of the files in order. Throws Error.
void read_source_file(const SourceFiles& files, const std::string& path,
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
