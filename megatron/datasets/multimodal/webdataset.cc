#include "megatron/datasets/multimodal/webdataset.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>

#include "megatron/base/check.h"

namespace megatron {
namespace {

MemberKind member_kind_of(std::string_view extension) {
  const std::string_view last = extension.substr(extension.rfind('.') + 1);
  constexpr std::pair<std::string_view, MemberKind> kKinds[] = {
      {"jpg", MemberKind::kImage},  {"jpeg", MemberKind::kImage}, {"png", MemberKind::kImage},
      {"webp", MemberKind::kImage}, {"wav", MemberKind::kSound},  {"flac", MemberKind::kSound},
      {"ogg", MemberKind::kSound},  {"txt", MemberKind::kText},   {"json", MemberKind::kJson}};
  for (const auto& [name, kind] : kKinds)
    if (last == name) return kind;
  return MemberKind::kOther;
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

// The first run of digits before the last dot of an extension; -1: there is none.
int64_t number_of(std::string_view extension) {
  const size_t last = extension.rfind('.');
  const std::string_view stem = last == std::string_view::npos ? "" : extension.substr(0, last);
  size_t at = stem.find_first_of("0123456789");
  if (at == std::string_view::npos) return -1;
  int64_t out = 0;
  for (size_t n = 0; n < 18 && at < stem.size() && stem[at] >= '0' && stem[at] <= '9'; ++at, ++n)
    out = 10 * out + (stem[at] - '0');
  return out;
}

}  // namespace

const ShardMember* ShardSample::find(const std::string& extension) const {
  const auto found = std::find_if(members.begin(), members.end(), [&](const ShardMember& member) {
    return member.extension == extension;
  });
  return found == members.end() ? nullptr : &*found;
}

std::vector<const ShardMember*> ShardSample::media(MemberKind kind) const {
  std::vector<const ShardMember*> out;
  for (const ShardMember& member : members)
    if (member.kind == kind) out.push_back(&member);
  std::stable_sort(out.begin(), out.end(), [](const ShardMember* a, const ShardMember* b) {
    return number_of(a->extension) < number_of(b->extension);
  });
  return out;
}

std::vector<ShardSample> group_members(std::span<const TarMember> members,
                                       const std::string& archive) {
  std::vector<ShardSample> out;
  std::unordered_set<std::string> keys;
  for (const TarMember& member : members) {
    const std::string_view name = member.name;
    const size_t base = name.rfind('/') == std::string_view::npos ? 0 : name.rfind('/') + 1;
    const std::string_view last = name.substr(base);
    if (last.starts_with(".") ||
        (last.size() > 4 && last.starts_with("__") && last.ends_with("__")))
      continue;
    const size_t dot = name.find('.', base);
    MEGATRON_CHECK(dot != std::string_view::npos, archive, ": byte ", member.offset, ": member ",
                   name, " has no extension, expected KEY.EXTENSION");
    const std::string key(name.substr(0, dot));
    if (out.empty() || out.back().key != key) {
      MEGATRON_CHECK(keys.insert(key).second, archive, ": byte ", member.offset, ": member ", name,
                     ": the key ", key,
                     " comes back after another key\nhint: the members of a sample follow each "
                     "other, as tar --sort=name writes them");
      out.push_back({key, {}});
    }
    const std::string extension = lower_case(name.substr(dot + 1));
    MEGATRON_CHECK(out.back().find(extension) == nullptr, archive, ": byte ", member.offset,
                   ": member ", name, ": the sample ", key, " has the extension ", extension,
                   " twice");
    out.back().members.push_back({extension, member_kind_of(extension), member});
  }
  return out;
}

}  // namespace megatron
