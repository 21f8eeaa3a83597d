// What the routers of a run decided, to be imposed on another one.
//
// Two layouts round differently, and a rounding may change which expert has the higher score, after
// which their numbers are not comparable. With the decisions of one run imposed on the other they
// are: weights, scores and losses are computed as ever, at the imposed decisions. Such are the
// choices of experts, which of them stay within a capacity, and the counts of the highest scores
// that the losses of balance compare with.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "megatron/tensor/random.h"

namespace megatron {

// What is decided for each row and choice.
enum class RowDecision : uint8_t {
  kExpert,  // which one
  kKept,    // whether the choice stays within the capacity of its expert: 0 or 1
};

// Decisions by layer, sample and position. Ranks that are threads may share one.
class RoutingTable {
 public:
  // Keeps the decisions for a layer's rows; those for rows that are known already are replaced.
  //   rows       sample [b] and position [s] of the rows
  //   decisions  [s b, k] int32
  //   use        ForwardContext::layer_use
  void record(int64_t layer_number, const TokenPositions& rows, const at::Tensor& decisions,
              int64_t use = 0, RowDecision kind = RowDecision::kExpert);

  // The decisions for such rows, on the device of `rows.sample`. Throws Error that names the first
  // row that was not recorded. Waits for the device.
  at::Tensor find(int64_t layer_number, const TokenPositions& rows, int64_t use = 0,
                  RowDecision kind = RowDecision::kExpert) const;

  // The recorded choices of experts of one layer and use.
  struct Choices {
    int64_t layer_number = 0, use = 0;
    std::vector<int64_t> samples;  // ascending
    at::Tensor experts;            // [samples, positions, k] int32; -1: not recorded
  };
  std::vector<Choices> choices() const;

  // The same for the counts of whole samples.
  //   samples  [b]
  //   counts   [b, E], integers; that type comes back
  void record_counts(int64_t layer_number, const at::Tensor& samples, const at::Tensor& counts,
                     int64_t use = 0);
  at::Tensor find_counts(int64_t layer_number, const at::Tensor& samples, int64_t use = 0) const;

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t>;             // layer, use, sample
  std::map<std::pair<Key, RowDecision>, at::Tensor> decisions_;  // [positions, k]; -1: unknown
  std::map<Key, at::Tensor> counts_;                             // [E]
  mutable std::mutex mutex_;
};

// What the routers of a rank compute, and what they would choose by themselves whatever is imposed
// on them.
class RouterLog {
 public:
  // Of one layer, use and sample; NaN where this rank has no row of a position.
  struct Rows {
    at::Tensor logits;   // [positions, E] fp64
    at::Tensor choices;  // [positions, k] fp64
    at::Tensor bias;     // [E] fp64, of the selection; undefined: none
  };
  using Place = std::tuple<int64_t, int64_t, int64_t>;  // layer, use, sample

  // Keeps a layer's rows in place of those that are known already. Waits for the device.
  //   rows     sample [b] and position [s] of the rows
  //   logits   [s b, E]
  //   choices  [s b, k]
  //   bias     [E]; undefined: none
  void record(int64_t layer_number, const TokenPositions& rows, int64_t use,
              const at::Tensor& logits, const at::Tensor& choices, const at::Tensor& bias);
  // What was kept since the last call.
  std::map<Place, Rows> take() { return std::exchange(rows_, {}); }

 private:
  std::map<Place, Rows> rows_;
};

// What a pass does with the decisions of its routers.
struct RoutingReplay {
  RoutingTable* record = nullptr;         // keeps them, imposed ones too; null: does not
  const RoutingTable* imposed = nullptr;  // takes them from here; null: makes its own
  // The table that is imposed has nothing but choices of experts; the run decides the rest.
  bool only_experts = false;
  RouterLog* log = nullptr;  // of this rank; null: none
};

}  // namespace megatron
