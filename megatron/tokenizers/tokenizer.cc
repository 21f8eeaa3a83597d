#include "megatron/tokenizers/tokenizer.h"

#include <array>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/bpe_tokenizer.h"
#include "megatron/tokenizers/detail/simple_tokenizers.h"
#include "megatron/tokenizers/detail/utf8.h"

namespace megatron {
namespace {

// Megatron's types that are not built, and why.
constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kRefusedTypes = {{
    {"BertWordPieceLowerCase", "WordPiece is not built"},
    {"BertWordPieceCase", "WordPiece is not built"},
    {"SentencePieceTokenizer", "SentencePiece is not built"},
    {"GPTSentencePieceTokenizer", "SentencePiece is not built"},
    {"Llama2Tokenizer", "SentencePiece is not built"},
    {"TikTokenizer", "tiktoken's own file format is not built; convert it to a tokenizer.json"},
    {"MultimodalTokenizer", "multimodal models are not built"},
    {"NullMultimodalTokenizer", "multimodal models are not built"},
    {"SFTTokenizer", "chat templates are not built"},
    {"NullTokenizerWithEod", "use NullTokenizer with --null-tokenizer-eod-id"},
}};
constexpr std::string_view kTypes =
    "HuggingFaceTokenizer, GPT2BPETokenizer, ByteLevelTokenizer, NullTokenizer";

std::filesystem::path find_tokenizer_json(const std::filesystem::path& model) {
  if (!std::filesystem::is_directory(model)) return model;
  const std::filesystem::path file = model / "tokenizer.json";
  MEGATRON_CHECK(std::filesystem::exists(file), "--tokenizer-model ", model.string(),
                 ": the folder holds no tokenizer.json",
                 std::filesystem::exists(model / "merges.txt")
                     ? "\nhint: --tokenizer-type GPT2BPETokenizer reads vocab.json and merges.txt"
                     : "");
  return file;
}

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode_append(text, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string bytes, text;
  for (const int32_t id : ids) {
    if (!(skip_special_tokens && is_special(id))) bytes += token_bytes(id);
  }
  append_repaired_utf8(bytes, text);
  return text;
}

std::string StreamDecoder::push(int32_t id) {
  pending_ += tokenizer_.token_bytes(id);
  const size_t whole = pending_.size() - incomplete_utf8_suffix(pending_);
  std::string text;
  append_repaired_utf8(std::string_view(pending_).substr(0, whole), text);
  pending_.erase(0, whole);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  append_repaired_utf8(pending_, text);
  pending_.clear();
  return text;
}

void TokenizerConfig::fields(FieldVisitor& v) {
  v.group("tokenizer");
  v.field("tokenizer_type", tokenizer_type,
          "HuggingFaceTokenizer (--tokenizer-model), GPT2BPETokenizer (--vocab-file, "
          "--merge-file), ByteLevelTokenizer, "
          "NullTokenizer (--vocab-size)");
  v.field("tokenizer_model", tokenizer_model, "a tokenizer.json, or the folder that holds it");
  v.field("vocab_file", vocab_file, "GPT-2's vocab.json");
  v.field("merge_file", merge_file, "GPT-2's merges.txt");
  v.field(
      "vocab_size", vocab_size,
      "number of ids of the model; needed with the null tokenizer, else those of the tokenizer");
  v.field("vocab_extra_ids", vocab_extra_ids,
          "extra ids of BERT and T5 vocabularies; only 0 for the tokenizers here");
  v.field("null_tokenizer_eod_id", null_tokenizer_eod_id,
          "end-of-document id of the null tokenizer; default: the last id");
  v.field("null_tokenizer_pad_id", null_tokenizer_pad_id,
          "padding id of the null tokenizer; -1 (default): none");
  v.field("make_vocab_size_divisible_by", make_vocab_size_divisible_by,
          "the vocabulary is padded to a multiple of this times the tensor-parallel size");
  v.field("padded_vocab_size", padded_vocab_size,
          "size of the padded vocabulary, instead of computing it");
  v.field({"pad_vocab_size", "--no-pad-vocab-size --disable-pad-vocab-size", true}, pad_vocab_size,
          "use the vocabulary at its own size");
}

void TokenizerConfig::validate(Violations& violations) const {
  if (make_vocab_size_divisible_by < 1) {
    violations.add(cat("--make-vocab-size-divisible-by is ", make_vocab_size_divisible_by),
                   "1 or more");
  }
  if (vocab_extra_ids != 0) {
    violations.add(cat("--vocab-extra-ids ", vocab_extra_ids,
                       " has no effect with the tokenizers that are built"),
                   "0");
  }
  if (tokenizer_type == "NullTokenizer") {
    const int64_t size = vocab_size.value_or(0);
    if (size < 1 || size > (int64_t{1} << 31)) {
      violations.add("--tokenizer-type NullTokenizer needs --vocab-size", "1 to 2147483648");
    }
    if (null_tokenizer_eod_id && (*null_tokenizer_eod_id < 0 || *null_tokenizer_eod_id >= size)) {
      violations.add(cat("--null-tokenizer-eod-id ", *null_tokenizer_eod_id,
                         " is outside --vocab-size ", size));
    }
    if (null_tokenizer_pad_id && (*null_tokenizer_pad_id < -1 || *null_tokenizer_pad_id >= size)) {
      violations.add(cat("--null-tokenizer-pad-id ", *null_tokenizer_pad_id,
                         " is outside --vocab-size ", size));
    }
    return;
  }
  if (null_tokenizer_eod_id || null_tokenizer_pad_id) {
    violations.add(
        "--null-tokenizer-eod-id and --null-tokenizer-pad-id have no effect without NullTokenizer");
  }
  if (tokenizer_type.empty() || tokenizer_type == "ByteLevelTokenizer") return;
  if (tokenizer_type == "HuggingFaceTokenizer") {
    if (tokenizer_model.empty()) {
      violations.add("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model",
                     "a tokenizer.json or its folder");
    }
  } else if (tokenizer_type == "GPT2BPETokenizer") {
    if (vocab_file.empty())
      violations.add("--tokenizer-type GPT2BPETokenizer needs --vocab-file", "vocab.json");
    if (merge_file.empty())
      violations.add("--tokenizer-type GPT2BPETokenizer needs --merge-file", "merges.txt");
  } else {
    std::string_view reason = "no such tokenizer";
    for (const auto& [type, why] : kRefusedTypes) reason = type == tokenizer_type ? why : reason;
    violations.add(cat("--tokenizer-type ", tokenizer_type, ": ", reason),
                   cat("supported: ", kTypes));
  }
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config) {
  Violations violations;
  config.validate(violations);
  if (config.tokenizer_type.empty()) {
    violations.add("--tokenizer-type is not given", cat("supported: ", kTypes));
  }
  violations.throw_if_any();
  if (config.tokenizer_type == "HuggingFaceTokenizer") {
    return std::make_unique<BpeTokenizer>(
        "HuggingFaceTokenizer", read_tokenizer_json(find_tokenizer_json(config.tokenizer_model)));
  }
  if (config.tokenizer_type == "GPT2BPETokenizer") {
    return std::make_unique<BpeTokenizer>("GPT2BPETokenizer",
                                          read_gpt2_files(config.vocab_file, config.merge_file));
  }
  if (config.tokenizer_type == "ByteLevelTokenizer") return std::make_unique<ByteLevelTokenizer>();
  return std::make_unique<NullTokenizer>(*config.vocab_size, config.null_tokenizer_eod_id,
                                         config.null_tokenizer_pad_id.value_or(-1));
}

int64_t model_vocab_size(const TokenizerConfig& config, const Tokenizer& tokenizer) {
  const int64_t size = config.vocab_size.value_or(tokenizer.vocab_size());
  if (size < tokenizer.vocab_size()) {
    throw UsageError(cat("--vocab-size ", size, " is below the ", tokenizer.vocab_size(),
                         " ids of the tokenizer"));
  }
  return size;
}

int64_t padded_vocab_size(int64_t vocab, int64_t divisible_by, int64_t tp) {
  MEGATRON_ASSERT(vocab >= 0 && divisible_by > 0 && tp > 0);
  const int64_t multiple = divisible_by * tp;
  return (vocab + multiple - 1) / multiple * multiple;
}

int64_t padded_vocab_size(const TokenizerConfig& config, int64_t vocab, int64_t tp) {
  if (config.padded_vocab_size) {
    if (*config.padded_vocab_size < vocab) {
      throw UsageError(cat("--padded-vocab-size ", *config.padded_vocab_size,
                           " is smaller than the tokenizer's vocabulary of ", vocab));
    }
    return *config.padded_vocab_size;
  }
  return config.pad_vocab_size ? padded_vocab_size(vocab, config.make_vocab_size_divisible_by, tp)
                               : vocab;
}

}  // namespace megatron
