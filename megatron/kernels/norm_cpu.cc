#include <algorithm>
#include <cmath>
#include <vector>

#include "megatron/kernels/detail/amax_cpu.h"
#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/lanes.h"
#include "megatron/kernels/norm.h"

namespace megatron {
namespace {

template <class Acc>
void normalise_row(int64_t n, const Acc* __restrict x, const Acc* __restrict gain,
                   const Acc* __restrict bias, Acc mean, Acc rstd, Acc* __restrict y) {
  if (bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * rstd * gain[i] + bias[i];
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * rstd * gain[i];
  }
}

template <class Norm>
DType weight_dtype(const Norm& norm) {
  return norm.weights_as_x || norm.dtype == DType::kFloat64 ? norm.dtype : DType::kFloat32;
}

// The gain of a norm, including the 1 of a zero-centered one.
template <class Acc, class Norm>
std::vector<Acc> gain_of(const Norm& norm) {
  std::vector<Acc> gain(norm.columns);
  const Acc* from = load_run(weight_dtype(norm), norm.gain, 0, norm.columns, gain.data());
  const Acc more = norm.zero_centered ? Acc(1) : Acc(0);
  for (int64_t i = 0; i < norm.columns; ++i) gain[i] = from[i] + more;
  return gain;
}

template <class Acc>
void forward_rows(const NormForward& norm, int64_t begin, int64_t end) {
  const int64_t n = norm.columns;
  std::vector<Acc> scratch(2 * n), for_bias(n);
  const std::vector<Acc> gain = gain_of<Acc>(norm);
  const Acc* bias = norm.bias == nullptr
                        ? nullptr
                        : load_run(weight_dtype(norm), norm.bias, 0, n, for_bias.data());
  Acc* means = static_cast<Acc*>(norm.mean);
  Acc* rstds = static_cast<Acc*>(norm.rstd);
  for (int64_t row = begin; row < end; ++row) {
    const Acc* x = load_run(norm.dtype, norm.x, row * n, n, scratch.data());
    if (!norm.saved_statistics) {
      const Acc mean =
          norm.layer_norm ? sum_over<Acc>(n, [=](int64_t i) { return x[i]; }) / Acc(n) : Acc(0);
      const Acc square = sum_over<Acc>(n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
      if (norm.layer_norm) means[row] = mean;
      rstds[row] = Acc(1) / std::sqrt(square / Acc(n) + static_cast<Acc>(norm.eps));
    }
    if (norm.y == nullptr) continue;
    const Acc mean = norm.layer_norm ? means[row] : Acc(0);
    const Acc rstd = rstds[row];
    Acc* y = output_run(norm.dtype, norm.y, row * n, scratch.data() + n);
    normalise_row(n, x, gain.data(), bias, mean, rstd, y);
    store_run(norm.dtype, norm.y, row * n, n, y);
  }
}

// One row: computes dx and adds this row's weight gradients to dgain and dbias (null without bias).
template <class Acc>
void backward_row(int64_t n, const Acc* __restrict dy, const Acc* __restrict x,
                  const Acc* __restrict gain, bool layer_norm, Acc mean, Acc rstd,
                  const Acc* __restrict residual, Acc* __restrict dx, Acc* __restrict dgain,
                  Acc* __restrict dbias) {
  const Acc mean_g =
      layer_norm ? sum_over<Acc>(n, [=](int64_t i) { return gain[i] * dy[i]; }) / Acc(n) : Acc(0);
  const Acc mean_gx =
      sum_over<Acc>(n, [=](int64_t i) { return gain[i] * dy[i] * ((x[i] - mean) * rstd); }) /
      Acc(n);
  if (dbias != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      const Acc xhat = (x[i] - mean) * rstd;
      dgain[i] += dy[i] * xhat;
      dbias[i] += dy[i];
      dx[i] = rstd * (gain[i] * dy[i] - mean_g - xhat * mean_gx);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const Acc xhat = (x[i] - mean) * rstd;
      dgain[i] += dy[i] * xhat;
      dx[i] = rstd * (gain[i] * dy[i] - mean_g - xhat * mean_gx);
    }
  }
  if (residual != nullptr) {
    for (int64_t i = 0; i < n; ++i) dx[i] += residual[i];
  }
}

template <class Acc>
void backward_block(const NormBackward& norm, int64_t block, const std::vector<Acc>& gain,
                    std::vector<Acc>& scratch) {
  const int64_t n = norm.columns;
  Acc* dgain = static_cast<Acc*>(norm.dgain) + block * n;
  Acc* dbias = norm.dbias == nullptr ? nullptr : static_cast<Acc*>(norm.dbias) + block * n;
  std::fill_n(dgain, n, Acc(0));
  if (dbias != nullptr) std::fill_n(dbias, n, Acc(0));
  const int64_t end = std::min(norm.rows, (block + 1) * kNormRowsPerBlock);
  for (int64_t row = block * kNormRowsPerBlock; row < end; ++row) {
    const Acc* dy = load_run(norm.dtype, norm.dy, row * n, n, scratch.data());
    const Acc* x = load_run(norm.dtype, norm.x, row * n, n, scratch.data() + n);
    // A copy, since dx may overwrite it.
    const Acc* residual = nullptr;
    if (norm.residual_grad != nullptr) {
      const Acc* from =
          load_run(norm.dtype, norm.residual_grad, row * n, n, scratch.data() + 3 * n);
      if (from != scratch.data() + 3 * n) std::copy_n(from, n, scratch.data() + 3 * n);
      residual = scratch.data() + 3 * n;
    }
    Acc* dx = output_run(norm.dtype, norm.dx, row * n, scratch.data() + 2 * n);
    const Acc mean = norm.layer_norm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
    backward_row(n, dy, x, gain.data(), norm.layer_norm, mean,
                 static_cast<const Acc*>(norm.rstd)[row], residual, dx, dgain, dbias);
    store_run(norm.dtype, norm.dx, row * n, n, dx);
  }
}

}  // namespace

void norm_forward_cpu(const NormForward& norm, int64_t row_begin, int64_t row_end) {
  with_accumulator(norm.dtype,
                   [&](auto acc) { forward_rows<decltype(acc)>(norm, row_begin, row_end); });
  if (norm.amax == nullptr || norm.y == nullptr) return;
  std::vector<float> scratch(norm.columns);
  float amax = 0.0f;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* y = load_run(norm.dtype, norm.y, row * norm.columns, norm.columns, scratch.data());
    amax = amax_of(y, norm.columns, amax);
  }
  raise_amax(norm.amax, amax);
}

void norm_backward_cpu(const NormBackward& norm, int64_t block_begin, int64_t block_end) {
  with_accumulator(norm.dtype, [&](auto acc) {
    const std::vector<decltype(acc)> gain = gain_of<decltype(acc)>(norm);
    std::vector<decltype(acc)> scratch(4 * norm.columns);
    for (int64_t block = block_begin; block < block_end; ++block)
      backward_block(norm, block, gain, scratch);
  });
}

}  // namespace megatron
