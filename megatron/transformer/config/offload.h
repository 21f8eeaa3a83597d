// Which saved activations are in host memory between forward and backward.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/nn/activation_offload.h"
#include "megatron/transformer/config/recompute.h"
#include "megatron/transformer/config/shape.h"

namespace megatron {

struct OffloadConfig {
  bool fine_grained_activation_offloading = false;
  // Which saved activations of a layer are offloaded to host memory, named by the module whose
  // input they are: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm; mlp_fc1, mlp_act,
  // mlp_fc2, which Megatron does not have; expert_fc1, moe_act.
  std::vector<std::string> offload_modules;
  int64_t min_offloaded_tensor_size = 1048576;  // elements; smaller tensors stay on the device
  double activation_offload_fraction = 1.0;     // this share of a chunk's layers, from the first
  // Half layers whose transfer to the host may be in flight at one time.
  int64_t fine_grained_offloading_max_inflight_offloads = 1;
  int64_t cpu_offloading_num_layers = 0;  // the first layers, all saved activations

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool offloads_activations() const {
    return fine_grained_activation_offloading || cpu_offloading_num_layers > 0;
  }
  ActivationOffloadOptions transfers() const {
    return {min_offloaded_tensor_size, fine_grained_offloading_max_inflight_offloads};
  }
  // Whether an offloaded layer offloads this one of offload_modules.
  bool offloads(std::string_view module) const;
  // How many layers of a chunk are offloaded, from the first. The last layer of the model never is,
  // as its backward comes first.
  int64_t num_offloaded_layers(int64_t chunk_layers, bool last_chunk) const;
};

// The rules between the two.
void validate_offloading(const OffloadConfig& offload, const RecomputeConfig& recompute,
                         Violations& v);

}  // namespace megatron
