// Settings that the ranks of a job compare before the first collective.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "megatron/base/fields.h"
#include "megatron/comm/rank_settings.h"

namespace megatron {

// How a field is compared. New fields are kSame unless they are listed in shared_settings.cc.
enum class FieldSharing {
  kSame,      // must be the same on every rank
  kLocal,     // may differ by rank or machine: caches, threads, network interfaces
  kGiven,     // a folder that only the first rank writes to: given on all ranks or on none
  kContents,  // kSame, and the named files must have the same contents
};
FieldSharing field_sharing(std::string_view name);

// The resolved flags of `configs`, the contents of the files of data and tokenizers that they name,
// and the builds of the program and of libtorch. Of files over 1 MiB sizes and a few blocks are
// read: the cost does not grow with the data.
RankSettings shared_settings(std::span<Config* const> configs);

// "12345 bytes, 8c1e0c93d1a6b8f2" for a file, for the .idx and .bin of a data prefix, for the
// tokenizer's files in a folder; "no such file". `few_blocks`: reads less of each file.
std::string contents_fingerprint(const std::string& path, bool few_blocks);

}  // namespace megatron
