// Texts, or pairs of texts, each with a class or a number: what classifiers are trained on.
//
// Files: TSV as GLUE has it, and JSON lines, {"text", "text_b" (optional), "label"}. Of a TSV file
// the first line names the columns, as in MNLI, MRPC, QNLI, QQP, RTE, SST-2, STS-B and WNLI, or
// four columns without names are those of CoLA. A file without a column of labels is one to
// predict.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct LabelledText {
  std::string text;
  std::optional<std::string> text_b;
  std::optional<double> label;                                 // a class from 0, or a number
  int64_t most_of_text = std::numeric_limits<int64_t>::max();  // tokens; the rest of it is cut
};

struct LabelOptions {
  int64_t classes = 2;              // 1: labels are numbers
  std::vector<std::string> labels;  // names of the classes; empty: 0, 1, ..., and those of MNLI
};

struct LabelledFile {
  std::vector<LabelledText> texts;
  int64_t num_skipped = 0;  // rows of QQP of another width or with an empty text
};

// Throws Error naming file and line: a row of another width, a label outside the classes, a line
// that is no such object, a first line with other columns.
LabelledFile read_labelled_texts(const std::string& path, const LabelOptions& options);

// White space becomes single spaces, " . " becomes ". ", three times over, as in Megatron-LM.
std::string clean_text(std::string_view text);

struct PairTokens {
  std::vector<int32_t> ids;  // [CLS] A [SEP] or [CLS] A [SEP] B [SEP]
  int64_t first_of_b = 0;    // where B begins; the length without B
};
// At most `most` tokens: a longer pair loses its end, the last token is [SEP] again. Throws Error
// if the tokenizer has no [CLS] or [SEP].
PairTokens encode_pair(const Tokenizer& tokenizer, const LabelledText& text, int64_t most);

struct LabelledTokens {
  PairTokens tokens;
  float label = 0;
};
// Throws Error for a text without a label, naming its number, and as encode_pair().
std::vector<LabelledTokens> encode_labelled(const Tokenizer& tokenizer,
                                            const std::vector<LabelledText>& texts, int64_t most);
// Random tokens from a vocabulary of this size, with and without a second text, and labels of all
// classes in turn (1: numbers).
std::vector<LabelledTokens> mock_labelled(int64_t count, int64_t seed, int64_t vocab_size,
                                          int64_t classes, int64_t most);
// The same for --mock-data: other rows for each split.
std::vector<LabelledTokens> mock_labelled(const DatasetRequest& request, Split split, int64_t count,
                                          int64_t classes);

// [s] each: text int64, behind it the padding token or 0; types int64, 1 from B on; padding_mask
// uint8, 1 where there is text. [1] each: target float32, the label; sample_weight float32, 1.
Columns labelled_columns(int64_t sequence_length);

struct LabelledDatasetConfig {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  int64_t pad = 0;
  int64_t group = 1;        // rows that follow each other in every order, and divide their number
  std::string description;  // one JSON object on one line: files, tokenizer
};

// Without a description.
LabelledDatasetConfig labelled_dataset_config(const DatasetRequest& request);

// In an order of its own in each epoch, from (seed, epoch).
class LabelledTextDataset final : public Dataset {
 public:
  // `num_samples`: over as many epochs as needed; 0: one epoch, in the order given. Throws Error if
  // there are no rows or some are in no whole group.
  LabelledTextDataset(std::vector<LabelledTokens> rows, int64_t num_samples,
                      LabelledDatasetConfig config);
  int64_t size() const override { return std::ssize(order_); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  const std::vector<LabelledTokens> rows_;
  const bool in_order_;
  const LabelledDatasetConfig config_;
  const std::vector<int32_t> order_;  // rows, epoch after epoch
};

}  // namespace megatron
