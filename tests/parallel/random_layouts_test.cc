// Random models under random layouts of up to eight ranks: every configuration that `pretrain`
// accepts computes what one rank computes, and `prove` confirms it.
//
//   MEGATRON_RANDOM_LAYOUTS=N  configurations (default 10)
//   MEGATRON_RANDOM_SEED=S     seed of the first one (default 1)
//
// As many with experts follow, from seed kFirstOfExperts + S - 1 on, as many encoder-decoders from
// seed kFirstOfStacks + S - 1 on, proofs of as many in FP8 with scales of blocks from seed
// kFirstOfBlocks + S - 1 on and, if N is given, as many encoders from seed kFirstOfEncoders + S - 1
// on; as many models of letters from seed kFirstOfHybrids + S - 1 on, with retrieval from seed
// kFirstOfRetro + S - 1 on and with images and sounds from seed kFirstOfMimo + S - 1 on. A
// configuration is determined by its seed, which a failure message names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "against_one_rank.h"
#include "drawn_layouts.h"
#include "megatron/base/check.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

constexpr int kSteps = 3;

int64_t number_in_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoll(text);
}

// What a check says, or the exception that ended it: crashes are failures like others.
std::string outcome(const std::function<std::string()>& check) {
  try {
    return check();
  } catch (const std::exception& error) {
    return cat("  threw: ", error.what(), "\n");
  }
}

// How to repeat a check.
std::string again(int64_t seed) {
  int64_t number = seed;
  for (const int64_t first : {kFirstOfExperts, kFirstOfStacks, kFirstOfBlocks, kFirstOfEncoders,
                              kFirstOfHybrids, kFirstOfRetro, kFirstOfMimo})
    if (seed >= first) number = seed - first + 1;
  return cat("again: MEGATRON_RANDOM_SEED=", number, " MEGATRON_RANDOM_LAYOUTS=1, seed ", seed,
             "\n");
}

class RandomLayouts : public testing::TestWithParam<int64_t> {};

TEST_P(RandomLayouts, TrainWhatOneRankTrains) {
  const int64_t seed = GetParam();
  const DrawnLayout drawn = legal_configuration(static_cast<uint64_t>(seed), kMaxRanks);
  SCOPED_TRACE(
      cat(again(seed), drawn.world_size, " ranks: pretrain ", drawn.flags, drawn.precision));
  // Adam's epsilon as in the matrix and in proofs: first steps divide vanishing gradients by little
  // more than it.
  const Arguments arguments = parse_run(drawn.flags + " --adam-eps 1e-3", drawn.world_size);
  EXPECT_EQ(outcome([&] {
              return differences_from_one_rank(arguments, c10::ScalarType::Double, 1e-10, kSteps,
                                               arguments.training.task);
            }),
            "");
}

// No false alarms, in any type.
class ProvedLayouts : public RandomLayouts {};
TEST_P(ProvedLayouts, AreProved) {
  const DrawnLayout drawn = legal_configuration(static_cast<uint64_t>(GetParam()), kMaxRanks);
  SCOPED_TRACE(
      cat(again(GetParam()), drawn.world_size, " ranks: prove ", drawn.flags, drawn.precision));
  RecordProperty("precision", drawn.precision);
  const Arguments whole = parse_run(drawn.flags + drawn.precision, drawn.world_size);
  EXPECT_EQ(
      outcome([&] {
        return failures(prove(find_task(whole), shrink(whole, /*max_axis=*/4).arguments, kSteps));
      }),
      "");
}

// To the bit in the types of the proof, or with narrow states if those are fp32.
TEST_P(RandomLayouts, UpdateAsOneRankUpdates) {
  const DrawnLayout drawn = legal_configuration(static_cast<uint64_t>(GetParam()), kMaxRanks);
  std::string flags = drawn.flags + drawn.precision;
  if (drawn.precision.empty() && flags.find("--optimizer adam") != std::string::npos)
    flags += " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16";
  SCOPED_TRACE(cat(again(GetParam()), drawn.world_size, " ranks: pretrain ", flags));
  const Arguments arguments = parse_run(flags, drawn.world_size);
  EXPECT_EQ(outcome([&] { return failures({prove_updates(find_task(arguments), arguments)}); }),
            "");
}

// What is too large to run here is at least made small: by rules that it then keeps.
TEST_P(RandomLayouts, ShrinkToWhatIsLegal) {
  const DrawnLayout drawn =
      legal_configuration(static_cast<uint64_t>(GetParam()), /*max_ranks=*/4096);
  SCOPED_TRACE(
      cat(again(GetParam()), drawn.world_size, " ranks: prove ", drawn.flags, drawn.precision));
  const Arguments arguments = parse_run(drawn.flags + drawn.precision, drawn.world_size);
  EXPECT_EQ(outcome([&] {
              const Arguments small = shrink(arguments, /*max_axis=*/4).arguments;
              EXPECT_LE(small.parallel.tensor_model_parallel_size, 4);
              EXPECT_LE(small.parallel.context_parallel_size, 4);
              EXPECT_LE(small.data_parallel_size(), 4);
              EXPECT_EQ(small.parallel.pipeline_model_parallel_size,
                        arguments.parallel.pipeline_model_parallel_size);
              return std::string();
            }),
            "");
}

