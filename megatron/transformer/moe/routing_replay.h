// The choices of the routers of a run, to be imposed on another one.
//
// Two layouts round differently, and a rounding may change a choice, after which their numbers are
// not comparable. With the choices of one run imposed on the other they are: weights and scores are
// computed as ever, at the imposed choices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "megatron/tensor/random.h"

namespace megatron {

// Choices by layer, sample and position. Ranks that are threads may share one.
class RoutingTable {
 public:
  // Keeps the choices of a layer's rows; those of rows that are known already are replaced.
  //   rows     sample [b] and position [s] of the rows
  //   choices  [s b, k] int32
  //   use      ForwardContext::layer_use
  void record(int64_t layer_number, const TokenPositions& rows, const at::Tensor& choices,
              int64_t use = 0);

  // The choices of such rows, on the device of `rows.sample`. Throws Error that names the first row
  // that was not recorded. Waits for the device.
  at::Tensor find(int64_t layer_number, const TokenPositions& rows, int64_t use = 0) const;

 private:
  struct Sample {
    at::Tensor choices;  // [positions, k] int32; -1: not recorded
  };
  std::map<std::tuple<int64_t, int64_t, int64_t>, Sample> samples_;  // by layer, use and sample
  mutable std::mutex mutex_;
};

// What a pass does with the choices of its routers.
struct RoutingReplay {
  RoutingTable* record = nullptr;         // keeps them; null: does not
  const RoutingTable* imposed = nullptr;  // takes them from here; null: makes its own
};

}  // namespace megatron
