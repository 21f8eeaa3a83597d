// Metadatasets of Megatron-Energon (MetadatasetV2): blends, subsets and joins of folders.
//
//   splits:
//     train:
//       blend:                      # or blend_epochized, with repetitions in the place of weights
//       - {weight: 2, path: ./a}
//       - {weight: 1, path: ./b, subset: {range: [10%, 90%]}}
//       - weight: 1                 # samples of one key become one sample of the joiner's type
//         join: [{path: ./images}, {path: ./texts, nonmatch: skip}]
//         joiner: {__module__: megatron.energon, __class__: OCRSample}
//
// Paths are relative to the file, and may lead to other such files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/datasets/multimodal/energon/energon_folder.h"

namespace megatron {

// Samples [first, last) of a part, and of those from a share to another one.
struct EnergonSubset {
  std::optional<int64_t> first, last;  // no last: to the end
  double begin = 0, end = 1;
  bool is_whole() const { return !first && begin == 0 && end == 1; }
};
// Samples [first, second) of `total`. Throws Error whose message starts with `where`.
std::pair<int64_t, int64_t> samples_of(const EnergonSubset& subset, int64_t total,
                                       const std::string& where);

// What becomes of a sample whose key a joined folder lacks: left out, joined without it, an error.
enum class EnergonNonmatch { kSkip, kNone, kError };

// A folder, or several that are joined by the keys of their samples; the first has the order.
struct EnergonEntry {
  double factor = 1;  // weight, or repetitions
  std::vector<EnergonRequest> folders;
  std::vector<EnergonNonmatch> nonmatch;  // of each folder
  const EnergonType* joiner = nullptr;    // null: one folder, of its own type
  EnergonSubset subset;
  std::string where;  // the file, for messages
};

enum class EnergonMode { kOne, kWeights, kRepetitions };

struct EnergonBlend {
  EnergonMode mode = EnergonMode::kOne;
  std::vector<EnergonEntry> entries;  // those of blends within blends multiplied out
};

bool is_energon_blend(const std::string& path);

// The blend of a part; without entries: the file has no such part. Throws Error naming the file.
EnergonBlend parse_energon_blend(const std::string& path, const std::string& part);

}  // namespace megatron
