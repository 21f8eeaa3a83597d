#include "megatron/media/detail/resample_weights.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace megatron::media {
namespace {

double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

double bilinear(double x) {
  x = std::abs(x);
  return x < 1 ? 1 - x : 0.0;
}

double hamming(double x) {
  x = std::abs(x);
  if (x == 0) return 1.0;
  if (x >= 1) return 0.0;
  x *= std::numbers::pi;
  // The constants are single precision in Pillow.
  return std::sin(x) / x * (0.54f + 0.46f * std::cos(x));
}

double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

double sinc(double x) {
  if (x == 0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos(double x) { return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0.0; }

struct Filter {
  double (*value)(double);
  double support;
};

Filter filter_of(Resampling filter) {
  switch (filter) {
    case Resampling::kLanczos:
      return {lanczos, 3.0};
    case Resampling::kBilinear:
      return {bilinear, 1.0};
    case Resampling::kBicubic:
      return {bicubic, 2.0};
    case Resampling::kBox:
      return {box, 0.5};
    case Resampling::kHamming:
      return {hamming, 1.0};
  }
  return {};
}

// The filter, stretched over the samples of an axis.
struct Stretched {
  double (*value)(double);
  double scale, width, support;
};

Stretched stretched(int64_t from, int64_t to, Resampling filter) {
  const auto [value, support] = filter_of(filter);
  // Pillow keeps the borders of the input in single precision.
  const double scale = static_cast<double>(static_cast<float>(from)) / static_cast<double>(to);
  const double width = std::max(scale, 1.0);
  return {value, scale, width, support * width};
}

}  // namespace

int64_t most_taps(int64_t from, int64_t to, Resampling filter) {
  return 2 * static_cast<int64_t>(std::ceil(stretched(from, to, filter).support)) + 1;
}

AxisWeights axis_weights(int64_t from, int64_t to, Resampling filter, int64_t begin,
                         int64_t count) {
  const auto [value, scale, width, support] = stretched(from, to, filter);
  AxisWeights out;
  out.most_taps = most_taps(from, to, filter);
  out.weights.resize(static_cast<size_t>(count * out.most_taps));
  std::vector<double> exact;
  for (int64_t i = 0; i < count; ++i) {
    const double centre = (static_cast<double>(begin + i) + 0.5) * scale;
    const auto first = std::max<int64_t>(0, static_cast<int64_t>(centre - support + 0.5));
    const auto last = std::min<int64_t>(from, static_cast<int64_t>(centre + support + 0.5));
    exact.clear();
    double sum = 0;
    for (int64_t j = first; j < last; ++j) {
      exact.push_back(value((static_cast<double>(j) - centre + 0.5) * (1.0 / width)));
      sum += exact.back();
    }
    int32_t* weights = out.weights.data() + i * out.most_taps;
    for (double weight : exact) {
      if (sum != 0) weight /= sum;
      *weights++ = static_cast<int32_t>(weight * (1 << kWeightBits) + (weight < 0 ? -0.5 : 0.5));
    }
    out.first.push_back(static_cast<int32_t>(first));
    out.taps.push_back(static_cast<int32_t>(exact.size()));
  }
  return out;
}

}  // namespace megatron::media
