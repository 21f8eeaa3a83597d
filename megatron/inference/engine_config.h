// Flags of the engine.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"
#include "megatron/inference/config/speculation_config.h"
#include "megatron/inference/config/states_config.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/memory_plan.h"

namespace megatron {

// kAuto: that of the activations.
enum class KvCacheType { kAuto, kFp8 };

struct EngineConfig : Config {
  int64_t max_requests = 64;
  int64_t max_seq_length = 0;
  double cache_gb = 0.0;
  double swap_gb = 0.0;
  int64_t block_size = 64;
  int64_t max_step_tokens = 2048;
  double max_gap_ms = 0.0;
  int64_t max_waiting_requests = 1024;
  bool prefix_caching = true;
  KvCacheType kv_cache_dtype = KvCacheType::kAuto;
  int64_t num_cuda_graphs = -1;
  double step_timeout_seconds = 300.0;
  SequenceStatesConfig states;
  SpeculationConfig speculation;
  int64_t max_media = 0;  // of a request; of the server's own flags (ServeLimits), 0: none

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
  // Throws Error for flags that --batch-invariant-mode cannot have.
  void check_batch_invariant() const;
};

EngineOptions engine_options(const EngineConfig& config);

// How these flags serve a model, on one rank.
ServedShape served_shape(const EngineConfig& config, const ModelConfig& model, at::ScalarType dtype,
                         bool on_gpu);
// Numbers of rows of steps that run as CUDA graphs, rising; empty: none do.
std::vector<int64_t> served_graph_sizes(const EngineConfig& config, const ServedShape& shape);
// The cache of a rank whose stage has these layers, in the bytes of the flag, or else in `budget`.
// A model has as many blocks as the rank with the fewest. Throws Error: see plan_cache().
CachePlan served_cache(const EngineConfig& config, const ModelConfig& model,
                       const ServedShape& shape, const StageSlice& slice, int64_t budget);

}  // namespace megatron
