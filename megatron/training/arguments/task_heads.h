// Heads that a task trains in the place of those of the tasks before it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// Patterns of the parameters of heads: where the checkpoint of another task lacks one it starts
// anew, and one that the model lacks stays unread. Empty: checkpoints must fit exactly.
inline std::vector<std::string> heads_of_task(std::string_view task) {
  if (task != "classify" && task != "multichoice") return {};
  return {"lm_head.*", "output_layer.*",        "binary_head.*",
          "pooler.*",  "classification_head.*", "multichoice_head.*"};
}

}  // namespace megatron
