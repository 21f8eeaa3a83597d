// Decoding: the same with and without KV cache, in batches and single; ends of text and streaming.
#include "megatron/inference/generator.h"

#include <gtest/gtest.h>

#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

std::unique_ptr<Tokenizer> byte_tokenizer() {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  return make_tokenizer(config);
}

ModelConfig small_config() {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.num_layers = 2;
  t.hidden_size = 32;
  t.num_attention_heads = 4;
  t.seq_length = 64;
  t.init_method_std = 0.4;
  config.vocab_size = 257;
  config.padded_vocab_size = 320;
  return config;
}

// A model with its memory, in fp64.
struct TestModel {
  explicit TestModel(ModelConfig config) : model((config.transformer.finalize(), config), groups) {
    at::set_num_threads(1);  // more would only wait for each other
    store = std::make_unique<PlainParameterStore>(model, at::kDouble, at::kCPU, false);
    initialize_parameters(model, 5, groups);
  }
  const ParallelGroups groups;
  GPTModel model;
  std::unique_ptr<PlainParameterStore> store;
};

GenerateOptions greedy(int64_t tokens) {
  GenerateOptions options;
  options.sampling.greedy = true;
  options.tokens_to_generate = tokens;
  options.stop_at_eod = false;
  return options;
}

std::vector<Generation> generate_all(TestModel& model, const std::vector<std::string>& prompts,
                                     const GenerateOptions& options,
                                     const StreamCallback& stream = {}) {
  return generate(model.model, *byte_tokenizer(), prompts, options, stream);
}

// The most likely next token by the full forward, again and again.
std::vector<int32_t> decoded_without_cache(TestModel& model, const std::string& prompt,
                                           int64_t tokens) {
  std::vector<int32_t> ids = byte_tokenizer()->encode(prompt), generated;
  for (int64_t i = 0; i < tokens; ++i) {
    const at::Tensor logits = full_logits(model.model, ids);
    EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{static_cast<int64_t>(ids.size()), 257}));
    generated.push_back(static_cast<int32_t>(logits[-1].argmax().item<int64_t>()));
    ids.push_back(generated.back());
  }
  return generated;
}

std::vector<std::pair<std::string, ModelConfig>> model_kinds() {
  std::vector<std::pair<std::string, ModelConfig>> kinds;
  kinds.emplace_back("learned positions", small_config());
  ModelConfig rope = small_config();
  rope.transformer.position_embedding_type = PositionEmbedding::kRope;
  rope.transformer.normalization = Normalization::kRMSNorm;
  rope.transformer.swiglu = true;
  rope.transformer.add_bias_linear = false;
  rope.transformer.untie_embeddings_and_output_weights = true;
  kinds.emplace_back("rope", rope);
  ModelConfig window = rope;
  window.transformer.window_size = {5, 0};
  window.transformer.window_attn_skip_freq = "2";
  kinds.emplace_back("rope, a window in one layer", window);
  ModelConfig grouped = rope;
  grouped.transformer.group_query_attention = true;
  grouped.transformer.num_query_groups = 2;
  grouped.transformer.qk_layernorm = true;
  grouped.transformer.rotary_percent = 0.5;
  grouped.transformer.rotary_interleaved = true;
  kinds.emplace_back("grouped queries, half of each head rotated, query and key norms", grouped);
  ModelConfig none = small_config();
  none.transformer.position_embedding_type = PositionEmbedding::kNone;
  none.transformer.kv_channels = 16;
  kinds.emplace_back("no positions, wide heads", none);
  return kinds;
}

TEST(Generate, TheCacheChangesNoToken) {
  for (const auto& [name, config] : model_kinds()) {
    TestModel model(config);
    for (const std::string prompt : {"a", "The quick"}) {
      const Generation result = generate_all(model, {prompt}, greedy(24))[0];
      EXPECT_EQ(result.tokens, decoded_without_cache(model, prompt, 24))
          << name << ", prompt " << prompt;
      EXPECT_EQ(result.prompt_tokens, byte_tokenizer()->encode(prompt));
      EXPECT_EQ(result.finish_reason, FinishReason::kLength);
      EXPECT_EQ(result.text, byte_tokenizer()->decode(result.tokens));
      const std::set<int32_t> distinct(result.tokens.begin(), result.tokens.end());
      EXPECT_GT(distinct.size(), 2u) << name << ": too uniform to show anything";
    }
  }
}

TEST(Generate, ABatchGivesEachPromptItsOwnTokens) {
  const std::vector<std::string> prompts = {"The quick brown", "a", "no",
                                            "The quick brown fox jumps", "xyz"};
  for (const auto& [name, config] : model_kinds()) {
    TestModel model(config);
    const std::vector<Generation> batch = generate_all(model, prompts, greedy(20));
    ASSERT_EQ(batch.size(), prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i)
      EXPECT_EQ(batch[i].tokens, decoded_without_cache(model, prompts[i], 20))
          << name << ", prompt " << prompts[i];
  }
}

