#include "megatron/inference/evaluation/classification_metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "megatron/base/check.h"

namespace megatron {
namespace {

void check_sizes(size_t predicted, size_t labels) {
  MEGATRON_CHECK(labels > 0, "there are no labels to compare with");
  MEGATRON_CHECK(predicted == labels, "there are ", predicted, " predictions for ", labels,
                 " labels");
}

double pearson(std::span<const double> a, std::span<const double> b) {
  const auto n = static_cast<double>(a.size());
  const double mean_a = std::accumulate(a.begin(), a.end(), 0.0) / n,
               mean_b = std::accumulate(b.begin(), b.end(), 0.0) / n;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i] - mean_a, y = b[i] - mean_b;
    ab += x * y;
    aa += x * x;
    bb += y * y;
  }
  return ab / std::sqrt(aa * bb);
}

// Ranks from 1; equal numbers share the mean of theirs.
std::vector<double> ranks_of(std::span<const double> numbers) {
  std::vector<size_t> order(numbers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return numbers[a] < numbers[b]; });
  std::vector<double> ranks(numbers.size());
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin;
    while (end < order.size() && numbers[order[end]] == numbers[order[begin]]) ++end;
    for (size_t i = begin; i < end; ++i) ranks[order[i]] = static_cast<double>(begin + 1 + end) / 2;
    begin = end;
  }
  return ranks;
}

}  // namespace

std::vector<NamedMetric> class_metrics(std::span<const int64_t> predicted,
                                       std::span<const int64_t> labels, int64_t classes) {
  check_sizes(predicted.size(), labels.size());
  const auto count = static_cast<size_t>(classes);
  std::vector<double> of_label(count, 0), of_prediction(count, 0), hits(count, 0);
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto label = static_cast<size_t>(labels[i]), guess = static_cast<size_t>(predicted[i]);
    MEGATRON_ASSERT(label < count && guess < count);
    ++of_label[label];
    ++of_prediction[guess];
    if (label == guess) ++hits[label];
  }
  const auto n = static_cast<double>(labels.size());
  const double all_hits = std::accumulate(hits.begin(), hits.end(), 0.0);
  double by_chance = 0, labels_squared = 0, predictions_squared = 0;
  for (size_t k = 0; k < count; ++k) {
    by_chance += of_label[k] * of_prediction[k];
    labels_squared += of_label[k] * of_label[k];
    predictions_squared += of_prediction[k] * of_prediction[k];
  }
  const double spread = std::sqrt(n * n - predictions_squared) * std::sqrt(n * n - labels_squared);
  std::vector<NamedMetric> metrics = {
      {"accuracy", all_hits / n},
      {"matthews", spread == 0 ? 0 : (all_hits * n - by_chance) / spread}};
  if (classes == 2) {
    const double positive = of_label[1] + of_prediction[1];
    metrics.emplace_back("f1", positive == 0 ? 0 : 2 * hits[1] / positive);
  }
  return metrics;
}

std::vector<NamedMetric> number_metrics(std::span<const double> predicted,
                                        std::span<const double> labels) {
  check_sizes(predicted.size(), labels.size());
  return {{"pearson", pearson(predicted, labels)},
          {"spearman", pearson(ranks_of(predicted), ranks_of(labels))}};
}

}  // namespace megatron
