#include "megatron/transformer/config/letters.h"

#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {
namespace {

void validate_attention_letter(const TransformerConfig& t, Violations& v) {
  if (!t.is_hybrid() || !t.multi_latent_attention || !t.has_letter('*')) return;
  v.add("--hybrid-layer-pattern has *, attention, but --multi-latent-attention is given",
        t.has_letter('+') ? "both in one model are not built" : "+ is latent attention");
}

void validate_latent_letter(const TransformerConfig& t, Violations& v) {
  if (!t.is_hybrid()) return;
  if (t.has_letter('+') && !t.multi_latent_attention)
    v.add("--hybrid-layer-pattern has +, latent attention, without --multi-latent-attention");
  if (!t.attends() && t.multi_latent_attention)
    v.add("--multi-latent-attention has no effect on a --hybrid-layer-pattern without +");
}

void validate_expert_letter(const TransformerConfig& t, Violations& v) {
  if (!t.is_hybrid()) return;
  const bool has = t.has_letter('E');
  if (has && !t.has_moe()) v.add("--hybrid-layer-pattern has E, experts, without --num-experts");
  if (!has && t.has_moe())
    v.add("--num-experts has no effect on a --hybrid-layer-pattern without E, experts");
  if (has && t.has_moe() && t.moe_layer_freq != t.hybrid_moe_layers())
    v.add(cat("--moe-layer-freq ", t.moe_layer_freq,
              " with --hybrid-layer-pattern, whose E say which layers have experts"),
          "leave --moe-layer-freq out");
}

constexpr LetterType kAttentionLetter{
    .letter = '*', .name = "attention", .validate = validate_attention_letter};
constexpr LetterType kMLPLetter{.letter = '-', .name = "MLP"};
constexpr LetterType kExpertsLetter{
    .letter = 'E', .name = "experts", .validate = validate_expert_letter};
constexpr LetterType kLatentAttentionLetter{
    .letter = '+', .name = "latent attention", .validate = validate_latent_letter};
constexpr LetterType kSparseAttentionLetter{
    .letter = 'D', .name = "sparse attention", .missing = "sparse attention is not built"};

// A letter with flags of its own declares its row beside them (mamba.h).
const LetterType* const kLetters[] = {
    &kMambaLetter,   &kGatedDeltaLetter,      &kAttentionLetter,       &kMLPLetter,
    &kExpertsLetter, &kLatentAttentionLetter, &kSparseAttentionLetter,
};

}  // namespace

void refuse_without_letter(const LetterType& letter, const std::vector<std::string>& flags,
                           Violations& v) {
  for (const std::string& flag : flags)
    v.add(
        cat(flag, " has no effect without layers of the letter ", letter.letter, ", ", letter.name),
        cat("leave it out, or give --hybrid-layer-pattern with ", letter.letter));
}

const LetterType* find_letter(char letter) {
  for (const LetterType* type : kLetters)
    if (type->letter == letter) return type;
  return nullptr;
}

std::string legal_letters() {
  std::vector<const LetterType*> built;
  for (const LetterType* type : kLetters)
    if (type->missing.empty()) built.push_back(type);
  return listed(built, [](const LetterType* one) { return cat(one->letter, " ", one->name); });
}

void validate_letters(const TransformerConfig& config, Violations& v) {
  for (const LetterType* type : kLetters)
    if (type->validate != nullptr) type->validate(config, v);
}

void validate_letter_ranks(const TransformerConfig& config, int64_t t, Violations& v) {
  for (const LetterType* type : kLetters)
    if (type->validate_ranks != nullptr && config.has_letter(type->letter))
      type->validate_ranks(config, t, v);
}

void shrink_letters(TransformerConfig& config, int64_t tensor_before, int64_t tensor,
                    Shrinker& shrinker) {
  for (const LetterType* type : kLetters)
    if (type->shrink != nullptr && config.has_letter(type->letter))
      type->shrink(config, tensor_before, tensor, shrinker);
}

}  // namespace megatron
