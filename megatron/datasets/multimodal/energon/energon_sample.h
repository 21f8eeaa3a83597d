// Samples of folders of Megatron-Energon: the fields that a folder's field_map finds, and the row
// that they make.
//
//   CaptioningSample, OCRSample    an image, and its caption or text
//   VQASample                      an image and its question, with the answer of most weight, the
//                                  first of equals
//   InterleavedSample              texts and media in order: `sequence` is a list of texts and of
//                                  {"text": ...}, {"image": MEMBER}, {"audio": MEMBER}; or lists
//                                  of one length, `texts` and `images`, one of both null at each
//                                  place (OBELICS); or `text_list` and `image_info` (MMC4)
//   SimilarityInterleavedSample    texts, images, and of each image the text that it stands before
//
// MEMBER is a member's name, or the part of it behind the key's dot.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/energon/energon_folder.h"
#include "megatron/datasets/multimodal/multimodal_source.h"

namespace megatron {

struct EnergonMedium {
  MediaKind kind = MediaKind::kImage;
  std::string name;  // of the member
  FileRange place;
};

struct EnergonSample {
  std::string name;                              // "a.tar: 12"
  std::string members;                           // for messages: "jpg, json"
  std::map<std::string, nlohmann::json> values;  // of fields
  std::optional<EnergonMedium> image;            // of the field of this name
  std::vector<EnergonMedium> media;              // all; of interleaved types

  // Fields of `other` take the place of these.
  void join(EnergonSample other);
};

// Throws Error naming shard, key and field.
EnergonSample read_energon_sample(const EnergonFolder& folder, size_t shard,
                                  const EnergonShard& content, const ShardSample& sample);

// Throws Error as above; all fields that `type` needs are there.
SourceRow energon_row(const EnergonType& type, const EnergonSample& sample);

}  // namespace megatron