TEST(Generate, DrawsDoNotDependOnTheOtherPrompts) {
  TestModel model(small_config());
  GenerateOptions options = greedy(20);
  options.sampling.greedy = false;
  const auto first = generate_all(model, {"abc", "abc"}, options),
             second = generate_all(model, {"z", "abc", "long prompt"}, options);
  EXPECT_EQ(first[1].tokens, second[1].tokens);
  EXPECT_NE(first[0].tokens, first[1].tokens) << "rows share their draws";
  EXPECT_EQ(generate_all(model, {"abc"}, options)[0].tokens, first[0].tokens);
  options.sampling.seed = 2;
  EXPECT_NE(generate_all(model, {"abc"}, options)[0].tokens, first[0].tokens);
}

// A model that says `script` whatever the prompt is, one token per position: each position
// embedding is a unit vector that the output layer maps to the script's next token.
struct ScriptedModel : TestModel {
  static ModelConfig config(size_t length) {
    ModelConfig config = small_config();
    config.transformer.num_layers = 1;
    config.transformer.hidden_size = 128;
    config.transformer.normalization = Normalization::kRMSNorm;
    config.transformer.seq_length = static_cast<int64_t>(length) + 8;
    config.transformer.untie_embeddings_and_output_weights = true;
    return config;
  }
  explicit ScriptedModel(const std::vector<int32_t>& script) : TestModel(config(script.size())) {
    model.visit([&](const std::string& name, Parameter& parameter) {
      if (!name.ends_with("norm.weight")) parameter.value.zero_();
      for (size_t p = 0; p < script.size(); ++p) {
        const auto position = static_cast<int64_t>(p);
        if (name == "embedding.position_embeddings.weight")
          parameter.value[position][position] = 1.0;
        if (name == "output_layer.weight") parameter.value[script[p]][position] = 1.0;
      }
    });
  }
  explicit ScriptedModel(const std::string& script)
      : ScriptedModel(byte_tokenizer()->encode(script)) {}
};

struct Streamed {
  Generation result;
  std::vector<std::string> pieces;
};

Streamed stream(TestModel& model, const GenerateOptions& options, const std::string& prompt = ">") {
  Streamed streamed;
  streamed.result = generate_all(model, {prompt}, options, [&](size_t row, std::string_view piece) {
    EXPECT_EQ(row, 0u);
    streamed.pieces.emplace_back(piece);
  })[0];
  std::string joined;
  for (const std::string& piece : streamed.pieces) joined += piece;
  EXPECT_EQ(joined, streamed.result.text);
  return streamed;
}

using Pieces = std::vector<std::string>;

TEST(Generate, StopsBeforeAStopStringAcrossTokens) {
  ScriptedModel model("hello world, hello");
  GenerateOptions options = greedy(18);
  options.stop = {"lo w", "never"};
  const Streamed stopped = stream(model, options);
  EXPECT_EQ(stopped.result.text, "hel");
  EXPECT_EQ(stopped.result.finish_reason, FinishReason::kStopText);
  EXPECT_EQ(stopped.result.tokens.size(), 7u);
  // "l" is held back twice: the first one is released by the second.
  EXPECT_EQ(stopped.pieces, (Pieces{"h", "e", "l"}));

  options.stop = {"lo,", "wor"};  // the first to be complete, after a false start
  EXPECT_EQ(stream(model, options).result.text, "hello ");
  options.stop = {"hello!"};  // a beginning at the very end is text after all
  EXPECT_EQ(stream(model, options).result.text, "hello world, hello");
  EXPECT_EQ(stream(model, options).result.finish_reason, FinishReason::kLength);
  options.stop = {"hello"};  // at the start, and with the last token allowed
  EXPECT_EQ(stream(model, options).result.text, "");
  options.tokens_to_generate = 5;
  EXPECT_EQ(stream(model, options).result.finish_reason, FinishReason::kStopText);
}

TEST(Generate, FalseStartsOfStopStringsOverlap) {
  ScriptedModel model("aabaabaac");
  GenerateOptions options = greedy(9);
  options.stop = {"aabaac"};
  const Streamed stopped = stream(model, options);
  EXPECT_EQ(stopped.result.text, "aab");
  EXPECT_EQ(stopped.result.finish_reason, FinishReason::kStopText);
}

