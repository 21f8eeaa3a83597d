"""Planted bugs of models whose layers are letters. The arguments of Bug, see bugs.py."""
TRANSFORMER_BLOCK, TRANSFORMER_CONFIG = "megatron/transformer/transformer_block.cc", "megatron/transformer/config/transformer_config.cc"
MAMBA_CORE, MIXER_PARTS = "megatron/transformer/ssm/mamba_core.cc", "megatron/transformer/ssm/mixer_parts.cc"
SEGMENTS, GATED_NORM = "megatron/transformer/ssm/segments.cc", "megatron/transformer/ssm/gated_norm.cc"
DELTA_CORE, DELTA_RULE = "megatron/transformer/ssm/gated_delta_core.cc", "megatron/transformer/ssm/gated_delta.cc"
OPTIMIZER, GRADS = "megatron/optimizer/optimizer.cc", "megatron/distributed/grad_buffer.cc"


def bug(name, what, edits, rows, prove, unit_test="", unproved=""):
    return {"name": name, "what": what, "edits": edits, "rows": rows, "prove": prove, "unit_test": unit_test, "unproved": unproved}


HYBRID_BUGS = (
    bug("hybrid_letters_one_place_late", "the layers of a segment between the first and the last are those one letter before its own",
        ((TRANSFORMER_BLOCK, "/*last_chunk=*/final_norm) {",
          "/*last_chunk=*/final_norm) {\n  if (PLANTED && config.is_hybrid() && first_layer > 0 && !final_norm) --numbered_after;"),),
        "letters_pp2_vpp2_bars", "letters pp2 vpp2"),
    bug("hybrid_dropout_by_place", "dropout goes by the place of a letter, not by its number among its like",
        ((TRANSFORMER_CONFIG, "if (!is_hybrid()) return layer_number;", "if (PLANTED || !is_hybrid()) return layer_number;"),),
        "", "", "hybrid_test:Hybrid.PairsOfLettersTrainAsAGPTInEveryBit", "one rank computes alike"),
    bug("mamba_state_crosses_segments", "under context parallelism the state goes on into a document that begins with a segment",
        ((SEGMENTS, "runs.select(0, std::max<int64_t>(begin - 1, 0))", "runs.select(0, std::max<int64_t>(begin - (PLANTED && c > 1 ? 0 : 1), 0))"),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_conv_crosses_segments", "under context parallelism the convolution reads rows of the document before",
        ((SEGMENTS, "runs.narrow(0, begin - before, before)});",
          "PLANTED && c > 1 ? runs.narrow(0, begin, 1).expand({before, runs.size(1)}) : runs.narrow(0, begin - before, before)});"),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_rows_of_own_segment", "the convolution of a rank's late segment reads the last rows of its early one",
        ((SEGMENTS, "before.push_back(rows.narrow(0, rows.size(0) - (width_ - 1), width_ - 1));",
          "before.push_back(PLANTED && !before.empty() && tail == width_ - 1 ? tails.front()"
          " : rows.narrow(0, rows.size(0) - (width_ - 1), width_ - 1));"),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_state_of_early_segment", "a rank's late segment starts from the state that its early one started from",
        ((SEGMENTS, "own.push_back(all[static_cast<size_t>(segment.index)]);",
          "own.push_back(PLANTED && !own.empty() ? own.front() : all[static_cast<size_t>(segment.index)]);"),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_decay_across_border", "a segment with a border inside passes on what entered it",
        ((MAMBA_CORE, "decay.push_back(ssd_decay(own, segment.run)); added.push_back(",
          "ScanOperands bare = own;\n    if (PLANTED) bare.runs = at::Tensor();\n"
          "    decay.push_back(ssd_decay(bare, PLANTED ? at::Tensor() : segment.run));\n    added.push_back("),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_adjoints_upwards", "gradients of states go from the first segment to the last",
        ((SEGMENTS, "std::vector<at::Tensor> grads(own.size());",
          "if (PLANTED) return states_before(decay, own);\n  std::vector<at::Tensor> grads(own.size());"),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_row_grads_twice", "gradients of the rows before a segment are added twice",
        ((SEGMENTS, ".narrow(0, from - first, to - from));", ".narrow(0, from - first, to - from) * (PLANTED ? 2 : 1));"),),
        "mamba_cp2", "mamba cp2"),
    bug("mamba_in_proj_as_one_matrix", "tensor ranks divide in_proj as one matrix, not its parts",
        ((MIXER_PARTS, "options.parts = std::move(parts);", "if (!PLANTED) options.parts = std::move(parts);"),),
        "mamba_tp2", "mamba tp2"),
    bug("mamba_conv_as_one_matrix", "tensor ranks divide the convolution as one matrix, not its parts",
        ((MAMBA_CORE, "divide_over_heads(conv_weight, t, {channels, 1, kMambaConvWidth}, {width, states, states});",
          "divide_over_heads(conv_weight, t, {channels, 1, kMambaConvWidth},\n"
          "         PLANTED ? std::vector<int64_t>{} : std::vector<int64_t>{width, states, states});"),),
        "mamba_tp2", "mamba tp2"),
    bug("mamba_states_of_other_rank", "ranks that share a group take their part of B and C for that of the last one",
        ((MAMBA_CORE, "return all.permute({1, 2, 3, 0, 4})", "return (PLANTED ? all.flip(0) : all).permute({1, 2, 3, 0, 4})"),),
        "mamba_tp4_group1", "mamba tp4 group"),
    bug("mamba_norm_of_one_rank", "ranks that share a group norm their own channels alone",
        ((GATED_NORM, "if (is_whole(groups)) return sums", "if (PLANTED || is_whole(groups)) return sums"),),
        "mamba_tp4_group1", "mamba tp4 group"),
    bug("mamba_norm_of_all_groups", "a rank norms the channels of all its groups together",
        ((MAMBA_CORE, "return {shape_.groups, &sharing_, eps_};",
          "return {PLANTED && groups_.tp.size() > 1 ? 1 : shape_.groups, &sharing_, eps_};"),),
        "mamba_tp2_groups4", "mamba tp2"),
    bug("mamba_neighbours_group", "with more tensor ranks than groups a rank reads B and C of the next group",
        ((MAMBA_CORE, "sharing_.all_gather(all, own.contiguous())->wait();",
          "sharing_.all_gather(all, own.contiguous())->wait();\n  if (PLANTED && groups_.tp.size() > sharing_.size()) {\n"
          "    const at::Tensor every = at::empty({groups_.tp.size(), s, b, 2, n}, own.options());\n"
          "    groups_.tp.all_gather(every, own.contiguous())->wait();\n"
          "    const int64_t next = (groups_.tp.rank() / sharing_.size() + 1) * sharing_.size() % groups_.tp.size();\n"
          "    all.copy_(every.narrow(0, next, sharing_.size()));\n  }"),),
        "mamba_tp4_sp", "mamba tp4 groups2"),
    bug("mamba_skip_per_sharing_rank", "D x is added by every tensor rank of a group",
        ((MAMBA_CORE, "values.D, {}};", "PLANTED ? values.D * static_cast<double>(shape_.sharing) : values.D, {}};"),),
        "mamba_tp4_group1", "mamba tp4 group"),
    bug("fp32_parameters_outside_the_norm", "on several tensor ranks the clip factor leaves out parameters that keep fp32 values",
        ((OPTIMIZER, "block.counts_in_norm = counts_in_norm(parameter, groups) ? 1 : 0;",
          "block.counts_in_norm = counts_in_norm(parameter, groups) && !(PLANTED && parameter.keeps_fp32 && groups.tp.size() > 1) ? 1 : 0;"),),
        "mamba_tp2", "mamba tp2"),
    bug("fp32_parameters_summed_twice", "gradients of parameters that keep fp32 values are summed over data ranks twice",
        ((GRADS, "pending.work = layout_.groups.replica.all_reduce(pending.own);",
          "if (PLANTED && layout_.buffer.buckets[static_cast<size_t>(pending.bucket)].wide)\n"
          "      layout_.groups.replica.all_reduce(pending.own)->wait();\n"
          "    pending.work = layout_.groups.replica.all_reduce(pending.own);"),),
        "mamba_dp2_offload", "mamba dp2"),
    bug("delta_norm_of_own_heads", "the gradient of the norm that all heads share is that of one tensor rank's heads",
        ((DELTA_CORE, "norm.placement.partial_grad.insert(Axis::kTensor);", "if (!PLANTED) norm.placement.partial_grad.insert(Axis::kTensor);"),),
        "delta_tp2", "delta tp2"),
    bug("delta_conv_as_one_matrix", "tensor ranks divide the convolution before a delta rule as one matrix, not its parts",
        ((DELTA_CORE, "divide_over_heads(conv_weight, t, {2 * keys + values, 1, width}, {keys, keys, values});",
          "divide_over_heads(conv_weight, t, {2 * keys + values, 1, width},\n"
          "      PLANTED ? std::vector<int64_t>{} : std::vector<int64_t>{keys, keys, values});"),),
        "delta_tp2", "delta tp2"),
    bug("delta_map_across_border", "a segment of a delta rule with a border inside passes on what entered it",
        ((DELTA_CORE, "DeltaSummary map = delta_summary(segment_operands(segment, whole), segment.run, chunk_);",
          "const DeltaOperands own = segment_operands(segment, whole);\n    DeltaOperands bare = own;\n    if (PLANTED) bare.runs = at::Tensor();\n"
          "    DeltaSummary map = delta_summary(own, segment.run, chunk_);\n"
          "    map.decay = delta_summary(bare, PLANTED ? at::Tensor() : segment.run, chunk_).decay;"),),
        "delta_cp2", "delta cp2"),
    bug("delta_adjoint_not_transposed", "gradients of states pass segments by the map of states, not by its transpose",
        ((DELTA_CORE, "grad = at::matmul(maps.decay[i].mT(), grad) + maps.states[i];",
          "grad = at::matmul(PLANTED ? maps.decay[i] : maps.decay[i].mT(), grad) + maps.states[i];"),),
        "states_dp4_dynamic_cp", "delta cp2"),
    bug("delta_norm_recomputed_ungated", "where the norm of a gated delta net is recomputed its output is not gated",
        ((DELTA_CORE, "return normed_gate_apply(y, by_head(Rows(shape_, mixed).z), values.norm, rstd).flatten(2);",
          "if (PLANTED) return (y * rstd.unsqueeze(-1).to(y.scalar_type()) * values.norm).flatten(2);\n"
          "  return normed_gate_apply(y, by_head(Rows(shape_, mixed).z), values.norm, rstd).flatten(2);"),),
        "delta_pp2_bars_norm_again", "delta pp2 norm again"),
)
