// Samples in the members of a tar archive, as WebDataset groups them: neighbours of one key.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/multimodal/tar_reader.h"

namespace megatron {

// What the extension of a member says that it is.
enum class MemberKind { kImage, kSound, kText, kJson, kOther };

struct ShardMember {
  std::string extension;  // everything behind the first dot of the last component, lower-cased
  MemberKind kind = MemberKind::kOther;
  TarMember place;
};

struct ShardSample {
  std::string key;  // everything before that dot, with the folder
  std::vector<ShardMember> members;
  // Null: there is none.
  const ShardMember* find(const std::string& extension) const;
  // Images or sounds, those with a number in the order of their numbers ("img1.jpg", "2.png"), else
  // in that of the archive.
  std::vector<const ShardMember*> media(MemberKind kind) const;
};

// Members whose last component is "__x__" or begins with a dot are left out. Throws Error that
// names archive and member: no dot, a key that comes back after another one, an extension twice.
std::vector<ShardSample> group_members(std::span<const TarMember> members,
                                       const std::string& archive);

}  // namespace megatron
