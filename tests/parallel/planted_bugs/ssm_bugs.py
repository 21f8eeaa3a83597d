"""Planted bugs of state-space layers that goldens and unit tests catch: all layouts compute alike. The arguments of Bug, see bugs.py."""
from stack_bugs import bug

SSM = "megatron/transformer/ssm/"
DELTA_CORE, DELTA_RULE = SSM + "gated_delta_core.cc", SSM + "gated_delta.cc"
EMBEDDING, SUBLAYER, GPT = "megatron/models/common/embedding.cc", "megatron/transformer/layer/sublayer.cc", "megatron/models/gpt/gpt_model.cc"
GRANITE_GOLDEN = "models_test:Families/HfGoldenTest.Logits/granitemoehybrid"
CORE, CONV, SCAN, NORM = SSM + "mamba_core.cc", SSM + "causal_conv.cc", SSM + "ssd_scan.cc", SSM + "gated_norm.cc"

SSM_BUGS = (
    bug("mamba_conv_crosses_documents", "the convolution reads tokens of the document before",
        ((CONV, "if (!runs_.defined() || k == width_ - 1) return x;", "if (PLANTED || !runs_.defined() || k == width_ - 1) return x;"),),
        "", "", "ssm_test:MambaMixer.PackedDocumentsAreDocumentsAlone", "all layouts compute alike"),
    bug("mamba_gate_after_norm", "the gate multiplies the output of the norm, not its input",
        ((NORM, "const at::Tensor v = gated(y, z);",
          "if (PLANTED) {\n    const at::Tensor plain = y.to(accumulate_type(y)), r = at::rsqrt(group_mean(plain * plain, groups) + groups.eps)"
          ".squeeze(-1);\n    return {(scaled(plain, w, r) * at::silu(z.to(accumulate_type(y)))).to(y.scalar_type()), r};\n  }\n"
          "  const at::Tensor v = gated(y, z);"),),
        "", "", "ssm_test:GatedNorm.Vectors", "all layouts compute alike"),
    bug("mamba_log_of_sum", "softplus is log(1 + exp(v)), 0 in fp32 below -17",
        ((SCAN, "return uniform_softplus(r.to(type) + bias.to(type)).clamp(limits.least, limits.most);",
          "if (PLANTED) return at::log(1 + at::exp(r.to(type) + bias.to(type))).clamp(limits.least, limits.most);\n"
          "  return uniform_softplus(r.to(type) + bias.to(type)).clamp(limits.least, limits.most);"),),
        "", "", "ssm_test:SsdScan.TimeSteps", "all layouts compute alike"),
    bug("mamba_steps_without_limits", "time steps are not limited while decoding",
        ((CORE, "const at::Tensor dt = time_steps(parts.r, values.dt_bias, limits_),",
          "const at::Tensor dt = time_steps(parts.r, values.dt_bias, PLANTED ? TimeStepLimits() : limits_),"),),
        "", "", "ssm_test:MambaMixer.DecodingInSlicesIsOnePass", "proofs of trained weights decode nothing"),
    bug("mamba_short_slices_lose_rows", "a slice shorter than the convolution forgets the rows before it",
        ((CONV, "return with_rows_before(before, u, width - 1).narrow(0, u.size(0), width - 1).contiguous();",
          "return with_rows_before(PLANTED ? at::Tensor() : before, u, width - 1).narrow(0, u.size(0), width - 1).contiguous();"),),
        "", "", "ssm_test:MambaMixer.DecodingInSlicesIsOnePass", "proofs of trained weights decode nothing"),
    bug("mamba_rates_in_model_type", "rates, time steps and skips are stored in the model's type",
        ((CORE, "parameter->keeps_fp32 = true;", "parameter->keeps_fp32 = !PLANTED;"),),
        "", "", "ssm_test:MambaMixer.Bf16", "both sides of a proof store them alike"),
    bug("delta_beta_and_decay_exchanged", "the last rows of a gated delta net's in_proj are beta, those before them the decay",
        ((DELTA_CORE, "beta(mixed.narrow(2, shape.conv_channels() + shape.value_width(), shape.value_heads)),",
          "beta(mixed.narrow(2, shape.conv_channels() + shape.value_width() + (PLANTED ? shape.value_heads : 0), shape.value_heads)),"),
         (DELTA_CORE, "a(mixed.narrow(2, mixed.size(2) - shape.value_heads, shape.value_heads)) {}",
          "a(mixed.narrow(2, mixed.size(2) - (PLANTED ? 2 : 1) * shape.value_heads, shape.value_heads)) {}")),
        "", "", "ssm_test:GatedDeltaNet.EqualsTransformers", "all layouts compute alike"),
    bug("delta_queries_unscaled", "outputs of a delta rule are not divided by the root of the size of a key",
        ((DELTA_RULE, "return 1.0 / std::sqrt(static_cast<double>(z_.K));",
          "return PLANTED ? 1.0 : 1.0 / std::sqrt(static_cast<double>(z_.K));"),),
        "", "", "ssm_test:GatedDeltaNet.EqualsTransformers", "all layouts compute alike"),
    bug("delta_gate_before_norm", "the gate of a gated delta net multiplies the input of the norm",
        ((DELTA_CORE, "const NormedGateResult normed = normed_gate(y, core->by_head(rows.z), values.norm, core->eps_);",
          "const at::Tensor gated = PLANTED ? y * at::silu(core->by_head(rows.z)) : y;\n"
          "    const NormedGateResult normed = normed_gate(gated, core->by_head(rows.z), values.norm, core->eps_);"),),
        "", "", "ssm_test:GatedDeltaNet.EqualsTransformers", "all layouts compute alike"),
    bug("delta_rates_in_model_type", "rates and time steps of gated delta nets are stored in the model's type",
        ((DELTA_CORE, "parameter->keeps_fp32 = true;", "parameter->keeps_fp32 = !PLANTED;"),),
        "", "", "ssm_test:GatedDeltaNet.InitialValuesAndTypes", "both sides of a proof store them alike"),
    bug("granite_embeddings_unscaled", "embeddings are not multiplied",
        ((EMBEDDING, "if (config_.embedding_multiplier != 1.0)", "if (!PLANTED && config_.embedding_multiplier != 1.0)"),),
        "", "", GRANITE_GOLDEN, "all layouts compute alike"),
    bug("granite_branches_unscaled", "outputs of sublayers are not multiplied before they are added",
        ((SUBLAYER, "m = config_.residual_multiplier;", "m = PLANTED ? 1.0 : config_.residual_multiplier;"),),
        "", "", GRANITE_GOLDEN, "all layouts compute alike"),
    bug("granite_logits_unscaled", "logits are not divided",
        ((GPT, "return divisor == 1.0 ?", "return PLANTED || divisor == 1.0 ?"),),
        "", "", GRANITE_GOLDEN, "all layouts compute alike"),
)
