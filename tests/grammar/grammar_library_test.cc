// Grammars through xgrammar: what is sampled under a grammar follows it whatever the logits, states
// are taken back exactly, and no grammar ends the process.
//
// MEGATRON_GRAMMAR_SAMPLES names a file for the samples under schemas, one {"schema", "text"} a
// line; check_samples.py has them validated by a program that is not ours.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "megatron/inference/grammar.h"
#include "megatron/serving/generation_request.h"
#include "megatron/tokenizers/tokenizer.h"
#include "tests/grammar/hostile_grammars.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using Random = std::mt19937_64;
using Clock = std::chrono::steady_clock;

constexpr int32_t kEnd = 602;  // <|im_end|>

const Tokenizer& tokenizer() {
  static const auto loaded = [] {
    TokenizerConfig config;
    config.tokenizer_type = "HuggingFaceTokenizer";
    config.tokenizer_model = MEGATRON_SOURCE_DIR "/tests/golden/chat/tokenizer/tokenizer.json";
    return make_tokenizer(config);
  }();
  return *loaded;
}

GrammarCompiler& compiler() {
  // Padded ids stand behind those of the tokenizer.
  static GrammarCompiler shared(tokenizer(), 640, {kEnd, 600});
  return shared;
}

std::vector<int32_t> allowed_ids(TokenMatcher& matcher) {
  std::vector<uint32_t> mask(static_cast<size_t>(token_mask_words(640)), 0xffffffff);
  matcher.fill(mask);
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < 640; ++id)
    if (is_allowed(mask, id)) ids.push_back(id);
  return ids;
}

// A text drawn from random logits under the grammar, which prefer an end after some tokens;
// nullopt: it did not end.
std::optional<std::string> sample(const TokenGrammar& grammar, Random& random) {
  const auto matcher = grammar.start();
  const size_t patience = random() % 60;
  std::vector<int32_t> ids;
  for (size_t step = 0; step < 600; ++step) {
    const std::vector<int32_t> allowed = allowed_ids(*matcher);
    if (allowed.empty()) return std::nullopt;
    int32_t id = allowed[random() % allowed.size()];
    if (step > patience) {
      // What closes strings, lists and objects; a string first, since it may hold the others.
      for (const char* const closes : {"", "\"", "]", "}"}) {
        const auto found = std::ranges::find_if(allowed, [&](int32_t candidate) {
          return *closes == 0 ? candidate == kEnd : tokenizer().token_bytes(candidate) == closes;
        });
        if (found == allowed.end()) continue;
        id = *found;
        break;
      }
    }
    EXPECT_TRUE(matcher->accept(id)) << tokenizer().token_bytes(id);
    if (matcher->has_ended()) {
      EXPECT_TRUE(id == kEnd || id == 600);
      EXPECT_TRUE(allowed_ids(*matcher).empty());
      EXPECT_FALSE(matcher->accept(ids.empty() ? 0 : ids[0])) << "after the end";
      return tokenizer().decode(ids);
    }
    EXPECT_FALSE(tokenizer().is_special(id)) << "in the middle of a text";
    ids.push_back(id);
  }
  return std::nullopt;
}

