// Reads tokenizer.json with tokenizer_config.json, and GPT-2's files, which are parts of a
// tokenizer.json. Every unknown component is refused by type and position.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

#include "megatron/base/files.h"
#include "megatron/tokenizers/detail/json_value.h"
#include "megatron/tokenizers/detail/metaspace_cutter.h"
#include "megatron/tokenizers/detail/text/base64.h"
#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/detail/tokenizer_definition.h"

namespace megatron {
namespace {

[[noreturn]] void refuse(const JsonValue& component, std::string_view supported) {
  throw_error(cat(component.where, ": type \"", component.type(),
                  "\" is not supported\nhint: supported types: ", supported));
}

int32_t token_id(const JsonValue& value) {
  const int64_t id = value.as<int64_t>("an integer");
  MEGATRON_CHECK(id >= 0 && id <= kMaxTokenId, value.where, " is ", id,
                 ", expected a token id from 0 to ", kMaxTokenId);
  return static_cast<int32_t>(id);
}

// A string of one character.
std::string character(const JsonValue& value) {
  const std::string text = value.str();
  size_t length = 0;
  if (!text.empty()) decode_utf8(text.data(), length);
  MEGATRON_CHECK(!text.empty() && length == text.size(), value.where, " is \"", text,
                 "\", expected one character");
  return text;
}

// A pattern, {"String": s} or {"Regex": r}; returns whether it is a regular expression.
bool read_pattern(const JsonValue& value, std::string& pattern) {
  const auto regex = value.find("Regex");
  pattern = regex ? regex->str() : value.at("String").str();
  MEGATRON_CHECK(!pattern.empty(), value.where, " is empty");
  return regex.has_value();
}

void read_normalizer(const JsonValue& value, std::vector<NormalizerStep>& steps) {
  using Kind = NormalizerStep::Kind;
  const std::string type = value.type();
  NormalizerStep step;
  step.where = value.where;
  constexpr std::array<std::string_view, 4> kForms = {"NFC", "NFD", "NFKC", "NFKD"};
  const auto form = std::find(kForms.begin(), kForms.end(), type);
  if (type == "Sequence") {
    for (const JsonValue& part : value.at("normalizers").elements()) read_normalizer(part, steps);
    return;
  }
  if (form != kForms.end()) {
    step.kind = Kind::kNormalForm;
    step.form = static_cast<NormalForm>(form - kForms.begin());
  } else if (type == "Lowercase") {
    step.kind = Kind::kLowercase;
  } else if (type == "StripAccents") {
    step.kind = Kind::kStripAccents;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    step.left = value.boolean_or("strip_left", true);
    step.right = value.boolean_or("strip_right", true);
  } else if (type == "Replace") {
    step.kind = read_pattern(value.at("pattern"), step.pattern) ? Kind::kReplaceRegex
                                                                : Kind::kReplaceString;
    step.content = value.at("content").str();
  } else if (type == "Prepend") {
    step.kind = Kind::kPrepend;
    step.content = value.at("prepend").str();
  } else if (type == "Precompiled") {
    // Without rules it changes nothing.
    const auto map = value.find_value("precompiled_charsmap");
    if (!map || map->str().empty()) return;
    step.kind = Kind::kCharsmap;
    MEGATRON_CHECK(parse_base64(map->str(), step.content), map->where, " is not base64");
    step.where = map->where;
  } else if (type == "BertNormalizer") {
    step.kind = Kind::kBert;
    step.clean_text = value.boolean_or("clean_text", true);
    step.chinese = value.boolean_or("handle_chinese_chars", true);
    step.lower = value.boolean_or("lowercase", true);
    step.strip_accents = value.boolean_or("strip_accents", step.lower);
  } else if (type == "Nmt") {
    step.kind = Kind::kNmt;
  } else if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else {
    refuse(value,
           "BertNormalizer, ByteLevel, Lowercase, NFC, NFD, NFKC, NFKD, Nmt, Precompiled, Prepend, "
           "Replace, Sequence, Strip, StripAccents");
  }
  steps.push_back(std::move(step));
}

SplitBehavior read_behavior(const JsonValue& behavior) {
  constexpr std::array<std::string_view, 5> kNames = {"Isolated", "Removed", "MergedWithPrevious",
                                                      "MergedWithNext", "Contiguous"};
  const std::string name = behavior.str();
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  MEGATRON_CHECK(
      found != kNames.end(), behavior.where, " is \"", name,
      "\", expected Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
  return static_cast<SplitBehavior>(found - kNames.begin());
}

PreTokenizerStep read_split(const JsonValue& value) {
  PreTokenizerStep step;
  step.kind = read_pattern(value.at("pattern"), step.pattern)
                  ? PreTokenizerStep::Kind::kSplitRegex
                  : PreTokenizerStep::Kind::kSplitString;
  step.behavior = read_behavior(value.at("behavior"));
  step.invert = value.boolean_or("invert", false);
  return step;
}

// Whether marks are prepended: "prepend_scheme", or "add_prefix_space" in older files.
PreTokenizerStep::Prepend read_prepend_scheme(const JsonValue& value) {
  using Prepend = PreTokenizerStep::Prepend;
  const bool prefix = value.boolean_or("add_prefix_space", true);
  const auto scheme = value.find_value("prepend_scheme");
  if (!scheme) return prefix ? Prepend::kAlways : Prepend::kNever;
  const std::string name = scheme->str();
  MEGATRON_CHECK(name == "always" || name == "first" || name == "never", scheme->where, " is \"",
                 name, "\", expected always, first or never");
  if (!prefix) return Prepend::kNever;
  return name == "always" ? Prepend::kAlways : name == "first" ? Prepend::kFirst : Prepend::kNever;
}

void read_pre_tokenizer(const JsonValue& value, std::vector<PreTokenizerStep>& steps) {
  using Kind = PreTokenizerStep::Kind;
  const std::string type = value.type();
  if (type == "Sequence") {
    for (const JsonValue& part : value.at("pretokenizers").elements())
      read_pre_tokenizer(part, steps);
  } else if (type == "ByteLevel") {
    if (value.at("add_prefix_space").boolean()) steps.push_back({.kind = Kind::kPrefixSpace});
    if (value.boolean_or("use_regex", true)) {
      steps.push_back(
          {.kind = Kind::kSplitRegex, .pattern = std::string(pattern_text(KnownPattern::kGpt2))});
    }
    steps.push_back({.kind = Kind::kByteLevel});
  } else if (type == "Split") {
    steps.push_back(read_split(value));
  } else if (type == "Digits") {
    steps.push_back({.kind = Kind::kDigits,
                     .behavior = value.boolean_or("individual_digits", false)
                                     ? SplitBehavior::kIsolated
                                     : SplitBehavior::kContiguous});
  } else if (type == "Metaspace") {
    const auto mark = value.find_value("replacement");
    steps.push_back({.kind = Kind::kMetaspace,
                     .pattern = mark ? character(*mark) : std::string(kMetaspace),
                     .prepend = read_prepend_scheme(value),
                     .split = value.boolean_or("split", true)});
  } else if (type == "Whitespace") {
    steps.push_back({.kind = Kind::kWords});
  } else if (type == "WhitespaceSplit") {
    steps.push_back({.kind = Kind::kWhitespace, .behavior = SplitBehavior::kRemoved});
  } else if (type == "BertPreTokenizer") {
    steps.push_back({.kind = Kind::kWhitespace, .behavior = SplitBehavior::kRemoved});
    steps.push_back({.kind = Kind::kPunctuation});
  } else if (type == "Punctuation") {
    const auto behavior = value.find_value("behavior");
    steps.push_back({.kind = Kind::kPunctuation,
                     .behavior = behavior ? read_behavior(*behavior) : SplitBehavior::kIsolated});
  } else if (type == "CharDelimiterSplit") {
    steps.push_back({.kind = Kind::kSplitString,
                     .pattern = character(value.at("delimiter")),
                     .behavior = SplitBehavior::kRemoved});
  } else {
    refuse(value,
           "BertPreTokenizer, ByteLevel, CharDelimiterSplit, Digits, Metaspace, Punctuation, "
           "Sequence, Split, Whitespace, WhitespaceSplit");
  }
}

// Tokens that post-processors put around one text. Those that only adjust offsets do not affect
// ids.
void read_post_processor(const JsonValue& value, TokenizerDefinition& definition) {
  const std::string type = value.type();
  if (type == "Sequence") {
    for (const JsonValue& part : value.at("processors").elements())
      read_post_processor(part, definition);
  } else if (type == "TemplateProcessing") {
    std::vector<std::string> before, after;
    bool seen = false;
    for (const JsonValue& part : value.at("single").elements()) {
      if (part.find("Sequence")) {
        MEGATRON_CHECK(!seen, part.where, ": the text appears twice, which is not supported");
        seen = true;
        continue;
      }
      const JsonValue special = part.at("SpecialToken").at("id");
      const auto token = value.at("special_tokens").find(special.str());
      MEGATRON_CHECK(token.has_value(), special.where, " \"", special.str(),
                     "\" is not among special_tokens");
      for (const JsonValue& spelled : token->at("tokens").elements())
        (seen ? after : before).push_back(spelled.str());
    }
    MEGATRON_CHECK(seen, value.where, ".single does not hold the text");
    definition.before.insert(definition.before.begin(), before.begin(), before.end());
    definition.after.insert(definition.after.end(), after.begin(), after.end());
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    const std::vector<JsonValue> cls = value.at("cls").elements(), sep = value.at("sep").elements();
    MEGATRON_CHECK(cls.size() == 2 && sep.size() == 2, value.where,
                   ": cls and sep are pairs of a token and its id");
    definition.before.insert(definition.before.begin(), cls[0].str());
    definition.after.push_back(sep[0].str());
  } else if (type != "ByteLevel") {
    refuse(value, "BertProcessing, ByteLevel, RobertaProcessing, Sequence, TemplateProcessing");
  }
}

void read_decoder(const JsonValue& value, std::vector<DecoderStep>& steps) {
  using Kind = DecoderStep::Kind;
  const std::string type = value.type();
  DecoderStep step;
  step.where = value.where;
  const auto text_or = [&](std::string_view key, std::string_view otherwise) {
    const auto found = value.find_value(key);
    return found ? found->str() : std::string(otherwise);
  };
  if (type == "Sequence") {
    for (const JsonValue& part : value.at("decoders").elements()) read_decoder(part, steps);
    return;
  }
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "Metaspace") {
    const auto mark = value.find_value("replacement");
    step.kind = Kind::kMetaspace;
    step.pattern = mark ? character(*mark) : std::string(kMetaspace);
    step.drop_first = read_prepend_scheme(value) != PreTokenizerStep::Prepend::kNever;
  } else if (type == "WordPiece") {
    step.kind = Kind::kWordPiece;
    step.pattern = text_or("prefix", "##");
    step.cleanup = value.boolean_or("cleanup", true);
    MEGATRON_CHECK(!step.pattern.empty(), value.where, ".prefix is empty");
  } else if (type == "BPEDecoder") {
    step.kind = Kind::kBpe;
    step.pattern = text_or("suffix", "</w>");
    MEGATRON_CHECK(!step.pattern.empty(), value.where, ".suffix is empty");
  } else if (type == "ByteFallback") {
    step.kind = Kind::kByteFallback;
  } else if (type == "Fuse") {
    step.kind = Kind::kFuse;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    step.pattern = character(value.at("content"));
    step.start = static_cast<size_t>(value.at("start").count(1 << 20));
    step.stop = static_cast<size_t>(value.at("stop").count(1 << 20));
  } else if (type == "Replace") {
    step.kind = read_pattern(value.at("pattern"), step.pattern) ? Kind::kReplaceRegex
                                                                : Kind::kReplaceString;
    step.content = value.at("content").str();
  } else {
    refuse(value,
           "BPEDecoder, ByteFallback, ByteLevel, Fuse, Metaspace, Replace, Sequence, Strip, "
           "WordPiece");
  }
  steps.push_back(std::move(step));
}

void read_vocab(const JsonValue& vocab, TokenizerDefinition& definition) {
  const dom::object object = vocab.object();
  definition.vocab_where = vocab.where;
  definition.vocab.reserve(object.size());
  for (const dom::key_value_pair entry : object) {
    // The position is formatted only for invalid values: there are many valid ones.
    int64_t id = -1;
    if (entry.value.get(id) != simdjson::SUCCESS || id < 0 || id > kMaxTokenId) {
      token_id(JsonValue{entry.value, cat(vocab.where, "[\"", entry.key, "\"]")});
    }
    definition.vocab.emplace_back(entry.key, static_cast<int32_t>(id));
  }
}

// The number that the `tokenizers` package reads from the shortest decimal spelling of `value`: its
// JSON reader rounds twice, the digits and then their division by a power of ten. Sums of scores
// that are equal except for rounding decide between segmentations of a word.
double as_package_reads(double value) {
  char text[40];
  const auto [end, error] =
      std::to_chars(text, text + sizeof(text), std::abs(value), std::chars_format::scientific);
  MEGATRON_ASSERT(error == std::errc());
  uint64_t digits = 0;
  int exponent = 0, num_decimals = 0;
  for (const char* p = text; p < end; ++p) {
    if (*p == 'e') {
      std::from_chars(p[1] == '+' ? p + 2 : p + 1, end, exponent);
      break;
    }
    if (*p == '.') continue;
    digits = digits * 10 + static_cast<uint64_t>(*p - '0');
    num_decimals += p > text;
  }
  exponent -= num_decimals;
  if (exponent < -308 || exponent > 308) return value;
  const double power = std::stod(cat("1e", std::abs(exponent)));
  const auto whole = static_cast<double>(digits);
  return std::copysign(exponent < 0 ? whole / power : whole * power, value);
}

// A list of [token, score]; the position in the list is the id.
void read_unigram(const JsonValue& model, TokenizerDefinition& definition) {
  const JsonValue vocab = model.at("vocab");
  definition.vocab_where = vocab.where;
  for (const dom::element item : vocab.array()) {
    const auto where = [&] { return cat(vocab.where, "[", definition.vocab.size(), "]"); };
    dom::array pair;
    MEGATRON_CHECK(item.get(pair) == simdjson::SUCCESS && pair.size() == 2, where(), " is ",
                   json_type_name(item.type()), ", expected [token, score]");
    std::string_view token;
    double score = 0;
    if (pair.at(0).get(token) != simdjson::SUCCESS)
      (void)JsonValue{pair.at(0), where() + "[0]"}.str();
    if (pair.at(1).get(score) != simdjson::SUCCESS)
      (void)JsonValue{pair.at(1), where() + "[1]"}.number();
    MEGATRON_CHECK(std::isfinite(score), where(), "[1] is not finite");
    definition.vocab.emplace_back(token, static_cast<int32_t>(definition.vocab.size()));
    definition.scores.push_back(as_package_reads(score));
  }
  MEGATRON_CHECK(static_cast<int64_t>(definition.vocab.size()) <= kMaxTokenId, vocab.where, " has ",
                 definition.vocab.size(), " tokens, expected at most ", kMaxTokenId);
  if (const auto unk = model.find_value("unk_id")) {
    const int64_t id = unk->count(static_cast<int64_t>(definition.vocab.size()) - 1);
    definition.unk_token = definition.vocab[static_cast<size_t>(id)].first;
  }
}

// Splits "a b" at its only space.
std::pair<std::string, std::string> split_merge(std::string_view text, std::string_view where) {
  const size_t space = text.find(' ');
  MEGATRON_CHECK(space != text.npos && space > 0 && space + 1 < text.size() &&
                     text.find(' ', space + 1) == text.npos,
                 where, " is \"", text, "\", expected two tokens with one space between them");
  return {std::string(text.substr(0, space)), std::string(text.substr(space + 1))};
}

void read_merges(const JsonValue& merges, TokenizerDefinition& definition) {
  definition.merges_where = merges.where;
  for (const dom::element item : merges.array()) {
    const auto where = [&] { return cat(merges.where, "[", definition.merges.size(), "]"); };
    std::string_view text;
    dom::array pair;
    if (item.get(text) == simdjson::SUCCESS) {
      const bool plain = text.find(' ') != text.npos && text.find(' ') == text.rfind(' ');
      definition.merges.push_back(split_merge(text, plain ? std::string() : where()));
    } else if (item.get(pair) == simdjson::SUCCESS && pair.size() == 2) {
      const JsonValue left{pair.at(0), where() + "[0]"}, right{pair.at(1), where() + "[1]"};
      definition.merges.emplace_back(left.str(), right.str());
    } else {
      throw_error(cat(where(), " is ", json_type_name(item.type()),
                      ", expected \"a b\" or [\"a\", \"b\"]"));
    }
  }
}

// The kind named by "type"; in older files without it, inferred from the members.
ModelKind model_kind(const JsonValue& model) {
  if (!model.find("type")) {
    if (model.find("merges")) return ModelKind::kBpe;
    if (model.find("unk_id")) return ModelKind::kUnigram;
    return model.find("continuing_subword_prefix") ? ModelKind::kWordPiece : ModelKind::kWordLevel;
  }
  const std::string type = model.type();
  if (type == "BPE") return ModelKind::kBpe;
  if (type == "Unigram") return ModelKind::kUnigram;
  if (type == "WordPiece") return ModelKind::kWordPiece;
  if (type == "WordLevel") return ModelKind::kWordLevel;
  refuse(model, "BPE, Unigram, WordLevel, WordPiece");
}

void read_model(const JsonValue& model, TokenizerDefinition& definition) {
  const auto text = [&](std::string_view key) {
    const auto found = model.find_value(key);
    return found ? found->str() : std::string();
  };
  if (const auto unk = model.find_value("unk_token")) definition.unk_token = unk->str();
  definition.byte_fallback = model.boolean_or("byte_fallback", false);
  definition.prefix = text("continuing_subword_prefix");
  definition.suffix = text("end_of_word_suffix");
  if (definition.model == ModelKind::kUnigram) return read_unigram(model, definition);
  read_vocab(model.at("vocab"), definition);
  if (definition.model == ModelKind::kWordPiece) {
    if (!model.find_value("continuing_subword_prefix")) definition.prefix = "##";
    if (const auto longest = model.find_value("max_input_chars_per_word"))
      definition.max_input_chars_per_word = static_cast<size_t>(longest->count(INT32_MAX));
  }
  if (definition.model != ModelKind::kBpe) return;
  if (const auto dropout = model.find_value("dropout")) {
    MEGATRON_CHECK(dropout->number() == 0, dropout->where,
                   " is not supported: encoding would be random");
  }
  definition.ignore_merges = model.boolean_or("ignore_merges", false);
  definition.fuse_unk = model.boolean_or("fuse_unk", false);
  read_merges(model.at("merges"), definition);
}

// Byte-level BPE merges bytes directly, without their printable spelling.
void find_byte_level(TokenizerDefinition& definition) {
  using Kind = PreTokenizerStep::Kind;
  definition.byte_level = definition.model == ModelKind::kBpe && !definition.steps.empty() &&
                          definition.steps.back().kind == Kind::kByteLevel &&
                          !definition.byte_fallback && definition.prefix.empty() &&
                          definition.suffix.empty();
  if (!definition.byte_level) return;
  definition.steps.pop_back();
  if (definition.decoder.empty()) definition.decoder.push_back({});  // ByteLevel
}

AddedToken read_added_token(const JsonValue& value) {
  AddedToken token;
  token.id = token_id(value.at("id"));
  token.content = value.at("content").str();
  token.single_word = value.boolean_or("single_word", false);
  token.lstrip = value.boolean_or("lstrip", false);
  token.rstrip = value.boolean_or("rstrip", false);
  token.special = value.boolean_or("special", false);
  token.normalized = value.boolean_or("normalized", !token.special);
  return token;
}

// EOS, BOS and padding of a transformers tokenizer_config.json: a string, or an object with
// "content". add_bos_token and add_eos_token override the post-processor.
void read_tokenizer_config(std::string_view text, const std::string& where,
                           TokenizerDefinition& definition) {
  dom::parser parser;
  const JsonValue root = parse_json_object(parser, text, where);
  const auto name = [&](std::string_view key) -> std::optional<std::string> {
    const auto value = root.find_value(key);
    if (!value) return std::nullopt;
    return value->element.is_object() ? value->at("content").str() : value->str();
  };
  definition.eos = name("eos_token");
  definition.bos = name("bos_token");
  definition.pad = name("pad_token");
  definition.cls = name("cls_token");
  definition.sep = name("sep_token");
  definition.mask = name("mask_token");
  const auto overrule = [&](std::string_view key, const std::optional<std::string>& token,
                            std::vector<std::string>& around, bool front) {
    const auto wanted = root.find_value(key);
    if (!wanted || !token) return;
    const bool has = std::find(around.begin(), around.end(), *token) != around.end();
    if (wanted->boolean() && !has) around.insert(front ? around.begin() : around.end(), *token);
    if (!wanted->boolean() && has) std::erase(around, *token);
  };
  overrule("add_bos_token", definition.bos, definition.before, true);
  overrule("add_eos_token", definition.eos, definition.after, false);
}

}  // namespace

TokenizerDefinition parse_tokenizer_json(std::string_view text, const std::string& name,
                                         std::string_view config, const std::string& config_name) {
  TokenizerDefinition definition;
  dom::parser parser;
  const JsonValue root = parse_json_object(parser, text, name);
  if (const auto version = root.find_value("version")) {
    MEGATRON_CHECK(version->str() == "1.0", version->where, " is \"", version->str(),
                   "\", expected \"1.0\"");
  }
  // The kind of model and its components are checked before the large tables, so that refusals name
  // the reason.
  if (const auto normalizer = root.find_value("normalizer"))
    read_normalizer(*normalizer, definition.normalizer);
  const JsonValue model = root.at("model");
  definition.model = model_kind(model);
  definition.steps_where = name + ": pre_tokenizer";
  if (const auto pre_tokenizer = root.find_value("pre_tokenizer"))
    read_pre_tokenizer(*pre_tokenizer, definition.steps);
  if (const auto processor = root.find_value("post_processor"))
    read_post_processor(*processor, definition);
  if (const auto decoder = root.find_value("decoder")) read_decoder(*decoder, definition.decoder);
  read_model(model, definition);
  find_byte_level(definition);
  definition.added_where = name + ": added_tokens";
  if (const auto added = root.find_value("added_tokens")) {
    for (const JsonValue& token : added->elements())
      definition.added_tokens.push_back(read_added_token(token));
  }
  if (!config.empty()) read_tokenizer_config(config, config_name, definition);
  definition.special_where = config.empty() ? name : config_name;
  return definition;
}

TokenizerDefinition read_tokenizer_json(const std::filesystem::path& path) {
  const std::filesystem::path config = path.parent_path() / "tokenizer_config.json",
                              chat = path.parent_path() / "chat_template.jinja";
  const bool has_config = std::filesystem::exists(config);
  TokenizerDefinition definition =
      parse_tokenizer_json(read_file(path), path.string(),
                           has_config ? read_file(config) : std::string(), config.string());
  definition.files.push_back(path);
  if (has_config) definition.files.push_back(config);
  if (std::filesystem::exists(chat)) definition.files.push_back(chat);
  return definition;
}

TokenizerDefinition read_gpt2_files(const std::filesystem::path& vocab,
                                    const std::filesystem::path& merges) {
  TokenizerDefinition definition;
  definition.byte_level = true;
  definition.decoder.push_back({.kind = DecoderStep::Kind::kByteLevel});
  definition.files = {vocab, merges};
  dom::parser parser;
  read_vocab(parse_json_object(parser, vocab), definition);
  definition.vocab_where = definition.special_where = vocab.string();
  definition.merges_where = definition.steps_where = merges.string();
  const std::string text = read_file(merges);
  MEGATRON_CHECK(valid_utf8_prefix(text) == text.size(), merges.string(), ": byte ",
                 valid_utf8_prefix(text), " is not UTF-8");
  std::string_view rest = text;
  for (int64_t line_number = 1; !rest.empty(); ++line_number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("#version")) continue;
    definition.merges.push_back(split_merge(line, cat(merges.string(), ": line ", line_number)));
  }
  definition.steps.push_back({.kind = PreTokenizerStep::Kind::kSplitRegex,
                              .pattern = std::string(pattern_text(KnownPattern::kGpt2))});
  AddedToken end_of_text;
  end_of_text.content = "<|endoftext|>";
  end_of_text.special = true;
  end_of_text.id = 0;
  for (const auto& [token, id] : definition.vocab) {
    end_of_text.id = token == end_of_text.content ? id : end_of_text.id;
  }
  const bool listed =
      std::any_of(definition.vocab.begin(), definition.vocab.end(),
                  [&](const auto& entry) { return entry.first == end_of_text.content; });
  if (!listed) {  // after the vocabulary, where the tokenizers package would add it
    for (const auto& entry : definition.vocab)
      end_of_text.id = std::max(end_of_text.id, entry.second + 1);
  }
  definition.added_where = vocab.string();
  definition.added_tokens.push_back(end_of_text);
  definition.eos = end_of_text.content;
  return definition;
}

}  // namespace megatron
