#include "megatron/tokenizers/detail/text/double_array.h"

#include <algorithm>

namespace megatron {
namespace {

constexpr int32_t kFree = -1, kRoot = -2;

// A node whose children are still to be placed: keys [begin, end) share its path of `depth` bytes.
struct Pending {
  int32_t node;
  size_t begin, end, depth;
};

}  // namespace

// Breadth first, so that frequently visited units are close together. Single children take the
// first free unit; several search further on, after the crowded region.
DoubleArray::DoubleArray(std::vector<std::pair<std::string_view, int32_t>> entries) {
  std::erase_if(entries, [](const auto& entry) { return entry.first.empty(); });
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  if (entries.empty()) return;
  units_.resize(512);
  units_[0].parent = kRoot;
  size_t first_free = 256, first_roomy = 256;  // so that no base is below 0
  std::vector<Pending> queue = {{0, 0, entries.size(), 0}};
  std::vector<std::pair<unsigned char, size_t>> children;  // byte, first key
  for (size_t at = 0; at < queue.size(); ++at) {
    const Pending pending = queue[at];
    size_t begin = pending.begin;
    while (begin < pending.end && entries[begin].first.size() == pending.depth) {
      units_[pending.node].value = entries[begin++].second;
    }
    if (begin == pending.end) continue;
    children.clear();
    for (size_t i = begin; i < pending.end; ++i) {
      const auto byte = static_cast<unsigned char>(entries[i].first[pending.depth]);
      if (children.empty() || children.back().first != byte) children.emplace_back(byte, i);
    }
    while (first_free < units_.size() && units_[first_free].parent != kFree) ++first_free;
    const size_t start = children.size() > 1 ? std::max(first_free, first_roomy) : first_free;
    size_t base = start - children[0].first;
    const auto fits = [&] {
      if (units_.size() < base + 256) units_.resize(std::max(base + 256, units_.size() * 5 / 4));
      return std::none_of(children.begin(), children.end(), [&](const auto& child) {
        return units_[base + child.first].parent != kFree;
      });
    };
    int tries = 0;
    while (!fits()) {
      ++base;
      ++tries;
    }
    if (tries > 16) first_roomy = base + children[0].first;
    units_[pending.node].base = static_cast<int32_t>(base);
    for (size_t i = 0; i < children.size(); ++i) {
      const auto child = static_cast<int32_t>(base + children[i].first);
      units_[child].parent = pending.node;
      const size_t end = i + 1 < children.size() ? children[i + 1].second : pending.end;
      queue.push_back({child, children[i].second, end, pending.depth + 1});
    }
  }
}

}  // namespace megatron