bool is_json(const std::string& text) {
  // Half of a surrogate pair as an escape is JSON by its grammar, though not for this parser.
  if (text.find("\\uD") != text.npos || text.find("\\ud") != text.npos) return true;
  try {
    return !nlohmann::json::parse(text).is_discarded();
  } catch (const nlohmann::json::out_of_range&) {  // 1e999 is a number of JSON
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

TEST(GrammarLibrary, IsThere) { ASSERT_EQ(GrammarCompiler::unavailable(), ""); }

TEST(GrammarLibrary, SamplesUnderSchemasAreTheirJson) {
  std::ifstream in(MEGATRON_SOURCE_DIR "/tests/grammar/schemas.jsonl");
  std::ofstream out;
  if (const char* path = std::getenv("MEGATRON_GRAMMAR_SAMPLES")) out.open(path);
  Random random(1);
  int64_t schemas = 0, complete = 0, all = 0;
  for (std::string schema; std::getline(in, schema); ++schemas) {
    const auto grammar = compiler().compile({GrammarKind::kJsonSchema, schema});
    int64_t of_this = 0;
    for (int i = 0; i < 30; ++i, ++all) {
      const std::optional<std::string> text = sample(*grammar, random);
      if (!text) continue;
      ++complete, ++of_this;
      EXPECT_TRUE(is_json(*text)) << schema << "\n" << *text;
      if (out.is_open())
        out << "{\"schema\": " << schema << ", \"text\": " << nlohmann::json(*text).dump() << "}\n";
    }
    EXPECT_GT(of_this, 0) << schema;
  }
  EXPECT_GE(schemas, 50);
  EXPECT_GT(complete, all * 8 / 10);
}

TEST(GrammarLibrary, SamplesUnderExpressionsMatchThem) {
  Random random(2);
  for (const char* text : {"[a-z]{3,5}", "(foo|bar)+", "\\d{4}-\\d{2}-\\d{2}", "a*b?c",
                           "[A-Fa-f0-9]+", "(yes|no|maybe)", "([a-c]x)*", "^(a+)+$"}) {
    const auto grammar = compiler().compile({GrammarKind::kRegex, text});
    const std::regex expected(text);
    int complete = 0;
    for (int i = 0; i < 30; ++i) {
      const auto found = sample(*grammar, random);
      if (!found || found->size() > 200) continue;  // the standard library's matcher recurses
      ++complete;
      EXPECT_TRUE(std::regex_match(*found, expected)) << text << ": " << *found;
    }
    EXPECT_GT(complete, 20) << text;
  }
  const auto sum = compiler().compile(
      {GrammarKind::kEbnf, "root ::= term (\"+\" term)*\nterm ::= [0-9] | \"(\" root \")\""});
  for (int i = 0; i < 20; ++i) {
    const std::string text = sample(*sum, random).value_or("");
    EXPECT_EQ(text.find_first_not_of("0123456789+()"), std::string::npos) << text;
  }
}

// Masks after tokens were taken back are those before.
TEST(GrammarLibrary, StatesAreTakenBackExactly) {
  std::ifstream in(MEGATRON_SOURCE_DIR "/tests/grammar/schemas.jsonl");
  Random random(3);
  for (std::string schema; std::getline(in, schema);) {
    const auto grammar = compiler().compile({GrammarKind::kJsonSchema, schema});
    const auto matcher = grammar->start();
    std::vector<std::vector<int32_t>> masks;
    for (int step = 0; step < 120; ++step) {
      if (!masks.empty() && random() % 3 == 0) {
        const size_t back = random() % (masks.size() + 1);
        matcher->roll_back(static_cast<int64_t>(back));
        const std::vector<int32_t> before =
            back > 0 ? masks[masks.size() - back] : allowed_ids(*matcher);
        masks.resize(masks.size() - back);
        EXPECT_EQ(allowed_ids(*matcher), before) << schema;
        continue;
      }
      const std::vector<int32_t> allowed = allowed_ids(*matcher);
      for (int32_t id = 0; id < 640; id += 37) {  // refused tokens change nothing
        const bool refused = !std::binary_search(allowed.begin(), allowed.end(), id);
        EXPECT_FALSE(refused && matcher->accept(id));
      }
      EXPECT_EQ(allowed_ids(*matcher), allowed);
      if (allowed.empty()) break;
      masks.push_back(allowed);
      ASSERT_TRUE(matcher->accept(allowed[random() % allowed.size()]));
    }
  }
  const auto matcher = compiler().compile({GrammarKind::kJson, ""})->start();
  EXPECT_THAT(error_of([&] { matcher->roll_back(1); }),
              HasSubstr("cannot take back 1 tokens of 0"));
}

TEST(GrammarLibrary, ToolCallsAreTaggedText) {
  const char* const tag = R"({"type": "structural_tag", "format": {"type": "triggered_tags",
    "triggers": ["<tool_call>"], "tags": [{"type": "tag", "begin": "<tool_call>{\"name\": \"f\", \"arguments\": ",
    "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}},
    "required": ["x"], "additionalProperties": false}}, "end": "}</tool_call>"}]}})";
  const auto grammar = compiler().compile({GrammarKind::kStructuralTag, tag});
  const auto accepts = [&](const std::string& text) {
    const auto matcher = grammar->start();
    for (const int32_t id : tokenizer().encode(text))
      if (!matcher->accept(id)) return false;
    return matcher->accept(kEnd);
  };
  EXPECT_TRUE(
      accepts("Let me see. <tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 3}}</tool_call>"));
  EXPECT_FALSE(accepts("<tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 3}}</tool_call>"));
  EXPECT_FALSE(accepts("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"3\"}}</tool_call>"));
  EXPECT_FALSE(accepts("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 3}}"));
}

