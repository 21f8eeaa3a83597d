#include "engine_harness.h"

#include <algorithm>

#include "megatron/base/utf8.h"
#include "megatron/scheduling/text_output.h"

namespace megatron {

void EngineHarness::receive() {
  for (Event& event : engine->take_events()) {
    Received& choice = received[{event.request, event.choice}];
    EXPECT_FALSE(choice.finish) << "an event after the end";
    EXPECT_GE(event.time_ns, choice.last_ns);
    EXPECT_TRUE(is_valid_utf8(event.text));
    choice.last_ns = event.time_ns;
    choice.text += event.text;
    choice.tokens.insert(choice.tokens.end(), event.tokens.begin(), event.tokens.end());
    if (!event.prompt_log_probabilities.empty()) {
      EXPECT_TRUE(choice.prompt.empty());
      choice.prompt = std::move(event.prompt_log_probabilities);
    }
    if (!event.finish) continue;
    choice.finish = std::move(event.finish);
    choice.one_version = version_at_submission_[event.request] == engine->stats().weights_version;
    --open;
  }
}

namespace {

// Ids, text and end of a request by itself.
struct Expected {
  AloneOutput alone;
  std::string text;
  FinishReason reason = FinishReason::kLength;
};

Expected expect(const FakeOptions& model, const RequestSpec& spec, int32_t choice,
                const std::vector<int64_t>& versions, const Tokenizer* tokenizer) {
  Expected expected;
  expected.alone = run_alone(model, spec, choice, versions);
  std::vector<int32_t>& ids = expected.alone.ids;
  std::optional<TextOutput> text;
  const auto automaton = std::make_shared<const StopAutomaton>(spec.stop.stop_texts);
  if (tokenizer != nullptr)
    text.emplace(*tokenizer, spec.stop, spec.stop.stop_texts.empty() ? nullptr : automaton);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (std::ranges::count(spec.stop.end_tokens, ids[i]) > 0) {
      expected.reason = FinishReason::kEndToken;
    } else if (std::ranges::count(spec.stop.stop_tokens, ids[i]) > 0) {
      expected.reason = FinishReason::kStopToken;
    } else if (text) {
      expected.text += text->push(ids[i]);
      if (text->match() < 0) continue;
      expected.reason = FinishReason::kStopText;
    } else {
      continue;
    }
    ids.resize(i + 1);
    if (!expected.alone.log_probabilities.empty()) expected.alone.log_probabilities.resize(i + 1);
    expected.alone.finite = true;
  }
  if (!expected.alone.finite) expected.reason = FinishReason::kNonFinite;
  if (text && text->match() < 0) expected.text += text->finish();
  if (text && text->match() >= 0 && is_complete(expected.reason))
    expected.reason = FinishReason::kStopText;
  return expected;
}

}  // namespace

void EngineHarness::check_outputs() const {
  for (const auto& [id, spec] : specs)
    for (int32_t choice = 0; choice < spec.choices; ++choice) {
      const auto found = received.find({id, choice});
      ASSERT_NE(found, received.end()) << static_cast<uint64_t>(id);
      const Received& got = found->second;
      ASSERT_TRUE(got.finish) << static_cast<uint64_t>(id);
      std::vector<int64_t> versions;
      std::vector<int32_t> ids;
      std::vector<PositionLogProbabilities> log_probabilities;
      for (const GeneratedToken& token : got.tokens) {
        versions.push_back(token.weights_version);
        ids.push_back(token.id);
        if (token.log_probabilities) log_probabilities.push_back(*token.log_probabilities);
      }
      ASSERT_TRUE(std::ranges::is_sorted(versions));
      FakeOptions model = model_;
      model.facts.weights_version = version_at_submission_.at(id);
      const Expected expected = expect(model, spec, choice, versions, tokenizer_);
      ASSERT_EQ(got.finish->usage.output_tokens, static_cast<int64_t>(ids.size()));
      ASSERT_EQ(got.finish->usage.prompt_tokens, prompt_positions(spec));
      const FinishReason reason = got.finish->reason;
      if (!is_complete(reason) && reason != FinishReason::kNonFinite) {
        ASSERT_LE(ids.size(), expected.alone.ids.size());
        ASSERT_TRUE(std::equal(ids.begin(), ids.end(), expected.alone.ids.begin()))
            << static_cast<uint64_t>(id);
        continue;
      }
      ASSERT_EQ(ids, expected.alone.ids) << static_cast<uint64_t>(id) << " choice " << choice;
      ASSERT_EQ(reason, expected.reason) << static_cast<uint64_t>(id);
      ASSERT_EQ(got.text, expected.text);
      ASSERT_EQ(log_probabilities, expected.alone.log_probabilities);
      // Log-probabilities of a prompt do not say which weights gave them.
      if (got.one_version)
        ASSERT_EQ(got.prompt, expected.alone.prompt);
      else
        ASSERT_EQ(got.prompt.size(), expected.alone.prompt.size());
    }
}

}  // namespace megatron
