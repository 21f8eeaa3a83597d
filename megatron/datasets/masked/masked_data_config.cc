#include "megatron/datasets/masked/masked_data_config.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "megatron/base/format.h"

namespace megatron {
namespace {

constexpr std::string_view kGeometric[] = {"auto", "true", "false"};
constexpr std::string_view kBertData[] = {"sentences", "packed"};

}  // namespace

void MaskedDataConfig::fields(FieldVisitor& v) {
  v.group("masked data");
  v.role(FieldRole::kNumerics);
  v.choice("bert_data", bert_data, kBertData,
           "samples of BERT: sentences of one document, or packed, documents one after the other "
           "that fill them, each of which attends to itself alone");
  v.field("mask_prob", mask_prob, "share of the tokens of a sample that are masked");
  v.field("short_seq_prob", short_seq_prob,
          "share of samples of BERT and T5 that are built for a shorter length");
  v.field("masking_max_ngram", masking_max_ngram,
          "most words that are masked together; default: 3 for BERT, 10 for T5");
  v.field({"masking_whole_word", "--no-masking-whole-word", true}, masking_whole_word,
          "mask single tokens instead of whole words");
  v.field("masking_longer_ngrams", masking_longer_ngrams,
          "prefer long n-grams to short ones, where their lengths are not geometric");
  v.choice("masking_geometric", masking_geometric, kGeometric,
           "lengths of masked n-grams follow a geometric distribution; auto: for T5");
  v.field("mlm_replace", mlm_replace,
          "shares of the masked tokens of BERT that become [MASK], a random token, and stay");
  v.field("mock_lengths", mock_lengths,
          "LEAST MOST: texts of --mock-data have so many tokens, each number as often, and no "
          "tokens inside that are padding");
}

void MaskedDataConfig::validate(Violations& violations) const {
  violations.require(mask_prob > 0 && mask_prob < 1, cat("--mask-prob is ", mask_prob),
                     "above 0 and below 1, such as 0.15");
  const double kShortSeqProb = MaskedDataConfig().short_seq_prob;
  violations.require(short_seq_prob >= 0 && short_seq_prob <= 1,
                     cat("--short-seq-prob is ", short_seq_prob), "0 to 1");
  violations.require(bert_data == BertData::kSentences || short_seq_prob == kShortSeqProb,
                     "--short-seq-prob has no effect with --bert-data packed, whose samples are "
                     "all full",
                     "leave it out");
  violations.require(!masking_max_ngram || (*masking_max_ngram >= 1 && *masking_max_ngram <= 1000),
                     cat("--masking-max-ngram is ", masking_max_ngram.value_or(0)), "1 to 1000");
  violations.require(!masking_longer_ngrams || masking_geometric != MaskingGeometric::kTrue,
                     "--masking-longer-ngrams has no effect with --masking-geometric true",
                     "leave one of them out");
  violations.require(mock_lengths.empty() || (mock_lengths.size() == 2 && mock_lengths[0] >= 2 &&
                                              mock_lengths[0] <= mock_lengths[1]),
                     cat("--mock-lengths is ", listed(mock_lengths, {}, " ")),
                     "the least and the most tokens of a text, 2 or more: 64 512");
  const bool shares =
      mlm_replace.size() == 3 &&
      std::all_of(mlm_replace.begin(), mlm_replace.end(), [](double x) { return x >= 0; }) &&
      std::abs(std::accumulate(mlm_replace.begin(), mlm_replace.end(), -1.0)) < 1e-6;
  violations.require(shares, cat("--mlm-replace is ", listed(mlm_replace, {}, " ")),
                     "three shares whose sum is 1: 0.8 0.1 0.1");
}

MaskingOptions MaskedDataConfig::masking(MaskedKind kind) const {
  const bool t5 = kind == MaskedKind::kT5;
  MaskingOptions options;
  options.probability = mask_prob;
  options.max_ngram = masking_max_ngram.value_or(t5 ? 10 : 3);
  options.whole_word = masking_whole_word;
  options.longer_ngrams = masking_longer_ngrams;
  options.geometric = masking_geometric == MaskingGeometric::kAuto
                          ? t5
                          : masking_geometric == MaskingGeometric::kTrue;
  options.masks = mlm_replace[0];
  options.random = mlm_replace[1];
  options.kept = mlm_replace[2];
  return options;
}

}  // namespace megatron
