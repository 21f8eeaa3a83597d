// Questions and their answers, as two streams of different length.
//
//   tokens         int64   [s]  padding, the question, the answer without its last token
//   answer         int64   [a]  the answer, then padding; a = s / 2
//   answer_weight  float32 [a]  1 / length of the answer, then 0: every answer counts alike
//
// The token at position first_answer() + k predicts answer[k]; the first of these is the last one
// of the question. A question that is too long loses its beginning, an answer its end.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/indexed_dataset.h"

namespace megatron {

struct QuestionAndAnswer {
  std::vector<int64_t> question, answer;  // both have tokens
};

struct AnswerDatasetConfig {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  int64_t pad = 0;
};

// Position whose token predicts answer[0].
int64_t first_answer(int64_t sequence_length);

class AnswerDataset final : public Dataset {
 public:
  using Source = std::function<QuestionAndAnswer(int64_t pair)>;

  // `source` gives pairs [0, num_pairs); `num_samples` of them are read, in a
  // permutation of all pairs for each epoch, from (seed, epoch). `name`: of the
  // source, one JSON value.
  AnswerDataset(Source source, std::string name, int64_t num_pairs, int64_t num_samples,
                const AnswerDatasetConfig& config);
  int64_t size() const override { return static_cast<int64_t>(order_.size()); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  const Source source_;
  const std::string name_;
  const int64_t num_pairs_;
  const AnswerDatasetConfig config_;
  std::vector<int64_t> order_;
};

// Documents [first, last) of a file: each is a question and an answer, two
// sequences. Throws Error, also when read, for a document that is not.
AnswerDataset::Source answers_of(std::shared_ptr<const IndexedDataset> file, int64_t first,
                                 int64_t last);
// Synthetic: each token of the answer is one of the question, plus one.
AnswerDataset::Source mock_answers(int64_t seed, int64_t vocab_size, int64_t sequence_length);

}  // namespace megatron
