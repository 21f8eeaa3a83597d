#include "megatron/tokenizers/detail/bpe_definition.h"

#include <simdjson.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/detail/utf8.h"

namespace megatron {
namespace {

namespace dom = simdjson::dom;

std::string_view type_name(dom::element_type type) {
  switch (type) {
    case dom::element_type::ARRAY:
      return "an array";
    case dom::element_type::OBJECT:
      return "an object";
    case dom::element_type::STRING:
      return "a string";
    case dom::element_type::BOOL:
      return "a boolean";
    case dom::element_type::NULL_VALUE:
      return "null";
    default:
      return "a number";
  }
}

// A value of a JSON file that knows where it stands, for messages.
struct Value {
  dom::element element;
  std::string where;  // "file: key.key[3]"

  bool is_null() const { return element.is_null(); }
  template <class T>
  T as(std::string_view expected) const {
    T result;
    MEGATRON_CHECK(element.get(result) == simdjson::SUCCESS, where, " is ",
                   type_name(element.type()), ", expected ", expected);
    return result;
  }
  std::string str() const { return std::string(as<std::string_view>("a string")); }
  bool boolean() const { return as<bool>("a boolean"); }
  dom::object object() const { return as<dom::object>("an object"); }
  dom::array array() const { return as<dom::array>("an array"); }
  int32_t id() const {
    const int64_t id = as<int64_t>("an integer");
    MEGATRON_CHECK(id >= 0 && id <= kMaxTokenId, where, " is ", id,
                   ", expected a token id from 0 to ", kMaxTokenId);
    return static_cast<int32_t>(id);
  }
  // A member; none when it is absent.
  std::optional<Value> find(std::string_view key) const {
    dom::element found;
    if (object()[key].get(found) != simdjson::SUCCESS) return std::nullopt;
    return Value{found, cat(where, where.ends_with(": ") ? "" : ".", key)};
  }
  // A member that is neither absent nor null.
  std::optional<Value> find_value(std::string_view key) const {
    std::optional<Value> found = find(key);
    if (found && found->is_null()) return std::nullopt;
    return found;
  }
  Value at(std::string_view key) const {
    std::optional<Value> found = find(key);
    MEGATRON_CHECK(found.has_value(), where, where.ends_with(": ") ? "" : " ", "has no \"", key,
                   "\"");
    return *found;
  }
  std::vector<Value> elements() const {
    std::vector<Value> values;
    for (const dom::element item : array())
      values.push_back({item, cat(where, "[", values.size(), "]")});
    return values;
  }
  bool boolean_or(std::string_view key, bool otherwise) const {
    const std::optional<Value> found = find_value(key);
    return found ? found->boolean() : otherwise;
  }
  // The member "type", which names a component.
  std::string type() const { return at("type").str(); }
};

dom::element parse(dom::parser& parser, const std::filesystem::path& path) {
  const std::string text = read_file(path);
  dom::element root;
  const simdjson::error_code error = parser.parse(text).get(root);
  MEGATRON_CHECK(error == simdjson::SUCCESS, path.string(),
                 ": not JSON: ", simdjson::error_message(error));
  MEGATRON_CHECK(root.is_object(), path.string(), ": the file holds ", type_name(root.type()),
                 ", expected an object");
  return root;
}

[[noreturn]] void refuse(const Value& component, std::string_view supported) {
  throw_error(cat(component.where, ": type \"", component.type(),
                  "\" is not supported\nhint: supported types: ", supported));
}

void read_normalizer(const Value& value, bool& nfc) {
  const std::string type = value.type();
  if (type == "Sequence") {
    for (const Value& part : value.at("normalizers").elements()) read_normalizer(part, nfc);
  } else if (type == "NFC") {
    nfc = true;
  } else {
    refuse(value, "NFC, Sequence");
  }
}

PreTokenizerStep read_split(const Value& value) {
  PreTokenizerStep step;
  const Value pattern = value.at("pattern");
  if (const auto regex = pattern.find("Regex")) {
    step.kind = PreTokenizerStep::Kind::kSplitRegex;
    step.pattern = regex->str();
  } else {
    step.kind = PreTokenizerStep::Kind::kSplitString;
    step.pattern = pattern.at("String").str();
  }
  MEGATRON_CHECK(!step.pattern.empty(), pattern.where, " is empty");
  constexpr std::array<std::string_view, 5> kNames = {"Isolated", "Removed", "MergedWithPrevious",
                                                      "MergedWithNext", "Contiguous"};
  const Value behavior = value.at("behavior");
  const std::string name = behavior.str();
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  MEGATRON_CHECK(
      found != kNames.end(), behavior.where, " is \"", name,
      "\", expected Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
  step.behavior = static_cast<SplitBehavior>(found - kNames.begin());
  step.invert = value.boolean_or("invert", false);
  return step;
}

// Appends the steps of one component; `byte_level` tells whether ByteLevel was seen, which must be
// the last.
void read_pre_tokenizer(const Value& value, std::vector<PreTokenizerStep>& steps,
                        bool& byte_level) {
  const std::string type = value.type();
  if (type == "Sequence") {
    for (const Value& part : value.at("pretokenizers").elements())
      read_pre_tokenizer(part, steps, byte_level);
    return;
  }
  MEGATRON_CHECK(!byte_level, value.where, ": type \"", type,
                 "\" behind ByteLevel is not supported");
  if (type == "ByteLevel") {
    byte_level = true;
    if (value.at("add_prefix_space").boolean()) {
      steps.push_back({.kind = PreTokenizerStep::Kind::kPrefixSpace});
    }
    if (value.boolean_or("use_regex", true)) {
      steps.push_back({.kind = PreTokenizerStep::Kind::kSplitRegex,
                       .pattern = std::string(pattern_text(KnownPattern::kGpt2))});
    }
  } else if (type == "Split") {
    steps.push_back(read_split(value));
  } else if (type == "Digits") {
    steps.push_back({.kind = PreTokenizerStep::Kind::kDigits,
                     .behavior = value.boolean_or("individual_digits", false)
                                     ? SplitBehavior::kIsolated
                                     : SplitBehavior::kContiguous});
  } else {
    refuse(value, "ByteLevel, Digits, Sequence, Split");
  }
}

// Post-processors add tokens around the text or trim offsets; neither concerns encode(). Only known
// ones are let through.
void check_post_processor(const Value& value) {
  constexpr std::array<std::string_view, 4> kKnown = {"ByteLevel", "TemplateProcessing",
                                                      "RobertaProcessing", "BertProcessing"};
  const std::string type = value.type();
  if (type == "Sequence") {
    for (const Value& part : value.at("processors").elements()) check_post_processor(part);
  } else if (std::find(kKnown.begin(), kKnown.end(), type) == kKnown.end()) {
    refuse(value, "BertProcessing, ByteLevel, RobertaProcessing, Sequence, TemplateProcessing");
  }
}

void check_decoder(const Value& value) {
  const std::string type = value.type();
  if (type == "Sequence") {
    for (const Value& part : value.at("decoders").elements()) check_decoder(part);
  } else if (type != "ByteLevel") {
    refuse(value, "ByteLevel, Sequence");
  }
}

void read_vocab(const Value& vocab, BpeDefinition& definition) {
  const dom::object object = vocab.object();
  definition.vocab_where = vocab.where;
  definition.vocab.reserve(object.size());
  for (const dom::key_value_pair entry : object) {
    // The place is spelled out only for a wrong value: there are many right ones.
    int64_t id = -1;
    if (entry.value.get(id) != simdjson::SUCCESS || id < 0 || id > kMaxTokenId) {
      Value{entry.value, cat(vocab.where, "[\"", entry.key, "\"]")}.id();
    }
    definition.vocab.emplace_back(entry.key, static_cast<int32_t>(id));
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

void read_merges(const Value& merges, BpeDefinition& definition) {
  definition.merges_where = merges.where;
  for (const dom::element item : merges.array()) {
    const auto where = [&] { return cat(merges.where, "[", definition.merges.size(), "]"); };
    std::string_view text;
    dom::array pair;
    if (item.get(text) == simdjson::SUCCESS) {
      const bool plain = text.find(' ') != text.npos && text.find(' ') == text.rfind(' ');
      definition.merges.push_back(split_merge(text, plain ? std::string() : where()));
    } else if (item.get(pair) == simdjson::SUCCESS && pair.size() == 2) {
      const Value left{pair.at(0), where() + "[0]"}, right{pair.at(1), where() + "[1]"};
      definition.merges.emplace_back(left.str(), right.str());
    } else {
      throw_error(
          cat(where(), " is ", type_name(item.type()), ", expected \"a b\" or [\"a\", \"b\"]"));
    }
  }
}

void read_model(const Value& model, BpeDefinition& definition) {
  if (model.find("type") && model.type() != "BPE") refuse(model, "BPE (byte level)");
  if (const auto dropout = model.find_value("dropout")) {
    MEGATRON_CHECK(dropout->as<double>("a number") == 0, dropout->where,
                   " is not supported: encoding would be random");
  }
  for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto affix = model.find_value(key);
    MEGATRON_CHECK(!affix || affix->str().empty(), affix->where, " \"", affix->str(),
                   "\" is not supported");
  }
  MEGATRON_CHECK(!model.boolean_or("byte_fallback", false), model.where,
                 ".byte_fallback is not supported: the tokenizer is not of the byte-level kind");
  definition.ignore_merges = model.boolean_or("ignore_merges", false);
  definition.fuse_unk = model.boolean_or("fuse_unk", false);
  if (const auto unk = model.find_value("unk_token")) definition.unk_token = unk->str();
  read_vocab(model.at("vocab"), definition);
  read_merges(model.at("merges"), definition);
}

AddedToken read_added_token(const Value& value) {
  AddedToken token;
  token.id = value.at("id").id();
  token.content = value.at("content").str();
  token.single_word = value.boolean_or("single_word", false);
  token.lstrip = value.boolean_or("lstrip", false);
  token.rstrip = value.boolean_or("rstrip", false);
  token.special = value.boolean_or("special", false);
  token.normalized = value.boolean_or("normalized", !token.special);
  return token;
}

// EOS, BOS and padding of a transformers tokenizer_config.json: a string, or an object with
// "content".
void read_special_names(const std::filesystem::path& path, BpeDefinition& definition) {
  dom::parser parser;
  const Value root{parse(parser, path), path.string() + ": "};
  const auto name = [&](std::string_view key) -> std::optional<std::string> {
    const auto value = root.find_value(key);
    if (!value) return std::nullopt;
    return value->element.is_object() ? value->at("content").str() : value->str();
  };
  definition.eos = name("eos_token");
  definition.bos = name("bos_token");
  definition.pad = name("pad_token");
  definition.files.push_back(path);
}

}  // namespace

BpeDefinition read_tokenizer_json(const std::filesystem::path& path) {
  BpeDefinition definition;
  definition.files.push_back(path);
  dom::parser parser;
  const Value root{parse(parser, path), path.string() + ": "};
  if (const auto version = root.find_value("version")) {
    MEGATRON_CHECK(version->str() == "1.0", version->where, " is \"", version->str(),
                   "\", expected \"1.0\"");
  }
  // The kind of model and its parts are looked at before the large tables, so that refusals name
  // the reason.
  if (const auto normalizer = root.find_value("normalizer"))
    read_normalizer(*normalizer, definition.nfc);
  const Value model = root.at("model");
  if (model.find("type") && model.type() != "BPE") refuse(model, "BPE (byte level)");
  bool byte_level = false;
  definition.steps_where = path.string() + ": pre_tokenizer";
  if (const auto pre_tokenizer = root.find_value("pre_tokenizer")) {
    read_pre_tokenizer(*pre_tokenizer, definition.steps, byte_level);
  }
  MEGATRON_CHECK(byte_level, definition.steps_where,
                 " has no ByteLevel\nhint: only byte-level BPE is supported");
  if (const auto processor = root.find_value("post_processor")) check_post_processor(*processor);
  if (const auto decoder = root.find_value("decoder")) check_decoder(*decoder);
  read_model(model, definition);
  definition.added_where = path.string() + ": added_tokens";
  if (const auto added = root.find_value("added_tokens")) {
    for (const Value& token : added->elements())
      definition.added_tokens.push_back(read_added_token(token));
  }
  const std::filesystem::path config = path.parent_path() / "tokenizer_config.json";
  if (std::filesystem::exists(config)) read_special_names(config, definition);
  return definition;
}

BpeDefinition read_gpt2_files(const std::filesystem::path& vocab,
                              const std::filesystem::path& merges) {
  BpeDefinition definition;
  definition.files = {vocab, merges};
  dom::parser parser;
  read_vocab(Value{parse(parser, vocab), vocab.string() + ": "}, definition);
  definition.vocab_where = vocab.string();
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
  if (!listed) {  // behind the vocabulary, where the tokenizers package would add it
    for (const auto& entry : definition.vocab)
      end_of_text.id = std::max(end_of_text.id, entry.second + 1);
  }
  definition.added_where = vocab.string();
  definition.added_tokens.push_back(end_of_text);
  definition.eos = end_of_text.content;
  return definition;
}

}  // namespace megatron
