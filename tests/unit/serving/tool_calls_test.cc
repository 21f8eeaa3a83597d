// Calls of tools in text that comes in any pieces: the same calls and the same text, nothing lost.
#include "megatron/serving/tool_calls.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"

namespace megatron {
namespace {

const ToolParameters kParameters = {
    {"weather", {{"city", "string"}, {"days", "integer"}, {"units", "any"}}}};

// What came out of it: the content, then "NAME(arguments)" for each call.
std::string summary(ToolFormat format, const std::vector<std::string>& pieces) {
  const auto parser = make_tool_call_parser(format, kParameters);
  std::string content;
  std::vector<std::pair<std::string, std::string>> calls;
  const auto add = [&](const ToolCallText& text) {
    content += text.content;
    for (const ToolCallDelta& call : text.calls) {
      if (!call.name.empty()) calls.push_back({call.name, ""});
      EXPECT_EQ(call.index, static_cast<int>(calls.size()) - 1);
      calls.back().second += call.arguments;
    }
  };
  for (const std::string& piece : pieces) add(parser->push(piece));
  add(parser->finish());
  for (const auto& [name, arguments] : calls) content += cat("|", name, "(", arguments, ")");
  return content;
}

// In one piece, in single characters, and cut in two at every place.
void expect_summary(ToolFormat format, const std::string& text, const std::string& expected) {
  EXPECT_EQ(summary(format, {text}), expected) << text;
  std::vector<std::string> characters;
  for (const char c : text) characters.emplace_back(1, c);
  EXPECT_EQ(summary(format, characters), expected) << text;
  for (size_t cut = 1; cut < text.size(); ++cut)
    ASSERT_EQ(summary(format, {text.substr(0, cut), text.substr(cut)}), expected)
        << text << " cut at " << cut;
}

TEST(ToolCalls, OfHermes) {
  const ToolFormat f = ToolFormat::kHermes;
  expect_summary(f, "plain text < and <tool", "plain text < and <tool");
  expect_summary(f,
                 "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"\"}}\n</tool_call>",
                 "|f({\"a\": \"}\\\"\"})");
  expect_summary(f, "Let me see.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n",
                 "Let me see.|f({})");
  expect_summary(f,
                 "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":[1,{\"y\":2}]}}</tool_call>\n"
                 "<tool_call>{\"arguments\":{\"b\":1},\"name\":\"g\"}</tool_call>",
                 "|f({\"x\":[1,{\"y\":2}]})|g({\"b\":1})");
  expect_summary(f, "<tool_call>{\"name\":\"f\"}</tool_call>", "|f({})");
  expect_summary(f, "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}</tool_call> done",
                 " done|f({\"a\":1})");
  // No end mark, and text after it.
  expect_summary(f, "<tool_call>{\"name\":\"f\",\"arguments\":{}} then text", "then text|f({})");
}

TEST(ToolCalls, WhatIsNoCallStaysText) {
  for (const char* const text :
       {"<tool_call>no json</tool_call>", "<tool_call>{\"nome\": \"f\"}</tool_call>",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>", "<tool_call>",
        "<tool_call>{\"name\": \"f\"", "a <tool_call> b", "<tool_call>{\"name\" \"f\"}",
        "<tool_call>{]}</tool_call>"})
    expect_summary(ToolFormat::kHermes, text, text);
  for (const char* const text : {"{\"answer\": 42}", "{\"name\": 3}", " text {", "{", "[1]"})
    expect_summary(ToolFormat::kLlama3Json, text, text);
  for (const char* const text : {"<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
                                 "<tool_call><call=f></tool_call>"})
    expect_summary(ToolFormat::kQwen3Coder, text, text);
  expect_summary(ToolFormat::kNone, "<tool_call>{}", "<tool_call>{}");
}

TEST(ToolCalls, OfLlama) {
  const ToolFormat f = ToolFormat::kLlama3Json;
  expect_summary(f, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "|f({\"a\": 1})");
  expect_summary(f, "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}",
                 "|f({})");
  expect_summary(f, "{\"name\":\"f\",\"parameters\":{}}; {\"name\":\"g\",\"parameters\":{}}\n",
                 "|f({})|g({})");
  expect_summary(f, "I do not need a tool: {\"name\":\"f\"}",
                 "I do not need a tool: {\"name\":\"f\"}");
}

TEST(ToolCalls, OfQwenCoder) {
  const ToolFormat f = ToolFormat::kQwen3Coder;
  expect_summary(f,
                 "Sure\n<tool_call>\n<function=weather>\n<parameter=city>\nSan <b> Francisco\n"
                 "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
                 "Sure|weather({\"city\": \"San <b> Francisco\", \"days\": 3})");
  expect_summary(f, "<tool_call><function=weather></function></tool_call>", "|weather({})");
  expect_summary(f,
                 "<tool_call><function=weather><parameter=units>[1, 2]</parameter>"
                 "<parameter=days>many</parameter><parameter=other>5</parameter></function>",
                 "|weather({\"units\": [1, 2], \"days\": \"many\", \"other\": \"5\"})");
}

TEST(ToolCalls, FormatsByName) {
  EXPECT_EQ(tool_format("hermes", ""), ToolFormat::kHermes);
  EXPECT_EQ(tool_format("none", "<tool_call>"), ToolFormat::kNone);
  EXPECT_EQ(tool_format("auto", "... <tool_call> ..."), ToolFormat::kHermes);
  EXPECT_EQ(tool_format("auto", "<tool_call>\n<function=x>"), ToolFormat::kQwen3Coder);
  EXPECT_EQ(tool_format("auto", "{{ tools }} \"parameters\": "), ToolFormat::kLlama3Json);
  EXPECT_EQ(tool_format("auto", "{{ messages }}"), ToolFormat::kNone);
}

}  // namespace
}  // namespace megatron
