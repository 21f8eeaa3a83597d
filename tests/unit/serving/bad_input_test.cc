// Requests that must not be taken: each is answered within a second, with a JSON error that names
// the member, and leaves nothing behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "ask.h"
#include "megatron/base/check.h"
#include "tests/unit/slowness.h"

namespace megatron {
namespace {

struct BadInput {
  std::string name, path, body;
  int status = 400;
  std::string member;
};

std::string repeated(const std::string& text, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += text;
  return out;
}

std::string list_of(const std::string& item, size_t count) {
  return "[" + item + repeated("," + item, count - 1) + "]";
}

// Of POST /v1/completions, with a prompt that is in order unless the row brings one.
std::vector<BadInput> of_completions() {
  const auto with = [](const std::string& members, const std::string& member, int status = 400) {
    return BadInput{members.substr(0, 50), "/v1/completions", "{\"prompt\":\"a\"," + members + "}",
                    status, member};
  };
  const auto prompt = [](const std::string& value, int status = 400) {
    return BadInput{"prompt " + value.substr(0, 50), "/v1/completions",
                    "{\"prompt\":" + value + "}", status, "prompt"};
  };
  std::vector<BadInput> rows = {
      with("\"user\":\"\xff\xfe\"", "user"),
      with("\"user\":\"\xed\xa0\x80\"", "user"),
      with("\"user\":\"\\ud800\"", "user"),
      with("\"temperature\":NaN", "temperature"),
      with("\"temperature\":-NaN", "temperature"),
      with("\"temperature\":Infinity", "temperature"),
      with("\"temperature\":1e999", "temperature"),
      with("\"temperature\":-1", "temperature"),
      with("\"temperature\":1e300", "temperature"),
      with("\"temperature\":\"hot\"", "temperature"),
      with("\"top_p\":0", "top_p"),
      with("\"top_p\":1.5", "top_p"),
      with("\"top_p\":-1e-300", "top_p"),
      with("\"top_k\":-2", "top_k"),
      with("\"top_k\":99999999999", "top_k"),
      with("\"top_k\":2.5", "top_k"),
      with("\"min_p\":2", "min_p"),
      with("\"repetition_penalty\":0", "repetition_penalty"),
      with("\"repetition_penalty\":-1", "repetition_penalty"),
      with("\"presence_penalty\":3", "presence_penalty"),
      with("\"frequency_penalty\":-3", "frequency_penalty"),
      with("\"n\":1000000", "n"),
      with("\"n\":0", "n"),
      with("\"n\":-1", "n"),
      with("\"n\":1.5", "n"),
      with("\"n\":99999999999999999999", "n"),
      with("\"best_of\":1000000", "best_of"),
      with("\"max_tokens\":-1", "max_tokens"),
      with("\"max_tokens\":0", "max_tokens"),
      with("\"max_tokens\":4096", "max_tokens"),
      with("\"max_tokens\":9223372036854775807", "max_tokens"),
      with("\"max_tokens\":18446744073709551616", "max_tokens"),
      with("\"max_tokens\":true", "max_tokens"),
      with("\"min_tokens\":17", "min_tokens"),
      with("\"min_tokens\":-1", "min_tokens"),
      with("\"logprobs\":21", "logprobs"),
      with("\"logprobs\":-1", "logprobs"),
      with("\"prompt_logprobs\":1000", "prompt_logprobs"),
      with("\"seed\":1e300", "seed"),
      with("\"seed\":\"x\"", "seed"),
      with("\"stop\":" + list_of("\"x\"", 10'000), "stop"),
      with("\"stop\":\"\"", "stop"),
      with("\"stop\":[\"a\",\"\"]", "stop"),
      with("\"stop\":\"" + std::string(257, 'x') + "\"", "stop"),
      with("\"stop\":[1]", "stop"),
      with("\"stop\":{}", "stop"),
      with("\"stop_token_ids\":[257]", "stop_token_ids"),
      with("\"stop_token_ids\":[-2]", "stop_token_ids"),
      with("\"stop_token_ids\":[2147483648]", "stop_token_ids"),
      with("\"stop_token_ids\":5", "stop_token_ids"),
      with("\"logit_bias\":{\"257\":1}", "logit_bias"),
      with("\"logit_bias\":{\"-1\":1}", "logit_bias"),
      with("\"logit_bias\":{\"5x\":1}", "logit_bias"),
      with("\"logit_bias\":{\"5\":\"a\"}", "logit_bias"),
      with("\"logit_bias\":{\"5\":1000}", "logit_bias"),
      with("\"logit_bias\":[1]", "logit_bias"),
      with("\"priority\":99999999999", "priority"),
      with("\"cache_salt\":\"" + std::string(257, 's') + "\"", "cache_salt"),
      with("\"cache_salt\":5", "cache_salt"),
      with("\"stream\":\"yes\"", "stream"),
      with("\"stream_options\":{}", "stream_options"),
      with("\"stream\":true,\"stream_options\":{\"include_usage\":5}",
           "stream_options.include_usage"),
      with("\"stream\":true,\"stream_options\":5", "stream_options"),
      with("\"model\":\"" + std::string(100'000, 'm') + "\"", "model", 404),
      with("\"model\":5", "model"),
      with("\"echo\":1", "echo"),
      with("\"max_tokens\":1,\"max_tokens\":2", "max_tokens"),
      prompt("[]"),
      prompt("null"),
      prompt("{}"),
      prompt("5"),
      prompt("[[]]"),
      prompt("[257]"),
      prompt("[-2]"),
      prompt("[2147483648]"),
      prompt("[9223372036854775807]"),
      prompt("[1.5]"),
      prompt("[\"a\",5]"),
      prompt("[[1],\"a\",[true]]"),
      prompt(list_of("\"a\"", 1025)),
      prompt("\"" + std::string(4097, 'a') + "\""),
      prompt(list_of("1", 4097)),
      prompt("\"" + std::string(6'000'000, ' ') + "\""),
  };
  std::string bias = "\"logit_bias\":{\"0\":1";
  for (int i = 1; i < 2000; ++i) bias += cat(",\"", i, "\":1");
  rows.push_back(with(bias + "}", "logit_bias"));
  return rows;
}

// Bodies that are no JSON object at all.
std::vector<BadInput> of_bodies() {
  std::vector<BadInput> rows;
  const auto add = [&](const std::string& name, const std::string& body, int status = 400,
                       const std::string& member = "") {
    rows.push_back({name, "/v1/completions", body, status, member});
  };
  add("empty", "");
  add("zeros", std::string(1000, '\0'));
  add("broken UTF-8", "\xff\xfe{}");
  add("a byte order mark in UTF-16", std::string("\xff\xfe{\0}\0", 6));
  add("half", "{\"prompt\":\"a\"", 400, "prompt");
  add("a list", "[]");
  add("a number", "5");
  add("two documents", "{}{}");
  add("single quotes", "{'prompt':'a'}");
  add("a comment", "{/**/}");
  add("a trailing comma", "{\"prompt\":\"a\",}");
  add("deep lists", std::string(100'000, '['), 400, repeated("[0]", 21) + "[");
  add("deep objects", repeated("{\"a\":", 100'000), 400, repeated("a.", 32));
  add("a megabyte of quotes", std::string(1'000'000, '"'));
  add("a megabyte of escapes", "{\"prompt\":\"" + repeated("\\", 1'000'000), 400, "prompt");
  add("10 MB", std::string(10'000'000, ' '), 413);
  add("urlencoded", "prompt=a&max_tokens=5");
  return rows;
}

std::vector<BadInput> of_conversations() {
  const auto messages = [](const std::string& value, const std::string& member) {
    return BadInput{"messages " + value.substr(0, 50), "/v1/chat/completions",
                    "{\"messages\":" + value + "}", 400, member};
  };
  const auto with = [](const std::string& members, const std::string& member) {
    return BadInput{members.substr(0, 50), "/v1/chat/completions",
                    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]," + members + "}", 400,
                    member};
  };
  const std::string tool = "{\"type\":\"function\",\"function\":{\"name\":\"f\"}}";
  return {
      {"none", "/v1/chat/completions", "{}", 400, "messages"},
      messages("[]", "messages"),
      messages("\"a\"", "messages"),
      messages("[5]", "messages[0]"),
      messages("[{}]", "messages[0].role"),
      messages("[{\"role\":\"root\",\"content\":\"a\"}]", "messages[0].role"),
      messages("[{\"role\":\"user\"}]", "messages[0].content"),
      messages("[{\"role\":\"user\",\"content\":5}]", "messages[0].content"),
      messages("[{\"role\":\"user\",\"content\":[5]}]", "messages[0].content[0]"),
      messages("[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":"
               "\"http://127.0.0.1/\"}}]}]",
               "messages[0].content[0]"),
      messages("[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages[0].content[0]"),
      messages("[{\"role\":\"user\",\"content\":\"a\",\"tool_calls\":[]}]",
               "messages[0].tool_calls"),
      messages("[{\"role\":\"assistant\",\"tool_calls\":[{}]}]", "messages[0].tool_calls[0]"),
      messages("[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
               "\"arguments\":\"{\"}}]}]",
               "messages[0].tool_calls[0].function.arguments"),
      messages("[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
               "\"arguments\":\"" +
                   repeated("[", 100'000) + "\"}}]}]",
               "messages[0].tool_calls[0].function.arguments"),
      messages("[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"\xff\"}]",
               "messages[1].content"),
      messages(repeated("[", 1000), "messages" + repeated("[0]", 18) + "[0"),
      messages("[{\"role\":\"user\",\"content\":\"" + std::string(5000, 'a') + "\"}]", "messages"),
      with("\"max_tokens\":5,\"max_completion_tokens\":6", "max_tokens"),
      with("\"max_completion_tokens\":0", "max_completion_tokens"),
      with("\"max_completion_tokens\":5000", "max_completion_tokens"),
      with("\"top_logprobs\":5", "top_logprobs"),
      with("\"logprobs\":true,\"top_logprobs\":21", "top_logprobs"),
      with("\"logprobs\":5", "logprobs"),
      with("\"tools\":5", "tools"),
      with("\"tools\":[5]", "tools[0]"),
      with("\"tools\":[{\"type\":\"code_interpreter\"}]", "tools[0].type"),
      with("\"tools\":[{\"type\":\"function\"}]", "tools[0]"),
      with("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":5}}]",
           "tools[0].function.parameters"),
      with("\"tools\":" + list_of(tool, 1000), "tools"),
      with("\"tool_choice\":\"auto\"", "tool_choice"),
      with("\"tools\":[" + tool + "],\"tool_choice\":\"always\"", "tool_choice"),
      with("\"tools\":[" + tool + "],\"tool_choice\":{\"function\":{\"name\":\"g\"}}",
           "tool_choice"),
      with("\"tools\":[" + tool + "],\"tool_choice\":{}", "tool_choice"),
      with("\"response_format\":{}", "response_format.type"),
      with("\"response_format\":{\"type\":\"xml\"}", "response_format.type"),
      with("\"response_format\":5", "response_format"),
      with("\"response_format\":{\"type\":\"json_schema\"}", "response_format.json_schema.schema"),
      with("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":[]}}",
           "response_format.json_schema.schema"),
      with("\"structured_outputs\":5", "structured_outputs"),
      with("\"structured_outputs\":{}", "structured_outputs"),
      with("\"structured_outputs\":{\"json\":5}", "structured_outputs.json"),
      with("\"structured_outputs\":{\"regex\":5}", "structured_outputs.regex"),
      with("\"structured_outputs\":{\"regex\":\"wrong\"}", "structured_outputs.regex"),
      with("\"structured_outputs\":{\"choice\":[]}", "structured_outputs.choice"),
      with("\"structured_outputs\":{\"choice\":[1]}", "structured_outputs.choice"),
      with("\"structured_outputs\":{\"new\":1}", "structured_outputs.new"),
      with("\"structured_outputs\":{\"regex\":\"a\",\"grammar\":\"b\"}", "structured_outputs"),
      with(
          "\"structured_outputs\":{\"regex\":\"a\"},\"response_format\":{\"type\":\"json_object\"}",
          "structured_outputs"),
      with("\"chat_template_kwargs\":{\"tools\":[]}", "chat_template_kwargs.tools"),
      with("\"chat_template_kwargs\":{\"a\":{}}", "chat_template_kwargs.a"),
      with("\"chat_template_kwargs\":5", "chat_template_kwargs"),
      with("\"chat_template_kwargs\":{\"blow_up\":1}", "messages"),
      with("\"chat_template\":\"{{ 1 }}\"", "chat_template"),
      with("\"functions\":[{}]", "functions"),
  };
}

void expect_refused(int port, const BadInput& row) {
  Answer answer;
  double seconds = 1e9;
  // On a machine that is busy with other things, the best of three.
  for (int attempt = 0; attempt < 3 && seconds > 1.0 * kSlowness; ++attempt) {
    const auto begin = std::chrono::steady_clock::now();
    answer = post(port, row.path, row.body);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  EXPECT_LE(seconds, 1.0 * kSlowness) << row.name;
  EXPECT_EQ(answer.status, row.status) << row.name << ": " << answer.body.substr(0, 300);
  ASSERT_TRUE(answer.json.is_object()) << row.name << ": " << answer.body.substr(0, 300);
  ASSERT_TRUE(answer.json.contains("error")) << row.name << ": " << answer.body.substr(0, 300);
  EXPECT_EQ(answer.param(), row.member) << row.name << ": " << answer.body.substr(0, 300);
  EXPECT_GT(answer.message().size(), 10u) << row.name;
  EXPECT_LT(answer.body.size(), 2000u) << row.name;
}

TEST(BadInput, IsRefusedByName) {
  FakeServer fake;
  size_t rows = 0;
  for (const auto& list : {of_completions(), of_bodies(), of_conversations()})
    for (const BadInput& row : list) {
      expect_refused(fake.port(), row);
      ++rows;
    }
  EXPECT_GE(rows, 130u);
  // Nothing of it reached the engine, and the server goes on.
  EXPECT_EQ(fake.engine->stats().submitted, 0u);
  EXPECT_EQ(fake.server->num_open(), 0u);
  EXPECT_EQ(post(fake.port(), "/v1/completions", "{\"prompt\":\"a\"}").status, 200);
}

}  // namespace
}  // namespace megatron
