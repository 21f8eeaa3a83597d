// How fast a machine could serve a load at most: its memory moves the weights and the cache, its
// arithmetic units multiply, and nothing else takes time.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "megatron/models/model.h"

namespace megatron {

struct MachineRates {
  double copied_bytes = 0.0;    // a second, read and written
  double operations = 0.0;      // of matrix products, a second, as they are sustained
  double fp8_operations = 0.0;  // of those in FP8; 0: not measured
};

// Measured here and now. A GPU slows down to the power that it may take within the first second of
// products, so that they run for one second before the next one is measured; on a GPU that takes
// about two seconds, twice as many with FP8, and 1.2 GiB, which are given back. `type` of the
// products; `fp8`: also those in E4M3.
MachineRates measure_rates(at::ScalarType type, at::Device device, bool fp8 = false);

// What one token costs.
struct ServedCost {
  double weight_bytes = 0.0;     // read for a step, whatever its number of tokens
  double operations = 0.0;       // of the products of all layers, but those in FP8
  double fp8_operations = 0.0;   // of those in FP8
  double head_operations = 0.0;  // of the logits
  double cache_bytes = 0.0;      // of a position that it sees
  double pair_operations = 0.0;  // of attention to it
};

// Of a decoder of dense layers with weights in FP8 or of 16 bits or more; nothing: of another
// model. Of several tensor ranks what one of them has, without their exchanges. `cache_bytes`: of
// an element of the cache.
std::optional<ServedCost> served_cost(Model& model, int64_t cache_bytes);

struct ServedLoad {
  int64_t requests = 1, together = 1;
  int64_t prompt_tokens = 1;  // that are not in the cache
  int64_t cached_tokens = 0;  // of the prompt, which all requests share
  int64_t output_tokens = 1;  // of a request
};

struct ServingBound {
  double token_seconds = 0.0;      // between two tokens of a request
  double tokens_per_second = 0.0;  // generated, of all requests, prompts included in the time
};

ServingBound serving_bound(const ServedCost& cost, const ServedLoad& load,
                           const MachineRates& rates);

}  // namespace megatron
