#include "megatron/transformer/ssm/reference_notes.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/ssm/conv_silu.h"
#include "megatron/kernels/ssm/gated_delta.h"
#include "megatron/kernels/ssm/gated_delta_backward.h"
#include "megatron/kernels/ssm/gated_norm.h"
#include "megatron/kernels/ssm/ssd_scan.h"
#include "megatron/kernels/ssm/ssd_scan_backward.h"
#include "megatron/kernels/ssm/ssd_step.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/transformer/ssm/gated_delta_core.h"
#include "megatron/transformer/ssm/mamba_core.h"

namespace megatron {
namespace {

constexpr std::string_view kReference = " runs as tensor operations: ";

void add_mamba(const TransformerConfig& c, int64_t t, bool scans, bool training,
               std::vector<std::string>& notes) {
  const MambaShape rank(c, t);
  const auto add = [&](std::string_view what, const std::string& why) {
    notes.push_back(cat("the ", what, " of Mamba-2 layers", kReference, why));
  };
  if (!conv_silu_supports(rank.conv_channels(), kMambaConvWidth))
    add("convolution", cat("its kernel takes multiples of 8 channels, not ", rank.conv_channels()));
  const std::string sizes =
      cat("not heads of ", c.mamba_head_dim, " and states of ", c.mamba_state_dim);
  if (!scans)
    add("scan", "its kernel is for Hopper GPUs");
  else if (!ssd_scan_supports(c.mamba_head_dim, c.mamba_state_dim))
    add("scan", cat("its kernel takes heads of 64 and 128 and states of 64, 128 and 256, ", sizes));
  else if (training && !ssd_scan_backward_supports(c.mamba_head_dim, c.mamba_state_dim))
    add("scan's backward", cat("its kernel takes states of 64 and 128, not ", c.mamba_state_dim));
  if (!training && !ssd_step_supports(c.mamba_head_dim, c.mamba_state_dim))
    add("decoding step",
        cat("its kernel takes heads of multiples of 8 and states of 64, 128 and 256, ", sizes));
  if (const int64_t group = rank.width() / rank.groups; !gated_norm_supports(group))
    add("gated norm",
        cat("its kernel takes groups of multiples of 8 channels up to 8192, not ", group));
}

void add_gated_delta(const TransformerConfig& c, int64_t t, bool scans, bool training,
                     std::vector<std::string>& notes) {
  const GatedDeltaShape rank(c, t);
  const auto add = [&](std::string_view what, const std::string& why) {
    notes.push_back(cat("the ", what, " of gated delta nets", kReference, why));
  };
  if (!conv_silu_supports(rank.conv_channels(), rank.conv_size))
    add("convolution", cat("its kernel takes multiples of 8 channels and 2 to 4 tokens, not ",
                           rank.conv_channels(), " and ", rank.conv_size));
  const std::string sizes = cat("not ", c.linear_key_head_dim, " and ", c.linear_value_head_dim);
  if (!scans)
    add("delta rule", "its kernel is for Hopper GPUs");
  else if (!gated_delta_supports(c.linear_key_head_dim, c.linear_value_head_dim))
    add("delta rule", cat("its kernel takes heads of 64 and 128, ", sizes));
  else if (c.linear_chunk_size % ssm_kernels::kDeltaChunk != 0)
    add("delta rule", cat("its kernel takes chunks of multiples of ", ssm_kernels::kDeltaChunk,
                          " rows, not ", c.linear_chunk_size));
  else if (training &&
           !gated_delta_backward_supports(c.linear_key_head_dim, c.linear_value_head_dim))
    add("delta rule's backward", cat("its kernel takes keys and values of one size, ", sizes));
  if (!training) add("decoding step", "it has no kernel");
  if (!gated_norm_supports(c.linear_value_head_dim))
    add("norm and gate",
        cat("its kernel takes heads of multiples of 8 up to 8192, not ", c.linear_value_head_dim));
}

}  // namespace

std::vector<std::string> reference_notes(const TransformerConfig& config, int64_t t,
                                         at::ScalarType type, bool scans, bool training) {
  std::vector<std::string> notes;
  const bool mamba = config.has_letter('M'), delta = config.has_letter('G');
  if ((mamba || delta) && type != at::kBFloat16) {
    notes.push_back(cat("what state-space layers compute between their linears", kReference,
                        "kernels are for bf16"));
    return notes;
  }
  if (mamba) add_mamba(config, t, scans, training, notes);
  if (delta) add_gated_delta(config, t, scans, training, notes);
  return notes;
}

}  // namespace megatron
