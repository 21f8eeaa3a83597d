// The table of kernel tests: one row per operation, element type and shape.
//
// Each row is checked in three ways: on the CPU against a composition of ATen operations in fp64;
// its gradients against ATen's autograd in fp64; on CUDA (gpu_tests) against the CPU. `kernel_test
// --perf` times rows with `bytes` against ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace megatron {

using Tensors = std::vector<at::Tensor>;

struct KernelCase {
  std::string name;
  at::ScalarType type = at::kFloat;
  // Deterministic inputs on the CPU; floating-point ones in `type` unless the operation needs
  // another.
  std::function<Tensors()> inputs;
  // The operation of megatron/tensor on tensors of any device; returns outputs, then gradients.
  std::function<Tensors(const Tensors&)> run;
  // The same in ATen operations, with fp64 inputs.
  std::function<Tensors(const Tensors&)> reference;
  // The operations of eager PyTorch for it, in `type`, to be timed; empty: the reference is timed.
  std::function<Tensors(const Tensors&)> eager = {};
  double tolerance = 1e-6;  // CPU and CUDA against the reference, relative to max(1, largest)
  bool bit_equal = false;   // CUDA equals the CPU bit for bit
  int64_t bytes = 0;        // moved by `run`; > 0: timed by --perf
};

inline void PrintTo(const KernelCase& row, std::ostream* out) { *out << row.name; }

// All rows. Large shapes only with `perf`.
std::vector<KernelCase> kernel_cases(bool perf);

// Tolerances of one rounding to the type, with room for sums of a few hundred terms.
double tolerance_of(at::ScalarType type);
// The type of sums and statistics: fp64 for fp64, else fp32.
at::ScalarType wide(at::ScalarType type);
at::Tensor normal(at::IntArrayRef shape, at::ScalarType type, uint64_t seed, double scale = 1.0);

// Those of layers of experts, which kernel_cases() includes.
void add_expert_cases(std::vector<KernelCase>& rows, bool perf);
// Those of attention over a paged cache.
void add_paged_cases(std::vector<KernelCase>& rows, bool perf);
// Those of drawing tokens.
void add_sampling_cases(std::vector<KernelCase>& rows, bool perf);

// Runs `run` with the inputs on `device`; returns the outputs on the CPU.
Tensors run_on(const KernelCase& kernel_case, const Tensors& inputs, const at::Device& device);

// Largest absolute difference divided by max(1, largest reference); infinity for different shapes
// or a NaN.
double relative_error(const at::Tensor& got, const at::Tensor& expected);

}  // namespace megatron
