// Routes of the server over the fake engine: what is answered, in which shape, and what the engine
// was asked for.
#include "megatron/serving/api_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "api_server_fixture.h"
#include "ask.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

template <class Claim>
bool becomes_so(Claim&& claim) {
  for (int i = 0; i < 2000; ++i) {
    if (claim()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

TEST_F(ApiServerTest, CompletionsOfTextsAndIds) {
  const Answer one = completions({{"prompt", "abc"}, {"max_tokens", 5}, {"temperature", 0}});
  ASSERT_EQ(one.status, 200) << one.body;
  EXPECT_EQ(one.json["object"], "text_completion");
  EXPECT_EQ(one.json["model"], "fake");
  EXPECT_THAT(one.json["id"].get<std::string>(), StartsWith("cmpl-"));
  EXPECT_EQ(one.header("X-Request-Id"), one.json["id"].get<std::string>());
  EXPECT_EQ(one.json["choices"][0]["text"], "abcab");
  EXPECT_EQ(one.json["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(one.json["choices"][0]["logprobs"], nullptr);
  EXPECT_EQ(completions({{"prompt", {97, 98}}, {"max_tokens", 3}}).json["choices"][0]["text"],
            "aba");
  const Answer lists = completions({{"prompt", {{97, 98}, {99}}}, {"max_tokens", 3}, {"n", 2}});
  std::vector<std::string> texts;
  for (const Json& choice : lists.json["choices"]) texts.push_back(choice["text"]);
  EXPECT_THAT(texts, ::testing::ElementsAre("aba", "aba", "ccc", "ccc"));
  // Each prompt counts once, each text.
  EXPECT_EQ(lists.json["usage"]["prompt_tokens"], 3);
  EXPECT_EQ(lists.json["usage"]["completion_tokens"], 12);
  EXPECT_EQ(lists.json["usage"]["total_tokens"], 15);
  EXPECT_EQ(lists.json["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(completions({{"prompt", {"ab", "c"}}, {"max_tokens", 2}}).json["choices"][1]["text"],
            "cc");
}

TEST_F(ApiServerTest, WhatTheEngineIsAskedFor) {
  const Answer answer = completions({{"prompt", "abc"},
                                     {"max_tokens", 9},
                                     {"min_tokens", 2},
                                     {"temperature", 0.5},
                                     {"top_k", 7},
                                     {"top_p", 0.9},
                                     {"min_p", 0.05},
                                     {"repetition_penalty", 1.1},
                                     {"presence_penalty", 0.25},
                                     {"frequency_penalty", -0.5},
                                     {"logit_bias", {{"7", -100}, {"3", 5.5}}},
                                     {"seed", 42},
                                     {"stop", {"x", "yz"}},
                                     {"stop_token_ids", {5}},
                                     {"include_stop_str_in_output", true},
                                     {"skip_special_tokens", false},
                                     {"priority", -3},
                                     {"cache_salt", "tenant"},
                                     {"logprobs", 3},
                                     {"model", "fake-adapter"}});
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json["model"], "fake-adapter");
  EXPECT_EQ(answer.json["seed"], 42);
  const RequestSpec spec = this->spec();
  EXPECT_EQ(spec.prompt, (std::vector<int32_t>{97, 98, 99}));
  EXPECT_EQ(spec.stop.max_tokens, 9);
  EXPECT_EQ(spec.stop.min_tokens, 2);
  EXPECT_EQ(spec.stop.stop_texts, (std::vector<std::string>{"x", "yz"}));
  EXPECT_EQ(spec.stop.stop_tokens, std::vector<int32_t>{5});
  EXPECT_EQ(spec.stop.end_tokens, std::vector<int32_t>{256});
  EXPECT_TRUE(spec.stop.include_stop_text);
  EXPECT_FALSE(spec.stop.skip_special_tokens);
  const SamplingParameters expected{.temperature = 0.5,
                                    .top_k = 7,
                                    .top_p = 0.9,
                                    .min_p = 0.05,
                                    .repetition_penalty = 1.1,
                                    .presence_penalty = 0.25,
                                    .frequency_penalty = -0.5,
                                    .logit_bias = {{3, 5.5f}, {7, -100.0f}},
                                    .seed = 42};
  EXPECT_EQ(spec.sampling, expected);
  EXPECT_EQ(spec.log_probabilities.output_top, 3);
  EXPECT_EQ(spec.log_probabilities.prompt_top, -1);
  EXPECT_EQ(spec.priority, -3);
  EXPECT_EQ(spec.cache_salt, "tenant");
  EXPECT_EQ(spec.adapter, 0);
  EXPECT_GT(spec.timeout_ns, 500'000'000'000);
  EXPECT_LE(spec.timeout_ns, 600'000'000'000);
}

TEST_F(ApiServerTest, DefaultsByEndpoint) {
  ASSERT_EQ(completions({{"prompt", "abc"}}).status, 200);
  EXPECT_EQ(spec().stop.max_tokens, 16);
  EXPECT_EQ(spec().sampling.temperature, 1.0);
  EXPECT_EQ(spec().sampling.top_p, 1.0);
  EXPECT_EQ(spec().sampling.top_k, 0);
  EXPECT_EQ(spec().choices, 1);
  const uint64_t seed = spec().sampling.seed;
  ASSERT_EQ(completions({{"prompt", "abc"}}).status, 200);
  EXPECT_NE(spec().sampling.seed, seed);
  ASSERT_EQ(chat(hello()).status, 200);
  EXPECT_EQ(spec().stop.max_tokens, 4096 - static_cast<int64_t>(spec().prompt.size()));
  ASSERT_EQ(post(fake().port(), "/completions", "{\"prompt\":\"abc\",\"top_k\":-1}").status, 200);
  EXPECT_EQ(spec().sampling.top_k, 0);
}

TEST_F(ApiServerTest, DefaultTokensOfReplies) {
  config_.default_max_tokens = 30;
  ASSERT_EQ(chat(hello()).status, 200);
  EXPECT_EQ(spec().stop.max_tokens, 30);
}

// The whole context can be used, and not one token more.
TEST_F(ApiServerTest, TheContextIsTheLimit) {
  const std::string prompt(4000, 'a');
  EXPECT_EQ(completions({{"prompt", prompt}, {"max_tokens", 95}}).status, 200);
  EXPECT_EQ(completions({{"prompt", prompt}, {"max_tokens", 96}}).status, 200);
  const Answer over = completions({{"prompt", prompt}, {"max_tokens", 97}});
  EXPECT_EQ(over.status, 400);
  EXPECT_EQ(over.param(), "max_tokens");
  EXPECT_THAT(over.message(), HasSubstr("context of 4096; at most 96 can be generated"));
  EXPECT_EQ(completions({{"prompt", std::string(4095, 'a')}, {"max_tokens", 1}}).status, 200);
  EXPECT_EQ(completions({{"prompt", std::string(4096, 'a')}, {"max_tokens", 1}}).param(),
            "max_tokens");
  const Answer longer = completions({{"prompt", std::string(4097, 'a')}, {"max_tokens", 1}});
  EXPECT_EQ(longer.param(), "prompt");
  EXPECT_THAT(longer.message(), HasSubstr("the prompt has 4097 tokens"));
  const Json message = {{"role", "user"}, {"content", std::string(5000, 'a')}};
  EXPECT_EQ(chat({{"messages", {message}}}).param(), "messages");
  Json small = hello();
  small["max_completion_tokens"] = 5000;
  EXPECT_EQ(chat(small).param(), "max_completion_tokens");
}

TEST_F(ApiServerTest, GreedyOnEveryRoute) {
  for (const char* const path : {"/v1/completions", "/completions"}) {
    ASSERT_EQ(post(fake().port(), path, "{\"prompt\":\"a\",\"temperature\":0}").status, 200);
    EXPECT_EQ(spec().sampling.temperature, 0.0);
  }
  for (const char* const path : {"/v1/chat/completions", "/chat/completions"}) {
    Json body = hello();
    body["temperature"] = 0;
    ASSERT_EQ(post(fake().port(), path, body.dump()).status, 200);
    EXPECT_EQ(spec().sampling.temperature, 0.0);
  }
  ASSERT_EQ(ask(fake().port(),
                "PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: 35\r\n\r\n"
                "{\"prompts\":[\"a\"],\"temperature\":0.0}")
                .status,
            200);
  EXPECT_EQ(spec().sampling.temperature, 0.0);
}

TEST_F(ApiServerTest, FinishReasonsSayWhatMatched) {
  reply_with("one two three");
  const auto finish = [&](Json body) {
    body["prompt"] = "x";
    const Answer answer = completions(body);
    const Json& choice = answer.json["choices"][0];
    return cat(choice["text"].get<std::string>(), "|", choice["finish_reason"].get<std::string>(),
               "|", choice["stop_reason"].dump());
  };
  EXPECT_EQ(finish({{"max_tokens", 3}}), "one|length|null");
  EXPECT_EQ(finish({{"max_tokens", 20}}), "one two three|stop|null");
  // The end token as the last one allowed is an end.
  EXPECT_EQ(finish({{"max_tokens", 14}}), "one two three|stop|null");
  EXPECT_EQ(finish({{"max_tokens", 13}}), "one two three|length|null");
  EXPECT_EQ(finish({{"max_tokens", 20}, {"stop", "tw"}}), "one |stop|\"tw\"");
  EXPECT_EQ(
      finish({{"max_tokens", 20}, {"stop", {"q", " t"}}, {"include_stop_str_in_output", true}}),
      "one t|stop|\" t\"");
  EXPECT_EQ(finish({{"max_tokens", 20}, {"stop_token_ids", {119}}}), "one t|stop|119");
  EXPECT_EQ(finish({{"max_tokens", 16}, {"ignore_eos", true}}), "one two threeone|length|null");
}

// Every reply: the joined pieces of the stream are the whole text.
TEST_F(ApiServerTest, StreamsAddUpToTheWhole) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    std::vector<int32_t> ids;
    for (uint32_t length = random() % 60; length > 0; --length) {
      // Broken and whole characters, and text that a stop text may begin in.
      static const std::string kParts[] = {
          "ab",       "a",    "stop", "st", "\xe4\xbd\xa0", "\xe4\xbd", "\xf0\x9f\x98\x80",
          "\xf0\x9f", "\xff", " ",    "</s"};
      for (const char c : kParts[random() % std::size(kParts)])
        ids.push_back(static_cast<unsigned char>(c));
    }
    if (ids.empty()) ids.push_back(97);
    fake().engine->set_script([ids](const RequestSpec&, int32_t choice) {
      return std::vector<int32_t>(ids.begin() + std::min<int32_t>(choice, 1), ids.end());
    });
    Json body = {{"prompt", {"p", "\xc3\xa9"}}, {"n", 2}, {"max_tokens", 100}, {"stop", "stopp"}};
    if (round % 2 == 1) body["echo"] = true;
    if (round % 3 == 1) body["logprobs"] = 1;
    const Answer whole = completions(body);
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
    const Answer stream = completions(body);
    ASSERT_EQ(stream.status, 200);
    EXPECT_THAT(stream.header("Content-Type"), StartsWith("text/event-stream"));
    const Joined joined = join(stream.body);
    EXPECT_TRUE(joined.done);
    ASSERT_EQ(joined.texts.size(), 4u);
    for (const Json& choice : whole.json["choices"]) {
      EXPECT_EQ(joined.texts.at(choice["index"]), choice["text"].get<std::string>());
      EXPECT_EQ(joined.finish_reasons.at(choice["index"]),
                choice["finish_reason"].get<std::string>());
    }
    EXPECT_EQ(joined.usage, whole.json["usage"]);
  }
}

TEST_F(ApiServerTest, ConversationsAreRendered) {
  const Json body = {
      {"messages",
       {{{"role", "developer"}, {"content", "be brief"}},
        {{"role", "user"},
         {"content", {{{"type", "text"}, {"text", "a"}}, {{"type", "text"}, {"text", "b"}}}}},
        {{"role", "assistant"},
         {"content", nullptr},
         {"tool_calls",
          {{{"id", "1"},
            {"type", "function"},
            {"function", {{"name", "f"}, {"arguments", "{\"x\": [1, 2]}"}}}}}}},
        {{"role", "tool"}, {"tool_call_id", "1"}, {"content", "42"}}}},
      {"max_tokens", 4},
      {"unknown_thing", 1}};
  const Answer answer = chat(body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(fake().tokenizer->decode(spec().prompt),
            "system: be brief\nuser: a\nb\nassistant: \n<tool_call>f{\"x\": [1, 2]}</tool_call>\n"
            "tool: 42\nassistant: ");
  EXPECT_EQ(answer.header("X-Ignored-Members"), "unknown_thing");
  EXPECT_EQ(answer.json["object"], "chat.completion");
  EXPECT_EQ(answer.json["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(answer.json["choices"][0]["message"]["content"], "syst");
}

TEST_F(ApiServerTest, LogProbabilitiesOfConversations) {
  reply_with("a\xc3\xa9");
  Json body = hello();
  body["logprobs"] = true;
  body["top_logprobs"] = 2;
  const Answer answer = chat(body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  const Json& content = answer.json["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 4u);  // the end token, too
  EXPECT_EQ(content.size(), answer.json["usage"]["completion_tokens"]);
  EXPECT_EQ(content[0]["token"], "a");
  EXPECT_EQ(content[0]["bytes"], Json({97}));
  EXPECT_EQ(content[1]["token"], "bytes:\\xc3");
  EXPECT_EQ(content[1]["bytes"], Json({195}));
  EXPECT_EQ(content[0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(content[0]["top_logprobs"][0]["logprob"], content[0]["logprob"]);
  body["stream"] = true;
  size_t streamed = 0;
  for (const std::string& event : events_of(chat(body).body))
    if (event != "[DONE]")
      streamed += Json::parse(event)["choices"][0]["logprobs"]["content"].size();
  EXPECT_EQ(streamed, 4u);
}

TEST_F(ApiServerTest, LogProbabilitiesOfCompletions) {
  reply_with("\xc3\xa9z");
  const Answer answer =
      completions({{"prompt", "ab"}, {"max_tokens", 3}, {"logprobs", 2}, {"echo", true}});
  const Json& logprobs = answer.json["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], Json({"a", "b", "bytes:\\xc3", "bytes:\\xa9", "z"}));
  EXPECT_EQ(logprobs["text_offset"], Json({0, 1, 2, 3, 3}));
  EXPECT_EQ(logprobs["token_logprobs"][0], nullptr);
  EXPECT_EQ(logprobs["top_logprobs"][0], nullptr);
  for (size_t i = 1; i < 5; ++i) {
    // The chosen token's number and that among the top ones are the same bits.
    EXPECT_EQ(logprobs["token_logprobs"][i],
              logprobs["top_logprobs"][i][logprobs["tokens"][i].get<std::string>()]);
    EXPECT_EQ(logprobs["token_logprobs"][i].get<float>(), fake_log_probabilities(i == 1   ? 98
                                                                                 : i == 2 ? 195
                                                                                 : i == 3 ? 169
                                                                                          : 122,
                                                                                 0, 257)
                                                              .chosen.log_probability);
  }
  EXPECT_EQ(completions({{"prompt", "ab"}, {"logprobs", 0}})
                .json["choices"][0]["logprobs"]["top_logprobs"],
            nullptr);
  // The prompt alone, and with vLLM's member.
  const Answer scored =
      completions({{"prompt", "abc"}, {"max_tokens", 0}, {"logprobs", 0}, {"echo", true}});
  EXPECT_EQ(scored.json["choices"][0]["text"], "abc");
  EXPECT_EQ(scored.json["choices"][0]["logprobs"]["token_logprobs"].size(), 3u);
  EXPECT_EQ(scored.json["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(completions({{"prompt", "abc"}, {"max_tokens", 0}, {"echo", true}})
                .json["choices"][0]["text"],
            "abc");
  EXPECT_EQ(completions({{"prompt", "abc"}, {"max_tokens", 0}}).param(), "max_tokens");
  const Json prompt =
      completions({{"prompt", "ab"}, {"prompt_logprobs", 1}}).json["choices"][0]["prompt_logprobs"];
  EXPECT_EQ(prompt[0], nullptr);
  EXPECT_EQ(prompt[1]["98"]["decoded_token"], "b");
  EXPECT_EQ(prompt[1]["98"]["rank"], 1);
}

// Embeddings are padded beyond the tokenizer, and a model may draw such an id.
TEST_F(ApiServerTest, IdsThatTheTokenizerLacks) {
  fake().model.limits.vocab_size = fake().tokenizer->vocab_size() + 7;
  fake().engine->set_script(
      [](const RequestSpec&, int32_t) { return std::vector<int32_t>{97, 257, 98}; });
  const Answer answer =
      completions({{"prompt", {97}}, {"max_tokens", 3}, {"logprobs", 1}, {"echo", true}});
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json["choices"][0]["text"], "aab");
  EXPECT_EQ(answer.json["choices"][0]["logprobs"]["tokens"], Json({"a", "a", "", "b"}));
  const Answer text = post(fake().port(), "/detokenize", R"({"tokens": [97, 260, 98]})");
  EXPECT_EQ(text.json["prompt"], "ab") << text.body;
}

TEST_F(ApiServerTest, IdsOnRequest) {
  const Answer answer = completions({{"prompt", "ab"},
                                     {"max_tokens", 2},
                                     {"return_token_ids", true},
                                     {"logprobs", 1},
                                     {"return_tokens_as_token_ids", true}});
  const Json& choice = answer.json["choices"][0];
  EXPECT_EQ(choice["prompt_token_ids"], Json({97, 98}));
  EXPECT_EQ(choice["token_ids"], Json({97, 98}));
  EXPECT_EQ(choice["weights_versions"], Json({0, 0}));
  EXPECT_EQ(choice["logprobs"]["tokens"], Json({"token_id:97", "token_id:98"}));
  // As Megatron-LM's server has them.
  const Answer plain =
      post(fake().port(), "/completions", "{\"prompt\":\"ab\",\"max_tokens\":2,\"logprobs\":true}");
  EXPECT_EQ(plain.json["choices"][0]["prompt_token_ids"], Json({97, 98}));
  EXPECT_EQ(plain.json["choices"][0]["generation_token_ids"], Json({97, 98}));
  EXPECT_EQ(plain.json["choices"][0]["generation_log_probs"].size(), 2u);
}

Answer put_api(int port, const std::string& body) {
  return ask(port, cat("PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", body.size(),
                       "\r\n\r\n", body));
}

TEST_F(ApiServerTest, MegatronsTextGeneration) {
  const int port = fake().port();
  reply_with("xyz");
  const Answer answer = put_api(
      port,
      R"({"prompts": ["ab", "c"], "tokens_to_generate": 2, "logprobs": true, "add_BOS": true})");
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json["text"], Json({"abxy", "cxy"}));
  EXPECT_EQ(answer.json["segments"][1], Json({"<|endoftext|>", "c", "x", "y"}));
  EXPECT_EQ(answer.json["tokens"][0], Json({256, 97, 98, 120, 121}));
  EXPECT_EQ(answer.json["logprobs"][0].size(), 4u);
  const Answer plain = put_api(port, R"({"prompts": ["ab"]})");
  EXPECT_EQ(spec().stop.max_tokens, 64);
  EXPECT_FALSE(plain.json.contains("tokens"));
  EXPECT_EQ(put_api(port, R"({"prompts": ["ab"], "tokens_to_generate": 0})").json["text"],
            Json({"ab"}));
  ASSERT_EQ(
      put_api(port, R"({"prompts": ["a"], "top_p": 0.5, "random_seed": 3, "stop_on_eol": true})")
          .status,
      200);
  EXPECT_EQ(spec().sampling.top_p, 0.5);
  EXPECT_EQ(spec().sampling.seed, 3u);
  EXPECT_EQ(spec().stop.stop_texts, std::vector<std::string>{"\n"});
  // Errors are what Megatron-LM's client reads.
  for (const auto& [body, message] : std::vector<std::pair<std::string, std::string>>{
           {R"({})", "prompts is missing"},
           {R"({"prompts": "a"})", "prompts is a text; expected a list"},
           {R"({"prompts": []})", "prompts is empty"},
           {R"({"prompts": [1]})", "prompts has a number; expected texts"},
           {R"({"prompts": ["a"], "max_len": 3})",
            "max_len is not used any more; expected tokens_to_generate"},
           {R"({"sentences": ["a"]})", "sentences is not used any more; expected prompts"},
           {R"({"prompts": ["a"], "beam_width": 2})",
            "beam_width is not supported: beam search is not built"},
           {R"({"prompts": ["a"], "top_k": 1, "top_p": 0.5})",
            "top_p and top_k are both given; expected one of them"},
           {R"({"prompts": ["a"], "top_k": 1001})", "top_k 1001 is outside [0, 1000]"},
           {R"({"prompts": ["a"], "temperature": 101})", "temperature 101 is outside [0, 100]"},
           {R"({"prompts": ["a"], "tokens_to_generate": -1})",
            "tokens_to_generate -1 is outside [0, 2147483647]"},
           {R"({"prompts": ["a"], "length_penalty": 2})",
            "length_penalty is not supported: leave it out"},
           {R"({"prompts": ["a"], "stop_token": 257})",
            "stop_token 257 is outside the vocabulary, 0 to 256"},
           {R"({"prompts": ["a"], "tokens_to_generate": 5000})",
            "max_tokens 5000 and the prompt's 1 tokens are beyond the model's context of 4096; at "
            "most 4095 can be generated"}}) {
    const Answer refused = put_api(port, body);
    EXPECT_EQ(refused.status, 400) << body;
    EXPECT_EQ(refused.json, Json({{"message", message}})) << body;
  }
  std::string many = "{\"prompts\": [\"a\"";
  for (int i = 0; i < 128; ++i) many += ",\"a\"";
  EXPECT_EQ(put_api(port, many + "]}").json["message"],
            "prompts has 129 prompts, at most 128 are taken");
  EXPECT_EQ(get(port, "/api").json, Json({{"message", "/api takes PUT"}}));
}

TEST_F(ApiServerTest, EmptyPrompts) {
  ASSERT_EQ(completions({{"prompt", ""}, {"max_tokens", 1}}).status, 200);
  EXPECT_EQ(spec().prompt, std::vector<int32_t>{256});  // the token that begins a text
  for (const Json& prompt : {Json::array(), Json::array({Json::array()}), Json(nullptr), Json(5),
                             Json({{"a", 1}}), Json::array({"a", 5}), Json::array({true})})
    EXPECT_EQ(completions({{"prompt", prompt}}).param(), "prompt") << prompt;
}

TEST_F(ApiServerTest, MembersThatAreNotSupported) {
  for (const auto& [member, value] :
       std::vector<std::pair<std::string, Json>>{{"suffix", "x"},
                                                 {"best_of", 2},
                                                 {"use_beam_search", true},
                                                 {"chat_template", "{{ x }}"},
                                                 {"truncate_prompt_tokens", 5},
                                                 {"guided_json", {{"type", "object"}}},
                                                 {"logits_processors", {"x"}},
                                                 {"prompt_embeds", "abc"},
                                                 {"neighbors", {{{"a text"}}}},
                                                 {"length_penalty", 2}}) {
    const Answer answer = completions({{"prompt", "a"}, {member, value}});
    EXPECT_EQ(answer.status, 400) << member;
    EXPECT_EQ(answer.param(), member);
  }
  // What asks for nothing is no reason to refuse.
  const Answer answer = completions({{"prompt", "a"},
                                     {"suffix", nullptr},
                                     {"use_beam_search", false},
                                     {"length_penalty", 1},
                                     {"best_of", 1},
                                     {"user", "me"},
                                     {"new_thing", 1},
                                     {"\xc3\xa9", 1},
                                     {"line\nend", 2}});
  EXPECT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.header("X-Ignored-Members"), "new_thing");
}

TEST_F(ApiServerTest, VariablesOfTemplates) {
  Json body = hello();
  body["chat_template_kwargs"] = {{"blow_up", true}};
  const Answer blown = chat(body);
  EXPECT_EQ(blown.status, 400);
  EXPECT_EQ(blown.param(), "messages");
  body["chat_template_kwargs"] = {{"messages", "x"}};
  EXPECT_EQ(chat(body).param(), "chat_template_kwargs.messages");
  body["chat_template_kwargs"] = {{"add_generation_prompt", false}};
  EXPECT_EQ(chat(body).param(), "chat_template_kwargs.add_generation_prompt");
  body["chat_template_kwargs"] = {{"x", {1}}};
  EXPECT_EQ(chat(body).param(), "chat_template_kwargs.x");
  body["chat_template_kwargs"] = {{"enable_thinking", false}};
  EXPECT_EQ(chat(body).status, 200);
}

TEST_F(ApiServerTest, TokensAndText) {
  const int port = fake().port();
  EXPECT_EQ(post(port, "/tokenize", R"({"prompt": "a\u00e9", "return_token_strs": true})").json,
            Json({{"count", 3},
                  {"max_model_len", 4096},
                  {"tokens", {97, 195, 169}},
                  {"token_strs", {"a", "bytes:\\xc3", "bytes:\\xa9"}}}));
  const Answer chat = post(port, "/tokenize", hello().dump());
  EXPECT_EQ(fake().tokenizer->decode(chat.json["tokens"].get<std::vector<int32_t>>()),
            "user: hello\nassistant: ");
  EXPECT_EQ(post(port, "/detokenize", R"({"tokens": [97, 195, 169]})").json["prompt"], "a\xc3\xa9");
  EXPECT_EQ(post(port, "/detokenize", R"({"tokens": [257]})").param(), "tokens");
  EXPECT_EQ(post(port, "/tokenize", "{}").param(), "prompt");
  const Answer info = get(port, "/tokenizer_info");
  EXPECT_EQ(info.json["eos_token"], "<|endoftext|>");
  EXPECT_EQ(info.json["bos_token"], nullptr);
  EXPECT_THAT(info.json["chat_template"].get<std::string>(), HasSubstr("add_generation_prompt"));
}

// The client gets an answer, without what only operators may see.
TEST_F(ApiServerTest, FaultsOfTheServer) {
  class Broken final : public Tokenizer {
   public:
    int64_t vocab_size() const override { return 257; }
    void encode_append(std::string_view, std::vector<int32_t>&) const override {
      throw std::runtime_error("planned fault");
    }
    std::string token_bytes(int32_t) const override { return ""; }
    bool is_special(int32_t) const override { return false; }
    std::optional<int32_t> eod() const override { return 256; }
    std::optional<int32_t> bos() const override { return std::nullopt; }
    std::optional<int32_t> pad() const override { return std::nullopt; }
    std::optional<int32_t> token_to_id(std::string_view) const override { return std::nullopt; }
    std::string id_to_token(int32_t) const override { return ""; }
    std::string fingerprint() const override { return "broken"; }
  };
  const Broken broken;
  fake().model.tokenizer = &broken;
  for (const char* path : {"/v1/completions", "/tokenize"}) {
    const Answer answer = post(fake().port(), path, R"({"prompt": "a"})");
    EXPECT_EQ(answer.status, 500) << path;
    EXPECT_THAT(answer.message(), HasSubstr("its log says why")) << path;
    EXPECT_THAT(answer.body, ::testing::Not(HasSubstr("planned"))) << path;
  }
}

TEST_F(ApiServerTest, ModelsAndHealth) {
  const int port = fake().port();
  EXPECT_EQ(get(port, "/v1/models").json["data"][0]["id"], "fake");
  EXPECT_EQ(get(port, "/v1/models").json["data"][1]["parent"], "fake");
  EXPECT_EQ(get(port, "/v1/models/fake").json["max_model_len"], 4096);
  EXPECT_EQ(get(port, "/v1/models/other").status, 404);
  EXPECT_EQ(completions({{"prompt", "a"}, {"model", "other"}}).status, 404);
  EXPECT_EQ(get(port, "/version").json["version"], MEGATRON_VERSION);
  const auto health = [&](const char* path) { return get(port, path).status; };
  EXPECT_EQ(health("/health"), 200);
  EXPECT_EQ(get(port, "/v1/health").json["ready"], true);
  fake().engine->set_state(EngineState::kSuspended);
  EXPECT_EQ(health("/health"), 503);
  EXPECT_EQ(health("/health?ready"), 503);
  EXPECT_EQ(health("/health?live"), 200);
  EXPECT_EQ(health("/health/live"), 200);
  const Answer busy = completions({{"prompt", "a"}});
  EXPECT_EQ(busy.status, 503);
  EXPECT_EQ(busy.header("Retry-After"), "2");
  fake().engine->set_state(EngineState::kFailed);
  EXPECT_EQ(health("/health/live"), 503);
  EXPECT_EQ(get(port, "/health").json["failure"], "rank 1 does not answer");
}

TEST_F(ApiServerTest, PathsAndMethods) {
  const int port = fake().port();
  EXPECT_EQ(get(port, "/nothing").status, 404);
  EXPECT_EQ(get(port, "/v1/completions").status, 405);
  EXPECT_EQ(get(port, "/v1/completions").header("Allow"), "POST");
  EXPECT_EQ(post(port, "/health", "").header("Allow"), "GET, HEAD");
  EXPECT_EQ(get(port, "/v1/models/").status, 404);
  EXPECT_EQ(post(port, "/start_profile", "").status, 501);
  EXPECT_EQ(get(port, "/v1/models", "Origin: http://evil.example\r\n").status, 403);
  EXPECT_EQ(ask(port, "GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n").status, 403);
  EXPECT_EQ(ask(port, "GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n").status,
            200);
  EXPECT_EQ(ask(port, "GET http://other/health HTTP/1.1\r\nHost: localhost\r\n\r\n").status, 400);
  const Answer page = get(port, "/");
  EXPECT_THAT(page.header("Content-Security-Policy"), HasSubstr("default-src 'none'"));
  EXPECT_EQ(page.header("Content-Type"), "text/html; charset=utf-8");
}

TEST_F(ApiServerTest, ThePageCanBeSwitchedOff) {
  config_.chat_page = false;
  EXPECT_EQ(get(fake().port(), "/").status, 404);
}

TEST_F(ApiServerTest, KeysGuardEveryRoute) {
  config_.api_key_file = ::testing::TempDir() + "/serving-keys";
  std::ofstream(config_.api_key_file) << "a:0123456789abcdef\nroot:fedcba9876543210:admin\n";
  const int port = fake().port();
  const std::string user = "Authorization: Bearer 0123456789abcdef\r\n",
                    admin = "Authorization: Bearer fedcba9876543210\r\n",
                    wrong = "Authorization: Bearer 0123456789abcdeg\r\n";
  EXPECT_EQ(completions({{"prompt", "a"}}, user).status, 200);
  ASSERT_GT(all_routes().size(), 20u);
  for (const RouteInfo& route : all_routes()) {
    const auto status = [&](const std::string& header) {
      return ask(port, cat(route.method, " ", route.path, " HTTP/1.1\r\nHost: anything.example\r\n",
                           header, "Content-Length: 0\r\n\r\n"))
          .status;
    };
    EXPECT_EQ(status(""), 401) << route.path;
    EXPECT_EQ(status(wrong), 401) << route.path;
    const bool is_admin = route.access == RouteAccess::kAdmin;
    EXPECT_EQ(is_admin, route.path.starts_with("/admin/"));
    EXPECT_EQ(status(user) == 403, is_admin) << route.path;
    EXPECT_NE(status(user), 401) << route.path;
    EXPECT_NE(status(admin), 403) << route.path;
  }
  // Nobody without a key learns what routes there are.
  EXPECT_EQ(get(port, "/nothing").status, 401);
  EXPECT_EQ(get(port, "/nothing", user).status, 404);
  // Browsers ask for the key at the page.
  EXPECT_THAT(get(port, "/").headers,
              ::testing::Contains(::testing::Field(&HttpHeader::value, StartsWith("Basic realm"))));
  EXPECT_EQ(get(port, "/", "Authorization: Basic dTowMTIzNDU2Nzg5YWJjZGVm\r\n").status, 200);
}

TEST_F(ApiServerTest, OtherMachinesNeedKeys) {
  ServeConfig config;
  config.host = "0.0.0.0";
  config.port = 0;
  FakeServer& running = fake();
  EXPECT_THAT(error_of([&] { ApiServer(config, limits_, *running.engine, running.model); }),
              HasSubstr("--host 0.0.0.0 lets other machines in, and nobody needs a key\n"
                        "hint: --api-key-file FILE, or --no-auth"));
  config.no_auth = true;
  const ApiServer open(config, limits_, *running.engine, running.model);
}

TEST_F(ApiServerTest, QueuesThatAreFull) {
  engine_ = {.step_ns = 200'000, .max_running = 2, .max_queued = 4, .stop_early = false};
  // More prompts than the queue holds are served in turns.
  Json many = {{"prompt", Json::array()}, {"max_tokens", 10}};
  for (int i = 0; i < 40; ++i)
    many["prompt"].push_back(std::string(1, static_cast<char>('a' + i % 26)));
  const Answer answer = completions(many);
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_EQ(answer.json["choices"].size(), 40u);
  EXPECT_EQ(answer.json["choices"][39]["text"], "nnnnnnnnnn");
  EXPECT_EQ(answer.json["usage"]["completion_tokens"], 400);
  // A request for which there is no room is told when to come back.
  fake().engine->set_state(EngineState::kPaused);
  std::vector<std::unique_ptr<RawClient>> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.push_back(std::make_unique<RawClient>(fake().port()));
    waiting.back()->send(post_request("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":2}"));
  }
  EXPECT_TRUE(becomes_so([&] { return fake().engine->stats().queued == 4; }));
  const Answer refused = completions({{"prompt", "a"}});
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.header("Retry-After"), "3");
  EXPECT_EQ(refused.json["error"]["type"], "rate_limit_error");
  fake().engine->set_state(EngineState::kRunning);
  for (const auto& client : waiting) EXPECT_EQ(client->response().status, 200);
}

TEST_F(ApiServerTest, ClientsThatLeaveFreeTheEngine) {
  engine_ = {.step_ns = 5'000'000, .max_running = 4, .stop_early = false};
  const auto nothing_runs = [&] {
    const EngineStats stats = fake().engine->stats();
    return stats.running == 0 && stats.queued == 0;
  };
  uint64_t cancelled = 0;
  for (const bool stream : {false, true})
    for (const bool hard : {false, true})
      for (const int after_ms : {0, 20, 60}) {
        RawClient client(fake().port());
        client.send(post_request(
            "/v1/completions",
            Json({{"prompt", {"a", "b", "c"}}, {"n", 2}, {"max_tokens", 4000}, {"stream", stream}})
                .dump()));
        std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
        hard ? client.reset() : client.close();
        EXPECT_TRUE(becomes_so(nothing_runs));
        EXPECT_TRUE(becomes_so([&] { return fake().server->num_open() == 0; }));
      }
  cancelled = fake().engine->stats().finished[static_cast<size_t>(FinishReason::kCancelled)];
  EXPECT_GE(cancelled, 60u);
  EXPECT_TRUE(becomes_so([&] { return fake().server->counts().open == 0; }));
}

TEST_F(ApiServerTest, ErrorsOfTheEngine) {
  reply_with("abcdef");
  fake().engine->fail_with(FinishReason::kNonFinite);
  const Answer answer = completions({{"prompt", "a"}});
  EXPECT_EQ(answer.status, 500);
  EXPECT_EQ(answer.json["error"]["code"], "non_finite");
  // A stream that has begun ends with an error, not with a bare cut.
  const Answer stream = completions({{"prompt", "a"}, {"stream", true}, {"n", 2}});
  EXPECT_EQ(stream.status, 200);
  const auto events = events_of(stream.body);
  ASSERT_THAT(events.back(), StartsWith("error: "));
  EXPECT_EQ(Json::parse(events.back().substr(7))["error"]["code"], "non_finite");
  fake().engine->fail_with(FinishReason::kShutdown);
  EXPECT_EQ(completions({{"prompt", "a"}}).status, 503);
}

TEST_F(ApiServerTest, RequestsHaveATime) {
  engine_ = {.step_ns = 20'000'000, .stop_early = false};
  const Answer late =
      completions({{"prompt", "a"}, {"max_tokens", 1000}}, "X-Request-Timeout-Ms: 100\r\n");
  EXPECT_EQ(late.status, 504);
  EXPECT_EQ(late.json["error"]["type"], "timeout_error");
  EXPECT_EQ(completions({{"prompt", "a"}}, "X-Request-Timeout-Ms: soon\r\n").status, 400);
  ASSERT_EQ(
      completions({{"prompt", "a"}, {"max_tokens", 1}}, "X-Request-Timeout-Ms: 99999999999\r\n")
          .status,
      200);
  EXPECT_LE(spec().timeout_ns, 600'000'000'000);
}

TEST_F(ApiServerTest, Draining) {
  engine_ = {.step_ns = 5'000'000, .stop_early = false};
  RawClient busy(fake().port()), stuck(fake().port());
  busy.send(post_request("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":30}"));
  stuck.send(
      post_request("/v1/completions", "{\"prompt\":\"a\",\"max_tokens\":4000,\"stream\":true}"));
  EXPECT_TRUE(becomes_so([&] { return fake().engine->stats().running == 2; }));
  size_t cut_off = 0;
  std::thread drain([&] { cut_off = fake().server->drain(1'000'000'000); });
  EXPECT_TRUE(becomes_so([&] { return get(fake().port(), "/health").status == 503; }));
  EXPECT_EQ(get(fake().port(), "/health").json["state"], "draining");
  const Answer refused = completions({{"prompt", "a"}});
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.header("Connection"), "close");
  EXPECT_EQ(refused.header("Retry-After"), "1");
  EXPECT_EQ(busy.response().status, 200);
  drain.join();
  EXPECT_EQ(cut_off, 1u);
  fake().server->stop();
  EXPECT_FALSE(stuck.response().complete);
}

TEST_F(ApiServerTest, CommandsOfOperators) {
  const int port = fake().port();
  EXPECT_EQ(post(port, "/admin/pause", R"({"mode": "keep"})").json["state"], "paused");
  EXPECT_EQ(
      post(port, "/admin/suspend", R"({"cache": "drop", "weights": "offload"})").json["state"],
      "suspended");
  EXPECT_EQ(get(port, "/admin/status").json["state"], "suspended");
  EXPECT_EQ(post(port, "/admin/resume", "").json["state"], "running");
  const Answer refused = post(port, "/admin/suspend", "{}");
  EXPECT_EQ(refused.status, 409);
  EXPECT_EQ(refused.json["error"]["code"], "refused");
  EXPECT_FALSE(refused.message().empty());
  EXPECT_EQ(post(port, "/admin/update_weights", R"({"source": "/x", "version": 3})").status, 200);
  EXPECT_EQ(completions({{"prompt", "a"}, {"max_tokens", 1}, {"return_token_ids", true}})
                .json["choices"][0]["weights_versions"],
            Json({3}));
  EXPECT_EQ(post(port, "/admin/pause", R"({"mode": "now"})").param(), "mode");
  EXPECT_EQ(post(port, "/admin/pause", R"({"mod": "keep"})").param(), "mod");
  EXPECT_EQ(post(port, "/admin/update_weights", R"({"version": 3})").param(), "source");
  EXPECT_EQ(post(port, "/admin/update_weights", R"({"source": "/x"})").param(), "version");
  EXPECT_EQ(post(port, "/admin/drain", R"({"timeout_seconds": -1})").param(), "timeout_seconds");
  EXPECT_EQ(get(port, "/admin/pause").status, 405);
}

// Counters are the sums of what was answered.
TEST_F(ApiServerTest, Metrics) {
  const int port = fake().port();
  int64_t prompt_tokens = 0, output_tokens = 0;
  for (int i = 1; i <= 5; ++i) {
    const Answer answer =
        completions({{"prompt", std::string(static_cast<size_t>(i), 'a')}, {"max_tokens", i}});
    prompt_tokens += answer.json["usage"]["prompt_tokens"].get<int64_t>();
    output_tokens += answer.json["usage"]["completion_tokens"].get<int64_t>();
  }
  EXPECT_EQ(completions({{"prompt", "a"}, {"max_tokens", 100'000}}).status, 400);
  EXPECT_EQ(get(port, "/nothing").status, 404);
  const Answer answer = get(port, "/metrics");
  EXPECT_THAT(answer.header("Content-Type"), StartsWith("text/plain"));
  const std::string text = "\n" + answer.body;
  for (const std::string& line :
       {cat("megatron_prompt_tokens_total ", prompt_tokens),
        cat("megatron_output_tokens_total ", output_tokens),
        std::string("megatron_requests_submitted_total 5"),
        std::string("megatron_requests_finished_total{reason=\"length\"} 5"),
        std::string("megatron_http_responses_total{route=\"/v1/completions\",status=\"200\"} 5"),
        std::string("megatron_http_responses_total{route=\"/v1/completions\",status=\"400\"} 1"),
        std::string("megatron_http_responses_total{route=\"\",status=\"404\"} 1"),
        std::string("megatron_first_token_seconds_count 5"),
        std::string("megatron_requests_waiting 0"), std::string("megatron_cache_usage_ratio 0")})
    EXPECT_THAT(text, HasSubstr("\n" + line + "\n"));
  std::set<std::string> names;
  for (size_t at = text.find("\n# TYPE "); at != std::string::npos;
       at = text.find("\n# TYPE ", at + 1))
    EXPECT_TRUE(names.insert(text.substr(at + 8, text.find(' ', at + 8) - at - 8)).second);
  for (const std::string& name : names) EXPECT_THAT(name, StartsWith("megatron_"));
}

}  // namespace
}  // namespace megatron
