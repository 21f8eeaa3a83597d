// Prompts that a model cannot read: of an encoder-decoder, and conversations without a template.
#include "megatron/serving/generation_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/serving/api_error.h"

namespace megatron {
namespace {

class PromptsOfAnEncoder : public testing::Test {
 protected:
  PromptsOfAnEncoder() {
    TokenizerConfig config;
    config.tokenizer_type = "ByteLevelTokenizer";
    tokenizer_ = make_tokenizer(config);
    model_.name = "m";
    model_.tokenizer = tokenizer_.get();
    model_.limits = {.vocab_size = 257, .max_positions = 100};
    model_.limits.takes_state_input = model_.limits.needs_state_input = true;
    model_.encoder = {.decoder_start = 3, .end = 256, .max_tokens = 4};
  }
  GenerationRequest prepared(const std::string& body) {
    GenerationRequest request = parse_completion(body, model_, {});
    prepare(request, model_, 0);
    return request;
  }
  // "member: message"; empty: it is taken.
  std::string refusal(const std::string& body) {
    try {
      prepared(body);
    } catch (const ApiError& error) {
      EXPECT_EQ(error.status, 400);
      return error.member + ": " + error.what();
    }
    return "";
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  ServedModel model_;
};

TEST_F(PromptsOfAnEncoder, AreItsInput) {
  const GenerationRequest request = prepared(R"({"prompt": "abc"})");
  EXPECT_THAT(request.prompts.at(0).ids, testing::ElementsAre(97, 98, 99, 256));
  EXPECT_THAT(spec_of(request, 0).prompt, testing::ElementsAre(3));
  EXPECT_NE(spec_of(request, 0).state_input, nullptr);
}

TEST_F(PromptsOfAnEncoder, AreRefusedByTheirMember) {
  EXPECT_EQ(refusal(R"({"prompt": "abcd"})"),
            "prompt: the prompt has 5 tokens, the encoder reads 4");
  EXPECT_THAT(refusal(R"({"prompt": [300]})"), testing::HasSubstr("300"));
  for (const char* const member : {"echo", "prompt_logprobs"})
    EXPECT_EQ(refusal(std::string(R"({"prompt": "a", ")") + member +
                      (member[0] == 'e' ? "\": true}" : "\": 1}")),
              std::string(member) +
                  ": the model's encoder reads the prompts, which its texts do not continue");
  EXPECT_EQ(refusal(R"({"prompt": ""})"), "") << "the token that ends a prompt";
  model_.encoder->end.reset();
  EXPECT_EQ(refusal(R"({"prompt": ""})"), "prompt: the prompt is empty");
}

TEST_F(PromptsOfAnEncoder, ConversationsNeedATemplate) {
  model_.why_no_template = "its tokenizer has none";
  GenerationRequest request =
      parse_chat(R"({"messages": [{"role": "user", "content": "a"}]})", model_, {});
  try {
    prepare(request, model_, 0);
    FAIL() << "was taken";
  } catch (const ApiError& error) {
    EXPECT_EQ(error.member, "messages");
    EXPECT_STREQ(error.what(), "the model has no chat template: its tokenizer has none");
  }
}

}  // namespace
}  // namespace megatron