const int64_t kFirstSeed = number_in_environment("MEGATRON_RANDOM_SEED", 1),
              kSeeds = number_in_environment("MEGATRON_RANDOM_LAYOUTS", 10);

// How many proofs of these seeds run in which type: at least a quarter each in fp32, bf16 and FP8.
TEST(DrawnTypes, AreDrawnAboutAsOften) {
  constexpr int64_t kLeast = 200;
  int64_t fp32 = 0, bf16 = 0, fp16 = 0, fp8 = 0;
  for (int64_t seed = kFirstSeed; seed < kFirstSeed + std::max(kSeeds, kLeast); ++seed) {
    const std::string flags = legal_configuration(static_cast<uint64_t>(seed), kMaxRanks).precision;
    const auto has = [&](const char* flag) { return flags.find(flag) != std::string::npos; };
    ++(has("--fp8-") ? fp8 : has("--bf16") ? bf16 : has("--fp16") ? fp16 : fp32);
  }
  std::printf("fp32 %d, bf16 %d, FP8 %d, fp16 %d\n", static_cast<int>(fp32), static_cast<int>(bf16),
              static_cast<int>(fp8), static_cast<int>(fp16));
  const auto all = static_cast<double>(fp32 + bf16 + fp16 + fp8);
  for (const int64_t count : {fp32, bf16, fp8}) EXPECT_GE(static_cast<double>(count), 0.25 * all);
}

TEST(DrawnTypes, StacksAreDrawnOverContextRanks) {
  int64_t over_context = 0;
  for (int64_t seed = kFirstOfStacks; seed < kFirstOfStacks + 100; ++seed)
    over_context += legal_configuration(static_cast<uint64_t>(seed), kMaxRanks)
                        .flags.find("--context-parallel-size") != std::string::npos;
  EXPECT_GE(over_context, 20);
}

auto seeds(int64_t first, int64_t count) {
  return testing::Range(first + kFirstSeed - 1, first + kFirstSeed - 1 + count);
}
std::string seed_name(const testing::TestParamInfo<int64_t>& info) { return cat(info.param); }

INSTANTIATE_TEST_SUITE_P(Seeds, RandomLayouts, seeds(1, kSeeds), seed_name);
// Proofs take most of the time: those of three with experts are part of `make test`, three
// encoder-decoders, models of letters, and with retrieval and images (no proofs of these), and none
// with blocks and of the seeds of encoders.
const bool kMany = std::getenv("MEGATRON_RANDOM_LAYOUTS") != nullptr;
const int64_t kFew = kMany ? kSeeds : 3, kNoneOrAll = kMany ? kSeeds : 0;
INSTANTIATE_TEST_SUITE_P(Seeds, ProvedLayouts, seeds(1, kSeeds), seed_name);
INSTANTIATE_TEST_SUITE_P(Experts, ProvedLayouts, seeds(kFirstOfExperts, kFew), seed_name);
INSTANTIATE_TEST_SUITE_P(Experts, RandomLayouts, seeds(kFirstOfExperts, kSeeds), seed_name);
INSTANTIATE_TEST_SUITE_P(Stacks, RandomLayouts, seeds(kFirstOfStacks, kFew), seed_name);
INSTANTIATE_TEST_SUITE_P(Blocks, ProvedLayouts, seeds(kFirstOfBlocks, kNoneOrAll), seed_name);
INSTANTIATE_TEST_SUITE_P(Encoders, RandomLayouts, seeds(kFirstOfEncoders, kNoneOrAll), seed_name);
INSTANTIATE_TEST_SUITE_P(Encoders, ProvedLayouts, seeds(kFirstOfEncoders, kNoneOrAll), seed_name);
INSTANTIATE_TEST_SUITE_P(Hybrids, RandomLayouts, seeds(kFirstOfHybrids, kFew), seed_name);
INSTANTIATE_TEST_SUITE_P(Mimo, RandomLayouts, seeds(kFirstOfMimo, kFew), seed_name);
INSTANTIATE_TEST_SUITE_P(Mimo, ProvedLayouts, seeds(kFirstOfMimo, kNoneOrAll), seed_name);
INSTANTIATE_TEST_SUITE_P(Retro, RandomLayouts, seeds(kFirstOfRetro, kFew), seed_name);
INSTANTIATE_TEST_SUITE_P(Retro, ProvedLayouts, seeds(kFirstOfRetro, kNoneOrAll), seed_name);
INSTANTIATE_TEST_SUITE_P(Hybrids, ProvedLayouts, seeds(kFirstOfHybrids, kFew), seed_name);
INSTANTIATE_TEST_SUITE_P(Stacks, ProvedLayouts, seeds(kFirstOfStacks, kFew), seed_name);

}  // namespace
}  // namespace megatron
