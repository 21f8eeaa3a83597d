// megatron tokenize: token ids of a text, for inspection and for comparison with other programs.
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/base/parse.h"
#include "megatron/tokenizers/tokenizer.h"
#include "tools/support/input_path.h"

namespace megatron {
namespace {

constexpr std::string_view kTokenizeUsage =
    "megatron tokenize --tokenizer-type TYPE --tokenizer-model FILE TEXT... [options]";

struct TokenizeConfig : Config {
  std::vector<std::string> text;
  std::string input;
  bool add_special_tokens = false;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("tokenize");
    v.field("text", text, "texts to encode; they may stand without the flag");
    v.field("input", input, "a file whose content is one more text; -: standard input");
    v.field("add_special_tokens", add_special_tokens,
            "show also what the tokenizer's post-processor puts around a text");
    v.field("json", json, "print JSON");
  }
  void validate(Violations& violations) const override {
    if (text.empty() && input.empty())
      violations.add("no text is given", "megatron tokenize ... \"some text\", or --input FILE");
  }
};

nlohmann::json describe(const Tokenizer& tokenizer, const std::string& text, bool special) {
  const uint64_t replaced = tokenizer.num_replaced();
  std::vector<int32_t> ids = special ? tokenizer.prefix_ids() : std::vector<int32_t>();
  tokenizer.encode_append(text, ids);
  if (special) {
    for (const int32_t id : tokenizer.suffix_ids()) ids.push_back(id);
  }
  nlohmann::json tokens = nlohmann::json::array();
  for (const int32_t id : ids) tokens.push_back(tokenizer.token_bytes(id));
  return {{"text", text},
          {"ids", ids},
          {"tokens", tokens},
          {"decoded", tokenizer.decode(ids)},
          {"replaced", tokenizer.num_replaced() - replaced}};
}

std::string printable(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void print_table(const nlohmann::json& result) {
  const size_t count = result["ids"].size();
  for (size_t i = 0; i < count; ++i) {
    std::printf("%8d  %s\n", result["ids"][i].get<int>(), printable(result["tokens"][i]).c_str());
  }
  const std::string text = result["text"];
  std::printf("%zu ids of %zu bytes", count, text.size());
  if (const auto replaced = result["replaced"].get<uint64_t>(); replaced > 0)
    std::printf(", %llu ill-formed sequences read as U+FFFD",
                static_cast<unsigned long long>(replaced));
  const bool same = result["decoded"] == result["text"];
  std::printf("; decoded: %s\n", same ? "the same text" : printable(result["decoded"]).c_str());
}

}  // namespace

int tokenize(int argc, char** argv) {
  TokenizeConfig config;
  TokenizerConfig tokenizer_config;
  const std::array<Config*, 2> configs = {&config, &tokenizer_config};
  if (!parse_or_help(kTokenizeUsage, configs, argc, argv, {.positional = "text"})) return 0;
  const auto tokenizer = make_tokenizer(tokenizer_config);
  std::vector<std::string> texts = config.text;
  if (!config.input.empty()) texts.push_back(read_file(input_path(config.input)));
  nlohmann::json results = nlohmann::json::array();
  for (const std::string& text : texts) {
    results.push_back(describe(*tokenizer, text, config.add_special_tokens));
    if (!config.json) print_table(results.back());
  }
  const auto id_or_null = [](std::optional<int32_t> id) {
    return id ? nlohmann::json(*id) : nlohmann::json();
  };
  const nlohmann::json about = {{"vocab_size", tokenizer->vocab_size()},
                                {"eod", id_or_null(tokenizer->eod())},
                                {"bos", id_or_null(tokenizer->bos())},
                                {"pad", id_or_null(tokenizer->pad())},
                                {"fingerprint", tokenizer->fingerprint()}};
  if (config.json) {
    nlohmann::json all = about;
    all["results"] = results;
    std::printf("%s\n", printable(all).c_str());
  } else {
    std::printf("vocabulary %s, end of document %s, begin %s, padding %s, fingerprint %s\n",
                about["vocab_size"].dump().c_str(), about["eod"].dump().c_str(),
                about["bos"].dump().c_str(), about["pad"].dump().c_str(),
                about["fingerprint"].get<std::string>().c_str());
  }
  return 0;
}

}  // namespace megatron
