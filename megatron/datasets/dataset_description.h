// What a data set says of itself: <prefix>.json, next to its .bin and .idx. It names the tokenizer
// that wrote the tokens, so that a run with another one is refused at its start. Data sets of
// Megatron-LM have none. The format is described in docs/formats/indexed_dataset.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/indexed_dataset.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// What tells one tokenizer from another.
struct TokenizerIdentity {
  std::string name;         // for messages: "HuggingFaceTokenizer of run/tokenizer.json"
  std::string fingerprint;  // Tokenizer::fingerprint(); empty: unknown
  int64_t vocab_size = 0;
  bool knows_text = true;  // false: the null tokenizer, whose ids are those of any other
};
TokenizerIdentity identity_of(const Tokenizer& tokenizer, const std::string& type);

struct DatasetDescription {
  std::string program;  // "megatron 1.2.0"
  TokenizerIdentity tokenizer;
  std::optional<bool> append_eod;    // none: merged from parts that differ
  std::vector<std::string> sources;  // files and folders as they were given, or merged data sets
  std::string element_type;          // "u16"
  int64_t num_documents = 0, num_sequences = 0, num_tokens = 0;
};

std::filesystem::path description_path(const std::string& prefix);
std::string description_json(const DatasetDescription& description);

// None: there is no such file, or it is somebody else's. Throws Error when it is damaged or of a
// later version.
std::optional<DatasetDescription> read_description(const std::string& prefix);

// Throws Error when <prefix>.bin or .idx exists and `overwrite` is false, or when <prefix>.json
// exists and describes no data set, whatever `overwrite` is.
void refuse_existing_dataset(const std::string& prefix, bool overwrite);

// The description of what `inputs` become in one, without the counts; none when no input has one,
// or (with a warning) when some have none. Throws Error when two were written by different
// tokenizers.
std::optional<DatasetDescription> merged_description(std::span<const std::string> inputs,
                                                     const std::string& program);

// Compares a data set with its description and, when its fingerprint is known, with `tokenizer`.
// Throws Error that names both tokenizers. False: the data set does not say which tokenizer wrote
// it.
bool check_tokenizer(const IndexedDataset& data, const TokenizerIdentity& tokenizer);

}  // namespace megatron