// What the server asks for is what its parser of calls reads.
TEST(GrammarLibrary, RequestsGetTheirGrammars) {
  ServedModel model;
  model.name = "tiny";
  model.tokenizer = &tokenizer();
  model.grammars = &compiler();
  const auto accepts = [&](const std::string& members, const std::string& text) {
    const auto request = parse_chat(
        R"({"messages": [{"role": "user", "content": "x"}], )" + members + "}", model, {});
    const auto matcher = request.spec.grammar->start();
    for (const int32_t id : tokenizer().encode(text))
      if (!matcher->accept(id)) return false;
    return matcher->accept(kEnd);
  };
  const std::string object = R"("response_format": {"type": "json_object"})";
  EXPECT_TRUE(accepts(object, R"({"a": [1, {"b": null}], "c": "d"})"));
  EXPECT_FALSE(accepts(object, "[1]"));
  EXPECT_FALSE(accepts(object, R"({"a": )"));
  const std::string choice = R"("structured_outputs": {"choice": ["yes", "a \"b\""]})";
  EXPECT_TRUE(accepts(choice, "yes"));
  EXPECT_TRUE(accepts(choice, "a \"b\""));
  EXPECT_FALSE(accepts(choice, "no"));
  const std::string tools =
      R"("tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object",
      "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}, {"type": "function",
      "function": {"name": "g"}}], "tool_choice": )";
  struct Form {
    ToolFormat format;
    std::string f, g, wrong;
    const char* separator;
  };
  for (const Form& form :
       {Form{ToolFormat::kHermes,
             "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 3}}\n</tool_call>",
             "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
             "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": true}}\n</tool_call>", "\n"},
        Form{ToolFormat::kLlama3Json, R"({"name": "f", "parameters": {"x": 3}})",
             R"({"name": "g", "parameters": {}})", R"({"name": "h", "parameters": {}})", "; "},
        Form{ToolFormat::kQwen3Coder,
             "<tool_call>\n<function=f>\n<parameter=x>3</parameter>\n</function>\n</tool_call>",
             "<tool_call>\n<function=g>\n\n</function>\n</tool_call>",
             "<tool_call>\n<function=h>\n\n</function>\n</tool_call>", "\n"}}) {
    model.tool_format = form.format;
    const std::string any = tools + "\"required\"", one = any + R"(, "parallel_tool_calls": false)",
                      named = tools + R"({"type": "function", "function": {"name": "f"}})";
    EXPECT_TRUE(accepts(any, form.f)) << form.f;
    EXPECT_TRUE(accepts(any, form.g)) << form.g;
    EXPECT_TRUE(accepts(any, form.f + form.separator + form.g)) << form.f;
    EXPECT_FALSE(accepts(any, "no call"));
    EXPECT_FALSE(accepts(any, "")) << form.f;
    EXPECT_FALSE(accepts(any, form.wrong)) << form.wrong;
    EXPECT_FALSE(accepts(one, form.f + form.separator + form.g)) << form.f;
    EXPECT_TRUE(accepts(named, form.f)) << form.f;
    EXPECT_FALSE(accepts(named, form.g)) << form.g;
    const auto parser = make_tool_call_parser(form.format, {});
    ToolCallText read = parser->push(form.f + form.separator + form.g);
    for (ToolCallDelta& call : parser->finish().calls) read.calls.push_back(std::move(call));
    std::vector<std::string> names;
    for (const ToolCallDelta& call : read.calls)
      if (!call.name.empty()) names.push_back(call.name);
    EXPECT_THAT(names, testing::ElementsAre("f", "g")) << form.f;
  }
}

TEST(GrammarLibrary, GrammarsAreKeptAndShared) {
  const GrammarText text{GrammarKind::kRegex, "kept+"};
  EXPECT_EQ(compiler().compile(text), compiler().compile(text));
  GrammarCompiler none(tokenizer(), 640, {kEnd}, {.cached = 0});
  EXPECT_NE(none.compile(text), none.compile(text));
  // A grammar outlives its compiler.
  std::shared_ptr<const TokenGrammar> kept;
  {
    GrammarCompiler gone(tokenizer(), 640, {kEnd});
    kept = gone.compile(text);
  }
  EXPECT_TRUE(kept->start()->accept(tokenizer().encode("k")[0]));
}

