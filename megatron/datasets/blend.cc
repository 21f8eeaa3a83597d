#include "megatron/datasets/blend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

std::optional<double> to_number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const bool whole = !text.empty() && end == text.c_str() + text.size();
  return whole && text.find_first_of("xX") == std::string::npos ? std::optional(value)
                                                                : std::nullopt;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// numpy.sum of a contiguous float64 array: eight partial sums in blocks of up to 128, blocks added
// pairwise.
double pairwise_sum(std::span<const double> v) {
  const size_t n = v.size();
  if (n < 8) {
    double sum = 0;
    for (const double x : v) sum += x;
    return sum;
  }
  if (n <= 128) {
    double r[8];
    for (size_t k = 0; k < 8; ++k) r[k] = v[k];
    size_t i = 8;
    for (; i < n - n % 8; i += 8)
      for (size_t k = 0; k < 8; ++k) r[k] += v[i + k];
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; ++i) sum += v[i];
    return sum;
  }
  size_t half = n / 2;
  half -= half % 8;
  return pairwise_sum(v.first(half)) + pairwise_sum(v.subspan(half));
}

}  // namespace

Blend parse_blend(std::span<const std::string> tokens, const std::string& flag) {
  Blend blend;
  if (tokens.size() % 2 == 1) {
    const auto is_weight = [](const std::string& token) {
      return to_number(token) && !std::filesystem::exists(token + ".idx");
    };
    if (tokens.size() > 1 && is_weight(tokens.front()) && is_weight(tokens.back()))
      throw UsageError(cat(flag, " ends with the weight \"", tokens.back(),
                           "\", without a path after it\nhint: ", "weights and paths alternate: ",
                           flag, " 0.3 PREFIX 0.7 PREFIX"));
    blend.prefixes.assign(tokens.begin(), tokens.end());
    return blend;
  }
  size_t numbers = 0;
  std::string not_a_number;
  for (size_t i = 0; i < tokens.size(); i += 2) {
    if (to_number(tokens[i]))
      ++numbers;
    else
      not_a_number = tokens[i];
  }
  if (numbers == 0) {
    blend.prefixes.assign(tokens.begin(), tokens.end());
    return blend;
  }
  if (2 * numbers != tokens.size())
    throw UsageError(cat(flag, " mixes weights and paths: \"", not_a_number,
                         "\" stands where a weight was expected",
                         "\nhint: write either only prefixes or a weight before each prefix"));
  blend.weights.emplace();
  for (size_t i = 0; i < tokens.size(); i += 2) {
    const double weight = *to_number(tokens[i]);
    if (!(std::isfinite(weight) && weight > 0))
      throw UsageError(
          cat(flag, ": weight ", tokens[i], " of ", tokens[i + 1], " is not positive"));
    blend.weights->push_back(weight);
    blend.prefixes.push_back(tokens[i + 1]);
  }
  return blend;
}

Blend read_blend_file(const std::string& path, const std::string& flag) {
  const Blend blend = parse_blend(words_of(read_file(path)), flag + " " + path);
  MEGATRON_CHECK(!blend.prefixes.empty(), flag, " ", path, ": the file names no dataset");
  return blend;
}

std::array<std::optional<Blend>, kNumSplits> read_per_split_blend_file(const std::string& path,
                                                                       const std::string& flag) {
  nlohmann::json root;
  try {
    root = nlohmann::json::parse(read_file(path));
  } catch (const nlohmann::json::exception& error) {
    throw_error(cat(path, ": is no JSON: ", error.what()));
  }
  MEGATRON_CHECK(root.is_object(), path, ": the top level is ", root.type_name(),
                 ", expected an object");
  std::array<std::optional<Blend>, kNumSplits> blends;
  for (int i = 0; i < kNumSplits; ++i) {
    const std::string key = to_string(static_cast<Split>(i));
    MEGATRON_CHECK(root.contains(key), path, ": has no key \"", key,
                   "\"\nhint: train, valid and test are all required");
    const nlohmann::json& value = root[key];
    std::vector<std::string> tokens;
    if (value.is_string()) {
      tokens = words_of(value.get<std::string>());
    } else if (value.is_array()) {
      for (const nlohmann::json& item : value) {
        MEGATRON_CHECK(item.is_string() || item.is_number(), path, ": an element of \"", key,
                       "\" is ", item.type_name(), ", expected a string or a number");
        tokens.push_back(item.is_string() ? item.get<std::string>() : item.dump());
      }
    } else {
      MEGATRON_CHECK(value.is_null(), path, ": \"", key, "\" is ", value.type_name(),
                     ", expected a list or a string");
    }
    if (!tokens.empty()) blends[i] = parse_blend(tokens, flag + " " + path + " \"" + key + "\"");
  }
  return blends;
}

std::vector<double> normalize_weights(std::span<const double> weights) {
  const double sum = pairwise_sum(weights);
  std::vector<double> out(weights.begin(), weights.end());
  for (double& weight : out) weight /= sum;
  return out;
}

SplitMatrix parse_split(const std::string& text) {
  std::vector<double> parts;
  for (size_t at = 0; (at = text.find_first_of(".0123456789", at)) != std::string::npos;) {
    const size_t end = std::min(text.find_first_not_of(".0123456789", at), text.size());
    const auto value = to_number(text.substr(at, end - at));
    if (!value)
      throw UsageError(
          cat("--split \"", text, "\": \"", text.substr(at, end - at), "\" is no number"));
    parts.push_back(*value);
    at = end;
  }
  if (parts.size() > kNumSplits || text.find('-') != std::string::npos)
    throw UsageError(cat("--split \"", text,
                         "\" does not read as up to three shares\nhint: write e.g. 969,30,1"));
  parts.resize(kNumSplits, 0.0);
  const std::vector<double> shares = normalize_weights(parts);
  if (!std::isfinite(shares[0]))
    throw UsageError(cat("--split \"", text, "\" has shares that sum to 0"));
  SplitMatrix matrix;
  double begin = 0;
  for (int i = 0; i < kNumSplits; ++i) {
    const double end = begin + shares[i];
    if (begin < end) matrix[i] = {begin, end};
    begin = end;
  }
  return matrix;
}

std::pair<int64_t, int64_t> split_range(std::pair<double, double> bounds, int64_t count) {
  const auto at = [&](double fraction) {  // rounds half to even
    return std::min<int64_t>(count, std::llrint(fraction * static_cast<double>(count)));
  };
  return {at(bounds.first), at(bounds.second)};
}

std::vector<int64_t> member_sizes(std::span<const double> normalized_weights, int64_t size,
                                  double surplus) {
  std::vector<int64_t> sizes;
  for (const double weight : normalized_weights) {
    const double target = std::ceil(static_cast<double>(size) * weight);
    sizes.push_back(static_cast<int64_t>(std::ceil(target * (1 + surplus))));
  }
  return sizes;
}

}  // namespace megatron
