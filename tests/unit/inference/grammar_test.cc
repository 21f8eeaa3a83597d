// What happens to a grammar without xgrammar: limits, keywords that are not built, the process that
// compiles, and the refusal where the library is not there.
#include "megatron/inference/grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "megatron/base/failure_class.h"
#include "megatron/inference/grammar/compile_process.h"
#include "megatron/tokenizers/tokenizer.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string refusal(GrammarKind kind, const std::string& text) {
  return error_of([&] { check_grammar({kind, text}, {}); });
}

TEST(Grammar, IsRefusedWithTheReasonWithoutTheLibrary) {
  setenv("MEGATRON_GRAMMAR_LIBRARY", "/nowhere/libmegatron_grammar.so", 1);
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  const auto tokenizer = make_tokenizer(config);
  GrammarCompiler compiler(*tokenizer, tokenizer->vocab_size(), {256});
  const std::string message = error_of([&] { compiler.compile({GrammarKind::kRegex, "a"}); });
  EXPECT_EQ(message,
            "grammars need libmegatron_grammar.so, which was not built or cannot be loaded\n"
            "hint: `make grammars` builds it");
  EXPECT_EQ(GrammarCompiler::unavailable(), message);
  // A grammar that is wrong anyway is refused for that.
  EXPECT_EQ(error_of([&] { compiler.compile({GrammarKind::kJsonSchema, "{"}); }), "is not JSON");
  unsetenv("MEGATRON_GRAMMAR_LIBRARY");
}

TEST(Grammar, IsBounded) {
  EXPECT_EQ(refusal(GrammarKind::kRegex, std::string(65537, 'a')),
            "is 65537 bytes long, expected at most 65536");
  EXPECT_EQ(refusal(GrammarKind::kRegex, std::string(65536, 'a')), "");
  EXPECT_EQ(refusal(GrammarKind::kRegex, "\xff"), "is not UTF-8");
  EXPECT_EQ(refusal(GrammarKind::kRegex, std::string("a\0", 2)), "holds a zero byte");
  const auto nested = [](int depth, const char* open, const char* close) {
    std::string text;
    for (int i = 0; i < depth; ++i) text = open + text + close;
    return text;
  };
  EXPECT_EQ(refusal(GrammarKind::kRegex, nested(32, "(", ")")), "");
  EXPECT_EQ(refusal(GrammarKind::kRegex, nested(33, "(", ")")), "is nested more than 32 deep");
  EXPECT_EQ(refusal(GrammarKind::kRegex, nested(99, "\\(", "[(]")), "") << "these open nothing";
  EXPECT_EQ(refusal(GrammarKind::kEbnf, "root ::= " + nested(99, "\"(\"", "'('")), "");
  EXPECT_EQ(refusal(GrammarKind::kEbnf, nested(33, "(", ")")), "is nested more than 32 deep");
  EXPECT_EQ(refusal(GrammarKind::kJsonSchema, nested(33, "[", "]")), "is nested more than 32 deep");
  EXPECT_EQ(refusal(GrammarKind::kJsonSchema, nested(20000, "[", "]")),
            "is nested more than 32 deep");
  EXPECT_EQ(refusal(GrammarKind::kJsonSchema, "{\"type\": \"string\"} x"), "is not JSON");
}

TEST(Grammar, IsAtFaultForAnyEndOfItsCompilerThatHasStarted) {
  using End = ProcessResult::End;
  const auto end = [](End how, int status, const char* output) {
    return compiled_text({how, status, output}, {}, "/bin/compiler");
  };
  EXPECT_EQ(end(End::kExited, 0, "compiled"), "compiled");
  EXPECT_THROW(end(End::kDeadline, 9, ""), GrammarError);
  EXPECT_THROW(end(End::kTooMuch, 9, ""), GrammarError);
  EXPECT_THROW(end(End::kKilled, 11, ""), GrammarError);
  EXPECT_THROW(end(End::kExited, 1, "std::bad_alloc"), GrammarError);
  EXPECT_THROW(end(End::kExited, 1, "is not a regex"), GrammarError);
  // The loader ends a program without its libraries before it can say anything.
  EXPECT_THROW(end(End::kExited, 127, ""), RetryError);
  EXPECT_THAT(
      error_of([&] { end(End::kExited, 127, ""); }),
      StartsWith("grammars cannot be compiled: /bin/compiler ended with status 127\nhint:"));
  EXPECT_THROW(run_bounded_process("/nowhere/compiler", "", 1000, 1000), RetryError);
}

TEST(Grammar, WithKeywordsThatAreNotBuiltIsRefused) {
  const auto schema = [](const char* text) { return refusal(GrammarKind::kJsonSchema, text); };
  EXPECT_EQ(schema(R"({"not": {}})"), "the keyword not is not built");
  EXPECT_EQ(schema(R"({"properties": {"a": {"items": {"if": {}}}}})"),
            "the keyword if is not built");
  EXPECT_EQ(schema(R"({"anyOf": [{"type": "null"}, {"contains": {}}]})"),
            "the keyword contains is not built");
  EXPECT_EQ(schema(R"({"$defs": {"a": {"dependentRequired": {}}}})"),
            "the keyword dependentRequired is not built");
  EXPECT_EQ(schema(R"({"type": "array", "uniqueItems": true})"),
            "the keyword uniqueItems is not built");
  EXPECT_EQ(schema(R"({"type": "array", "uniqueItems": false})"), "");
  EXPECT_EQ(refusal(GrammarKind::kStructuralTag,
                    R"({"format": {"tags": [{"content": {"json_schema": {"not": {}}}}]}})"),
            "the keyword not is not built");
  // Names of properties and values are no keywords.
  EXPECT_EQ(schema(R"({"properties": {"not": {"const": {"if": 1}}}, "required": ["not"]})"), "");
}

double seconds_of(const auto& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(BoundedProcess, GivesOutputStatusAndSignal) {
  using End = ProcessResult::End;
  const auto run = [](const std::string& script) {
    return run_bounded_process("/bin/sh", script, 20000, 1 << 20);
  };
  ProcessResult result = run("echo out; echo err >&2; exit 3");
  EXPECT_EQ(result.end, End::kExited);
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.output, "out\n");
  result = run("kill -11 $$");
  EXPECT_EQ(result.end, End::kKilled);
  EXPECT_EQ(result.status, 11);
  // All of a long input, whoever reads first.
  const std::string text(3 << 20, 'x');
  EXPECT_EQ(run_bounded_process("/bin/cat", text, 20000, 4 << 20).output, text);
  EXPECT_EQ(run("ls /proc/self/fd | wc -l; env | wc -l").output.substr(0, 2), "4\n")
      << "the three standard files and the folder that is listed";
  EXPECT_THAT(error_of([&] { run_bounded_process("/nowhere/program", "", 1000, 1); }),
              HasSubstr("cannot run /nowhere/program: No such file"));
}

TEST(BoundedProcess, EndsAtItsDeadlineAndAtItsOutput) {
  using End = ProcessResult::End;
  ProcessResult result;
  EXPECT_LT(seconds_of([&] { result = run_bounded_process("/bin/sh", "exec sleep 60", 200, 1); }),
            20);
  EXPECT_EQ(result.end, End::kDeadline);
  EXPECT_LT(
      seconds_of([&] { result = run_bounded_process("/bin/sh", "exec yes", 60000, 1 << 20); }), 30);
  EXPECT_EQ(result.end, End::kTooMuch);
}

}  // namespace
}  // namespace megatron
