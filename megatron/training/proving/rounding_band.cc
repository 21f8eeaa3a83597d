#include "megatron/training/proving/rounding_band.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

// Limits. A bias below kSystematic of the type's precision is rounding, however constant: sums in
// another order may round in a preferred direction.
constexpr double kSystematic = 0.25, kLeastSystematic = 1e-6;
constexpr double kNoise = 2, kNoiseOfAll = 1.25;
// The noise of few steps varies: beyond its limit by as many standard errors.
constexpr double kNoiseErrors = 3;
// The error that is to be seen, and the standard errors by which it exceeds the limit then.
constexpr double kVisible = 0.01;
constexpr double kPower = 4;

// Machine epsilon of the type of the activations.
double precision(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return 0x1p-8;
    case at::kHalf:
      return 0x1p-11;
    case at::kFloat:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

double product(const at::Tensor& a, const at::Tensor& b) { return (a * b).sum().item<double>(); }

// The slope b of x = b y through one pair per step; its standard error by leaving out each step.
class Slope {
 public:
  void add(double x, double y) { pairs_.emplace_back(x, y); }
  double value() const {
    double xs = 0, ys = 0;
    for (const auto& [x, y] : pairs_) xs += x, ys += y;
    return ys == 0 ? 0 : xs / ys;
  }
  // Infinite where nothing is to be scaled, or in one step alone
  double standard_error() const {
    const double slope = value(), n = static_cast<double>(pairs_.size());
    double squares = 0, ys = 0;
    for (const auto& [x, y] : pairs_) ys += y;
    for (const auto& [x, y] : pairs_) {
      if (ys == 0 || ys == y) return HUGE_VAL;
      squares += std::pow((x - slope * y) / (ys - y), 2);
    }
    return std::sqrt(squares * (n - 1) / n);
  }
  // The same pairs, divided so that a step with a much larger gradient does not decide alone.
  Slope balanced() const {
    std::vector<double> sizes;
    for (const auto& [x, y] : pairs_)
      if (y != 0) sizes.push_back(std::abs(y));
    if (sizes.empty()) return *this;
    const auto middle = sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2);
    std::nth_element(sizes.begin(), middle, sizes.end());
    Slope out;
    for (const auto& [x, y] : pairs_)
      out.add(x / (std::abs(y) + *middle), y / (std::abs(y) + *middle));
    return out;
  }

 private:
  std::vector<std::pair<double, double>> pairs_;
};

struct Squares {
  double layout = 0, serial = 0;  // of the distances to the exact gradients
  double exact = 0;               // of those
  void add(const at::Tensor& l, const at::Tensor& s, const at::Tensor& e, double scale) {
    layout += (l - e).square().sum().item<double>() * scale;
    serial += (s - e).square().sum().item<double>() * scale;
    exact += product(e, e) * scale;
  }
  void add(const Squares& other) {
    layout += other.layout;
    serial += other.serial;
    exact += other.exact;
  }
};

double norm_of_all(const LogicalTensors& tensors) {
  double all = 0;
  for (const auto& [name, tensor] : tensors)
    all = std::hypot(all, at::linalg_vector_norm(tensor, 2).item<double>());
  return all;
}

// Collects comparisons over the steps of three traces.
class Rounding {
 public:
  Rounding(const TrainingTrace& layout, const TrainingTrace& serial, const TrainingTrace& exact,
           const RoundingOptions& options)
      : layout_(layout),
        serial_(serial),
        exact_(exact),
        systematic_(std::max(kLeastSystematic, kSystematic * precision(options.dtype))) {
    const size_t steps = exact.steps.size();
    MEGATRON_ASSERT(steps > 1 && layout.steps.size() == steps && serial.steps.size() == steps);
    for (const TracedStep& step : exact.steps) sizes_.push_back(norm_of_all(step.grads));
    of_step_.resize(steps);
  }

