// The description of a data set: <prefix>.json, next to its .bin and .idx. It names the tokenizer
// that wrote the tokens, so that a run with another one is refused at start. Data sets of
// Megatron-LM have none. Format: docs/formats/indexed_dataset.md.
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

// Identifies a tokenizer.
struct TokenizerIdentity {
  std::string name;         // for messages: "HuggingFaceTokenizer of run/tokenizer.json"
  std::string fingerprint;  // Tokenizer::fingerprint(); empty: unknown
  int64_t vocab_size = 0;
  bool knows_text = true;  // false: the null tokenizer, compatible with any other
};
TokenizerIdentity identity_of(const Tokenizer& tokenizer, const std::string& type);

struct DatasetDescription {
  std::string program;  // "megatron 1.2.0"
  TokenizerIdentity tokenizer;
  std::optional<bool> append_eod;    // nullopt: merged from parts that differ
  std::vector<std::string> sources;  // files and folders as they were given, or merged data sets
  std::string element_type;          // "u16"
  int64_t num_documents = 0, num_sequences = 0, num_tokens = 0;
};

std::filesystem::path description_path(const std::string& prefix);
std::string description_json(const DatasetDescription& description);

// Nullopt: there is no such file, or it is of another program. Throws Error if it is damaged or of
// a later version.
std::optional<DatasetDescription> read_description(const std::string& prefix);

// Throws Error if <prefix>.bin or .idx exists and `overwrite` is false, or if <prefix>.json exists
// and is not a description of ours, even with `overwrite`.
void refuse_existing_dataset(const std::string& prefix, bool overwrite);

// The description of the concatenation of `inputs`, without the counts; nullopt if no input has
// one, or (with a warning) if only some do. Throws Error if two were written by different
// tokenizers.
std::optional<DatasetDescription> merged_description(std::span<const std::string> inputs,
                                                     const std::string& program);

// Checks a data set against its description and, if its fingerprint is known, against `tokenizer`.
// Throws Error that names both tokenizers. False: the data set does not say which tokenizer wrote
// it.
bool check_tokenizer(const IndexedDataset& data, const TokenizerIdentity& tokenizer);

}  // namespace megatron
