// What scheduling must know of a model and its cache.
#pragma once

#include <cstdint>

namespace megatron {

// Equal on all ranks of a model.
struct RunnerFacts {
  int64_t vocab_size = 0;     // without padding
  int64_t hidden_size = 0;    // width of given rows; 0: the model takes none
  int64_t max_positions = 0;  // of a sequence; 0: no limit but the cache
  int64_t window = 0;         // positions that the widest layer sees, its own included; 0: all
  int64_t rope_border = 0;    // longrope: sequences beyond it rotate by other frequencies; 0: none
  bool takes_state_input = false, needs_state_input = false;
  // Sequences own a state in addition to their blocks. A prefix of blocks alone does not restore
  // it, so that no prefix is shared.
  bool owns_state = false;
  int32_t state_drafts = 0;  // drafts of a part that such a state does not keep until they stand
  int32_t num_adapters = 0;

  int32_t slots = 0;       // sequences that may run at a time
  int64_t block_size = 0;  // positions
  int32_t device_blocks = 0, host_blocks = 0;
  int32_t host_states = 0;  // slots' states that host memory holds for swapping
  // The fewest steps from the one that draws a token to the one that takes it as input: 1 without
  // a pipeline, its stages with one.
  int32_t draw_latency = 1;
  // launch() returns after the step: to plan the next one before its result is read saves nothing,
  // and computes a token more for each sequence that turns out to have ended.
  bool launch_waits = false;
  int64_t weights_version = 0;
};

}  // namespace megatron
