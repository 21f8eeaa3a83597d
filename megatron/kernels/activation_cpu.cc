#include <algorithm>

#include "megatron/kernels/activation.h"
#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/amax_cpu.h"
#include "megatron/kernels/detail/block_io.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 512;

template <class Gate, class Acc>
void gated_forward(const ActivationArgs& args, int64_t row) {
  Acc gate_run[kRun], up_run[kRun], out_run[kRun];
  const int64_t f = args.features;
  const Acc offset = static_cast<Acc>(args.offset);
  for (int64_t i = 0; i < f; i += kRun) {
    const int64_t n = std::min(kRun, f - i);
    const Acc* gate = load_run(args.dtype, args.x, 2 * row * f + i, n, gate_run);
    const Acc* up = load_run(args.dtype, args.x, (2 * row + 1) * f + i, n, up_run);
    Acc* y = output_run(args.dtype, args.out, row * f + i, out_run);
    for (int64_t j = 0; j < n; ++j) y[j] = Gate::at(gate[j]).act * (up[j] + offset);
    store_run(args.dtype, args.out, row * f + i, n, y);
  }
}

template <class Gate, class Acc>
void gated_backward(const ActivationArgs& args, int64_t row) {
  Acc gate_run[kRun], up_run[kRun], dy_run[kRun], dgate_run[kRun], dup_run[kRun];
  const int64_t f = args.features;
  const Acc offset = static_cast<Acc>(args.offset);
  for (int64_t i = 0; i < f; i += kRun) {
    const int64_t n = std::min(kRun, f - i), gate_at = 2 * row * f + i, up_at = gate_at + f;
    const Acc* gate = load_run(args.dtype, args.x, gate_at, n, gate_run);
    const Acc* up = load_run(args.dtype, args.x, up_at, n, up_run);
    const Acc* dy = load_run(args.dtype, args.dy, row * f + i, n, dy_run);
    Acc* dgate = output_run(args.dtype, args.out, gate_at, dgate_run);
    Acc* dup = output_run(args.dtype, args.out, up_at, dup_run);
    for (int64_t j = 0; j < n; ++j) {
      const GateValue<Acc> value = Gate::at(gate[j]);
      dgate[j] = dy[j] * value.slope * (up[j] + offset);
      dup[j] = dy[j] * value.act;
    }
    store_run(args.dtype, args.out, gate_at, n, dgate);
    store_run(args.dtype, args.out, up_at, n, dup);
  }
}

template <class Gate, class Acc>
void plain_row(const ActivationArgs& args, bool backward, int64_t row) {
  Acc x_run[kRun], dy_run[kRun], out_run[kRun];
  for (int64_t i = 0; i < args.features; i += kRun) {
    const int64_t n = std::min(kRun, args.features - i), at = row * args.features + i;
    const Acc* x = load_run(args.dtype, args.x, at, n, x_run);
    Acc* out = output_run(args.dtype, args.out, at, out_run);
    if (backward) {
      const Acc* dy = load_run(args.dtype, args.dy, at, n, dy_run);
      for (int64_t j = 0; j < n; ++j) out[j] = dy[j] * Gate::at(x[j]).slope;
    } else {
      for (int64_t j = 0; j < n; ++j) out[j] = Gate::at(x[j]).act;
    }
    store_run(args.dtype, args.out, at, n, out);
  }
}

template <class Gate, class Acc>
void plain_rows(const ActivationArgs& args, bool backward, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) plain_row<Gate, Acc>(args, backward, row);
}

template <class Gate, class Acc>
void gated_rows(const ActivationArgs& args, bool backward, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (backward) {
      gated_backward<Gate, Acc>(args, row);
    } else {
      gated_forward<Gate, Acc>(args, row);
    }
  }
}

template <class Acc>
void activation_rows(const ActivationArgs& args, bool backward, int64_t begin, int64_t end) {
  switch (args.kind) {
    case Activation::kGelu:
      return plain_rows<GeluGate, Acc>(args, backward, begin, end);
    case Activation::kGeluTanh:
      return plain_rows<GeluTanhGate, Acc>(args, backward, begin, end);
    case Activation::kRelu:
      return plain_rows<ReluGate, Acc>(args, backward, begin, end);
    case Activation::kSquaredRelu:
      return plain_rows<SquaredReluGate, Acc>(args, backward, begin, end);
    case Activation::kSwiglu:
      return gated_rows<SiluGate, Acc>(args, backward, begin, end);
    case Activation::kGeglu:
      return gated_rows<GeluTanhGate, Acc>(args, backward, begin, end);
    case Activation::kQuickGeglu:
      return gated_rows<QuickGeluGate, Acc>(args, backward, begin, end);
    case Activation::kExactGeglu:
      return gated_rows<GeluGate, Acc>(args, backward, begin, end);
    case Activation::kQuickGelu:
      return plain_rows<QuickGeluGate, Acc>(args, backward, begin, end);
  }
}

// Raises the amax by the written rows, `columns` each.
void measure_rows(const ActivationArgs& args, int64_t columns, int64_t begin, int64_t end) {
  if (args.amax == nullptr) return;
  float scratch[kRun];
  float amax = 0.0f;
  for (int64_t i = begin * columns; i < end * columns; i += kRun) {
    const int64_t n = std::min(kRun, end * columns - i);
    amax = amax_of(load_run(args.dtype, args.out, i, n, scratch), n, amax);
  }
  raise_amax(args.amax, amax);
}

}  // namespace

bool is_gated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kGeglu ||
         activation == Activation::kQuickGeglu || activation == Activation::kExactGeglu;
}

void activation_forward_cpu(const ActivationArgs& args, int64_t row_begin, int64_t row_end) {
  with_accumulator(args.dtype, [&](auto acc) {
    activation_rows<decltype(acc)>(args, false, row_begin, row_end);
  });
  measure_rows(args, args.features, row_begin, row_end);
}

void activation_backward_cpu(const ActivationArgs& args, int64_t row_begin, int64_t row_end) {
  with_accumulator(args.dtype, [&](auto acc) {
    activation_rows<decltype(acc)>(args, true, row_begin, row_end);
  });
  measure_rows(args, is_gated(args.kind) ? 2 * args.features : args.features, row_begin, row_end);
}

}  // namespace megatron
