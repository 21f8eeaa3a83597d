// What every rank of a job must have alike (flags, input files, the program), and how a difference
// is told.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// One thing that the ranks compare: "--lr" is "3e-04".
struct RankSetting {
  std::string name;
  std::string value;
};
using RankSettings = std::vector<RankSetting>;

// Ranks, in ascending order, whose settings are the same.
struct SettingsGroup {
  std::vector<int> ranks;
  RankSettings settings;
};

// 32 hexadecimal digits, equal for equal settings.
std::string digest(const RankSettings& settings);

// One text of all settings, and back.
std::string pack_settings(const RankSettings& settings);
RankSettings unpack_settings(std::string_view text);

// "rank 3", "ranks 0, 2-7"; of many only the first are listed.
std::string rank_list(const std::vector<int>& ranks);

// A message that names each setting in which the groups differ, its values and the ranks that hold
// each, the value of most ranks first: "the ranks do not agree: --lr is 3e-04 on ranks 0, 2-7 and
// 3e-05 on rank 1". Empty when nothing differs.
std::string describe_differences(const std::vector<SettingsGroup>& groups);

}  // namespace megatron
