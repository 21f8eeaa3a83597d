// The template language: white space around tags, scopes, values; and randomly damaged templates.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/chat/chat_template.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

std::string render(const std::string& source, const std::string& variables = "{}") {
  return ChatTemplate(source, "test").render({.messages = "[]", .variables = variables}).text;
}

TEST(Jinja, WhiteSpaceAroundTags) {
  EXPECT_EQ(render("a\n  {% if true %}\n  b\n  {% endif %}\nc\n"), "a\n  b\nc")
      << "statements take their line away";
  EXPECT_EQ(render("a {% if true %} b {% endif %} c"), "a  b  c") << "inside a line nothing goes";
  EXPECT_EQ(render("a  {%- if true -%}  \n b {%- endif -%} \n c"), "abc");
  EXPECT_EQ(render("  {%+ if true %}\nx{% endif +%}\ny"), "  x\ny");
  EXPECT_EQ(render("  {{ 1 }}\n  {{- 2 -}}\n  3"), "  123") << "expressions leave their line alone";
  EXPECT_EQ(render("a\n  {# note #}\nb{#- x -#} c"), "a\nbc");
  EXPECT_EQ(render("a\r\nb\rc\n\n"), "a\nb\nc\n") << "one newline at the end goes";
  EXPECT_EQ(render("{% raw %}{{ x }}{% endraw %}"), "{{ x }}");
  EXPECT_EQ(render("x {%- raw -%} {% y {%- endraw -%} z"), "x{% yz");
  EXPECT_EQ(render("{{ {'a': {'b': 1}}['a']['b'] }}{{'}}'}}"), "1}}");
}

TEST(Jinja, Scopes) {
  EXPECT_EQ(
      render("{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}"),
      "231");
  EXPECT_EQ(render("{% if true %}{% set x = 2 %}{% endif %}{{ x }}"), "2");
  EXPECT_EQ(render("{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% "
                   "endfor %}{{ n.x }}"),
            "4");
  EXPECT_EQ(render("{% macro m(a, b='d') %}{{ a }}{{ b }}{{ y }}{% endmacro %}{% set y = 'Y' %}{{ "
                   "m(1) }}{{ m(b=2, a=3) }}"),
            "1dY32Y");
  EXPECT_EQ(render("{% for x in [] %}{% else %}none{% endfor %}"), "none");
  EXPECT_EQ(render("{% for x in [1, 2, 3, 4] if x > 1 %}{% if x == 3 %}{% continue %}{% endif %}{{ "
                   "loop.index }}{% endfor %}"),
            "13");
  EXPECT_EQ(render("{% for x in [{'c': [{'c': []}]}] recursive %}[{{ loop(x.c) }}]{% endfor %}"),
            "[[]]");
  EXPECT_EQ(render("{% set x %}a{{ 1 }}{% endset %}{{ x }}"), "a1");
  EXPECT_EQ(render("{{ messages|length }}{{ x }}", R"({"messages": [1, 2], "x": "own"})"), "2own")
      << "variables win";
}

std::string refusal(const std::string& source) {
  return error_of([&] { render(source); });
}

// The operations that make text: each is refused before it takes the memory.
TEST(Jinja, TextThatGrowsIsRefused) {
  for (const std::string step :
       {"n.s + n.s", "n.s ~ n.s", "[n.s, n.s] | join", "n.s.replace('a', 'aa')"}) {
    const std::string message =
        refusal("{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = " + step +
                " %}{% endfor %}");
    EXPECT_TRUE(message.starts_with("test:1:") &&
                message.ends_with(
                    ": the template makes more than 134217984 bytes of text and lists, which is "
                    "the limit for this conversation"))
        << step << ": " << message;
  }
  EXPECT_EQ(
      render("{% set n = namespace(s='') %}{% for i in range(1000) %}{% set n.s = n.s + 'abc' %}"
             "{% endfor %}{{ n.s | length }}"),
      "3000")
      << "what chats do";
}

TEST(Jinja, ValuesThatAreNestedOrSharedAreBounded) {
  EXPECT_TRUE(refusal("{% set n = namespace(x=[]) %}{% for i in range(1000) %}{% set n.x = [n.x] "
                      "%}{% endfor %}")
                  .ends_with("lists and dicts are nested too deeply in each other"));
  EXPECT_TRUE(refusal("{% for i in range(5000) %}{% set x = namespace() %}{% endfor %}")
                  .ends_with("the template makes more than 4000 namespaces"));
  EXPECT_TRUE(
      refusal("{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) %}"
              "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}")
          .find("the template makes more than") != std::string::npos);
}

