// The samples of a data set of text with media: token ids, rows, and where the bytes of media lie.
// Format: docs/formats/multimodal_index.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/media_files.h"
#include "megatron/datasets/multimodal/multimodal_encoder.h"
#include "megatron/media/media_source.h"

namespace megatron {

struct MultimodalIndexOptions {
  std::string media_root;      // empty: the folder of each file of rows
  std::string cache_path;      // empty: cache/MultimodalIndex next to the data
  std::string part = "train";  // of folders of Megatron-Energon: train, val or test
  MediaLimits limits;
  int64_t most_media = 64;  // of a sample
  // Every image is decoded, and those that cannot be are marked, at most so many: more are an
  // error. Empty: none is decoded, and headers that cannot be read are errors
  std::optional<int64_t> most_bad;
};

// A medium of a sample.
struct IndexedMedium {
  MediumFacts facts;
  FileRange place;   // empty path: the index holds the bytes
  std::string name;  // for messages: "a.tar: s/003: img1.png"
};

// A sample with a medium that cannot be decoded, of the size that its headers say or, if they do
// not, kBadImage or kBadSound.
struct BadSample {
  int64_t sample = 0;
  std::string reason;  // names file, row, medium and byte
};
// Samples up to `end` that an epoch has so often (RepeatedFiles).
struct RepeatedSamples {
  int64_t end = 0;
  double times = 1;
};

inline constexpr ImageSize kBadImage = {64, 64};
inline constexpr int64_t kBadSound = 16000;  // samples

// Built once for each node and mapped. Thread safe.
class MultimodalIndex {
 public:
  // `path`: a file or folder (multimodal_source.h). `encoder` is used here only. Throws Error that
  // names file, row and medium.
  MultimodalIndex(const std::string& path, const MultimodalEncoder& encoder,
                  const MultimodalIndexOptions& options);
  ~MultimodalIndex();

  int64_t size() const;  // samples
  EncodedSample sample(int64_t i) const;
  std::string name(int64_t i) const;                        // "data.json: row 3"
  int64_t shard(int64_t i) const;                           // the number of its file; ascending
  const std::vector<RepeatedSamples>& repetitions() const;  // all samples; ascending
  int64_t media_count(int64_t i) const;
  MediumFacts facts(int64_t i, int64_t medium) const;
  IndexedMedium medium(int64_t i, int64_t medium) const;
  // The bytes of a medium. Throws Error if they cannot be read, or if their headers say something
  // else than when the index was built.
  std::string bytes(int64_t i, int64_t medium) const;
  // With most_bad: whether a medium was marked; the samples of those, ascending.
  bool is_bad(int64_t i, int64_t medium) const;
  const std::vector<BadSample>& bad_samples() const;

  const std::string& path() const;
  const MediaRules& rules() const;
  const std::string& description() const;  // see Dataset
  const std::string& details() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
