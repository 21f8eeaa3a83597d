// How large a transformer is. The other topics read these sizes.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

struct ShapeConfig {
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 0;  // 0: 4 * hidden_size; with swiglu: floor(8 h / 3 / 64) * 64
  int64_t num_attention_heads = 0;
  bool group_query_attention = false;
  int64_t num_query_groups = 1;  // ignored without group_query_attention; see query_groups()
  int64_t kv_channels = 0;       // 0: hidden_size / num_attention_heads
  int64_t seq_length = 0;
  int64_t max_position_embeddings = 0;  // 0: seq_length
  bool untie_embeddings_and_output_weights = false;

  void fields(FieldVisitor& visitor);
  // `attends`: some layer has attention, and with it heads.
  void validate(Violations& v, bool attends = true) const;

  // Whether the sizes without defaults are given; validate() checks the others only then.
  bool is_given(bool attends = true) const {
    return num_layers > 0 && hidden_size > 0 && (num_attention_heads > 0 || !attends) &&
           seq_length > 0;
  }
  // For the record of a run.
  std::vector<std::pair<const char*, int64_t>> sizes() const {
    return {{"num_layers", num_layers},
            {"hidden_size", hidden_size},
            {"num_attention_heads", num_attention_heads},
            {"seq_length", seq_length}};
  }
  int64_t query_groups() const {
    return group_query_attention ? num_query_groups : num_attention_heads;
  }
};

}  // namespace megatron
