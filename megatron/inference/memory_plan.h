// Memory of serving, planned from shapes before anything is allocated: the blocks of the cache, and
// what a rank needs beside them. The server, `generate` and `check --serve` have this one plan.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "megatron/models/model.h"
#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// What a rank keeps of the layers of its stage; `element`: bytes of one activation. Keys and values
// are in that type, or with `fp8_cache` in FP8.
KeptBytes kept_bytes(const ModelConfig& config, const StageSlice& slice, int64_t tensor_ranks,
                     int64_t element, const StateKeeping& keeping = {}, bool fp8_cache = false);

// What the cache is wanted for.
struct CacheDemand {
  int64_t slots = 1;        // sequences that run at a time
  int64_t block_size = 64;  // positions
  int64_t wanted = 1;       // blocks that all of them could use
  int64_t needed = 1;       // blocks without which nothing is served
  std::string hint;         // for the user, when these do not fit
};

// Equal on all ranks, but for the bytes.
struct CachePlan {
  int32_t blocks = 0;
  int64_t block_bytes = 0;  // of one block
  int64_t state_bytes = 0;  // of the fixed-size states of all slots
  int64_t bytes() const { return blocks * block_bytes + state_bytes; }
};

// As many blocks as are wanted and as `budget` bytes hold. Throws Error if it does not hold those
// that are needed.
CachePlan plan_cache(const KeptBytes& kept, const CacheDemand& demand, int64_t budget);

// Bytes that the cache may take where no flag says so, beside steps that need `step_bytes`: up to
// 80% of the free memory of a GPU, a quarter of the machine's memory that is available.
int64_t cache_budget(c10::Device device, int64_t step_bytes);
// The same of a GPU with so much free memory.
int64_t gpu_cache_budget(int64_t free_bytes, int64_t step_bytes);
// Bytes that a GPU has free, or nothing on a CPU.
std::optional<int64_t> free_memory(c10::Device device);

// libtorch's allocator takes so many bytes of a GPU in one piece, and some for small tensors, and
// keeps them for tensors to come, which then need not ask the driver, whatever their sizes.
void hold_memory(c10::Device device, int64_t bytes);

// What a draft model adds on the first rank.
struct DraftMemory {
  int64_t weights = 0;
  int64_t step = 0;     // its largest step, when no other one runs
  KeptBytes kept = {};  // in blocks of the same number and positions
};

// How a model is served, for the memory of a step.
struct ServedShape {
  int64_t tensor_ranks = 1, stages = 1;
  int64_t slots = 1;
  int64_t drafts = 0;         // of a sequence in a step, at most
  int64_t max_positions = 0;  // of a sequence
  int64_t max_step_tokens = 2048;
  int64_t max_media = 0;  // images and sounds of a request, at most; 0: none are read
  int64_t element = 4;    // bytes of a weight and of an activation
  StateKeeping keeping = {};
  bool fp8_cache = false;  // a byte for each element of keys and values
  bool int8 = false;       // weights in 8-bit integers, see LoadModelRequest
  bool on_gpu = false;
  int64_t graph_rows = 0;  // of the largest CUDA graph of a decoding step; 0: there are none
  DraftMemory draft = {};
};

// What encoders of images and sounds need on the first rank, beside steps: prompts are encoded one
// at a time while other requests go on.
struct EncoderMemory {
  int64_t weights = 0;  // of encoders and projectors: a part of those of the stage
  // For the largest prompt that is read: as many pictures, or as much sound, as fill the model's
  // context, and as a request may have
  int64_t step = 0;
  int64_t graphs = 0;    // what CUDA graphs of few pictures hold
  bool unknown = false;  // how many pictures a prompt may have depends on the shapes of images
  int64_t passing() const { return step + graphs; }  // beside weights
};

// Steps of at least so many rows, and at most `most_rows`, divide them over the tensor ranks of the
// model, so that exchanges overlap with products; 0: none does.
int64_t divided_rows_from(const Model& model, bool on_gpu, int64_t most_rows);
// The largest part of an exchange of such a step of so many rows, in bytes.
int64_t divided_part_bytes(const Model& model, int64_t rows, int64_t element);

// Device memory of each rank of one stage.
struct ServingMemory {
  StageSlice slice;
  int64_t parameters = 0;  // elements
  int64_t weights = 0;
  CachePlan cache;
  // The largest step: either is freed before the other.
  int64_t activations = 0;  // of the layers, with keys and values that a chunk reads
  int64_t sampling = 0;     // logits and their copies, when every slot draws its tokens
  int64_t library_workspace = 0;
  int64_t graphs = 0;      // what CUDA graphs hold, also while other steps run
  int64_t sums = 0;        // memory that tensor ranks write into
  DraftMemory draft = {};  // its blocks are part of the cache
  EncoderMemory encoder = {};
  int64_t step() const {
    return std::max(std::max(activations, sampling) + library_workspace, draft.step) + graphs +
           sums;
  }
  // What comes and goes with the steps and prompts that do not run as graphs
  int64_t eager() const { return std::max(activations, sampling) + encoder.step; }
  // Beside weights and cache
  int64_t passing() const { return step() + encoder.passing(); }
  int64_t total() const { return weights + draft.weights + cache.bytes() + passing(); }
  std::string text() const;  // one line
  // Throws Error unless a GPU that holds the weights has room for the cache and for steps.
  void check_fits(int64_t free_bytes) const;
};

// Of the largest tensor that is summed over tensor ranks in a step of so many rows, in bytes:
// hidden states, or the counts by which top-k and top-p select (Note [Selection]). Those of larger
// steps than have graphs go through NCCL.
int64_t served_sum_bytes(const ModelConfig& config, int64_t rows, int64_t element);

// Of the prompts of a model that sees or hears; zeros: it does neither.
EncoderMemory encoder_memory(const ModelConfig& config, const ServedShape& shape);

// All but the cache, of one stage. Builds the stage's model without memory.
ServingMemory serving_memory(const ModelConfig& config, const ServedShape& shape, int64_t stage);

// Of a draft model for a model that is served so.
DraftMemory draft_memory(const ModelConfig& draft, at::ScalarType dtype, const ServedShape& served);

}  // namespace megatron
