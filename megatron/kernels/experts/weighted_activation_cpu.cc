#include <algorithm>
#include <cmath>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/lanes.h"
#include "megatron/kernels/detail/weighted_activation_math.h"
#include "megatron/kernels/experts/weighted_activation.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 512;

// A run of a row: its inputs as Acc, and where its outputs go.
template <class Acc>
struct Run {
  const Acc *x = nullptr, *up = nullptr, *dy = nullptr;
  Acc weight;
};

// Calls f(run of the inputs, first column, columns) along the row.
template <bool Gated, class Acc, class F>
void for_runs(const WeightedActivationArgs& args, int64_t row, F f) {
  Acc x_run[kRun], up_run[kRun], dy_run[kRun];
  const int64_t features = args.features, x_row = row * (Gated ? 2 * features : features);
  Run<Acc> run;
  run.weight = static_cast<const Acc*>(args.weights)[row];
  for (int64_t i = 0; i < features; i += kRun) {
    const int64_t n = std::min(kRun, features - i);
    run.x = load_run(args.dtype, args.x, x_row + i, n, x_run);
    if constexpr (Gated) run.up = load_run(args.dtype, args.x, x_row + features + i, n, up_run);
    if (args.dy != nullptr) run.dy = load_run(args.dtype, args.dy, row * features + i, n, dy_run);
    f(run, i, n);
  }
}

template <class Gate, bool Gated, class Acc>
void forward_row(const WeightedActivationArgs& args, int64_t row) {
  const Acc offset = static_cast<Acc>(args.offset), limit = static_cast<Acc>(args.limit);
  for_runs<Gated, Acc>(args, row, [&](const Run<Acc>& run, int64_t i, int64_t n) {
    Acc y_run[kRun];
    Acc* y = output_run(args.dtype, args.y, row * args.features + i, y_run);
    for (int64_t j = 0; j < n; ++j) {
      if constexpr (Gated) {
        const Acc act = Gate::at(at_most(run.x[j], limit)).act;
        y[j] = act * (within(run.up[j], limit) + offset) * run.weight;
      } else {
        y[j] = Gate::at(run.x[j]).act * run.weight;
      }
    }
    store_run(args.dtype, args.y, row * args.features + i, n, y);
  });
}

template <class Gate, bool Gated, class Acc>
void backward_row(const WeightedActivationArgs& args, int64_t row) {
  const Acc offset = static_cast<Acc>(args.offset), limit = static_cast<Acc>(args.limit);
  const int64_t features = args.features, x_row = row * (Gated ? 2 * features : features);
  Acc dweight = 0;
  float amax = 0.0f;
  // Of what was stored, which is rounded.
  const auto raise = [&](int64_t at, int64_t n) {
    if (args.dx_amax == nullptr) return;
    Acc stored[kRun];
    const Acc* dx = load_run(args.dtype, args.dx, at, n, stored);
    for (int64_t j = 0; j < n; ++j) amax = std::fmax(amax, std::fabs(static_cast<float>(dx[j])));
  };
  for_runs<Gated, Acc>(args, row, [&](const Run<Acc>& run, int64_t i, int64_t n) {
    Acc dx_run[kRun], dup_run[kRun], y_run[kRun], act[kRun];
    Acc* dx = output_run(args.dtype, args.dx, x_row + i, dx_run);
    for (int64_t j = 0; j < n; ++j) {
      const Acc grad = run.dy[j] * run.weight;
      if constexpr (Gated) {
        const auto element = gated_element<Gate>(run.x[j], run.up[j], offset, limit, grad);
        act[j] = element.act;
        dx[j] = element.dgate;
        dup_run[j] = element.dup;
      } else {
        const GateValue<Acc> value = Gate::at(run.x[j]);
        act[j] = value.act;
        dx[j] = grad * value.slope;
      }
    }
    store_run(args.dtype, args.dx, x_row + i, n, dx);
    raise(x_row + i, n);
    if constexpr (Gated) {
      const int64_t at = x_row + features + i;
      Acc* dup = output_run(args.dtype, args.dx, at, y_run);
      std::copy_n(dup_run, n, dup);
      store_run(args.dtype, args.dx, at, n, dup);
      raise(at, n);
    }
    dweight += sum_over<Acc>(n, [&](int64_t j) { return act[j] * run.dy[j]; });
    if (args.y == nullptr) return;
    Acc* y = output_run(args.dtype, args.y, row * features + i, y_run);
    for (int64_t j = 0; j < n; ++j) y[j] = act[j] * run.weight;
    store_run(args.dtype, args.y, row * features + i, n, y);
  });
  static_cast<Acc*>(args.dweights)[row] = dweight;
  if (args.dx_amax != nullptr) args.dx_amax[row] = amax;
}

template <class Gate, bool Gated>
void run_rows(const WeightedActivationArgs& args, bool backward, int64_t begin, int64_t end) {
  with_accumulator(args.dtype, [&](auto acc) {
    using Acc = decltype(acc);
    for (int64_t row = begin; row < end; ++row) {
      if (backward) {
        backward_row<Gate, Gated, Acc>(args, row);
      } else {
        forward_row<Gate, Gated, Acc>(args, row);
      }
    }
  });
}

void run(const WeightedActivationArgs& args, bool backward, int64_t begin, int64_t end) {
  switch (args.kind) {
    case Activation::kGelu:
      return run_rows<GeluGate, false>(args, backward, begin, end);
    case Activation::kGeluTanh:
      return run_rows<GeluTanhGate, false>(args, backward, begin, end);
    case Activation::kRelu:
      return run_rows<ReluGate, false>(args, backward, begin, end);
    case Activation::kSquaredRelu:
      return run_rows<SquaredReluGate, false>(args, backward, begin, end);
    case Activation::kSwiglu:
      return run_rows<SiluGate, true>(args, backward, begin, end);
    case Activation::kGeglu:
      return run_rows<GeluTanhGate, true>(args, backward, begin, end);
    case Activation::kQuickGeglu:
      return run_rows<QuickGeluGate, true>(args, backward, begin, end);
    case Activation::kExactGeglu:
      return run_rows<GeluGate, true>(args, backward, begin, end);
    case Activation::kQuickGelu:
      return run_rows<QuickGeluGate, false>(args, backward, begin, end);
  }
}

}  // namespace

void weighted_activation_forward_cpu(const WeightedActivationArgs& args, int64_t row_begin,
                                     int64_t row_end) {
  run(args, /*backward=*/false, row_begin, row_end);
}
void weighted_activation_backward_cpu(const WeightedActivationArgs& args, int64_t row_begin,
                                      int64_t row_end) {
  run(args, /*backward=*/true, row_begin, row_end);
}

}  // namespace megatron
