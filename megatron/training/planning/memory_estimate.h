// Memory of one rank of each pipeline stage during training, item by item.
//
//   E = elements of the flat buffers of the stage's chunks (alignment and padding included), P =
//   elements of its parameters, s = ranks that the states are sharded over, e = bytes per element
//   of the model's type
//
//   weights            E e  E e / s with sharded parameters
//   gathered weights   0    with sharded parameters, at the moment of the peak: sharded_stores.h
//   gradients          4 E  4 E / s with sharded gradients
//   filling gradients  0    with sharded gradients, at the moment of the peak: buckets being filled
//                           and, if reductions overlap, reduced
//   optimizer states   Adam: 8 E / s, SGD: 4 E / s; + 4 E / s of master weights when e is 2; less
//                      with narrow states; and 32 bytes of bookkeeping per 4096 elements
//                      with --optimizer-cpu-offload the part that --optimizer-offload-fraction
//                      leaves on the device
//   mailbox            on GPUs: buffers of tensor parallelism's peer copies, comm/peer_mailbox.h
//   rows of experts    on GPUs: buffers of --moe-token-dispatcher-type flex, comm/peer_rows.h
//   activations        saved between F and B, at the moment of the peak: activation_estimate.h
//   weight gradients   saved between I and W (zero-bubble schedules)
//   transfers          activations and gradients that the executor has received early, or sent and
//                      not yet released
//   batches            token ids, labels and loss mask of the micro-batches in memory
//   features ahead     of media, of micro-batches before their turn; on GPUs with what their
//                      encoder allocates meanwhile
//   temporaries        what the running pass allocates in addition to what it saves
//
// The peak is the largest sum over the actions of the schedule, which is walked with the executor's
// own rules for receives and sends, layer by layer. Outside of the allocator, as rough constants:
// the CUDA context, NCCL's buffers, libraries' workspaces.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/training/planning/activation_estimate.h"
#include "megatron/training/planning/layout_plan.h"

namespace megatron {

// Of weights, gradients and states: those of one module besides the language model.
struct ModuleMemory {
  std::string name;  // as of ModuleCost
  int64_t weights = 0, gradients = 0, states = 0;
};

struct StageMemory {
  int64_t parameters = 0;  // elements on this rank
  int64_t weights = 0;
  int64_t gradients = 0;
  int64_t optimizer_states = 0;
  int64_t mailbox = 0;      // buffers of tensor parallelism, comm/peer_mailbox.h
  int64_t expert_rows = 0;  // buffers of --moe-token-dispatcher-type flex, comm/peer_rows.h
  // At the moment of the peak:
  int64_t gathered_weights = 0;
  int64_t filling_gradients = 0;
  int64_t activations = 0;
  int64_t weight_gradients = 0;
  int64_t transfers = 0;
  int64_t batches = 0;
  int64_t features_ahead = 0;
  int64_t temporaries = 0;
  int64_t library_workspace = 0;  // cuBLAS, from the allocator

  int64_t host_optimizer_states = 0;  // in pinned memory of the host
  // Offloaded, in pinned memory of the host, at the moment of the peak
  int64_t host_activations = 0;

  std::vector<ModuleMemory> modules;  // of EndsCost::modules
  std::vector<PassBytes> passes;      // by chunk
  std::vector<int> passes_in_flight;  // by chunk, at the peak

  int64_t before_training() const;  // persistent memory, between steps
  int64_t allocated() const;        // at the peak, as the allocator counts it
};

// Memory outside of the allocator; rough constants of the libraries.
struct OutsideMemory {
  int64_t context = 0;        // CUDA context, modules and handles
  int64_t communicators = 0;  // NCCL's buffers of all communicators of a rank
};

StageMemory stage_memory(const LayoutPlan& plan, int stage);
OutsideMemory outside_memory(const LayoutPlan& plan);

}  // namespace megatron
