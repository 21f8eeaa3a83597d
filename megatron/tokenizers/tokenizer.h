// Converts text to token ids and back.
//
// make_tokenizer() gives one of
//   HuggingFaceTokenizer    a tokenizer.json (BPE, Unigram, WordPiece or WordLevel), or a folder of
//                           transformers: tokenizer.json, else tokenizer.model, else GPT-2's files,
//                           else vocab.txt
//   SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer    a SentencePiece .model
//   TikTokenizer            a vocabulary for tiktoken
//   GPT2BPETokenizer        GPT-2's vocab.json and merges.txt
//   BertWordPieceLowerCase, BertWordPieceCase    BERT's vocab.txt
//   ByteLevelTokenizer      ids 0..255 are bytes, 256 is <|endoftext|>
//   NullTokenizer           the text is decimal ids separated by white space
// Ids and decoded text equal those of the packages `tokenizers`, `sentencepiece` and `tiktoken`.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

// Thread safe: every member may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The largest id plus one, with added and special tokens, without padding.
  virtual int64_t vocab_size() const = 0;

  // Appends the ids of `text`. Adds no token (no BOS, no EOD); added and special tokens that are
  // spelled in the text become their ids. Ill-formed UTF-8 is read as U+FFFD (like Python's
  // errors="replace") and counted.
  virtual void encode_append(std::string_view text, std::vector<int32_t>& out) const = 0;
  std::vector<int32_t> encode(std::string_view text) const;

  // The text of `ids`, special tokens included (except SentencePiece's control symbols, which have
  // no text). Bytes that are not valid UTF-8 become U+FFFD.
  // Throws Error for an id outside the vocabulary.
  std::string decode(std::span<const int32_t> ids) const { return decode(ids, false); }
  virtual std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  // The bytes of one token in the middle of a text; may be part of a UTF-8 sequence. decode() may
  // drop a space at the start of the text, or before punctuation (WordPiece). Ids in gaps of the
  // vocabulary give "".
  virtual std::string token_bytes(int32_t id) const = 0;
  virtual bool is_special(int32_t id) const = 0;

  virtual std::optional<int32_t> eod() const = 0;  // end of document
  virtual std::optional<int32_t> bos() const = 0;
  virtual std::optional<int32_t> pad() const = 0;

  // What masked language models need: the first token of a text, the end of one of its parts, and
  // what stands for a masked token.
  virtual std::optional<int32_t> cls() const { return std::nullopt; }
  virtual std::optional<int32_t> sep() const { return std::nullopt; }
  virtual std::optional<int32_t> mask() const { return std::nullopt; }
  // How spellings of tokens begin that continue a word (`##` of WordPiece); empty: not marked so.
  virtual std::string_view continuation_prefix() const { return {}; }

  // Tokens that the tokenizer's own post-processor puts before and after one text ([CLS] and [SEP],
  // a BOS). encode() never adds them.
  virtual std::vector<int32_t> prefix_ids() const { return {}; }
  virtual std::vector<int32_t> suffix_ids() const { return {}; }

  // The id of a token, in the vocabulary's spelling ("<|endoftext|>", "\u0120the").
  virtual std::optional<int32_t> token_to_id(std::string_view token) const = 0;
  // The spelling of an id; "" in gaps of the vocabulary. Throws Error for an id outside of it.
  virtual std::string id_to_token(int32_t id) const = 0;

  // Differs if any text could get other ids. Stored in data sets and checkpoints.
  virtual std::string fingerprint() const = 0;

  // The files it was built from, to be stored with checkpoints.
  virtual std::vector<std::filesystem::path> files() const { return {}; }

  // Number of ill-formed UTF-8 sequences that were replaced by U+FFFD so far.
  uint64_t num_replaced() const { return num_replaced_.load(std::memory_order_relaxed); }

 protected:
  mutable std::atomic<uint64_t> num_replaced_{0};
};

// Turns a stream of tokens into text that is split only between complete UTF-8 sequences.
// Keeps a reference to the tokenizer. Not thread safe.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The text that `id` completes; "" while a sequence is unfinished. Ill-formed bytes become
  // U+FFFD.
  std::string push(int32_t id);
  // The rest: "" or one U+FFFD for an unfinished sequence.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

struct TokenizerConfig : Config {
  std::string tokenizer_type;
  std::string tokenizer_model;
  std::string vocab_file;
  std::string merge_file;
  std::vector<std::string> special_tokens;
  std::string tiktoken_pattern;
  int64_t tiktoken_num_special_tokens = 1000;
  std::optional<int64_t> vocab_size;
  int64_t vocab_extra_ids = 0;
  std::optional<int64_t> null_tokenizer_eod_id;
  std::optional<int64_t> null_tokenizer_pad_id;  // -1: none
  int64_t make_vocab_size_divisible_by = 128;
  std::optional<int64_t> padded_vocab_size;
  bool pad_vocab_size = true;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// Throws UsageError if the type or its files are not given, Error if a file cannot be used.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config);

// A tokenizer whose files lie in no folder, but in memory. `name` is used in errors.
struct TokenizerTexts {
  std::string name;
  std::string tokenizer;  // tokenizer.json
  std::string config;     // tokenizer_config.json; empty: none
};
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerTexts& texts);

// The type and the files for a folder of transformers; the type is empty if the folder contains no
// known tokenizer.
TokenizerConfig find_tokenizer(const std::filesystem::path& folder);

// The number of ids of a model: --vocab-size, else that of the tokenizer. A model may have more
// ids, which never result from text. Throws UsageError if it has fewer.
int64_t model_vocab_size(const TokenizerConfig& config, const Tokenizer& tokenizer);

// `vocab` rounded up to a multiple of divisible_by * tp.
int64_t padded_vocab_size(int64_t vocab, int64_t divisible_by, int64_t tp);

// The size of the embedding: --padded-vocab-size, else `vocab` padded unless --no-pad-vocab-size.
// Throws UsageError if --padded-vocab-size is smaller than `vocab`.
int64_t padded_vocab_size(const TokenizerConfig& config, int64_t vocab, int64_t tp);

}  // namespace megatron
