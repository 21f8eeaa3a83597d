#include "megatron/training/tasks/labelled_sets.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/training/tasks/row_sets.h"

namespace megatron {

TrainValidTestDatasets build_labelled_sets(const Arguments& arguments,
                                           const DatasetRequest& request,
                                           const LabelledSource& source) {
  RowSource<LabelledTokens> rows{source.read, source.mock, {}, source.group};
  rows.make = [&](std::vector<LabelledTokens> tokens, const std::vector<std::string>& files,
                  int64_t num_samples) {
    LabelledDatasetConfig config = labelled_dataset_config(request);
    config.group = source.group;
    JsonWriter description;
    description.begin_object().member("files", files);
    source.describe(description);
    description.member("tokenizer", request.tokenizer.identity.fingerprint).end_object();
    config.description = description.text();
    return std::make_shared<LabelledTextDataset>(std::move(tokens), num_samples, std::move(config));
  };
  return build_row_sets(arguments.data, request, rows);
}

std::vector<LabelledTokens> encode_file(const std::string& path,
                                        const std::vector<LabelledText>& texts,
                                        const DatasetRequest& request) {
  try {
    return encode_labelled(*request.text_tokenizer, texts, request.sequence_length);
  } catch (const Error& error) {
    throw Error(cat(path, ": ", error.what()));
  }
}

}  // namespace megatron