TEST(GrammarLibrary, LimitsOfTimeAndMemoryEndTheProcessThatCompiles) {
  GrammarCompiler quick(tokenizer(), 640, {kEnd}, {.compile_ms = 1});
  EXPECT_THAT(error_of([&] { quick.compile({GrammarKind::kJsonSchema, R"({"type": "object"})"}); }),
              testing::StrEq("cannot be compiled within 1 ms"));
  GrammarCompiler small(tokenizer(), 640, {kEnd}, {.compiled_bytes = 10});
  EXPECT_THAT(error_of([&] { small.compile({GrammarKind::kRegex, "a+"}); }),
              HasSubstr("is larger than 10 bytes when it is compiled"));
}

TEST(GrammarLibrary, GrammarsThatAreSlowToFollowAreRefused) {
  std::string nested = "a";
  for (int i = 0; i < 32; ++i) nested = cat("(", nested, ")*");
  EXPECT_THAT(error_of([&] { compiler().compile({GrammarKind::kRegex, nested}); }),
              testing::AnyOf(HasSubstr("takes more than 500 ms for one token of a text"),
                             HasSubstr("cannot be compiled within")));
  GrammarLimits limits;
  limits.token_ms = -1;
  limits.cached = 0;
  GrammarCompiler hasty(tokenizer(), 640, {kEnd, 600}, limits);
  EXPECT_THAT(error_of([&] { hasty.compile({GrammarKind::kRegex, "ab"}); }),
              HasSubstr("takes more than -1 ms for one token of a text"));
}

// The text that is tried when the grammar is compiled does not come to its slow part.
TEST(GrammarLibrary, TextsThatBecomeSlowAreGivenUp) {
  std::string nested = "a";
  for (int i = 0; i < 32; ++i) nested = cat("(", nested, "|a)*");
  GrammarLimits limits;
  limits.token_ms = 20;
  GrammarCompiler strict(tokenizer(), 640, {kEnd, 600}, limits);
  const auto grammar = strict.compile({GrammarKind::kRegex, cat("[b-z]{40}|a", nested)});
  const auto follow = [&](const std::string& text) {
    const auto matcher = grammar->start();
    for (const char letter : text) {
      allowed_ids(*matcher);
      EXPECT_TRUE(matcher->accept(tokenizer().encode(std::string(1, letter)).at(0)));
    }
  };
  follow(std::string(40, 'b'));
  // Each letter adds ways to read what came before.
  EXPECT_EQ(error_of([&] { follow(std::string(200, 'a')); }),
            "the grammar takes more than 20 ms for one token");
}

TEST(GrammarLibrary, SurvivesHostileGrammars) {
  const std::vector<GrammarText> all = hostile_grammars();
  ASSERT_GE(all.size(), 500u);
  const GrammarLimits limits;
  Random random(4);
  int64_t compiled = 0, refused = 0, too_slow = 0, longest_token = 0;
  double longest_compile = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto seconds = [start = Clock::now()] {
      return std::chrono::duration<double>(Clock::now() - start).count();
    };
    std::shared_ptr<const TokenGrammar> grammar;
    try {
      grammar = compiler().compile(all[i]);
      ++compiled;
    } catch (const GrammarError& error) {
      ++refused;
      EXPECT_FALSE(std::string(error.what()).empty());
    }
    longest_compile = std::max(longest_compile, seconds());
    EXPECT_LT(seconds(), static_cast<double>(limits.compile_ms) / 1000 + 2)
        << all[i].text.substr(0, 200);
    if (!grammar) continue;
    const auto matcher = grammar->start();
    try {
      for (int step = 0; step < 40; ++step) {
        const int64_t before = thread_ms();
        const std::vector<int32_t> allowed = allowed_ids(*matcher);
        if (!allowed.empty()) matcher->accept(allowed[random() % allowed.size()]);
        longest_token = std::max(longest_token, thread_ms() - before);
        if (allowed.empty()) break;
      }
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("takes more than 500 ms for one token"));
      ++too_slow;
    }
  }
  std::printf(
      "%zu grammars: %lld compiled, %lld refused, %lld given up; longest %.2f s to compile, %lld "
      "ms "
      "for a token\n",
      all.size(), static_cast<long long>(compiled), static_cast<long long>(refused),
      static_cast<long long>(too_slow), longest_compile, static_cast<long long>(longest_token));
  EXPECT_LE(longest_token, 2 * limits.token_ms);
  // One that is right, after all of them.
  EXPECT_TRUE(sample(*compiler().compile({GrammarKind::kRegex, "alive"}), random).has_value());
}

}  // namespace
}  // namespace megatron
