// Texts that a server writes while anything shares its steps, and the losses of a training forward
// over the same texts, whose bits batch-invariant mode promises to be equal.
#pragma once

#include <memory>
#include <vector>

#include "megatron/comm/process_group.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {

struct RolloutOptions {
  int tensor = 1;     // ranks, as threads of one device
  int schedules = 2;  // each anew from its number on
  int first_schedule = 0;
  size_t texts = 42;            // of a schedule
  int64_t longest_prompt = 17;  // tokens
  int64_t most_tokens = 9;      // that a text is continued by
  at::Device device = at::kCPU;
  at::ScalarType type = at::kFloat;
  // slots, block_size; blocks: of the smallest pool, and by how much that of the next is larger
  RunnerOptions runner = small_runner(9);
  int32_t more_blocks = 4;
};

struct Compared {
  int64_t texts = 0, numbers = 0, different = 0, accepted = 0, graph_steps = 0, divided_steps = 0;
};

// Rollouts in chunks of prompts, with prefixes that are shared, preemption by both ways, steps in
// flight, and once more with drafts, right and wrong ones; then the forward of the trainer.
Compared rollouts(const ModelConfig& config, const RolloutOptions& options);

// The same on one rank of `world`; the comparison is that of the first.
Compared rollouts_of_rank(const ModelConfig& config, const RolloutOptions& options,
                          const std::shared_ptr<Backend>& world);

// Of a training forward: tokens and labels [b, s] -> [s, b]. Documents count their own positions.
at::Tensor losses_of(Model& model, const at::Tensor& tokens, const at::Tensor& labels,
                     const at::Tensor& document_ids);

}  // namespace megatron
