#include "megatron/scheduling/request.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

namespace megatron {
namespace {

constexpr RequestLimits kLimits{.vocab_size = 100, .max_positions = 32, .hidden_size = 4};

RequestSpec good() {
  RequestSpec spec;
  spec.prompt = {1, 2, 3};
  return spec;
}

// "member: message" of the refusal of a good request that `change` has changed; "": none.
std::string refusal(const std::function<void(RequestSpec&)>& change,
                    const RequestLimits& limits = kLimits) {
  RequestSpec spec = good();
  change(spec);
  const auto found = check_request(spec, limits);
  if (!found) return "";
  EXPECT_EQ(found->kind, Refusal::Kind::kInvalid);
  return found->member + ": " + found->message;
}

TEST(Requests, GoodOnesPass) {
  EXPECT_EQ(refusal([](RequestSpec&) {}), "");
  EXPECT_EQ(refusal([](RequestSpec& s) { s.stop.max_tokens = 29; }), "");
  EXPECT_EQ(refusal([](RequestSpec& s) { s.sampling.temperature = 0; }), "");
  EXPECT_EQ(refusal([](RequestSpec& s) {
              s.prompt.clear();
              s.rows = std::make_shared<GivenRows>(GivenRows{1, 4, {1, 2, 3, 4}});
            }),
            "");
  const auto with_id = [](std::vector<int32_t> ids) {
    return refusal([&](RequestSpec& s) {
      s.rows = std::make_shared<GivenRows>(GivenRows{1, 4, {1, 2, 3, 4}, {}, {}, ids});
    });
  };
  EXPECT_EQ(with_id({-1}) + with_id({99}), "");
  EXPECT_EQ(with_id({-1, 3}), "rows: 1 given rows have 2 ids");
  for (const int32_t id : {-2, 100})
    EXPECT_EQ(with_id({id}),
              cat("rows: token id ", id, " among given rows is outside the vocabulary, 0 to 99"));
  EXPECT_EQ(refusal([](RequestSpec& s) {
              s.stop.max_tokens = 0;
              s.log_probabilities.prompt_top = 0;
            }),
            "");
}

TEST(Requests, ValuesOutOfRangeAreRefusedByTheirMember) {
  const double nan = std::nan("");
  const auto sampling = [](auto change) {
    return refusal([&](RequestSpec& s) { change(s.sampling); });
  };
  const auto stop = [](auto change) { return refusal([&](RequestSpec& s) { change(s.stop); }); };
  EXPECT_EQ(refusal([](RequestSpec& s) { s.prompt.clear(); }), "prompt: the prompt has no tokens");
  for (const int32_t id : {-2, -1, 100, INT32_MAX}) {
    const std::string range = std::to_string(id) + " is outside the vocabulary, 0 to 99";
    EXPECT_EQ(refusal([&](RequestSpec& s) { s.prompt[1] = id; }), "prompt: token id " + range);
    EXPECT_EQ(stop([&](StopConditions& s) { s.stop_tokens = {id}; }),
              "stop_token_ids: stop token " + range);
    EXPECT_EQ(stop([&](StopConditions& s) { s.end_tokens = {5, id}; }),
              "stop_token_ids: end token " + range);
    EXPECT_EQ(sampling([&](SamplingParameters& s) { s.forbidden = {id}; }),
              "forbidden: token id " + range);
    EXPECT_EQ(sampling([&](SamplingParameters& s) { s.logit_bias = {{id, 1.0f}}; }),
              "logit_bias: token id " + range);
  }
  EXPECT_EQ(refusal([](RequestSpec& s) { s.prompt.assign(33, 1); }),
            "prompt: the prompt has 33 tokens, the model's context is 32");
  EXPECT_EQ(stop([](StopConditions& s) { s.max_tokens = 30; }),
            "max_tokens: max_tokens 30 and the prompt's 3 tokens are beyond the model's context of "
            "32; at most 29 can be generated");
  EXPECT_EQ(stop([](StopConditions& s) { s.max_tokens = INT64_MAX; }).substr(0, 12),
            "max_tokens: ");
  EXPECT_EQ(stop([](StopConditions& s) { s.max_tokens = 0; }),
            "max_tokens: max_tokens 0 is below 1");
  EXPECT_EQ(stop([](StopConditions& s) { s.min_tokens = 17; }),
            "min_tokens: min_tokens 17 is outside [0, 16]");
  EXPECT_EQ(stop([](StopConditions& s) { s.stop_texts.assign(65, "a"); }),
            "stop: 65 stop texts were given, at most 64 are taken");
  EXPECT_EQ(stop([](StopConditions& s) { s.stop_texts = {""}; }), "stop: a stop text is empty");
  EXPECT_EQ(stop([](StopConditions& s) { s.stop_texts = {std::string(257, 'a')}; }),
            "stop: a stop text has 257 bytes, at most 256 are taken");
  EXPECT_EQ(stop([](StopConditions& s) { s.stop_texts = {"\xff"}; }),
            "stop: a stop text is not valid UTF-8");
  for (const double value : {-1.0, 100.5, nan, HUGE_VAL})
    EXPECT_NE(sampling([&](SamplingParameters& s) { s.temperature = value; }), "");
  for (const double value : {0.0, -0.1, 1.1, nan})
    EXPECT_NE(sampling([&](SamplingParameters& s) { s.top_p = value; }), "");
  for (const double value : {-0.1, 1.1, nan})
    EXPECT_NE(sampling([&](SamplingParameters& s) { s.min_p = value; }), "");
  for (const double value : {0.0, -1.0, nan, 1e9})
    EXPECT_NE(sampling([&](SamplingParameters& s) { s.repetition_penalty = value; }), "");
  for (const double value : {-2.1, 2.1, nan}) {
    EXPECT_NE(sampling([&](SamplingParameters& s) { s.presence_penalty = value; }), "");
    EXPECT_NE(sampling([&](SamplingParameters& s) { s.frequency_penalty = value; }), "");
  }
  EXPECT_EQ(sampling([](SamplingParameters& s) { s.top_k = -1; }),
            "top_k: top_k -1 is outside [0, 2147483647]");
  EXPECT_NE(sampling([&](SamplingParameters& s) { s.logit_bias = {{1, NAN}}; }), "");
  EXPECT_EQ(sampling([&](SamplingParameters& s) { s.logit_bias = {{2, 1.0f}, {2, 1.0f}}; }),
            "logit_bias: token id 2 is not above 2");
  EXPECT_NE(sampling([&](SamplingParameters& s) { s.logit_bias.resize(1025); }), "");
  EXPECT_NE(sampling([&](SamplingParameters& s) { s.forbidden.assign(100, 1); }), "");
  EXPECT_EQ(refusal([](RequestSpec& s) { s.choices = 1000000; }),
            "n: n 1000000 is outside [1, 16]");
  EXPECT_NE(refusal([](RequestSpec& s) { s.timeout_ns = -1; }), "");
  EXPECT_EQ(refusal([](RequestSpec& s) { s.adapter = 0; }),
            "model: adapter 0 is not one of the 0 that were loaded");
  EXPECT_NE(refusal([](RequestSpec& s) { s.log_probabilities.output_top = 21; }), "");
  EXPECT_NE(refusal([](RequestSpec& s) { s.log_probabilities.prompt_from = 4; }), "");
}

TEST(Requests, GivenRowsAndStatesAreForModelsThatTakeThem) {
  const auto rows = [](GivenRows rows, RequestLimits limits = kLimits) {
    return refusal(
        [&](RequestSpec& s) { s.rows = std::make_shared<const GivenRows>(std::move(rows)); },
        limits);
  };
  EXPECT_EQ(rows({1, 4, {1, 2, 3, 4}}, {.vocab_size = 100, .max_positions = 32}),
            "rows: the model takes token ids alone, no given rows");
  EXPECT_EQ(rows({1, 3, {1, 2, 3}}),
            "rows: given rows have the shape [1, 3] and 3 values; expected rows of 4");
  EXPECT_NE(rows({2, 4, {1, 2, 3, 4}}), "");
  EXPECT_NE(rows({0, 4, {}}), "");
  const GivenRows three = {3, 4, std::vector<float>(12)};
  const auto with_ends = [&](std::vector<int64_t> ends, int64_t together = 0) {
    GivenRows given = three;
    given.ends = std::move(ends);
    RequestLimits limits = kLimits;
    limits.most_together = together;
    return rows(std::move(given), limits);
  };
  for (const auto& ends : std::vector<std::vector<int64_t>>{
           {1, 2}, {0, 2, 3}, {1, 2, 4}, {3, 2, 3}, {1, 1, 3}, {1, 2, 3, 4}})
    EXPECT_EQ(with_ends(ends),
              "rows: the ends of given rows are not ascending numbers of leading rows");
  EXPECT_EQ(with_ends({1, 2, 3}, 1), "");
  EXPECT_EQ(with_ends({1, 3, 3}, 2), "");
  EXPECT_EQ(with_ends({1, 3, 3}, 1),
            "rows: 2 given rows attend to each other, a step has room for 1 beside other requests; "
            "--inference-dynamic-batching-max-tokens says how many");
  const auto with_positions = [&](std::vector<int64_t> positions) {
    GivenRows given = three;
    given.positions = std::move(positions);
    return rows(std::move(given));
  };
  EXPECT_EQ(with_positions({0, 0, 0, 1, 1, 1, 1, 1, 2}), "");
  EXPECT_EQ(with_positions({0, 1, 2}),
            "rows: given rows have 3 positions, the least 0; expected three of each row, none "
            "negative");
  EXPECT_EQ(with_positions({0, 0, 0, 1, 1, 1, 1, -1, 2}),
            "rows: given rows have 9 positions, the least -1; expected three of each row, none "
            "negative");
  EXPECT_EQ(three.next_position(), 3);
  EXPECT_EQ((GivenRows{2, 1, {1, 2}, {}, {0, 0, 0, 0, 4, 1}}.next_position()), 5);
  // 3 words, an image of 2 x 3 tokens, 2 words, one of a token, 2 words: words behind them go on
  // three places before their number.
  GivenRows seen{14, 1, std::vector<float>(14)};
  for (const int64_t t : {0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9, 10})
    seen.positions.insert(seen.positions.end(), {t, t, t});
  for (int64_t i = 3; i < 9; ++i) {
    seen.positions[3 * i + 1] += (i - 3) / 3;
    seen.positions[3 * i + 2] += (i - 3) % 3;
  }
  EXPECT_EQ(seen.next_position() - seen.count, -3);
  EXPECT_EQ(refusal([](RequestSpec& s) { s.state_input = std::make_shared<StateInput>(); }),
            "state_input: the model makes no state from an input");
  RequestLimits needs = kLimits;
  needs.takes_state_input = needs.needs_state_input = true;
  EXPECT_EQ(refusal([](RequestSpec&) {}, needs),
            "state_input: the model needs an input to make its state from");
}

TEST(Requests, ReasonsHaveNamesAndKinds) {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(FinishReason::kInternalError); ++i)
    names.insert(name(static_cast<FinishReason>(i)));
  EXPECT_EQ(names.size(), 10u);
  EXPECT_TRUE(is_complete(FinishReason::kEndToken));
  EXPECT_TRUE(is_complete(FinishReason::kLength));
  EXPECT_FALSE(is_complete(FinishReason::kCancelled));
  EXPECT_FALSE(is_error(FinishReason::kShutdown));
  EXPECT_TRUE(is_error(FinishReason::kNonFinite));
}

}  // namespace
}  // namespace megatron
