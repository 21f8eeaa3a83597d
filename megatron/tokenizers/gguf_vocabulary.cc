#include "megatron/tokenizers/gguf_vocabulary.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/tokenizers/detail/decoder.h"
#include "megatron/tokenizers/detail/metaspace_cutter.h"
#include "megatron/tokenizers/detail/pre_tokenizer.h"
#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

enum TokenType : int64_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

constexpr const char* kTokensKey = "tokenizer.ggml.tokens";
constexpr const char* kScoresKey = "tokenizer.ggml.scores";
constexpr const char* kTypesKey = "tokenizer.ggml.token_type";
constexpr const char* kMergesKey = "tokenizer.ggml.merges";

// -- how text is cut before byte-level BPE

// Expressions that are applied one after the other; matches are isolated.
struct PreTokenization {
  std::vector<std::string_view> names;
  std::vector<std::string_view> patterns;
  bool ignore_merges = false;  // a word that is a token needs no merges
  bool add_bos = false;        // unless the file says otherwise
  bool nfc = false;            // text is normalised first
};

constexpr std::string_view kDigit = R"(\p{N})";
constexpr std::string_view kDeepseekLetters =
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-"
    "\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-"
    "\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-"
    "\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943]+";
constexpr std::string_view kDeepseek3 =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

