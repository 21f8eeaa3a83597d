// Vocabularies without a tokenizer.json: BERT's vocab.txt and tiktoken's two forms.
#include <algorithm>
#include <charconv>
#include <set>

#include "megatron/base/files.h"
#include "megatron/tokenizers/detail/json_value.h"
#include "megatron/tokenizers/detail/text/base64.h"
#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/detail/tokenizer_definition.h"

namespace megatron {
namespace {

const std::vector<std::string>& megatron_special_tokens() {
  static const std::vector<std::string> tokens = {"<unk>", "<s>",   "</s>", "<mask>",
                                                  "<pad>", "<cls>", "<sep>"};
  return tokens;
}

// The special tokens of Llama 3's tokenizer.py.
std::vector<std::string> llama3_special_tokens() {
  std::vector<std::string> tokens = {"<|begin_of_text|>",
                                     "<|end_of_text|>",
                                     "<|reserved_special_token_0|>",
                                     "<|reserved_special_token_1|>",
                                     "<|reserved_special_token_2|>",
                                     "<|reserved_special_token_3|>",
                                     "<|start_header_id|>",
                                     "<|end_header_id|>",
                                     "<|reserved_special_token_4|>",
                                     "<|eot_id|>"};
  for (int i = 5; tokens.size() < 256; ++i)
    tokens.push_back(cat("<|reserved_special_token_", i, "|>"));
  return tokens;
}

// Calls on_line(line, number from 1) for each line, without its line end.
template <class OnLine>
void for_each_line(std::string_view text, OnLine&& on_line) {
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    on_line(line, number);
  }
}

void add_special(std::string_view content, int64_t id, TokenizerDefinition& definition) {
  AddedToken token;
  token.id = static_cast<int32_t>(id);
  token.content = content;
  token.special = true;
  definition.added_tokens.push_back(std::move(token));
}

void add_token(std::string_view bytes, int64_t id, TokenizerDefinition& definition) {
  std::string spelled;
  append_byte_level(bytes, spelled);
  definition.vocab.emplace_back(std::move(spelled), static_cast<int32_t>(id));
}

// {"rank": 0, "token_bytes": "AA==", "token_str": ...}, ranks from 0.
void read_rank_list(const std::filesystem::path& path, const std::string& text,
                    const TiktokenOptions& options, TokenizerDefinition& definition) {
  std::vector<std::string> special =
      options.special_tokens.empty() ? megatron_special_tokens() : options.special_tokens;
  for (const std::string& token : megatron_special_tokens()) {
    MEGATRON_CHECK(std::find(special.begin(), special.end(), token) != special.end(),
                   "--tokenizer-special-tokens lacks \"", token,
                   "\"\nhint: TikTokenizer needs <unk> <s> </s> <mask> <pad> <cls> <sep>");
  }
  const auto num_special = options.num_special_tokens;
  MEGATRON_CHECK(static_cast<int64_t>(special.size()) <= num_special,
                 "--tokenizer-special-tokens names ", special.size(),
                 " tokens, more than --tiktoken-num-special-tokens ", num_special);
  MEGATRON_CHECK(num_special < options.vocab_size && options.vocab_size <= kMaxTokenId,
                 "--tiktoken-num-special-tokens ", num_special, " leaves no ids of --vocab-size ",
                 options.vocab_size);
  for (auto i = static_cast<int64_t>(special.size()); i < num_special; ++i)
    special.push_back(cat("<SPECIAL_", i, ">"));
  for (size_t i = 0; i < special.size(); ++i)
    add_special(special[i], static_cast<int64_t>(i), definition);
  definition.eos = "</s>";
  definition.bos = "<s>";
  definition.pad = "<pad>";
  dom::parser parser;
  dom::array entries;
  const simdjson::error_code error = parser.parse(text).get(entries);
  MEGATRON_CHECK(error == simdjson::SUCCESS, path.string(),
                 ": not a JSON list: ", simdjson::error_message(error));
  const int64_t wanted = options.vocab_size - num_special;
  int64_t rank = 0;
  std::string bytes;
  for (const dom::element entry : entries) {
    if (rank == wanted) break;
    const JsonValue value{entry, cat(path.string(), ": [", rank, "]")};
    MEGATRON_CHECK(value.at("rank").count(kMaxTokenId) == rank, value.where, ".rank is not ", rank);
    const JsonValue spelled = value.at("token_bytes");
    MEGATRON_CHECK(parse_base64(spelled.str(), bytes) && !bytes.empty(), spelled.where,
                   " is not base64 of a token");
    add_token(bytes, num_special + rank++, definition);
  }
  MEGATRON_CHECK(rank == wanted, path.string(), " holds ", rank, " tokens, but --vocab-size ",
                 options.vocab_size, " with ", num_special, " special tokens needs ", wanted,
                 "\nhint: --vocab-size ", rank + num_special, " takes all of them");
}

// "base64 rank" per line.
void read_rank_lines(const std::filesystem::path& path, const std::string& text,
                     const TiktokenOptions& options, TokenizerDefinition& definition) {
  int64_t end = 0;
  std::string bytes;
  for_each_line(text, [&](std::string_view line, int64_t number) {
    if (line.empty()) return;
    const size_t space = line.find(' ');
    int64_t rank = -1;
    bool right = space != line.npos && parse_base64(line.substr(0, space), bytes) && !bytes.empty();
    if (right) {
      const auto [stop, error] =
          std::from_chars(line.data() + space + 1, line.data() + line.size(), rank);
      right = error == std::errc() && stop == line.data() + line.size() && rank >= 0 &&
              rank < kMaxTokenId - 4096;
    }
    MEGATRON_CHECK(right, path.string(), ": line ", number, " is \"", line.substr(0, 60),
                   "\", expected the base64 of a token and its rank");
    add_token(bytes, rank, definition);
    end = std::max(end, rank + 1);
  });
  const std::vector<std::string> special =
      options.special_tokens.empty() ? llama3_special_tokens() : options.special_tokens;
  for (size_t i = 0; i < special.size(); ++i)
    add_special(special[i], end + static_cast<int64_t>(i), definition);
}

}  // namespace

