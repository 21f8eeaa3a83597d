// The random generators for the order of data, against NumPy and PyTorch; and the helpers of these
// tests.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "megatron/datasets/detail/numpy_random.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/sampler.h"
#include "testing.h"

namespace megatron::testing_datasets {

TempFolder::TempFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "megatron-datasets-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
  path_ = name;
}

TempFolder::~TempFolder() { std::filesystem::remove_all(path_); }

std::vector<std::string> TempFolder::files() const {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path_))
    if (entry.is_regular_file())
      out.push_back(std::filesystem::relative(entry.path(), path_).string());
  std::sort(out.begin(), out.end());
  return out;
}

const nlohmann::json& goldens() {
  static const nlohmann::json root = nlohmann::json::parse(
      std::ifstream(MEGATRON_SOURCE_DIR "/tests/golden/datasets/goldens.json"));
  return root;
}

std::string digest(const std::vector<int64_t>& values) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const int64_t value : values)
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3ULL;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

void expect_entry(const std::vector<int64_t>& values, const nlohmann::json& entry) {
  if (entry.contains("values")) {
    EXPECT_EQ(values, entry["values"].get<std::vector<int64_t>>());
    return;
  }
  ASSERT_EQ(values.size(), entry["size"].get<size_t>());
  const auto head = entry["head"].get<std::vector<int64_t>>(),
             tail = entry["tail"].get<std::vector<int64_t>>();
  EXPECT_TRUE(std::equal(head.begin(), head.end(), values.begin()));
  EXPECT_TRUE(std::equal(tail.rbegin(), tail.rend(), values.rbegin()));
  EXPECT_EQ(digest(values), entry["digest"].get<std::string>());
}

std::vector<int32_t> golden_lengths(const nlohmann::json& spec) {
  NumpyRandom random(spec["lengths_seed"]);
  std::vector<int32_t> out(spec["num_sequences"].get<size_t>());
  for (int32_t& length : out)
    length = static_cast<int32_t>(random.next_u32() % spec["lengths_mod"].get<uint32_t>()) +
             spec["lengths_min"].get<int>();
  return out;
}

void write_dataset(const std::string& prefix, const std::vector<int32_t>& lengths,
                   const std::function<int64_t(int64_t, int64_t)>& token) {
  IndexedDatasetBuilder builder(prefix, IndexedType::kUInt16);
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::vector<int64_t> tokens(lengths[i]);
    for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = token(i, t);
    builder.add_sequence(tokens);
    builder.end_document();
  }
  builder.finish();
}

