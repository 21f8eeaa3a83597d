// Lists of the parts of a layer that flags name (--recompute-modules, --offload-modules).
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {

template <class List>
bool contains_name(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

// " waits for X, which is not built yet" for values that Megatron has, else " is not known".
template <class List>
std::string why_unknown(std::string_view name, const List& later) {
  for (const auto& [known, what] : later)
    if (known == name) return cat(" waits for ", what, ", which is not built yet");
  return " is not known";
}

}  // namespace megatron
