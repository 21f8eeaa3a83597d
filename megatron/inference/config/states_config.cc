#include "megatron/inference/config/states_config.h"

#include <optional>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kStateTypes[] = {"auto", "bf16", "fp16", "fp32"};

std::optional<at::ScalarType> scalar_type(SequenceStatesConfig::Type type) {
  switch (type) {
    case SequenceStatesConfig::Type::kAuto:
      return {};
    case SequenceStatesConfig::Type::kBf16:
      return at::kBFloat16;
    case SequenceStatesConfig::Type::kFp16:
      return at::kHalf;
    case SequenceStatesConfig::Type::kFp32:
      return at::kFloat;
  }
  return {};
}

}  // namespace

void SequenceStatesConfig::fields(FieldVisitor& v) {
  v.group("states of sequences");
  v.choice("mamba_inference_conv_states_dtype", mamba_inference_conv_states_dtype, kStateTypes,
           "type of the rows that convolutions read again; auto: the model's, which loses nothing");
  v.choice("mamba_inference_ssm_states_dtype", mamba_inference_ssm_states_dtype, kStateTypes,
           "type of the states of Mamba-2 layers and gated delta nets; auto: fp32. In bf16 their "
           "error grows with the text");
  v.field("replay_chunks", replay_chunks,
          "Mamba-2 layers and gated delta nets compute a token with the rest of its chunk, whose "
          "rows are kept: the bits of a forward over the whole text, but slower");
}

void SequenceStatesConfig::validate(Violations& v) const {
  const auto rounds = [](Type type) { return type == Type::kBf16 || type == Type::kFp16; };
  v.require(!replay_chunks || (!rounds(mamba_inference_conv_states_dtype) &&
                               !rounds(mamba_inference_ssm_states_dtype)),
            "--replay-chunks keeps the bits of a forward over the whole text, which states in bf16 "
            "or fp16 lose",
            "leave --mamba-inference-conv-states-dtype and --mamba-inference-ssm-states-dtype out");
}

void SequenceStatesConfig::check_batch_invariant() const {
  MEGATRON_CHECK(mamba_inference_conv_states_dtype == Type::kAuto &&
                     mamba_inference_ssm_states_dtype == Type::kAuto,
                 "--batch-invariant-mode keeps states in the types that they are computed in"
                 "\nhint: leave --mamba-inference-conv-states-dtype and "
                 "--mamba-inference-ssm-states-dtype out");
}

StateKeeping SequenceStatesConfig::keeping() const {
  return {scalar_type(mamba_inference_conv_states_dtype),
          scalar_type(mamba_inference_ssm_states_dtype), replay_chunks};
}

}  // namespace megatron
