// Which files a run reads and with what weight, and how they are divided into splits.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "megatron/datasets/gpt/gpt_dataset.h"

namespace megatron {

// Prefixes, and their weights if given.
struct Blend {
  std::vector<std::string> prefixes;
  std::optional<std::vector<double>> weights;  // as written, not normalised
};

// Parses "[weight] prefix ...": an odd number of tokens are prefixes; an even number are pairs if
// every first element is a number, prefixes if none is. Throws UsageError that names `flag` if they
// are mixed or a weight is not positive.
Blend parse_blend(std::span<const std::string> tokens, const std::string& flag);

// Reads a blend from a file of white-space separated tokens.
Blend read_blend_file(const std::string& path, const std::string& flag);

// Reads blends of train, valid and test from a JSON file: each a list or a white-space separated
// string, null or empty for none.
std::array<std::optional<Blend>, kNumSplits> read_per_split_blend_file(const std::string& path,
                                                                       const std::string& flag);

// Divides by the sum, in float64 and with the rounding of numpy.sum.
std::vector<double> normalize_weights(std::span<const double> weights);

// Bounds of each split as fractions; nullopt for an empty split. `text` as for --split: "969, 30,
// 1".
using SplitMatrix = std::array<std::optional<std::pair<double, double>>, kNumSplits>;
SplitMatrix parse_split(const std::string& text);

// Elements [first, last) of a split among `count`.
std::pair<int64_t, int64_t> split_range(std::pair<double, double> bounds, int64_t count);

// Samples to request from each member for `size` samples of the blend: ceil(ceil(size * w) * (1 +
// surplus)).
std::vector<int64_t> member_sizes(std::span<const double> normalized_weights, int64_t size,
                                  double surplus);

}  // namespace megatron
