// Settings that must be equal on all ranks of a job (flags, input files, the program), and how
// differences are described.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// One compared setting: "--lr" is "3e-04".
struct RankSetting {
  std::string name;
  std::string value;
};
using RankSettings = std::vector<RankSetting>;

// Ranks, in ascending order, that have the same settings.
struct SettingsGroup {
  std::vector<int> ranks;
  RankSettings settings;
};

// 32 hexadecimal digits, equal for equal settings.
std::string digest(const RankSettings& settings);

// One text of all settings, and back.
std::string pack_settings(const RankSettings& settings);
RankSettings unpack_settings(std::string_view text);

// "rank 3", "ranks 0, 2-7"; a long list is cut.
std::string rank_list(const std::vector<int>& ranks);

// A message that names each setting in which the groups differ, its values and the ranks that have
// each, the most frequent value first: "the ranks do not agree: --lr is 3e-04 on ranks 0, 2-7 and
// 3e-05 on rank 1". Empty if nothing differs.
std::string describe_differences(const std::vector<SettingsGroup>& groups);

}  // namespace megatron
