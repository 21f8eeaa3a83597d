// How well predictions meet labels: the numbers that GLUE reports, as scikit-learn and SciPy
// compute them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace megatron {

using NamedMetric = std::pair<std::string, double>;

// accuracy, matthews (the correlation coefficient of Matthews), and with two classes f1 of class 1.
// Throws Error for no labels or another number of predictions.
std::vector<NamedMetric> class_metrics(std::span<const int64_t> predicted,
                                       std::span<const int64_t> labels, int64_t classes);

// pearson, spearman: correlations, NaN where all numbers are equal. Throws as class_metrics().
std::vector<NamedMetric> number_metrics(std::span<const double> predicted,
                                        std::span<const double> labels);

}  // namespace megatron
