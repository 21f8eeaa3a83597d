// Metrics of written texts against rouge-score and SQuAD's.
#include "megatron/inference/evaluation/text_metrics.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

TEST(TextMetrics, AreThoseOfRougeScoreAndSquad) {
  const auto cases = nlohmann::json::parse(
      read_file(MEGATRON_SOURCE_DIR "/tests/golden/encoders/text_metrics.json"));
  std::vector<std::string> written, expected;
  std::map<std::string, double> sums;
  for (const auto& golden : cases) {
    written.push_back(golden["written"]);
    expected.push_back(golden["expected"]);
    const auto metrics =
        text_metrics(std::span(&written.back(), 1), std::span(&expected.back(), 1));
    ASSERT_EQ(metrics.size(), 5U);
    for (const auto& [name, value] : metrics) {
      EXPECT_NEAR(value, golden[name].get<double>(), 1e-12)
          << name << " of \"" << written.back() << "\" for \"" << expected.back() << '"';
      sums[name] += golden[name].get<double>();
    }
  }
  for (const auto& [name, value] : text_metrics(written, expected))
    EXPECT_NEAR(value, sums[name] / static_cast<double>(cases.size()), 1e-12) << name;
}

TEST(TextMetrics, NeedTexts) {
  const std::vector<std::string> one = {"a"}, two = {"a", "b"};
  EXPECT_EQ(error_of([&] { text_metrics({}, {}); }), "there are no texts to compare with");
  EXPECT_EQ(error_of([&] { text_metrics(one, two); }),
            "there are 1 texts for 2 that were asked for");
}

}  // namespace
}  // namespace megatron
