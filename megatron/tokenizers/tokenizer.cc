#include "megatron/tokenizers/tokenizer.h"

#include <array>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/detail/pipeline_tokenizer.h"
#include "megatron/tokenizers/detail/sentencepiece_tokenizer.h"
#include "megatron/tokenizers/detail/simple_tokenizers.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

// Megatron's types that are not supported, and why.
constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kRefusedTypes = {{
    {"MultimodalTokenizer", "multimodal models are not built"},
    {"NullMultimodalTokenizer", "multimodal models are not built"},
    {"SFTTokenizer", "give the tokenizer of the model, which holds the chat template"},
    {"NullTokenizerWithEod", "use NullTokenizer with --null-tokenizer-eod-id"},
}};
constexpr std::string_view kTypes =
    "HuggingFaceTokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, "
    "TikTokenizer, GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, "
    "ByteLevelTokenizer, NullTokenizer";

bool is_sentencepiece(std::string_view type) {
  return type == "SentencePieceTokenizer" || type == "GPTSentencePieceTokenizer" ||
         type == "Llama2Tokenizer";
}
bool is_bert(std::string_view type) {
  return type == "BertWordPieceLowerCase" || type == "BertWordPieceCase";
}

// `model`, or the file `name` in it if it is a folder.
std::filesystem::path file_of(const std::filesystem::path& model, std::string_view name) {
  if (!std::filesystem::is_directory(model)) return model;
  const std::filesystem::path file = model / name;
  MEGATRON_CHECK(std::filesystem::exists(file), "--tokenizer-model ", model.string(),
                 ": the folder holds no ", name);
  return file;
}

// A SentencePiece model starts with the tag of its first piece; tiktoken's files are text.
bool is_tiktoken_file(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  return !bytes.empty() && bytes[0] != '\x0a';
}

void validate_null_tokenizer(const TokenizerConfig& c, Violations& v) {
  const int64_t size = c.vocab_size.value_or(0);
  v.require(size >= 1 && size <= (int64_t{1} << 31),
            "--tokenizer-type NullTokenizer needs --vocab-size", "1 to 2147483648");
  const auto inside = [&](const char* flag, std::optional<int64_t> id, int64_t least) {
    if (id && (*id < least || *id >= size))
      v.add(cat(flag, " ", *id, " is outside --vocab-size ", size));
  };
  inside("--null-tokenizer-eod-id", c.null_tokenizer_eod_id, 0);
  inside("--null-tokenizer-pad-id", c.null_tokenizer_pad_id, -1);
}

// The flags of a type that is read from files, or whether there is such a type.
void validate_tokenizer_files(const TokenizerConfig& c, Violations& v) {
  const std::string& type = c.tokenizer_type;
  const auto needs = [&](const char* flag, const std::string& value, const char* what) {
    v.require(!value.empty(), cat("--tokenizer-type ", type, " needs ", flag), what);
  };
  const bool tiktoken = type == "TikTokenizer", sentencepiece = is_sentencepiece(type);
  if (type == "HuggingFaceTokenizer" || sentencepiece || tiktoken) {
    needs("--tokenizer-model", c.tokenizer_model,
          tiktoken        ? "a tiktoken vocabulary"
          : sentencepiece ? "a SentencePiece .model"
                          : "a tokenizer.json or tekken.json, or its folder");
    const std::string& pattern = c.tiktoken_pattern;
    v.require(pattern.empty() || pattern == "v1" || pattern == "v2",
              cat("--tiktoken-pattern is \"", pattern, "\""), "v1 or v2");
    v.require(c.tiktoken_num_special_tokens >= 0,
              cat("--tiktoken-num-special-tokens is ", c.tiktoken_num_special_tokens), "0 or more");
  } else if (is_bert(type)) {
    needs("--vocab-file", c.vocab_file, "vocab.txt");
  } else if (type == "GPT2BPETokenizer") {
    needs("--vocab-file", c.vocab_file, "vocab.json");
    needs("--merge-file", c.merge_file, "merges.txt");
  } else {
    std::string_view reason = "no such tokenizer";
    for (const auto& [refused, why] : kRefusedTypes) reason = refused == type ? why : reason;
    v.add(cat("--tokenizer-type ", type, ": ", reason), cat("supported: ", kTypes));
  }
}

