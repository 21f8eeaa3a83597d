// Metrics against scikit-learn and SciPy.
#include "megatron/inference/evaluation/classification_metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

const nlohmann::json& metrics_golden() {
  static const nlohmann::json golden =
      nlohmann::json::parse(read_file(MEGATRON_SOURCE_DIR "/tests/golden/encoders/metrics.json"));
  return golden;
}

void expect_metrics(const std::vector<NamedMetric>& metrics, const nlohmann::json& expected) {
  for (const auto& [name, value] : metrics)
    EXPECT_NEAR(value, expected[name].get<double>(), 1e-9) << name;
}

TEST(ClassificationMetrics, OfClasses) {
  for (const auto& golden : metrics_golden()["classes"]) {
    const auto metrics =
        class_metrics(golden["predicted"].get<std::vector<int64_t>>(),
                      golden["labels"].get<std::vector<int64_t>>(), golden["classes"]);
    EXPECT_EQ(metrics.size(), golden.contains("f1") ? 3U : 2U);
    expect_metrics(metrics, golden);
  }
}

TEST(ClassificationMetrics, OfNumbers) {
  for (const auto& golden : metrics_golden()["numbers"])
    expect_metrics(number_metrics(golden["predicted"].get<std::vector<double>>(),
                                  golden["labels"].get<std::vector<double>>()),
                   golden);
  const std::vector<double> equal = {1, 1, 1}, others = {1, 2, 3};
  for (const auto& [name, value] : number_metrics(equal, others))
    EXPECT_TRUE(std::isnan(value)) << name;
}

TEST(ClassificationMetrics, NeedLabels) {
  const std::vector<int64_t> one = {1}, two = {1, 0};
  EXPECT_EQ(error_of([&] { class_metrics({}, {}, 2); }), "there are no labels to compare with");
  EXPECT_EQ(error_of([&] { class_metrics(one, two, 2); }), "there are 1 predictions for 2 labels");
}

}  // namespace
}  // namespace megatron
