// The contents of tokenizer files, before a tokenizer is built from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/tokenizers/detail/added_tokens.h"
#include "megatron/tokenizers/detail/decoder.h"
#include "megatron/tokenizers/detail/pre_tokenizer.h"
#include "megatron/tokenizers/detail/text/normalizer.h"

namespace megatron {

enum class ModelKind { kBpe, kUnigram, kWordPiece, kWordLevel };

struct TokenizerDefinition {
  // -- model
  ModelKind model = ModelKind::kBpe;
  std::vector<std::pair<std::string, int32_t>> vocab;
  // Byte-level BPE: the vocabulary is in GPT-2's printable spelling (byte_level.h), and merging
  // starts from bytes. The pre-tokenizer's steps then end before ByteLevel.
  bool byte_level = false;
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
  // any two tokens merge if the result is a token; lowest id first
  bool merges_by_id = false;
  bool ignore_merges = false;
  bool fuse_unk = false;
  bool byte_fallback = false;
  std::string prefix, suffix;  // continuing_subword_prefix, end_of_word_suffix
  size_t max_input_chars_per_word = 100;
  std::vector<double> scores;            // of Unigram, in the order of vocab
  std::optional<std::string> unk_token;  // Unigram: the token of unk_id
  // -- components around the model
  std::vector<NormalizerStep> normalizer;
  std::vector<PreTokenizerStep> steps;
  std::vector<DecoderStep> decoder;
  std::vector<AddedToken> added_tokens;
  bool text_spells_no_special = false;  // encode() does not look for them (rendered_text.h)
  // tokens that the post-processor puts around a single text
  std::vector<std::string> before, after;
  std::optional<std::string> eos, bos, pad, cls, sep, mask;  // spellings
  // File and key, for messages; of the file that names special tokens
  std::string vocab_where, merges_where, steps_where, added_where, special_where;
  std::vector<std::filesystem::path> files;
};

inline constexpr int64_t kMaxTokenId = (int64_t{1} << 24) - 1;

// Reads a tokenizer.json, and EOS, BOS and padding from a tokenizer_config.json next to it. Throws
// Error that names file and key of anything wrong or not supported.
TokenizerDefinition read_tokenizer_json(const std::filesystem::path& path);
// The same from the texts of such files; `config`: empty if there is none.
TokenizerDefinition parse_tokenizer_json(std::string_view text, const std::string& name,
                                         std::string_view config, const std::string& config_name);

// Reads GPT-2's vocab.json and merges.txt.
TokenizerDefinition read_gpt2_files(const std::filesystem::path& vocab,
                                    const std::filesystem::path& merges);

// Reads BERT's vocab.txt: a token per line. `lower_case`: text is lower-cased and accents are
// removed. `extra_tokens` are appended.
TokenizerDefinition read_bert_vocabulary(const std::filesystem::path& vocab, bool lower_case,
                                         const std::vector<std::string>& extra_tokens);

// do_lower_case of a tokenizer_config.json; true without the file or the key.
bool bert_lower_case(const std::filesystem::path& tokenizer_config);

struct TiktokenOptions {
  std::string pattern;                      // "v1", "v2" or "": Megatron's names
  int64_t num_special_tokens = 1000;        // ids before the file's
  std::vector<std::string> special_tokens;  // the first of them; empty: Megatron's seven
  int64_t vocab_size = 131072;              // including special tokens; longer files are truncated
};

// Reads a vocabulary for tiktoken. Two forms: Megatron's JSON list of {"rank", "token_bytes",
// "token_str"}, whose ids follow the special tokens; and lines of "base64 rank" (.tiktoken files
// and Llama 3's tokenizer.model), whose ids are their ranks, followed by Llama 3's 256 special
// tokens.
TokenizerDefinition read_tiktoken(const std::filesystem::path& path,
                                  const TiktokenOptions& options);

// Whether Mistral's programs take it for one: a name with "tekken" that ends with .json.
bool is_tekken_file(const std::filesystem::path& path);
// Reads one. Special tokens have the first ids, ranks those behind them.
TokenizerDefinition read_tekken(const std::filesystem::path& path);

}  // namespace megatron
