#include "megatron/transformer/config/hybrid.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/letters.h"

namespace megatron {
namespace {

std::string legal_marks() {
  return cat("letters of layers: ", legal_letters(), "; | ends a segment of the pipeline");
}

}  // namespace

void HybridConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("hybrid models");
  v.field({"hybrid_layer_pattern", "--hybrid-layer-pattern --hybrid-override-pattern"},
          hybrid_layer_pattern,
          cat("layers of one residual connection each: ", legal_letters(),
              "; | ends a segment of the pipeline"));
}

void HybridConfig::validate(Violations& v, const ShapeConfig& shape) const {
  if (!is_hybrid()) return;
  const std::string name = cat("--hybrid-layer-pattern \"", hybrid_layer_pattern, "\"");
  int64_t wrong = 0;
  for (size_t i = 0; i < hybrid_layer_pattern.size(); ++i) {
    const char c = hybrid_layer_pattern[i];
    if (c == '|') continue;
    const std::string at = cat(name, ": '", std::string(1, c), "' at position ", i + 1);
    const LetterType* known = find_letter(c);
    if (c == '/')
      v.add(cat(at, ": layers of multi-token prediction in a pattern are not built"),
            "leave out / and what follows it");
    if (c == '/') return;
    if (known == nullptr) {
      v.add(cat(at, " is no letter of a layer"), legal_marks());
      ++wrong;
    } else if (!known->missing.empty()) {
      v.add(cat(at, ": ", known->missing), legal_marks());
      ++wrong;
    }
  }
  if (wrong > 0) return;
  const auto letters = static_cast<int64_t>(hybrid_letters().size());
  if (letters == 0)
    v.add(cat(name, " has no layers"), legal_marks());
  else if (shape.num_layers != letters)
    v.add(cat("--num-layers ", shape.num_layers, " is not the number of letters of ", name, ", ",
              letters),
          "leave --num-layers out");
}

std::string HybridConfig::hybrid_letters() const {
  std::string letters = hybrid_layer_pattern;
  std::erase(letters, '|');
  return letters;
}

int64_t HybridConfig::count_hybrid_letter(char letter) const {
  return std::ranges::count(hybrid_layer_pattern, letter);
}

std::string HybridConfig::hybrid_moe_layers() const {
  std::string list;
  for (const char letter : hybrid_letters())
    list += cat(list.empty() ? "[" : ",", letter == 'E' ? 1 : 0);
  return list + "]";
}

std::vector<int64_t> HybridConfig::hybrid_segments() const {
  if (count_hybrid_letter('|') == 0) return {};
  std::vector<int64_t> segments = {0};
  for (const char c : hybrid_layer_pattern) {
    if (c == '|')
      segments.push_back(0);
    else
      ++segments.back();
  }
  return segments;
}

std::string_view HybridConfig::hybrid_letter(int64_t layer_number) const {
  const std::string_view pattern = hybrid_layer_pattern;
  for (size_t i = 0; i < pattern.size(); ++i)
    if (pattern[i] != '|' && --layer_number == 0) return pattern.substr(i, 1);
  MEGATRON_ASSERT(false, "a layer beyond ", pattern);
  return {};
}

std::string pattern_of_segments(std::string_view letters, const std::vector<int64_t>& segments) {
  std::string pattern;
  size_t next = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (i > 0) pattern += '|';
    pattern += letters.substr(next, static_cast<size_t>(segments[i]));
    next += static_cast<size_t>(segments[i]);
  }
  return pattern;
}

}  // namespace megatron
