// How well an answer that a model wrote fits the answers that count as right: from 0 to 1.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace megatron {

// Of answers that several people gave, `right`: the mean, over the sets without one of them, of
// min(equal ones / 3, 1); of fewer than 4 answers a smaller number takes the place of 3, so that an
// answer as all gave it has 1. Equal are texts as vqa_text() has them. Source: Antol et al. 2015
// (arXiv:1505.00468).
double vqa_score(std::string_view answer, std::span<const std::string> right);

// Lower case; punctuation as blanks but between digits; none, zero ... ten as digits; without a, an
// and the; one blank between words. VQA's table of contractions is not applied.
std::string vqa_text(std::string_view text);

// The largest of 1 - d / n, 0 below 0.5: d edits between answer and right one, n characters of the
// longer one, both in lower case with one blank between words. Source: Biten et al. 2019
// (arXiv:1907.00490).
double anls_score(std::string_view answer, std::span<const std::string> right);

// 1 for a number within 5% of a right one (not 0), where a percentage is a hundredth; of other
// texts for one that is equal without regard to case. Source: Masry et al. 2022 (arXiv:2203.10244).
double relaxed_score(std::string_view answer, std::span<const std::string> right);

// 1 for one of the texts, without blanks around it.
double exact_score(std::string_view answer, std::span<const std::string> right);

}  // namespace megatron