const std::vector<PreTokenization>& pre_tokenizations() {
  static const std::vector<PreTokenization> table = [] {
    const std::string_view gpt2 = pattern_text(KnownPattern::kGpt2),
                           llama3 = pattern_text(KnownPattern::kLlama3),
                           qwen2 = pattern_text(KnownPattern::kQwen2);
    return std::vector<PreTokenization>{
        {{"default", ""}, {R"([\p{P}\$\+<=>\^~\|]+)", gpt2, R"(\p{N}+)", "[0-9][0-9][0-9]"}},
        {{"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"},
         {llama3},
         /*ignore_merges=*/true,
         /*add_bos=*/true},
        {{"dbrx", "smaug-bpe", "chatglm-bpe"}, {llama3}},
        {{"glm4"}, {llama3}, /*ignore_merges=*/true},
        {{"qwen2", "deepseek-r1-qwen", "megrez", "kormo"}, {qwen2}, false, false, /*nfc=*/true},
        {{"stablelm2", "hunyuan", "solar-open"}, {qwen2}},
        {{"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"},
         {gpt2}},
        {{"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"},
         {kDigit, gpt2}},
        {{"falcon"}, {R"([\p{P}\$\+<=>\^~\|`]+)", gpt2, "[0-9][0-9][0-9]"}},
        {{"tekken"},
         {pattern_text(KnownPattern::kTiktokenV2)},
         /*ignore_merges=*/true,
         /*add_bos=*/true},
        {{"gpt-4o", "llama4", "kanana2"}, {pattern_text(KnownPattern::kO200k)}},
        {{"deepseek-llm"},
         {R"([\r\n])", kDeepseekLetters,
          "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", R"(\s+$)",
          "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", R"(\p{N}+)"}},
        {{"deepseek-coder"},
         {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
          kDigit}},
        {{"deepseek-v3", "hunyuan-dense"},
         {R"(\p{N}{1,3})", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", kDeepseek3}},
    };
  }();
  return table;
}

const PreTokenization& find_pre_tokenization(const GgufVocabulary& v) {
  std::string known;
  for (const PreTokenization& way : pre_tokenizations())
    for (const std::string_view name : way.names) {
      if (name == v.pre) return way;
      if (!name.empty()) known += cat(known.empty() ? "" : ", ", name);
    }
  throw_error(cat(v.place("tokenizer.ggml.pre"), ": \"", v.pre,
                  "\" is not built\nhint: those that are: ", known));
}

// -- checks of the tables

using Ids = std::unordered_map<std::string_view, int64_t>;

int64_t type_of(const GgufVocabulary& v, size_t id) {
  return v.types.empty() ? kNormal : v.types[id];
}

void check_tables(const GgufVocabulary& v) {
  const size_t count = v.tokens.size();
  MEGATRON_CHECK(count > 0, v.place(kTokensKey), ": holds no tokens");
  const auto as_many = [&](const char* key, size_t found) {
    MEGATRON_CHECK(found == count, v.place(key), ": has ", found, " elements for ", count,
                   " tokens");
  };
  if (!v.types.empty()) as_many(kTypesKey, v.types.size());
  for (size_t i = 0; i < v.types.size(); ++i)
    MEGATRON_CHECK(v.types[i] >= kNormal && v.types[i] <= kByte, v.place(kTypesKey), ": element ",
                   i, " is ", v.types[i], ", expected 1 to 6");
  const auto inside = [&](const char* key, const std::optional<int64_t>& id) {
    MEGATRON_CHECK(!id || (*id >= 0 && *id < static_cast<int64_t>(count)), v.place(key), ": is ",
                   id.value_or(0), ", which is none of the ", count, " tokens");
  };
  inside("tokenizer.ggml.bos_token_id", v.bos);
  inside("tokenizer.ggml.eos_token_id", v.eos);
  inside("tokenizer.ggml.unknown_token_id", v.unknown);
  inside("tokenizer.ggml.padding_token_id", v.padding);
  MEGATRON_CHECK(!v.add_bos.value_or(false) || v.bos, v.place("tokenizer.ggml.add_bos_token"),
                 ": is true, but there is no tokenizer.ggml.bos_token_id");
  MEGATRON_CHECK(!v.add_eos.value_or(false) || v.eos, v.place("tokenizer.ggml.add_eos_token"),
                 ": is true, but there is no tokenizer.ggml.eos_token_id");
}

Ids ids_of(const GgufVocabulary& v, const std::vector<std::string>& tokens) {
  Ids ids;
  ids.reserve(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    MEGATRON_CHECK(!tokens[id].empty(), v.place(kTokensKey), ": element ", id, " is empty");
    const auto [known, added] = ids.emplace(tokens[id], static_cast<int64_t>(id));
    MEGATRON_CHECK(added, v.place(kTokensKey), ": elements ", known->second, " and ", id,
                   " are both \"", tokens[id], "\"");
  }
  return ids;
}

// -- the two kinds of vocabularies

using Merge = std::pair<std::string_view, std::string_view>;

// Those that the file lists.
std::vector<Merge> listed_merges(const GgufVocabulary& v, const Ids& ids) {
  std::vector<Merge> merges;
  merges.reserve(v.merges.size());
  for (size_t i = 0; i < v.merges.size(); ++i) {
    const std::string_view text = v.merges[i];
    const size_t space = text.find(' ', 1);  // a part may be a space
    MEGATRON_CHECK(space != text.npos && space + 1 < text.size(), v.place(kMergesKey), ": element ",
                   i, " is \"", text, "\", expected two tokens with a space between them");
    const Merge merge = {text.substr(0, space), text.substr(space + 1)};
    std::string whole(merge.first);
    whole += merge.second;
    for (const std::string_view token : {merge.first, merge.second, std::string_view(whole)})
      MEGATRON_CHECK(ids.contains(token), v.place(kMergesKey), ": element ", i, " is \"", text,
                     "\", but \"", token, "\" is no token");
    merges.push_back(merge);
  }
  return merges;
}

size_t num_characters(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return count;
}

// Every way to make a piece of two others, best pieces first, as transformers derives them: of
// equal scores those with longer halves.
std::vector<Merge> merges_of_scores(const GgufVocabulary& v, const std::vector<std::string>& tokens,
                                    const Ids& ids) {
  struct Candidate {
    double score;
    size_t left_length, right_length;
    Merge merge;
  };
  const auto merges_with = [&](int64_t id) {
    const int64_t type = type_of(v, static_cast<size_t>(id));
    return type == kNormal || type == kUserDefined || type == kUnused;
  };
  std::vector<Candidate> all;
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!merges_with(static_cast<int64_t>(id))) continue;
    const std::string_view token = tokens[id];
    const size_t length = num_characters(token);
    size_t characters = 0;
    for (size_t at = 0, step = 0; at < token.size(); at += step) {
      if (at > 0) {
        const auto left = ids.find(token.substr(0, at)), right = ids.find(token.substr(at));
        if (left != ids.end() && right != ids.end() && merges_with(left->second) &&
            merges_with(right->second))
          all.push_back({v.merges_by_id ? -static_cast<double>(id) : v.scores[id],
                         characters,
                         length - characters,
                         {token.substr(0, at), token.substr(at)}});
      }
      decode_utf8(token.data() + at, step);
      ++characters;
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    return std::tie(a.score, a.left_length, a.right_length) >
           std::tie(b.score, b.left_length, b.right_length);
  });
  std::vector<Merge> merges;
  merges.reserve(all.size());
  for (const Candidate& candidate : all) merges.push_back(candidate.merge);
  return merges;
}

class TokenizerWriter {
 public:
  explicit TokenizerWriter(const GgufVocabulary& vocabulary) : v_(vocabulary) {}

