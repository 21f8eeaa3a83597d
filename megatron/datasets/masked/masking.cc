#include "megatron/datasets/masked/masking.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/datasets/blend.h"

namespace megatron {
namespace {

constexpr double kNgramGeometric = 0.2;

// Probabilities of n-grams of 1, 2, ... words: in proportion to 1/n, or the same reversed. Divided
// by their sum twice, as Megatron-LM does.
std::vector<double> ngram_probabilities(const MaskingOptions& options) {
  std::vector<double> p;
  for (int64_t n = 1; n <= options.max_ngram; ++n) p.push_back(1.0 / static_cast<double>(n));
  p = normalize_weights(p);
  if (options.longer_ngrams) std::reverse(p.begin(), p.end());
  return normalize_weights(p);
}

// The number of tokens that are masked at most. Not always whole.
double masking_budget(const MaskingOptions& options, int64_t tokens, int64_t target) {
  const double share = std::nearbyint(static_cast<double>(tokens) * options.probability);
  return std::min(options.probability * static_cast<double>(target), std::max(1.0, share));
}

}  // namespace

int64_t most_masked(const MaskingOptions& options, int64_t target) {
  return std::max<int64_t>(1,
                           static_cast<int64_t>(options.probability * static_cast<double>(target)));
}

Masking::Masking(const MaskingOptions& options, const MaskedTokens& tokens)
    : options_(options),
      tokens_(tokens),
      ngram_sums_(NumpyRandom::cumulative(ngram_probabilities(options))) {}

void Masking::find_words(std::span<const int64_t> ids, std::vector<int64_t>& positions,
                         std::vector<size_t>& ends) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == tokens_.cls || ids[i] == tokens_.sep) continue;
    const bool continues = options_.whole_word && !ends.empty() &&
                           tokens_.continues_word[static_cast<size_t>(ids[i])] != 0 &&
                           tokens_.ends_word[static_cast<size_t>(ids[i - 1])] == 0;
    positions.push_back(static_cast<int64_t>(i));
    if (continues)
      ends.back() = positions.size();
    else
      ends.push_back(positions.size());
  }
}

template <class Replace>
void Masking::draw(std::span<const int64_t> ids, int64_t target, NumpyRandom& random,
                   MaskedPositions& out, Replace replace) const {
  std::vector<int64_t> positions;
  std::vector<size_t> ends;
  find_words(ids, positions, ends);
  std::vector<size_t> order(ends.size());
  std::iota(order.begin(), order.end(), size_t{0});
  random.shuffle(std::span(order));
  std::vector<bool> masked(ids.size());
  const double budget = masking_budget(options_, static_cast<int64_t>(ids.size()), target);
  const auto fits = [&](size_t more) {
    return budget >= static_cast<double>(out.positions.size() + more);
  };
  for (const size_t word : order) {
    if (static_cast<double>(out.positions.size()) >= budget) break;
    const size_t begin = word == 0 ? 0 : ends[word - 1];
    auto words =
        options_.geometric
            ? static_cast<size_t>(std::min(random.geometric(kNgramGeometric), options_.max_ngram))
            : random.choice(ngram_sums_) + 1;
    const auto end_of = [&](size_t count) { return ends[std::min(word + count, ends.size()) - 1]; };
    while (words > 0 && !fits(end_of(words) - begin)) --words;
    if (words == 0) continue;
    const std::span<const int64_t> span(&positions[begin], end_of(words) - begin);
    if (std::any_of(span.begin(), span.end(), [&](int64_t at) { return masked[at]; })) continue;
    for (const int64_t at : span) {
      masked[at] = true;
      out.positions.push_back(at);
      out.originals.push_back(ids[at]);
      replace(at);
    }
    out.ends.push_back(out.positions.size());
  }
}

int64_t Masking::replacement(int64_t original, NumpyRandom& random) const {
  if (random.uniform() < options_.masks) return tokens_.mask;
  if (random.uniform() < options_.kept / (options_.random + options_.kept)) return original;
  const auto count = static_cast<int64_t>(tokens_.replacements.size());
  return tokens_.replacements[static_cast<size_t>(random.randint(0, count))];
}

void Masking::mask(std::span<int64_t> ids, int64_t target, NumpyRandom& random,
                   MaskedPositions& out) const {
  draw(ids, target, random, out, [&](int64_t at) { ids[at] = replacement(ids[at], random); });
}

void Masking::draw_positions(std::span<const int64_t> ids, int64_t target, NumpyRandom& random,
                             MaskedPositions& out) const {
  draw(ids, target, random, out, [](int64_t) {});
}

void describe_masking(const MaskingOptions& options, const MaskedTokens& tokens, JsonWriter& json) {
  json.member("tokenizer", tokens.identity.fingerprint).member("vocab_size", tokens.vocab_size);
  json.member("mask_probability", options.probability)
      .member("max_ngram", options.max_ngram)
      .member("whole_word", options.whole_word);
  json.member("longer_ngrams", options.longer_ngrams).member("geometric", options.geometric);
  const double shares[] = {options.masks, options.random, options.kept};
  json.member("replace", std::span(shares));
}

}  // namespace megatron
