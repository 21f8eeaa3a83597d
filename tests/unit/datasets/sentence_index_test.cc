// The order of sentence-level samples against Megatron-LM's helpers, and each of its rules.
#include "megatron/datasets/masked/sentence_index.h"

#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

nlohmann::json golden(const std::string& name) {
  return nlohmann::json::parse(
      std::ifstream(MEGATRON_SOURCE_DIR "/tests/golden/masked/" + name + ".json"));
}

struct Documents {
  Longs documents;
  std::vector<int32_t> lengths;

  SentenceIndexInputs inputs(int64_t max_length, int64_t min_sentences) const {
    SentenceIndexInputs in;
    in.documents = documents;
    in.lengths = lengths;
    in.max_length = max_length;
    in.min_sentences = min_sentences;
    return in;
  }
};

std::vector<Longs> rows_of(const SentenceRowArray& array) {
  std::vector<Longs> rows(static_cast<size_t>(array.size()));
  for (size_t i = 0; i < rows.size(); ++i)
    for (size_t k = 0; k < static_cast<size_t>(array.width); ++k)
      rows[i].push_back(array.narrow[i * static_cast<size_t>(array.width) + k]);
  return rows;
}

std::vector<Longs> sorted_rows(const SentenceIndexInputs& in) {
  std::vector<Longs> rows = rows_of(build_sentence_index(in).rows);
  std::sort(rows.begin(), rows.end());
  return rows;
}

TEST(SentenceIndex, EqualsMegatronOnGoldens) {
  for (const auto& spec : golden("mapping")) {
    const Documents data{spec["docs"], spec["sizes"]};
    SentenceIndexInputs in = data.inputs(spec["max_length"], spec["min_sentences"]);
    in.num_samples = spec["max_samples"].get<int64_t>();
    in.max_epochs = spec["epochs"];
    in.short_probability = spec["short_prob"];
    in.seed = spec["seed"];
    const SentenceIndex index = build_sentence_index(in);
    EXPECT_FALSE(index.rows.is_wide);
    EXPECT_EQ(rows_of(index.rows), spec["rows"].get<std::vector<Longs>>()) << spec.dump();
  }
}

TEST(SentenceIndex, BlocksEqualMegatronOnGoldens) {
  for (const auto& spec : golden("blocks")) {
    const Documents data{spec["docs"], spec["sizes"]};
    SentenceIndexInputs in = data.inputs(spec["max_length"], 1);
    in.num_samples = spec["max_samples"].get<int64_t>();
    in.max_epochs = spec["epochs"];
    in.seed = spec["seed"];
    const auto titles = spec["titles"].get<std::vector<int32_t>>();
    EXPECT_EQ(rows_of(build_blocks_index(in, titles, spec["one_sentence"])),
              spec["rows"].get<std::vector<Longs>>())
        << spec.dump();
  }
}

TEST(SentenceIndex, NeverLeavesASingleSentenceOver) {
  const Documents data{{0, 3, 7}, {9, 9, 1, 9, 9, 9, 9}};
  EXPECT_EQ(sorted_rows(data.inputs(8, 2)), (std::vector<Longs>{{0, 3, 8}, {3, 5, 8}, {5, 7, 8}}));
  EXPECT_EQ(sorted_rows(data.inputs(8, 1)),
            (std::vector<Longs>{{0, 1, 8}, {1, 3, 8}, {3, 4, 8}, {4, 5, 8}, {5, 7, 8}}));
}

TEST(SentenceIndex, LongSentencesExcludeDocumentsOfSeveral) {
  const Documents data{{0, 1, 3, 5, 5}, {600, 513, 2, 512, 2}};
  const SentenceIndex index = build_sentence_index(data.inputs(100, 1));
  std::vector<Longs> rows = rows_of(index.rows);
  std::sort(rows.begin(), rows.end());
  EXPECT_EQ(rows, (std::vector<Longs>{{0, 1, 100}, {3, 5, 100}}));
  EXPECT_EQ(index.counts.documents, 4);
  EXPECT_EQ(index.counts.with_long_sentence, 1);
  EXPECT_EQ(index.counts.too_few_sentences, 1) << "the empty document";
}

