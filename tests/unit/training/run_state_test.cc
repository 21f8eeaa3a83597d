#include "megatron/training/run_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "megatron/base/check.h"

namespace megatron {
namespace {

RunState example_state() {
  RunState state;
  state.iteration = 7;
  state.consumed_train_samples = 28;
  state.consumed_valid_samples = {4, 8};
  state.data_target = 100;
  state.data_fingerprint = "abc";
  state.data_description = R"({"seed":1,"split":"9,1"})";
  state.tokenizer_fingerprint = "tok";
  state.task = "gpt";
  StepState step;
  step.num_steps = 24;
  step.num_skipped = 1;
  step.loss_scale = 65536;
  step.grad_norm = std::numeric_limits<double>::quiet_NaN();
  state.step = step;
  state.schedule = ParameterSchedule{};
  state.schedule->max_lr[0] = 0.1;
  return state;
}

TEST(RunState, RoundTrip) {
  const RunState state = run_state_from_json(run_state_to_json(example_state()), "x");
  EXPECT_EQ(run_state_to_json(state), run_state_to_json(example_state()));
  EXPECT_EQ(state.iteration, 7);
  EXPECT_EQ(state.consumed_valid_samples, (std::vector<int64_t>{4, 8}));
  EXPECT_EQ(state.step->num_steps, 24);
  EXPECT_EQ(state.schedule->max_lr[0], 0.1);
  EXPECT_TRUE(std::isnan(state.step->grad_norm));
}

TEST(RunState, WithoutOptimizer) {
  RunState state = example_state();
  state.step.reset();
  state.schedule.reset();
  EXPECT_FALSE(run_state_from_json(run_state_to_json(state), "x").step);
}

TEST(RunState, NamesWhatIsMissing) {
  for (const char* text : {"{}", "no json", R"({"iteration": "seven"})"}) {
    try {
      run_state_from_json(text, "/ckpt/iter_0000007");
      FAIL() << text;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  testing::HasSubstr("/ckpt/iter_0000007: the state of the run cannot be read: "));
    }
  }
}

TEST(RunState, DifferencesAreNamed) {
  EXPECT_EQ(describe_difference(R"({"a":1,"b":[2],"c":3})", R"({"a":1,"b":[3],"d":4})"),
            "b is [2], was [3]; c is 3, was absent; d is absent, was 4");
  EXPECT_EQ(describe_difference("x", "{}"), "the descriptions cannot be compared");
  // Keys of keys, elements of long arrays, and what another file says in other words.
  EXPECT_EQ(describe_difference(R"({"a":{"b":{"c":1,"d":2},"e":[1]}})",
                                R"({"a":{"e":[1,2],"b":{"d":3,"c":1}}})"),
            "a.b.d is 2, was 3; a.e is [1], was [1,2]");
  const std::string hash(200, '0');
  EXPECT_EQ(describe_difference(cat(R"({"f":["a )", hash, R"(","b 1"]})"),
                                cat(R"({"f":["a )", hash, R"(","b 2"]})")),
            R"(f[1] is "b 1", was "b 2")");
  EXPECT_EQ(describe_difference(R"({"a":{"b":1,"c":2}})", R"({"a":{"c":2,"b":1}})"),
            "no value differs, only how a file that says them is written");
}

// A checkpoint of a version before has the hash of what is spelled out today.
TEST(RunState, AStoredHashIsNamedAsOne) {
  EXPECT_EQ(describe_difference(R"({"index":{"files":[]}})", R"({"index":"abc"})"),
            "index differs from what the checkpoint, of a version before, has only as the hash "
            "\"abc\"");
}

}  // namespace
}  // namespace megatron
