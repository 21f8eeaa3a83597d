// Mistral's tekken.json: a vocabulary for tiktoken behind special tokens.
#include <algorithm>
#include <charconv>

#include "megatron/tokenizers/detail/json_value.h"
#include "megatron/tokenizers/detail/text/base64.h"
#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/detail/tokenizer_definition.h"

namespace megatron {
namespace {

// Of files up to version 7 that name none.
constexpr const char* kSpecialTokens[] = {"<unk>",
                                          "<s>",
                                          "</s>",
                                          "[INST]",
                                          "[/INST]",
                                          "[AVAILABLE_TOOLS]",
                                          "[/AVAILABLE_TOOLS]",
                                          "[TOOL_RESULTS]",
                                          "[/TOOL_RESULTS]",
                                          "[TOOL_CALLS]",
                                          "[IMG]",
                                          "<pad>",
                                          "[IMG_BREAK]",
                                          "[IMG_END]",
                                          "[PREFIX]",
                                          "[MIDDLE]",
                                          "[SUFFIX]",
                                          "[SYSTEM_PROMPT]",
                                          "[/SYSTEM_PROMPT]",
                                          "[TOOL_CONTENT]"};
constexpr int64_t kLastWithoutSpecialTokens = 7;

int64_t version_of(const JsonValue& config) {
  const JsonValue version = config.at("version");
  const std::string text = version.str();
  int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data() + 1, text.data() + text.size(), number);
  MEGATRON_CHECK(text.size() > 1 && text[0] == 'v' && error == std::errc() &&
                     end == text.data() + text.size() && number >= 0,
                 version.where, " is \"", text, "\", expected v3, v7, ...");
  return number;
}

// That entry number `place` of a list has, which is its place.
void check_rank(const JsonValue& entry, int64_t place) {
  const int64_t rank = entry.at("rank").count(kMaxTokenId);
  MEGATRON_CHECK(rank >= place, entry.where, ".rank is ", rank,
                 ", which an entry before it has, expected ", place);
  MEGATRON_CHECK(rank == place, entry.where, ".rank is ", rank, ": rank ", place, " is missing");
}

void add_special_tokens(const JsonValue& file, int64_t version, int64_t count,
                        TokenizerDefinition& out) {
  std::vector<std::string> names;
  if (const auto given = file.find_value("special_tokens")) {
    for (const JsonValue& entry : given->elements()) {
      check_rank(entry, std::ssize(names));
      names.push_back(entry.at("token_str").str());
      size_t first = 0;
      if (!names.back().empty()) decode_utf8(names.back().data(), first);
      MEGATRON_CHECK(first < names.back().size(), entry.where, ".token_str is \"", names.back(),
                     "\", expected more than a character, as in <pad>");
    }
  } else {
    MEGATRON_CHECK(version <= kLastWithoutSpecialTokens, file.where,
                   "no special_tokens, which files of version ", version, " have");
    names.assign(std::begin(kSpecialTokens), std::end(kSpecialTokens));
  }
  MEGATRON_CHECK(std::ssize(names) <= count, file.where, names.size(),
                 " special tokens, more than config.default_num_special_tokens, ", count);
  for (auto id = std::ssize(names); id < count; ++id) names.push_back(cat("<SPECIAL_", id, ">"));
  for (size_t id = 0; id < names.size(); ++id) {
    AddedToken token;
    token.id = static_cast<int32_t>(id);
    token.content = names[id];
    token.special = true;
    out.added_tokens.push_back(std::move(token));
  }
}

void add_vocabulary(const JsonValue& file, int64_t specials, int64_t wanted,
                    TokenizerDefinition& out) {
  int64_t rank = 0;
  std::string bytes;
  const JsonValue vocab = file.at("vocab");
  for (const dom::element one : vocab.array()) {
    if (rank == wanted) break;
    const JsonValue entry{one, cat(vocab.where, "[", rank, "]")};
    check_rank(entry, rank);
    const JsonValue spelled = entry.at("token_bytes");
    MEGATRON_CHECK(parse_base64(spelled.str(), bytes) && !bytes.empty(), spelled.where,
                   " is not base64 of a token");
    MEGATRON_CHECK(rank >= 256 || bytes == std::string(1, static_cast<char>(rank)), spelled.where,
                   " is not the byte ", rank, ", which has that rank");
    std::string token;
    append_byte_level(bytes, token);
    out.vocab.emplace_back(std::move(token), static_cast<int32_t>(specials + rank++));
  }
  MEGATRON_CHECK(rank == wanted, vocab.where, " has ", rank, " tokens, expected ", wanted,
                 ": config.default_vocab_size ", wanted + specials, " without ", specials,
                 " special tokens");
}

}  // namespace

bool is_tekken_file(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  return name.find("tekken") != std::string::npos && name.ends_with(".json");
}

TokenizerDefinition read_tekken(const std::filesystem::path& path) {
  dom::parser parser;
  const JsonValue file = parse_json_object(parser, path), config = file.at("config");
  const int64_t version = version_of(config),
                specials = config.at("default_num_special_tokens").count(kMaxTokenId),
                size = config.at("default_vocab_size").count(kMaxTokenId);
  MEGATRON_CHECK(size >= specials + 256, config.where, ".default_vocab_size is ", size,
                 ", expected ", specials, " special tokens and at least 256 bytes");
  TokenizerDefinition out;
  out.files = {path};
  out.byte_level = out.merges_by_id = out.ignore_merges = out.text_spells_no_special = true;
  out.decoder.push_back({});  // ByteLevel
  out.vocab_where = out.merges_where = path.string() + ": vocab";
  out.added_where = out.special_where = path.string() + ": special_tokens";
  const JsonValue pattern = config.at("pattern");
  out.steps_where = pattern.where;
  out.steps.push_back({.kind = PreTokenizerStep::Kind::kSplitRegex, .pattern = pattern.str()});
  add_special_tokens(file, version, specials, out);
  add_vocabulary(file, specials, size - specials, out);
  for (const char* const token : {"<s>", "</s>"})
    MEGATRON_CHECK(
        std::ranges::find(out.added_tokens, token, &AddedToken::content) != out.added_tokens.end(),
        out.special_where, ": there is no ", token);
  out.bos = "<s>";
  out.eos = "</s>";
  out.before = {"<s>"};
  return out;
}

}  // namespace megatron