// Megatron adds a hundred sentinels to its cased BERT vocabulary. Its older releases added [BOS],
// [EOS] and `sentinels` to both.
std::vector<std::string> bert_extra_tokens(const TokenizerConfig& config, int64_t sentinels) {
  std::vector<std::string> tokens = config.special_tokens;
  if (sentinels > 0)
    tokens.insert(tokens.end(), {"[BOS]", "[EOS]"});
  else if (config.tokenizer_type == "BertWordPieceCase")
    sentinels = 100;
  for (int64_t i = 0; i < sentinels; ++i) tokens.push_back(cat("<extra_id_", i, ">"));
  return tokens;
}

std::unique_ptr<Tokenizer> make_hugging_face_tokenizer(const TokenizerConfig& config) {
  const std::filesystem::path model = config.tokenizer_model;
  std::filesystem::path file = model;
  if (std::filesystem::is_directory(model)) {
    TokenizerConfig found = find_tokenizer(model);
    MEGATRON_CHECK(!found.tokenizer_type.empty(), "--tokenizer-model ", config.tokenizer_model,
                   ": the folder holds no tokenizer.json, tekken.json, tokenizer.model, vocab.json "
                   "with merges.txt, or vocab.txt");
    if (found.tokenizer_type != "HuggingFaceTokenizer") return make_tokenizer(found);
    file = found.tokenizer_model;
  }
  return std::make_unique<PipelineTokenizer>(
      "HuggingFaceTokenizer", is_tekken_file(file) ? read_tekken(file) : read_tokenizer_json(file));
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
  v.role(FieldRole::kArchitecture);
  v.group("tokenizer");
  v.field("tokenizer_type", tokenizer_type,
          "HuggingFaceTokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer, "
          "Llama2Tokenizer, TikTokenizer (--tokenizer-model), GPT2BPETokenizer (--vocab-file, "
          "--merge-file), BertWordPieceLowerCase, BertWordPieceCase (--vocab-file), "
          "ByteLevelTokenizer, NullTokenizer (--vocab-size)");
  v.field(
      "tokenizer_model", tokenizer_model,
      "tokenizer.json, Mistral's tekken.json, SentencePiece .model or tiktoken vocabulary, or the "
      "folder that holds it");
  v.field("vocab_file", vocab_file, "GPT-2's vocab.json or BERT's vocab.txt");
  v.field("merge_file", merge_file, "GPT-2's merges.txt");
  v.field({"special_tokens", "--tokenizer-special-tokens"}, special_tokens,
          "special tokens of TikTokenizer (default: <unk> <s> </s> <mask> <pad> <cls> <sep>, or "
          "Llama 3's for a file of \"base64 rank\" lines), or added to BertWordPieceLowerCase");
  v.field("tiktoken_pattern", tiktoken_pattern,
          "how TikTokenizer cuts text into words: v1 or v2 (default for a JSON vocabulary); "
          "default for \"base64 rank\" lines: Llama 3's");
  v.field("tiktoken_num_special_tokens", tiktoken_num_special_tokens,
          "ids before those of a JSON vocabulary of TikTokenizer; those without a name are "
          "<SPECIAL_id>");
  v.field(
      "vocab_size", vocab_size,
      "number of ids of the model; needed with the null tokenizer, else those of the tokenizer");
  v.field("vocab_extra_ids", vocab_extra_ids,
          "add [BOS], [EOS] and so many sentinels <extra_id_0>, ... to a BERT vocabulary, as older "
          "releases of Megatron-LM did; 0: 100 sentinels to a cased one, for T5");
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

void TokenizerConfig::validate(Violations& v) const {
  v.require(make_vocab_size_divisible_by >= 1,
            cat("--make-vocab-size-divisible-by is ", make_vocab_size_divisible_by), "1 or more");
  v.require(vocab_extra_ids >= 0 && vocab_extra_ids <= 100000,
            cat("--vocab-extra-ids is ", vocab_extra_ids), "0 to 100000");
  v.require(
      vocab_extra_ids == 0 || is_bert(tokenizer_type),
      cat("--vocab-extra-ids ", vocab_extra_ids, " has no effect without a vocabulary of BERT"),
      "leave it out, or give --tokenizer-type BertWordPieceCase or BertWordPieceLowerCase");
  if (tokenizer_type == "NullTokenizer") return validate_null_tokenizer(*this, v);
  v.require(
      !null_tokenizer_eod_id && !null_tokenizer_pad_id,
      "--null-tokenizer-eod-id and --null-tokenizer-pad-id have no effect without NullTokenizer");
  const bool tiktoken = tokenizer_type == "TikTokenizer";
  v.require(special_tokens.empty() || tiktoken || tokenizer_type == "BertWordPieceLowerCase",
            "--tokenizer-special-tokens has no effect without TikTokenizer or "
            "BertWordPieceLowerCase");
  v.require(tiktoken || (tiktoken_pattern.empty() && tiktoken_num_special_tokens == 1000),
            "--tiktoken-pattern and --tiktoken-num-special-tokens have no effect without "
            "TikTokenizer");
  if (!tokenizer_type.empty() && tokenizer_type != "ByteLevelTokenizer")
    validate_tokenizer_files(*this, v);
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config) {
  Violations violations;
  config.validate(violations);
  if (config.tokenizer_type.empty()) {
    violations.add("--tokenizer-type is not given", cat("supported: ", kTypes));
  }
  violations.throw_if_any();
  const std::string& type = config.tokenizer_type;
  if (type == "HuggingFaceTokenizer") return make_hugging_face_tokenizer(config);
  if (is_sentencepiece(type)) {
    return std::make_unique<SentencePieceTokenizer>(
        type, file_of(config.tokenizer_model, "tokenizer.model"));
  }
  if (type == "TikTokenizer") {
    TiktokenOptions options;
    options.pattern = config.tiktoken_pattern;
    options.num_special_tokens = config.tiktoken_num_special_tokens;
    options.special_tokens = config.special_tokens;
    options.vocab_size = config.vocab_size.value_or(options.vocab_size);
    return std::make_unique<PipelineTokenizer>(
        type, read_tiktoken(file_of(config.tokenizer_model, "tokenizer.model"), options));
  }
  if (type == "GPT2BPETokenizer") {
    return std::make_unique<PipelineTokenizer>(
        type, read_gpt2_files(config.vocab_file, config.merge_file));
  }
  if (is_bert(type)) {
    return std::make_unique<PipelineTokenizer>(
        type, read_bert_vocabulary(config.vocab_file, type == "BertWordPieceLowerCase",
                                   bert_extra_tokens(config, config.vocab_extra_ids)));
  }
  if (config.tokenizer_type == "ByteLevelTokenizer") return std::make_unique<ByteLevelTokenizer>();
  return std::make_unique<NullTokenizer>(*config.vocab_size, config.null_tokenizer_eod_id,
                                         config.null_tokenizer_pad_id.value_or(-1));
}

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerTexts& texts) {
  return std::make_unique<PipelineTokenizer>(
      "HuggingFaceTokenizer",
      parse_tokenizer_json(texts.tokenizer, texts.name + ": tokenizer.json", texts.config,
                           texts.name + ": tokenizer_config.json"));
}