  TokenizerTexts run() {
    check_tables(v_);
    const bool byte_level = v_.model == "gpt2";
    MEGATRON_CHECK(byte_level || v_.model == "llama", v_.place("tokenizer.ggml.model"), ": \"",
                   v_.model, "\" is not built, only \"gpt2\" and \"llama\"");
    byte_level ? spell_bytes() : spell_pieces();
    const Ids ids = ids_of(v_, tokens_);
    json_.begin_object().member("version", "1.0").key("added_tokens");
    write_added_tokens();
    byte_level ? write_byte_level(ids) : write_pieces(ids);
    json_.end_object();
    return {v_.name, json_.text(), config()};
  }

 private:
  // Tokens of text outside the alphabet of bytes are spelled in it.
  void spell_bytes() {
    way_ = &find_pre_tokenization(v_);
    add_bos_ = v_.add_bos.value_or(way_->add_bos && v_.bos.has_value());
    tokens_ = v_.tokens;
    std::string ignored;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (type_of(v_, id) != kNormal || parse_byte_level(tokens_[id], ignored)) continue;
      tokens_[id].clear();
      append_byte_level(v_.tokens[id], tokens_[id]);
    }
  }

  // Runs of spaces, which some files have as they are, are pieces of the mark for a space.
  void spell_pieces() {
    MEGATRON_CHECK(!v_.merges.empty() || v_.merges_by_id || !v_.scores.empty(),
                   v_.place(kScoresKey), ": is not there: tokens without scores cannot be merged");
    MEGATRON_CHECK(v_.scores.empty() || v_.scores.size() == v_.tokens.size(), v_.place(kScoresKey),
                   ": has ", v_.scores.size(), " elements for ", v_.tokens.size(), " tokens");
    add_bos_ = v_.add_bos.value_or(v_.bos.has_value());
    tokens_ = v_.tokens;
    for (std::string& token : tokens_) {
      if (token.find_first_not_of(' ') != token.npos) continue;
      const size_t spaces = token.size();
      token.clear();
      for (size_t i = 0; i < spaces; ++i) token += kMetaspace;
    }
  }

  bool is_special(size_t id) const {
    return type_of(v_, id) == kControl || type_of(v_, id) == kUnknown;
  }

  void write_added_tokens() {
    json_.begin_array();
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (!is_special(id) && type_of(v_, id) != kUserDefined) continue;
      const bool strips = v_.strips_after_control && type_of(v_, id) == kControl &&
                          tokens_[id] != "<s>" && tokens_[id] != "<|endoftext|>";
      json_.begin_object()
          .member("id", id)
          .member("content", tokens_[id])
          .member("single_word", false)
          .member("lstrip", false)
          .member("rstrip", strips)
          .member("normalized", false)
          .member("special", is_special(id))
          .end_object();
    }
    json_.end_array();
  }

  void write_component(const char* type) { json_.begin_object().member("type", type); }

  void write_byte_level(const Ids& ids) {
    json_.key("normalizer");
    if (way_->nfc) {
      write_component("NFC");
      json_.end_object();
    } else {
      json_.null();
    }
    json_.key("pre_tokenizer");
    write_component("Sequence");
    json_.key("pretokenizers").begin_array();
    for (const std::string_view pattern : way_->patterns) {
      write_component("Split");
      json_.key("pattern").begin_object().member("Regex", pattern).end_object();
      json_.member("behavior", "Isolated").member("invert", false).end_object();
    }
    write_bytes_component();
    json_.end_array().end_object();
    write_post_processor();
    json_.key("decoder");
    write_bytes_component();
    begin_model(listed_merges(v_, ids));
    json_.member("byte_fallback", false).member("ignore_merges", way_->ignore_merges).end_object();
  }

  void write_bytes_component() {
    write_component("ByteLevel");
    json_.member("add_prefix_space", false)
        .member("trim_offsets", true)
        .member("use_regex", false)
        .end_object();
  }

  void write_replace(std::string_view from, std::string_view to) {
    write_component("Replace");
    json_.key("pattern").begin_object().member("String", from).end_object();
    json_.member("content", to).end_object();
  }

  void write_pieces(const Ids& ids) {
    const bool prefix = v_.add_space_prefix.value_or(true);
    json_.key("normalizer");
    write_component("Sequence");
    json_.key("normalizers").begin_array();
    if (prefix) {
      write_component("Prepend");
      json_.member("prepend", kMetaspace).end_object();
    }
    write_replace(" ", kMetaspace);
    json_.end_array().end_object().key("pre_tokenizer").null();
    write_post_processor();
    json_.key("decoder");
    write_component("Sequence");
    json_.key("decoders").begin_array();
    write_replace(kMetaspace, " ");
    for (const char* type : {"ByteFallback", "Fuse"}) {
      write_component(type);
      json_.end_object();
    }
    if (prefix) {
      write_component("Strip");
      json_.member("content", " ").member("start", 1).member("stop", 0).end_object();
    }
    json_.end_array().end_object();
    bool has_bytes = true;
    for (int byte = 0; byte < 256; ++byte) has_bytes &= ids.contains(byte_token(byte));
    begin_model(v_.merges.empty() ? merges_of_scores(v_, tokens_, ids) : listed_merges(v_, ids));
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (v_.unknown ? id != static_cast<size_t>(*v_.unknown) : type_of(v_, id) != kUnknown)
        continue;
      json_.member("unk_token", tokens_[id]);
      break;
    }
    json_.member("fuse_unk", true).member("byte_fallback", has_bytes).end_object();
  }

  void begin_model(const std::vector<Merge>& merges) {
    json_.key("model");
    write_component("BPE");
    json_.key("vocab").begin_object();
    for (size_t id = 0; id < tokens_.size(); ++id) json_.member(tokens_[id], id);
    json_.end_object().key("merges").begin_array();
    for (const auto& [left, right] : merges)
      json_.begin_array().value(left).value(right).end_array();
    json_.end_array();
  }

  // The tokens before and after a text.
  void write_post_processor() {
    json_.key("post_processor");
    const bool eos = v_.add_eos.value_or(false);
    if (!add_bos_ && !eos) {
      json_.null();
      return;
    }
    write_component("TemplateProcessing");
    for (const char* form : {"single", "pair"}) {
      json_.key(form).begin_array();
      for (const char* part : {"A", "B"}) {
        if (part == std::string_view("B") && form == std::string_view("single")) continue;
        if (add_bos_) write_template_token(*v_.bos);
        json_.begin_object().key("Sequence").begin_object().member("id", part);
        json_.member("type_id", 0).end_object().end_object();
        if (eos) write_template_token(*v_.eos);
      }
      json_.end_array();
    }
    json_.key("special_tokens").begin_object();
    if (add_bos_) write_template_entry(*v_.bos);
    if (eos && !(add_bos_ && *v_.bos == *v_.eos)) write_template_entry(*v_.eos);
    json_.end_object().end_object();
  }
  void write_template_token(int64_t id) {
    json_.begin_object().key("SpecialToken").begin_object();
    json_.member("id", token(id)).member("type_id", 0).end_object().end_object();
  }
  void write_template_entry(int64_t id) {
    json_.key(token(id)).begin_object().member("id", token(id));
    json_.key("ids").begin_array().value(id).end_array();
    json_.key("tokens").begin_array().value(token(id)).end_array().end_object();
  }

  const std::string& token(int64_t id) const { return tokens_[static_cast<size_t>(id)]; }

  // tokenizer_config.json
  std::string config() const {
    JsonWriter json(2);
    json.begin_object().member("tokenizer_class", "PreTrainedTokenizerFast");
    const auto name = [&](const char* key, const std::optional<int64_t>& id) {
      if (id) json.member(key, token(*id));
    };
    name("bos_token", v_.bos);
    name("eos_token", v_.eos);
    name("unk_token", v_.unknown);
    name("pad_token", v_.padding);
    if (v_.bos) json.member("add_bos_token", add_bos_);
    if (v_.eos) json.member("add_eos_token", v_.add_eos.value_or(false));
    json.member("clean_up_tokenization_spaces", false);
    if (v_.chat_templates.size() == 1 && v_.chat_templates[0].first == "default") {
      json.member("chat_template", v_.chat_templates[0].second);
    } else if (!v_.chat_templates.empty()) {
      json.key("chat_template").begin_array();
      for (const auto& [key, text] : v_.chat_templates)
        json.begin_object().member("name", key).member("template", text).end_object();
      json.end_array();
    }
    json.end_object();
    return json.text() + "\n";
  }

  const GgufVocabulary& v_;
  const PreTokenization* way_ = nullptr;
  bool add_bos_ = false;
  std::vector<std::string> tokens_;  // as tokenizer.json spells them
  JsonWriter json_;
};

}  // namespace

TokenizerTexts gguf_tokenizer_texts(const GgufVocabulary& vocabulary) {
  return TokenizerWriter(vocabulary).run();
}

}  // namespace megatron
