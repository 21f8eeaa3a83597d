// The letters of --hybrid-layer-pattern: what each is called, and the rules of its flags. What a
// layer of a letter computes is a row of transformer/layer_kinds.cc. docs/design/layers.md
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

class Shrinker;
struct TransformerConfig;

struct LetterType {
  char letter;
  std::string_view name;
  std::string_view missing = {};  // why its layers are refused; empty: they are built
  // Null: nothing. Rules of any model, whether it has such layers or not; of one that has: sizes
  // over t tensor-parallel ranks; and the sizes of its tiny model for a proof (proof/proof_size.h).
  void (*validate)(const TransformerConfig& config, Violations& v) = nullptr;
  void (*validate_ranks)(const TransformerConfig& config, int64_t t, Violations& v) = nullptr;
  void (*shrink)(TransformerConfig& config, int64_t tensor_before, int64_t tensor,
                 Shrinker& shrinker) = nullptr;
};

// Null: there is none.
const LetterType* find_letter(char letter);

// "M Mamba-2, G gated delta net, ...": those that are built.
std::string legal_letters();

// Of a model without layers of `letter`: each of these flags has no effect.
void refuse_without_letter(const LetterType& letter, const std::vector<std::string>& flags,
                           Violations& v);

// The rules of every letter.
void validate_letters(const TransformerConfig& config, Violations& v);
void validate_letter_ranks(const TransformerConfig& config, int64_t t, Violations& v);
void shrink_letters(TransformerConfig& config, int64_t tensor_before, int64_t tensor,
                    Shrinker& shrinker);

}  // namespace megatron