TEST(SentenceIndex, AddsWholeEpochsUpToTheTarget) {
  const Documents data{{0, 2, 4, 6}, {5, 5, 5, 5, 5, 5}};
  SentenceIndexInputs in = data.inputs(100, 2);
  EXPECT_EQ(build_sentence_index(in).rows.size(), 3) << "one epoch without a target";
  for (const auto& [samples, rows] : {std::pair{0, 0}, {1, 3}, {3, 3}, {4, 6}, {7, 9}}) {
    in.num_samples = samples;
    EXPECT_EQ(build_sentence_index(in).rows.size(), rows) << samples;
  }
}

TEST(SentenceIndex, EndsWhereNoDocumentGivesARow) {
  const Documents data{{0, 1, 3}, {5, 600, 3}};
  SentenceIndexInputs in = data.inputs(100, 2);
  in.num_samples = 10;
  const SentenceIndex index = build_sentence_index(in);
  EXPECT_EQ(index.rows.size(), 0);
  EXPECT_EQ(index.counts.with_long_sentence, 1);
  EXPECT_EQ(index.counts.too_few_sentences, 1);
  in.documents = in.documents.first(1);
  EXPECT_EQ(build_sentence_index(in).rows.size(), 0);
}

TEST(SentenceIndex, RefusesSeedsThatDoNotFit) {
  const Documents data{{0, 2}, {5, 5}};
  SentenceIndexInputs in = data.inputs(100, 1);
  for (const int64_t seed : {int64_t{0}, int64_t{-3}, int64_t{2147483647}, int64_t{1} << 32}) {
    in.seed = seed;
    EXPECT_THAT(
        error_of([&] { build_sentence_index(in); }),
        HasSubstr(cat("--seed is ", seed, ", the order of sentences needs 1 to 2147483646")));
  }
  in.seed = kMaxSentenceSeed;
  EXPECT_EQ(build_sentence_index(in).rows.size(), 1);
}

// 50 million sentences, next to build_mapping of megatron-core. MEGATRON_CORE_PYTHON: a Python that
// imports it. The best of five runs each, in turn.
TEST(SentenceIndex, IsBuiltFasterThanMegatron) {
  const char* python = std::getenv("MEGATRON_CORE_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "MEGATRON_CORE_PYTHON is not set";
  Documents data;
  std::mt19937 random(3);
  data.lengths.resize(50'000'000);
  for (int32_t& length : data.lengths) length = 5 + static_cast<int32_t>(random() % 45);
  const auto count = static_cast<int64_t>(data.lengths.size());
  data.documents = {0};
  while (data.documents.back() < count)
    data.documents.push_back(std::min<int64_t>(count, data.documents.back() + 1 + random() % 40));
  TempFolder folder;
  const auto write = [&](const char* name, const void* bytes, size_t size) {
    std::ofstream(folder / name, std::ios::binary)
        .write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  };
  write("lengths", data.lengths.data(), data.lengths.size() * 4);
  write("documents", data.documents.data(), data.documents.size() * 8);
  std::ofstream(folder / "peer.py") << R"(
import sys, time, numpy
sys.path.insert(0, sys.argv[2])
import helpers_cpp
lengths = numpy.fromfile(sys.argv[1] + "/lengths", numpy.int32)
documents = numpy.fromfile(sys.argv[1] + "/documents", numpy.int64)
start = time.monotonic()
rows = helpers_cpp.build_mapping(documents, lengths, 1, 1 << 40, 509, 0.1, 1234, False, 2)
print(time.monotonic() - start, len(rows))
)";
  const std::string command =
      cat(python, " ", folder / "peer.py", " ", folder.path(), " $(", python,
          " -c 'import importlib.util as u; print(u.find_spec(\"megatron.core\")"
          ".submodule_search_locations[0] + \"/datasets\")')");
  SentenceIndexInputs in = data.inputs(509, 2);
  in.num_samples = 1;
  in.short_probability = 0.1;
  double ours = 1e9, theirs = 1e9;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t rows = build_sentence_index(in).rows.size();
    ours = std::min(
        ours, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    FILE* peer = ::popen(command.c_str(), "r");
    double seconds = 0;
    long their_rows = 0;
    ASSERT_EQ(std::fscanf(peer, "%lf %ld", &seconds, &their_rows), 2);
    ASSERT_EQ(::pclose(peer), 0);
    EXPECT_EQ(rows, their_rows);
    theirs = std::min(theirs, seconds);
  }
  std::printf("time over that of build_mapping: %.2f\n", ours / theirs);
  EXPECT_LE(ours, 0.75 * theirs);
}

}  // namespace
}  // namespace megatron::testing_datasets
