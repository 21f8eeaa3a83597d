// Requests with tools and grammars over the fake engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api_server_fixture.h"
#include "megatron/serving/generation_request.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using GrammarRequests = ApiServerTest;

TEST_F(GrammarRequests, CallsOfTools) {
  const Json tools = {
      {{"type", "function"},
       {"function",
        {{"name", "weather"},
         {"parameters", {{"type", "object"}, {"properties", {{"city", {{"type", "string"}}}}}}}}}}};
  reply_with(
      "Let me see. <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": "
      "\"Bonn\"}}</tool_call>"
      "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}</tool_call>");
  Json body = hello();
  body["tools"] = tools;
  const Answer answer = chat(body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_THAT(fake().tokenizer->decode(spec().prompt), StartsWith("tools: weather\nuser:"));
  const Json& message = answer.json["choices"][0]["message"];
  EXPECT_EQ(message["content"], "Let me see.");
  ASSERT_EQ(message["tool_calls"].size(), 2u);
  EXPECT_EQ(message["tool_calls"][0]["type"], "function");
  EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "weather");
  EXPECT_EQ(message["tool_calls"][1]["function"]["arguments"], "{\"city\": \"Ulm\"}");
  EXPECT_NE(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
  EXPECT_EQ(answer.json["choices"][0]["finish_reason"], "tool_calls");

  body["stream"] = true;
  const Joined joined = join(chat(body).body);
  EXPECT_EQ(joined.texts.at(0), "Let me see.");
  ASSERT_EQ(joined.calls.at(0).size(), 2u);
  EXPECT_EQ(joined.calls.at(0)[1]["arguments"], "{\"city\": \"Ulm\"}");
  EXPECT_EQ(joined.finish_reasons.at(0), "tool_calls");
  body["parallel_tool_calls"] = false;
  EXPECT_EQ(join(chat(body).body).calls.at(0).size(), 1u);

  // A model that may not call does not hear of tools, and its text stays text.
  body["stream"] = false;
  body["tool_choice"] = "none";
  const Answer none = chat(body);
  EXPECT_THAT(fake().tokenizer->decode(spec().prompt), StartsWith("user:"));
  EXPECT_THAT(none.json["choices"][0]["message"]["content"].get<std::string>(),
              HasSubstr("<tool_call>"));
  EXPECT_EQ(none.json["choices"][0]["finish_reason"], "stop");
}

TEST_F(GrammarRequests, RepliesFollowGrammars) {
  const auto asked = [&](const Json& members, const std::string& text, GrammarKind kind) {
    Json body = hello();
    body.update(members);
    const Answer answer = chat(body);
    EXPECT_EQ(answer.status, 200) << answer.body;
    EXPECT_NE(spec().grammar, nullptr) << members;
    EXPECT_EQ(fake().grammars.last().text, text);
    EXPECT_EQ(fake().grammars.last().kind, kind);
  };
  const auto schema = GrammarKind::kJsonSchema;
  const Json form = {{"type", "json_schema"},
                     {"json_schema", {{"name", "x"}, {"schema", {{"type", "null"}}}}}};
  asked({{"response_format", {{"type", "json_object"}}}},
        R"({"type": "object", "additionalProperties": true})", schema);
  asked({{"response_format", form}}, R"({"type":"null"})", schema);
  const auto structured = [](const char* name, const Json& value) {
    return Json{{"structured_outputs", {{name, value}}}};
  };
  asked(structured("json", {{"type", "integer"}}), R"({"type":"integer"})", schema);
  asked(structured("json", R"({"type": "boolean"})"), R"({"type": "boolean"})", schema);
  asked(structured("json_object", true), R"({"type": "object", "additionalProperties": true})",
        schema);
  asked(structured("regex", "[ab]+"), "[ab]+", GrammarKind::kRegex);
  asked(structured("grammar", "root ::= \"a\""), "root ::= \"a\"", GrammarKind::kEbnf);
  asked(structured("choice", {"yes", "a \"b\"\n"}), "root ::= \"yes\" | \"a \\\"b\\\"\\n\"",
        GrammarKind::kEbnf);
  EXPECT_EQ(completions({{"prompt", "a"}, {"response_format", form}}).status, 200);
  EXPECT_NE(spec().grammar, nullptr);
  // No grammar is asked for.
  Json body = hello();
  body["response_format"] = {{"type", "text"}};
  body["structured_outputs"] = {{"json_object", false}};
  EXPECT_EQ(chat(body).status, 200);
  EXPECT_EQ(spec().grammar, nullptr);
  // What is wrong with one, and why there is none.
  body = hello();
  body["structured_outputs"] = {{"regex", "wrong"}};
  Answer answer = chat(body);
  EXPECT_EQ(answer.status, 400);
  EXPECT_EQ(answer.param(), "structured_outputs.regex");
  EXPECT_EQ(answer.json["error"]["message"], "structured_outputs.regex: the grammar is wrong");
  body["structured_outputs"] = {{"regex", "absent"}};
  answer = chat(body);
  EXPECT_EQ(answer.status, 400);
  EXPECT_EQ(answer.json["error"]["message"],
            "structured_outputs.regex is not supported: the library is not there");
  body["structured_outputs"] = {{"regex", "broken"}};
  answer = chat(body);
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.json["error"]["type"], "service_unavailable_error");
  EXPECT_EQ(answer.json["error"]["message"],
            "structured_outputs.regex cannot be followed now: the compiler does not start");
  ServedModel without = fake().model;
  without.grammars = nullptr;
  EXPECT_EQ(error_of([&] { parse_chat(body.dump(), without, {}); }),
            "structured_outputs.regex is not supported: the engine follows no grammars");
}

TEST_F(GrammarRequests, CallsOfToolsAreEnforcedByGrammars) {
  Json body = hello();
  const auto tool = [](const char* name) {
    return Json{{"type", "function"},
                {"function", {{"name", name}, {"parameters", {{"type", "object"}}}}}};
  };
  body["tools"] = {tool("f"), tool("g")};
  body["tool_choice"] = "required";
  ASSERT_EQ(chat(body).status, 200);
  EXPECT_EQ(fake().grammars.last().kind, GrammarKind::kStructuralTag);
  Json format = Json::parse(fake().grammars.last().text)["format"];
  EXPECT_EQ(format["tags"].size(), 2u);
  EXPECT_EQ(format["tags"][1]["begin"], "<tool_call>\n{\"name\": \"g\", \"arguments\": ");
  EXPECT_EQ(format["tags"][1]["content"],
            Json({{"type", "json_schema"}, {"json_schema", {{"type", "object"}}}}));
  EXPECT_EQ(format["tags"][1]["end"], "}\n</tool_call>");
  EXPECT_EQ(format["at_least_one"], true);
  EXPECT_EQ(format["stop_after_first"], false);
  body["tool_choice"] = {{"type", "function"}, {"function", {{"name", "g"}}}};
  body["parallel_tool_calls"] = false;
  ASSERT_EQ(chat(body).status, 200);
  format = Json::parse(fake().grammars.last().text)["format"];
  EXPECT_EQ(format["tags"].size(), 1u);
  EXPECT_EQ(format["stop_after_first"], true);
  body["response_format"] = {{"type", "json_object"}};
  EXPECT_EQ(chat(body).param(), "tool_choice");
  body.erase("response_format");
  body["tool_choice"] = "auto";
  ASSERT_EQ(chat(body).status, 200);
  EXPECT_EQ(spec().grammar, nullptr) << "the model may answer as well";
}

}  // namespace
}  // namespace megatron