TokenizerDefinition read_bert_vocabulary(const std::filesystem::path& vocab, bool lower_case,
                                         const std::vector<std::string>& extra_tokens) {
  TokenizerDefinition definition;
  definition.model = ModelKind::kWordPiece;
  definition.files = {vocab};
  definition.vocab_where = definition.added_where = definition.steps_where =
      definition.special_where = vocab.string();
  const std::string text = read_file(vocab);
  const size_t valid = valid_utf8_prefix(text);
  MEGATRON_CHECK(valid == text.size(), vocab.string(), ": byte ", valid, " is not UTF-8");
  std::set<std::string, std::less<>> tokens;
  for_each_line(text, [&](std::string_view line, int64_t number) {
    MEGATRON_CHECK(!line.empty(), vocab.string(), ": line ", number, " is empty");
    MEGATRON_CHECK(tokens.emplace(line).second, vocab.string(), ": line ", number, ": token \"",
                   line, "\" appears twice");
    definition.vocab.emplace_back(line, static_cast<int32_t>(number - 1));
  });
  definition.prefix = "##";
  definition.unk_token = "[UNK]";
  NormalizerStep bert;
  bert.kind = NormalizerStep::Kind::kBert;
  bert.clean_text = bert.chinese = true;
  bert.lower = bert.strip_accents = lower_case;
  definition.normalizer.push_back(std::move(bert));
  definition.steps.push_back(
      {.kind = PreTokenizerStep::Kind::kWhitespace, .behavior = SplitBehavior::kRemoved});
  definition.steps.push_back({.kind = PreTokenizerStep::Kind::kPunctuation});
  DecoderStep decoder;
  decoder.kind = DecoderStep::Kind::kWordPiece;
  decoder.pattern = "##";
  decoder.cleanup = true;
  definition.decoder.push_back(std::move(decoder));
  const auto id_of = [&](std::string_view token) {
    const auto found = std::find_if(definition.vocab.begin(), definition.vocab.end(),
                                    [&](const auto& entry) { return entry.first == token; });
    return found == definition.vocab.end() ? -1 : found->second;
  };
  for (const char* token : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}) {
    const int32_t id = id_of(token);
    MEGATRON_CHECK(id >= 0, vocab.string(), ": the vocabulary has no ", token);
    add_special(token, id, definition);
  }
  auto end = static_cast<int64_t>(definition.vocab.size());
  for (const std::string& token : extra_tokens) {
    const int32_t known = id_of(token);
    add_special(token, known >= 0 ? known : end++, definition);
  }
  definition.before = {"[CLS]"};
  definition.after = {"[SEP]"};
  const bool own_ends =
      std::find(extra_tokens.begin(), extra_tokens.end(), "[EOS]") != extra_tokens.end();
  definition.eos = own_ends ? "[EOS]" : "[SEP]";
  definition.bos = own_ends ? "[BOS]" : "[CLS]";
  definition.pad = "[PAD]";
  definition.cls = "[CLS]";
  definition.sep = "[SEP]";
  definition.mask = "[MASK]";
  return definition;
}

bool bert_lower_case(const std::filesystem::path& tokenizer_config) {
  if (!std::filesystem::exists(tokenizer_config)) return true;
  dom::parser parser;
  return parse_json_object(parser, tokenizer_config).boolean_or("do_lower_case", true);
}

TokenizerDefinition read_tiktoken(const std::filesystem::path& path,
                                  const TiktokenOptions& options) {
  TokenizerDefinition definition;
  definition.files = {path};
  definition.byte_level = definition.merges_by_id = definition.ignore_merges = true;
  definition.decoder.push_back({});  // ByteLevel
  definition.vocab_where = definition.merges_where = definition.steps_where =
      definition.added_where = definition.special_where = path.string();
  const std::string text = read_file(path);
  const bool list = text.find_first_not_of(" \t\r\n") != text.npos &&
                    text[text.find_first_not_of(" \t\r\n")] == '[';
  if (list) {
    read_rank_list(path, text, options, definition);
  } else {
    read_rank_lines(path, text, options, definition);
  }
  // Megatron's patterns for --tiktoken-pattern are those of its tiktoken_tokenizer.py.
  KnownPattern pattern = KnownPattern::kLlama3;
  if (options.pattern == "v1") pattern = KnownPattern::kTiktokenV1;
  if (options.pattern == "v2" || (list && options.pattern.empty()))
    pattern = KnownPattern::kTiktokenV2;
  definition.steps.push_back(
      {.kind = PreTokenizerStep::Kind::kSplitRegex, .pattern = std::string(pattern_text(pattern))});
  return definition;
}

}  // namespace megatron
