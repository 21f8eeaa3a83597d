#include "megatron/models/problems.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {

void throw_problems(const std::string& name, const std::vector<std::string>& problems) {
  if (problems.empty()) return;
  constexpr size_t kShown = 10;
  std::string text = cat(name, ": ", problems[0]);
  for (size_t i = 1; i < std::min(problems.size(), kShown); ++i)
    text += "\ndetail: " + problems[i];
  if (problems.size() > kShown)
    text += cat("\ndetail: and ", problems.size() - kShown, " more tensors");
  throw Error(text);
}

}  // namespace megatron
