// How well written texts meet the texts that were asked for.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/inference/evaluation/classification_metrics.h"

namespace megatron {

// Means over all texts:
//   exact_match             the texts are equal, without the white space around them
//   token_f1                F1 of the words of both, in any order; lower case, without punctuation
//                           and the articles of English, as SQuAD's
//   rouge1, rouge2, rougeL  F1 of runs of one and two words of ASCII letters and digits, and of the
//                           longest common subsequence of words, as those of the package
//                           rouge-score without stemming
// Throws Error for no texts or another number of them.
std::vector<NamedMetric> text_metrics(std::span<const std::string> written,
                                      std::span<const std::string> expected);

}  // namespace megatron