TEST(Jinja, SlicesAndWordsOfLongText) {
  EXPECT_EQ(render("{{ 'a\u00dfc'[1:] }} {{ 'abc'[:-1] }} {{ 'abc'[2:1] }}|{{ 'abcd'[::2] }} {{ "
                   "'abc'[::-1] }}"),
            "\u00dfc ab |ac cba");
  EXPECT_EQ(render("{{ '  a  b\u00a0c '.split() }} {{ ' a b c'.split(none, 1) }} {{ "
                   "'\u00dfa\u00df'|upper }}"),
            "['a', 'b', 'c'] ['a', 'b c'] SSASS");
}

TEST(Jinja, ArgumentsInLists) {
  const std::string macro = "{% macro m(a, b='d', c='e') %}{{ a }}{{ b }}{{ c }}{% endmacro %}";
  EXPECT_EQ(render(macro + "{{ m(*[1, 2]) }} {{ m(1, **{'c': 3}) }} {{ m(*'xyz') }}"),
            "12e 1d3 xyz");
  EXPECT_EQ(render("{{ none | selectattr('a') | list }}{{ none | map('upper') | list }}"), "[][]");
}

TEST(Jinja, GenerationSpansCountBytesOfTheText) {
  const RenderedChat chat =
      ChatTemplate(
          "\u00e9{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}.{% endfor %}",
          "test")
          .render({.messages = R"(["a", "zwei"])"});
  EXPECT_EQ(chat.text, "\u00e9a.zwei.");
  EXPECT_EQ(chat.generated, (std::vector<std::pair<size_t, size_t>>{{2, 3}, {4, 8}}));
}

TEST(Jinja, ValuesThatPythonWouldShow) {
  EXPECT_EQ(render("{{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 100.0 }} {{ -0.5 }}"),
            "1e+16 1000000000000000.0 0.0001 1e-05 100.0 -0.5");
  EXPECT_EQ(render("{{ [none, 'a\\'b', \"c\\n\", {'x': (1, 2)}] }}"),
            R"([None, "a'b", 'c\n', {'x': (1, 2)}])");
  EXPECT_EQ(render("{{ 'a\\x41\\u00e9\\U0001F600\\q' }}"), "aA\u00e9\U0001F600\\q");
  EXPECT_EQ(render("{{ x | tojson(ensure_ascii=true) }}", R"({"x": "\u00e9\ud83d\ude00"})"),
            R"("\u00e9\ud83d\ude00")");
}

// Bytes are changed, cut and repeated in real templates: an error or a text, never a crash or a run
// without end. MEGATRON_FUZZ_SECONDS makes it longer.
TEST(Jinja, BrokenTemplatesAreErrors) {
  std::vector<std::string> sources;
  for (const auto& entry : std::filesystem::directory_iterator(
           std::filesystem::path(MEGATRON_SOURCE_DIR) / "tests/golden/chat/templates"))
    sources.push_back(read_file(entry.path()));
  std::sort(sources.begin(), sources.end());
  const char* seconds = std::getenv("MEGATRON_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::milliseconds(seconds != nullptr ? 1000 * std::atoi(seconds) : 1500);
  const std::string messages =
      R"([{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}])";
  const std::vector<std::string> pieces = {"{{",
                                           "}}",
                                           "{%",
                                           "%}",
                                           "{%-",
                                           "-%}",
                                           "|",
                                           "(",
                                           ")",
                                           "[",
                                           "]",
                                           "'",
                                           ".",
                                           " if ",
                                           " else ",
                                           " in ",
                                           " is not ",
                                           "%s",
                                           "{% for x in messages %}",
                                           "{% endfor %}",
                                           "{% set ",
                                           "|map('upper')",
                                           "[::-1]",
                                           "\\",
                                           "\u00e9",
                                           "**",
                                           "//",
                                           "9999999999",
                                           "{#",
                                           "loop."};
  std::mt19937 random(1);
  int texts = 0, errors = 0;
  while (std::chrono::steady_clock::now() < end) {
    std::string source = sources[random() % sources.size()];
    for (int edits = 1 + static_cast<int>(random() % 4); edits > 0 && !source.empty(); --edits) {
      const size_t at = random() % source.size(), count = random() % 12;
      switch (random() % 4) {
        case 0:
          source.erase(at, count);
          break;
        case 1:
          source.insert(at, pieces[random() % pieces.size()]);
          break;
        case 2:
          source[at] = static_cast<char>(random());
          break;
        default:
          source.insert(at, source.substr(random() % source.size(), count * 4));
          break;
      }
    }
    try {
      ChatTemplate made(source, "fuzz");
      made.set_special_tokens({{"bos_token", "<s>"}, {"eos_token", "</s>"}});
      made.render({.messages = messages,
                   .tools = R"([{"function": {"name": "f", "parameters": {"properties": {}}}}])",
                   .add_generation_prompt = true});
      ++texts;
    } catch (const Error&) {
      ++errors;
    }
  }
  EXPECT_GT(texts, 0);
  EXPECT_GT(errors, 0);
}

}  // namespace
}  // namespace megatron