TokenizerConfig find_tokenizer(const std::filesystem::path& folder) {
  const auto holds = [&](const char* name) {
    std::error_code ignored;
    return std::filesystem::is_regular_file(folder / name, ignored);
  };
  TokenizerConfig config;
  if (holds("tokenizer.json")) {
    config.tokenizer_type = "HuggingFaceTokenizer";
    config.tokenizer_model = (folder / "tokenizer.json").string();
  } else if (holds("tekken.json")) {
    config.tokenizer_type = "HuggingFaceTokenizer";
    config.tokenizer_model = (folder / "tekken.json").string();
  } else if (holds("tokenizer.model")) {
    config.tokenizer_model = (folder / "tokenizer.model").string();
    config.tokenizer_type =
        is_tiktoken_file(config.tokenizer_model) ? "TikTokenizer" : "SentencePieceTokenizer";
  } else if (holds("vocab.json") && holds("merges.txt")) {
    config.tokenizer_type = "GPT2BPETokenizer";
    config.vocab_file = (folder / "vocab.json").string();
    config.merge_file = (folder / "merges.txt").string();
  } else if (holds("vocab.txt")) {
    config.tokenizer_type = bert_lower_case(folder / "tokenizer_config.json")
                                ? "BertWordPieceLowerCase"
                                : "BertWordPieceCase";
    config.vocab_file = (folder / "vocab.txt").string();
  }
  return config;
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