  void compare_number(const std::string& name) {
    const TracedNumber& first = exact_.steps.front().numbers.at(name);
    Slope bias;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const double l = layout_.steps[i].number(name), s = serial_.steps[i].number(name);
      bias.add(l - s, exact_.steps[i].number(name));
      if (first.exact) add(first.quantity, i + 1, name, std::abs(l - s), 0);
    }
    if (!first.exact) add_bias(first.quantity, name, bias);
  }

  void compare_gradient(const std::string& name) {
    Slope bias, ratio;
    Squares squares;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const at::Tensor &e = exact_.steps[i].grads.at(name), &s = serial_.steps[i].grads.at(name);
      const auto found = layout_.steps[i].grads.find(name);
      if (found == layout_.steps[i].grads.end() || found->second.sizes() != e.sizes())
        return add(Quantity::kGradients, i + 1, cat("gradient of ", name, " is missing"), 1, 0);
      if (sizes_[i] == 0) continue;  // no token of the step has weight
      bias.add(product(found->second - s, e), product(e, e));
      Squares of_step;
      of_step.add(found->second, s, e, 1 / (sizes_[i] * sizes_[i]));
      squares.add(of_step);
      ratio.add(of_step.layout, of_step.serial);
      of_step_[i].add(of_step);
    }
    add_bias(Quantity::kGradients, "gradient of " + name, bias);
    // Where nothing but rounding is left, its amount depends on the order of sums.
    if (squares.exact > squares.serial) add_noise("gradient of " + name, squares, ratio, kNoise);
  }

  RoundingComparison take() {
    Squares all;
    Slope ratio;
    for (const Squares& step : of_step_) all.add(step), ratio.add(step.layout, step.serial);
    add_noise("gradients", all, ratio, kNoiseOfAll);
    return std::move(out_);
  }

 private:
  void add(Quantity quantity, size_t step, const std::string& name, double difference,
           double allowed) {
    out_.comparisons.push_back({quantity, static_cast<int>(step),
                                step > 0 ? cat("step ", step, " ", name) : name, difference,
                                allowed});
  }
  void add_bias(Quantity quantity, const std::string& name, const Slope& of_steps) {
    const Slope bias = of_steps.balanced();
    const double error = bias.standard_error();
    add(quantity, 0, "bias of the " + name, std::abs(bias.value()),
        systematic_ + standard_errors(sizes_.size()) * error);
    const double visible = systematic_ + (standard_errors(sizes_.size()) + kPower) * error;
    if (visible > kVisible) out_.hidden.push_back({name, visible});
  }
  // `ratio`: of the squares of each step. A step whose rounding crosses a kink, as of a ReLU, may
  // have most of the noise of all.
  void add_noise(const std::string& name, const Squares& squares, const Slope& ratio,
                 double limit) {
    const double error = ratio.standard_error();  // infinite: one step alone has any noise
    if (std::isfinite(error)) limit = std::sqrt(limit * limit + kNoiseErrors * error);
    // Layouts that round nothing differently
    const bool same = squares.layout == squares.serial;
    add(Quantity::kGradients, 0, "noise of the " + name,
        same ? 1 : std::sqrt(squares.layout / squares.serial), limit);
  }

  const TrainingTrace &layout_, &serial_, &exact_;
  const double systematic_;
  std::vector<double> sizes_;     // of all gradients of a step
  std::vector<Squares> of_step_;  // over all gradients
  RoundingComparison out_;
};

}  // namespace

// Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5
double standard_errors(size_t steps) {
  const double z = 5.32;  // of the normal distribution
  const double z2 = z * z, n = static_cast<double>(steps) - 1;
  return z + z * (z2 + 1) / (4 * n) + z * ((5 * z2 + 16) * z2 + 3) / (96 * n * n) +
         z * (((3 * z2 + 19) * z2 + 17) * z2 - 15) / (384 * n * n * n);
}

RoundingComparison compare_rounding(const TrainingTrace& layout, const TrainingTrace& serial,
                                    const TrainingTrace& exact, const RoundingOptions& options) {
  Rounding rounding(layout, serial, exact, options);
  for (const auto& [name, number] : exact.steps.front().numbers) rounding.compare_number(name);
  for (const auto& [name, grad] : exact.steps.front().grads) rounding.compare_gradient(name);
  RoundingComparison out = rounding.take();
  if (!options.one_order) return out;
  TrainingTrace layout_states, serial_states;
  layout_states.states = layout.states;
  serial_states.states = serial.states;
  for (Comparison& state : compare_traces(layout_states, serial_states, 0))
    out.comparisons.push_back(std::move(state));
  return out;
}

}  // namespace megatron