TEST(Generate, StreamsWholeUtf8Sequences) {
  ScriptedModel model("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z");
  const Streamed all = stream(model, greedy(11));
  EXPECT_EQ(all.pieces, (Pieces{"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "z"}));
  const Streamed cut = stream(model, greedy(8));  // ends inside the last sequence
  EXPECT_EQ(cut.result.text, "a\xC3\xA9\xE2\x82\xAC\xEF\xBF\xBD");
  GenerateOptions options = greedy(11);
  options.stop = {"\xE2\x82\xAC"};
  EXPECT_EQ(stream(model, options).result.text, "a\xC3\xA9");
}

TEST(Generate, StopsAtTheEndOfDocument) {
  ScriptedModel model(std::vector<int32_t>{'a', 'b', 256, 'c'});
  GenerateOptions options = greedy(4);
  options.stop_at_eod = true;
  const Streamed stopped = stream(model, options);
  EXPECT_EQ(stopped.result.text, "ab");
  EXPECT_EQ(stopped.result.tokens, (std::vector<int32_t>{'a', 'b'}));
  EXPECT_EQ(stopped.result.finish_reason, FinishReason::kEndToken);
  options.stop_at_eod = false;
  EXPECT_EQ(stream(model, options).result.tokens, (std::vector<int32_t>{'a', 'b', 256, 'c'}));
}

TEST(Generate, RowsEndOnTheirOwn) {
  ScriptedModel model("abcdefgh");
  GenerateOptions options = greedy(4);
  options.stop = {"d"};
  std::vector<std::string> streamed(2);
  const auto results =
      generate_all(model, {"1", "12345"}, options,
                   [&](size_t row, std::string_view piece) { streamed[row] += piece; });
  EXPECT_EQ(results[0].text, "abc");
  EXPECT_EQ(results[0].finish_reason, FinishReason::kStopText);
  EXPECT_EQ(results[1].text, "efgh");
  EXPECT_EQ(results[1].finish_reason, FinishReason::kLength);
  EXPECT_EQ(streamed, (std::vector<std::string>{"abc", "efgh"}));
}

TEST(Generate, NothingToDo) {
  TestModel model(small_config());
  EXPECT_TRUE(generate_all(model, {}, greedy(4)).empty());
  const auto results = generate_all(model, {"ab"}, greedy(0));
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(results[0].tokens.empty());
  EXPECT_EQ(results[0].text, "");
}

TEST(Generate, AnEmptyPromptStartsFromTheEndOfDocument) {
  TestModel model(small_config());
  const auto results = generate_all(model, {"", "abc"}, greedy(6));
  EXPECT_EQ(results[0].prompt_tokens, (std::vector<int32_t>{256}));
  std::vector<int32_t> ids = {256};
  for (const int32_t token : results[0].tokens) {
    EXPECT_EQ(token, full_logits(model.model, ids)[-1].argmax().item<int64_t>());
    ids.push_back(token);
  }
}

TEST(Generate, FillsThePositionsAndRefusesMore) {
  TestModel model(small_config());
  EXPECT_EQ(max_positions(model.model.config()), 64);
  const std::string prompt(44, 'x');
  EXPECT_EQ(generate_all(model, {prompt}, greedy(20))[0].tokens,
            decoded_without_cache(model, prompt, 20));
  EXPECT_EQ(error_of([&] { generate_all(model, {"ok", prompt}, greedy(21)); }),
            "prompt 2 has 44 tokens; with 21 to generate that is beyond the model's 64 positions\n"
            "hint: shorten the prompt or give --tokens-to-generate 20");
  ModelConfig rope = small_config();
  rope.transformer.position_embedding_type = PositionEmbedding::kRope;
  TestModel endless(rope);
  EXPECT_EQ(max_positions(endless.model.config()), -1);
  EXPECT_EQ(generate_all(endless, {prompt}, greedy(40))[0].tokens.size(), 40u);
}

TEST(Generate, RefusesIdsThatTheModelDoesNotHave) {
  ModelConfig config = small_config();
  config.vocab_size = 100;
  TestModel model(config);
  EXPECT_EQ(error_of([&] { generate_all(model, {"A", "Az"}, greedy(1)); }),
            "prompt 2 has the token id 122, the model's vocabulary has 100");
}

TEST(Generate, CrossesTheBorderOfLongRope) {
  ModelConfig config = small_config();
  TransformerConfig& t = config.transformer;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.rope_scaling_type = RopeScaling::kLongRope;
  t.rope_original_max_position_embeddings = 20;
  t.longrope_short_factor.assign(4, 1.0);
  t.longrope_long_factor = {2.0, 3.0, 4.0, 5.0};
  TestModel model(config);
  const std::vector<std::string> prompts = {"a prompt", "ten letter", std::string(25, 'x')};
  const std::vector<Generation> together = generate_all(model, prompts, greedy(30));
  for (size_t i = 0; i < prompts.size(); ++i)
    EXPECT_EQ(together[i].tokens, decoded_without_cache(model, prompts[i], 30)) << prompts[i];
}

TEST(FullLogits, RefusesWhatItCannotRead) {
  TestModel model(small_config());
  const auto error = [&](const std::vector<int32_t>& ids) {
    return error_of([&] { full_logits(model.model, ids); });
  };
  EXPECT_EQ(error({}), "no token ids were given");
  EXPECT_EQ(error({1, 257}), "token id 257 at index 1 is outside the vocabulary of 257");
  EXPECT_EQ(error({-1}), "token id -1 at index 0 is outside the vocabulary of 257");
  EXPECT_EQ(error(std::vector<int32_t>(65, 1)), "65 token ids are beyond the model's 64 positions");
}

}  // namespace
}  // namespace megatron
