// Reads and writes ranges of elements of any floating type as fp32 or fp64 on the CPU.
//
// Kernels compute on ranges of `Acc` (float, or double for fp64 tensors). A range that already has
// that type is used in place; others are converted through a scratch buffer of the caller.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// Elements [offset, offset + n) of `data` as Acc: a pointer into data, or `scratch` after
// conversion.
template <class Acc>
const Acc* load_run(DType dtype, const void* data, int64_t offset, int64_t n, Acc* scratch);

// Where to put elements [offset, offset + n) before store_run: into data itself, or `scratch`.
template <class Acc>
Acc* output_run(DType dtype, void* data, int64_t offset, Acc* scratch);

// Rounds the range into data (to nearest even); nothing to do if `run` points into data.
template <class Acc>
void store_run(DType dtype, void* data, int64_t offset, int64_t n, const Acc* run);

// Calls f(float{}) or, for fp64, f(double{}).
template <class F>
void with_accumulator(DType dtype, F&& f) {
  if (dtype == DType::kFloat64) {
    f(double{});
  } else {
    f(float{});
  }
}

}  // namespace megatron
