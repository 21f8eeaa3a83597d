// Convention of all commands for their input: a positional argument, or --load (models,
// checkpoints, runs) or --input (texts, data); "-" is standard input for commands that read one
// text.
#pragma once

#include <string>

namespace megatron {

inline std::string input_path(const std::string& given) {
  return given == "-" ? "/dev/stdin" : given;
}

}  // namespace megatron
