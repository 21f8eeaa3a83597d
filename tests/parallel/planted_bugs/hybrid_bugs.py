"""Planted bugs of models whose layers are letters. The arguments of Bug, see bugs.py."""
TRANSFORMER_BLOCK, TRANSFORMER_CONFIG = "megatron/transformer/transformer_block.cc", "megatron/transformer/config/transformer_config.cc"
MAMBA_CORE, MIXER_PARTS = "megatron/transformer/ssm/mamba_core.cc", "megatron/transformer/ssm/mixer_parts.cc"
SEGMENTS, GATED_NORM = "megatron/transformer/ssm/segments.cc", "megatron/transformer/ssm/gated_norm.cc"


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
)
