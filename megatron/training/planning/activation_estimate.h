// Bytes that one micro-batch holds in one model chunk: the costs of its layers
// (transformer/layer/layer_cost.h; attention: transformer/attention/attention_cost.h) and of the
// model's ends (models/common/ends_cost.h), added up.
//
// Full recomputation: R h x per recomputed unit, divided by t with --distribute-saved-activations;
// in the backward, one unit at a time is held as its layers save. With --recompute-modules mlp a
// unit is the MLP half of a layer.
// Offloading: activations that --offload-modules names are not held. In the forward, up to
// --fine-grained-offloading-max-inflight-offloads half layers are still in transfer in addition to
// the running one; in the backward the next one has already been reloaded.
// Dropout saves nothing: masks are regenerated, keyed by position.
//
// Between the passes I and W of a zero-bubble schedule each linear layer holds its input and the
// gradient of its output.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

// Peaks in addition to PassBytes::saved at a moment of a pass: moments are those of
// sharded_stores.h. `backward` and `backward_first` as in PassBytes.
struct PassMoment {
  int64_t forward = 0, backward = 0, backward_first = 0;
};

struct PassBytes {
  SavedBytes saved;       // on the device, from F to B (or I)
  int64_t offloaded = 0;  // in host memory, from F to B (or I)
  // Of `offloaded`, bytes still in transfer from the device at the end of F, until another pass
  // begins
  int64_t leaving = 0;
  int64_t pending = 0;        // from I to W
  int64_t forward_extra = 0;  // peak in addition to `saved` while F runs
  // Peak in addition to `saved` while B or I runs, without the output gradient passed in
  int64_t backward_extra = 0;
  int64_t backward_first = 0;  // the same while transfers to the host may still be in flight
  // Peak in addition to `pending` while I runs: in attention of the first layer, which runs last
  int64_t deferred_extra = 0;
  // Held by peer copies of tensor parallelism while B runs: SublayerCost::postponed
  int64_t postponed = 0;
  std::vector<PassMoment> moments;
};

PassBytes pass_bytes(const LayoutPlan& plan, int stage, int chunk);

}  // namespace megatron
