// The one convention of all commands for their input: its name stands without a flag or behind
// --load (models, checkpoints, runs) or --input (texts, data), and "-" is standard input where one
// text is read.
#pragma once

#include <string>

namespace megatron {

inline std::string input_path(const std::string& given) {
  return given == "-" ? "/dev/stdin" : given;
}

}  // namespace megatron