namespace {

TEST(NumpyRandom, EqualsPublishedShuffles) {
  for (const auto& [seed, expected] : std::vector<std::pair<uint32_t, std::vector<int>>>{
           {42, {8, 1, 5, 0, 7, 2, 9, 4, 3, 6}}, {1234, {7, 2, 9, 1, 0, 8, 4, 5, 6, 3}}}) {
    std::vector<int> values(10);
    std::iota(values.begin(), values.end(), 0);
    NumpyRandom(seed).shuffle(std::span(values));
    EXPECT_EQ(values, expected);
  }
}

TEST(NumpyRandom, EqualsNumpyOnGoldens) {
  for (const auto& spec : goldens()["random"]["shuffle"]) {
    std::vector<int64_t> values(spec["n"].get<size_t>());
    std::iota(values.begin(), values.end(), 0);
    NumpyRandom(spec["seed"]).shuffle(std::span(values));
    expect_entry(values, spec["result"]);
  }
  NumpyRandom random(777);
  for (const auto& expected : goldens()["random"]["uniform"])
    EXPECT_EQ(random.uniform(), std::strtod(expected.get<std::string>().c_str(), nullptr));
  NumpyRandom wide(8);
  for (const auto& expected : goldens()["random"]["interval64"])
    EXPECT_EQ(wide.bounded((uint64_t{1} << 40) - 1), expected.get<uint64_t>());
}

TEST(NumpyRandom, BoundedStaysInRange) {
  NumpyRandom random(3);
  EXPECT_EQ(random.bounded(0), 0u);
  for (int i = 0; i < 1000; ++i) EXPECT_LE(random.bounded(i), static_cast<uint64_t>(i));
}

TEST(TorchRandperm, EqualsTorchOnGoldens) {
  for (const auto& spec : goldens()["random"]["torch_randperm"])
    expect_entry(torch_randperm(spec["n"], spec["seed"].get<uint64_t>()), spec["result"]);
}

TEST(Sampler, CyclicEqualsTorchOnGoldens) {
  for (const auto& spec : goldens()["cyclic"]) {
    SamplerConfig config{.type = DataloaderType::kCyclic,
                         .total_samples = spec["total"],
                         .micro_batch_size = spec["mbs"],
                         .data_parallel_rank = spec["rank"],
                         .data_parallel_size = spec["ranks"],
                         .data_sharding = spec["sharding"]};
    Sampler sampler(config);
    std::vector<int64_t> ids;
    ASSERT_TRUE(sampler.micro_batch(spec["consumed"], ids));
    EXPECT_EQ(ids, spec["ids"].get<std::vector<int64_t>>()) << spec.dump();
  }
}

TEST(Sampler, CyclicRanksCoverAnEpochOnce) {
  for (const bool sharding : {true, false}) {
    std::vector<int64_t> seen;
    for (int rank = 0; rank < 3; ++rank) {
      Sampler sampler({.type = DataloaderType::kCyclic,
                       .total_samples = 50,
                       .micro_batch_size = 2,
                       .data_parallel_rank = rank,
                       .data_parallel_size = 3,
                       .data_sharding = sharding});
      std::vector<int64_t> ids;
      for (int64_t step = 0; step < 8; ++step) {
        ASSERT_TRUE(sampler.micro_batch(step * 6, ids));
        seen.insert(seen.end(), ids.begin(), ids.end());
      }
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen.size(), 48u);
    EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end())
        << "a sample was read twice";
  }
}

TEST(Sampler, SingleGivesConsecutiveSlices) {
  Sampler sampler({.total_samples = 13,
                   .micro_batch_size = 2,
                   .data_parallel_rank = 1,
                   .data_parallel_size = 3});
  std::vector<int64_t> ids;
  ASSERT_TRUE(sampler.micro_batch(0, ids));
  EXPECT_EQ(ids, (std::vector<int64_t>{2, 3}));
  ASSERT_TRUE(sampler.micro_batch(6, ids));
  EXPECT_EQ(ids, (std::vector<int64_t>{8, 9}));
  EXPECT_FALSE(sampler.micro_batch(12, ids)) << "an incomplete tail is dropped";
}

TEST(Sampler, SinglePadsTheLastBatchWhenAsked) {
  SamplerConfig config{
      .total_samples = 13, .micro_batch_size = 2, .data_parallel_size = 3, .drop_last = false};
  std::vector<int64_t> ids;
  Sampler first(config);
  ASSERT_TRUE(first.micro_batch(12, ids));
  EXPECT_EQ(ids, (std::vector<int64_t>{12, kPaddingSample}));
  config.data_parallel_rank = 2;
  ASSERT_TRUE(Sampler(config).micro_batch(12, ids));
  EXPECT_EQ(ids, (std::vector<int64_t>{kPaddingSample, kPaddingSample}));
  EXPECT_FALSE(first.micro_batch(18, ids));
}

TEST(Sampler, RefusesTooFewSamplesAndForeignPositions) {
  EXPECT_THAT(
      error_of(
          [] { Sampler({.total_samples = 5, .micro_batch_size = 2, .data_parallel_size = 3}); }),
      ::testing::HasSubstr(
          "the dataset has 5 samples, one micro-batch on each of 3 data-parallel ranks takes 6"));
  Sampler sampler({.type = DataloaderType::kCyclic,
                   .total_samples = 20,
                   .micro_batch_size = 2,
                   .data_parallel_size = 2});
  std::vector<int64_t> ids;
  EXPECT_THAT(error_of([&] { sampler.micro_batch(22, ids); }),
              ::testing::HasSubstr("22 consumed samples are 2 in epoch 1, expected a multiple of"));
}

}  // namespace
}  // namespace megatron::testing_datasets
