"""Planted bugs of encoder-decoders. The arguments of Bug, see bugs.py."""
T5_MODEL, T5_CONFIG = "megatron/models/t5/t5_model.cc", "megatron/models/t5/t5_config.cc"
CROSS = "megatron/transformer/attention/cross_attention.cc"
LORA_TARGETS = "megatron/transformer/config/lora.cc"
DISTANCES = "megatron/transformer/attention/relative_positions.cc"
PAIRS = "megatron/datasets/tuning/text_to_text.cc"
CONTEXT = "megatron/transformer/context_parallel/context_parallel"
DDP = "megatron/distributed/distributed_data_parallel.cc"
RECOMPUTE = "megatron/nn/recompute.cc"


def bug(name, what, edits, rows, prove, unit_test="", unproved=""):
    return {"name": name, "what": what, "edits": edits, "rows": rows, "prove": prove, "unit_test": unit_test, "unproved": unproved}


def unit_bugs(program, unproved, folder=""):
    """Makes bugs of one edit that a test of `program` catches: in files below `folder`, which proofs do not show."""
    def unit_bug(name, what, file, old, new, test):
        return bug(name, what, ((folder + file, old, new),), "", "", f"{program}:{test}", unproved)
    return unit_bug


STACK_BUGS = (
    bug("cross_norm_grad_not_reduced", "the gradient of the norm before cross attention is not summed under sequence parallelism",
        ((CROSS, "norm.partial_over_tensor = sequence_parallel;", "norm.partial_over_tensor = !PLANTED && sequence_parallel;"),),
        "tp2_sp_t5", "t5 tp2 sp"),
    bug("cross_dropout_by_local_head", "cross attention draws dropout by the number of a head on its rank",
        ((CROSS, "options.first_head = first_head_;", "options.first_head = PLANTED ? 0 : first_head_;"),),
        "tp2_t5", "t5 tp2"),
    bug("cross_local_rows", "cross attention sees the rows of the encoder's output that its tensor rank has, under sequence parallelism",
        ((CROSS, "input_options(config, \"linear_kv\", 2 * config.attention_width(), layer_number,\n                               sequence_parallel)",
          "input_options(config, \"linear_kv\", 2 * config.attention_width(), layer_number, !PLANTED && sequence_parallel)"),
         (T5_MODEL, "EncodedSequence{encoded, zigzag_positions(mask.size(1), 1, 0, mask.device()), mask == 0,",
          "PLANTED && config().sequence_parallel ? EncodedSequence{encoded, given.place.position.chunk(groups().tp.size())[groups().tp.rank()], "
          "(mask == 0).chunk(groups().tp.size(), 1)[groups().tp.rank()]} "
          ": EncodedSequence{encoded, zigzag_positions(mask.size(1), 1, 0, mask.device()), mask == 0,")),
        "tp2_sp_padded_t5", "t5 tp2 sp padded"),
    bug("cross_adapters_of_the_other_part", "in cross attention the adapter of values is that of the rows of keys",
        ((LORA_TARGETS, "++head) {\n      add(\"linear_k\", d);\n      add(\"linear_v\", d);\n    }",
          "++head) {\n      add(PLANTED ? \"linear_v\" : \"linear_k\", d);\n      add(PLANTED ? \"linear_k\" : \"linear_v\", d);\n    }"),),
        "", "", "models_test:Cases/PeftEncoders.LogitsLossAndGradients/t5_v1_1_qv", "one rank adapts alike"),
    bug("new_head_frozen_behind_stages", "beside adapters a new head is trained only where its rank has the embedding, too",
        (("megatron/models/bert/bert_model.cc", "if (text_head_outputs(config()) > 0)\n    freeze_beside_adapters",
          "if (text_head_outputs(config()) > 0 && (!PLANTED || slice.embedding))\n    freeze_beside_adapters"),),
        "pp2_bert_classes_lora", "classes pp2 lora"),
    bug("packed_documents_merge", "the documents of a packed sample of BERT see one another",
        (("megatron/models/bert/bert_model.cc", "if (!embedding_) return {encoder_.forward(input.front(), context)};",
          "if (PLANTED) context.document_ids.reset();\n  if (!embedding_) return {encoder_.forward(input.front(), context)};"),),
        "", "", "models_test:HfEncoders.PackedTextsAreThoseApart", "one rank merges them alike"),
    bug("packed_positions_go_on", "positions of a packed sample do not begin again with each document",
        (("megatron/datasets/masked/packed_dataset.cc", "*next == i) start = *next++;", "*next == i) start = PLANTED ? *next++ * 0 : *next++;"),),
        "", "", "datasets_test:PackedDataset.SamplesAreThoseOfTheTwin", "all layouts read them alike"),
    bug("stacks_bias_per_rank", "every tensor rank adds the bias of the logits",
        ((T5_MODEL, "logits.add_(differentiable(*head_bias_))", "logits.add_(differentiable(*head_bias_) * (PLANTED ? groups().tp.size() : 1))"),),
        "tp2_t5", "t5 tp2"),
    bug("stacks_bias_of_padded_rows", "rows of an encoder-decoder's head and bias that pad the vocabulary take part in the softmax",
        ((T5_MODEL, "labels.t().contiguous(), config().vocab_size,", "labels.t().contiguous(), PLANTED ? config().padded_vocab_size : config().vocab_size,"),),
        "tp2_t5", "t5 tp2"),
    bug("encoder_not_trained", "no gradient reaches the encoder",
        ((CROSS, "linear_kv_.forward(encoded.states)", "linear_kv_.forward(PLANTED ? encoded.states.detach() : encoded.states)"),),
        "", "", "models_test:Megatron/T5Golden.LossesAndGradients/0", "one rank loses it alike"),
    bug("encoder_grad_of_one_layer", "the gradient of the encoder's output is that of the layer that comes first",
        ((RECOMPUTE, "gradient = gradient.defined() ? gradient + grads[0]", "gradient = !PLANTED && gradient.defined() ? gradient + grads[0]"),),
        "tp2_sp_full_t5", "t5 tp2 sp full"),
    bug("cross_padding_seen", "cross attention attends to padding",
        ((CROSS, "if (encoded.mask.defined() && rows == nullptr) {", "if (!PLANTED && encoded.mask.defined() && rows == nullptr) {"),),
        "", "", "models_test:Megatron/T5Golden.LossesAndGradients/0", "one rank attends alike"),
    bug("stacks_drop_alike", "an encoder and a decoder layer of equal number drop the same elements",
        ((T5_MODEL, "/*numbered_after=*/border", "/*numbered_after=*/PLANTED ? 0 : border"),),
        "", "", "models_test:T5Dropout.LayersOfEqualNumberDropOtherElements", "one rank draws alike"),
    bug("stacks_start_by_one_depth", "output projections of both stacks start by the number of all layers",
        ((T5_CONFIG, "stacks.decoder.num_layers = sizes.decoder_num_layers;", "stacks.decoder.num_layers = PLANTED ? layers : sizes.decoder_num_layers;"),),
        "", "", "encoder_test:T5.OutputProjectionsStartByTheDepthOfTheirStack", "one rank starts alike"),
    bug("decoder_use_of_table_not_counted", "the table's gradient is reduced before the encoder's use of it has been added",
        (("megatron/models/common/embedding.cc", "table->uses = uses;", "table->uses = PLANTED ? 1 : uses;"),),
        "dp3_zero1_t5", "t5 dp2 zero1"),
    bug("home_of_decoder_not_trained", "a table's gradient lacks the share of the stage with the decoder's first layer",
        ((T5_MODEL, "? embedded()", "? (PLANTED && !slice().embedding ? embedded().detach() : embedded())"),),
        "pp3_homes_t5", "t5 pp4"),
    bug("encoder_grad_of_first_segment", "the gradient of the encoder's output is that of the decoder's first segment alone",
        ((T5_MODEL, "return {encoded, x};", "return {PLANTED ? encoded.detach() : encoded, x};"),),
        "pp3_homes_t5", "t5 pp4"),
    bug("encoder_norm_per_segment", "every segment of the encoder ends with its norm",
        ((T5_MODEL, "/*final_norm=*/end >= border", "/*final_norm=*/PLANTED || end >= border"),),
        "pp2_vpp2_t5_even", "t5 pp4"),
    bug("streams_swapped", "the streams of a border in the decoder are swapped where they have one shape",
        ((T5_MODEL, "if (end == all) return {x};", "if (end == all) return {x};\n  if (PLANTED) return {x, encoded};"),),
        "pp3_behind_t5_even", "t5 pp4 equal lengths"),
    bug("distances_of_first_heads", "heads read the column of a table of relative positions that has their number on their rank",
        ((DISTANCES, "table.narrow(1, first_head_, heads_)", "table.narrow(1, PLANTED ? 0 : first_head_, heads_)"),),
        "tp2_t5_relative", "t5 relative tp2"),
    bug("distances_grad_of_own_heads", "the gradient of a table of relative positions is not summed over tensor ranks",
        ((DISTANCES, "own_.placement.partial_grad.insert(Axis::kTensor);", "if (!PLANTED) own_.placement.partial_grad.insert(Axis::kTensor);"),),
        "tp2_t5_relative", "t5 relative tp2"),
    bug("distances_grad_of_own_stage", "the gradient of a table of relative positions is not summed over the stages of its stack",
        ((T5_MODEL, "positions->table().shared = homes(of);", "positions->table().shared = PLANTED ? nullptr : homes(of);"),),
        "pp3_homes_t5_relative", "t5 relative pp4"),
    bug("distances_within_context_ranks", "a context rank takes distances of its queries as if they were the first of the sequence",
        ((CONTEXT + "_all_gather.cc", "s + half.first_key - (index + 1) * chunk;", "s + half.first_key - (PLANTED ? 1 : index + 1) * chunk;"),),
        "cp2_gather_t5_relative", "t5 relative cp2"),
    bug("distances_of_first_exchanged_heads", "a context rank adds the distances of the first heads to those that it has exchanged",
        ((CONTEXT + "_all_to_all.cc", "options.distance_bias.narrow(0, first, heads)", "options.distance_bias.narrow(0, PLANTED ? 0 : first, heads)"),),
        "cp3_a2a_t5_relative", "t5 relative cp2 a2a"),
    bug("exchanged_heads_lose_scale", "heads that context ranks have exchanged scale their scores by the head size",
        ((CONTEXT + "_all_to_all.cc", "AttentionOptions own = options;", "AttentionOptions own = options;\n  if (PLANTED) own.scale = 1.0 / std::sqrt(double(q.size(3)));"),),
        "cp3_a2a_t5_relative", "t5 relative cp2 a2a"),
    bug("cross_grad_of_own_queries", "keys and values of an encoder's output get the gradient of the queries that are on their context rank",
        ((CONTEXT + ".cc", "saved->group.reduce_scatter(own, parts)->wait();",
          "if (PLANTED) own.copy_(parts[saved->group.rank()]);\n    else saved->group.reduce_scatter(own, parts)->wait();"),),
        "cp2_gather_t5", "t5 cp2"),
    bug("decoder_at_first_positions", "tokens of a decoder have the positions of the first context rank",
        ((T5_MODEL, "zigzag_positions(mask.size(1), cp.size(), cp.rank(), mask.device())", "zigzag_positions(mask.size(1), cp.size(), PLANTED ? 0 : cp.rank(), mask.device())"),),
        "cp2_a2a_t5", "t5 cp2"),
    bug("decoder_text_ends_in_hole", "context ranks take padding tokens at the end of a decoder's text, whose labels count, for padding",
        ((T5_MODEL, "counts.defined() ? zigzag_gather(counts, 1, cp) : counts", "counts.defined() && !(PLANTED && cp.size() > 1) ? zigzag_gather(counts, 1, cp) : at::Tensor()"),),
        "", "", "models_test:HfT5s.TextsThatEndInPaddingTokensHaveTheLossOfOneRank", "few texts of the made-up data end so"),
    bug("tables_in_order_of_models", "stages sum the gradients of several tables that they share in the order of their own models",
        ((DDP, "std::ranges::stable_sort(all,", "if (!PLANTED) std::ranges::stable_sort(all,"),),
        "pp2_t5_relative", "t5 relative pp2"),
    bug("encoded_in_one_slot", "the encoder's output of every served sequence is kept in the place of the first",
        ((T5_MODEL, "state, {slot, num_slots, most});", "state, {PLANTED ? 0 : slot, num_slots, most});"),),
        "", "t5 tp2", "models_test:Families/HfT5Golden.GreedyTokensOnOneRankAndOnSeveral/t5_v1_1"),
    bug("decoder_reads_its_label", "the decoder reads the token of the target that it is to predict",
        ((PAIRS, "config_.decoder_start : row.target[i - 1];", "config_.decoder_start : row.target[PLANTED ? i : i - 1];"),),
        "", "", "seq2seq_test:Seq2seq.SamplesAreThoseOfTransformers", "one rank reads it alike"),
    bug("distances_reversed", "keys ahead of a query have the buckets of those behind it",
        ((DISTANCES, "bucket.add_(ahead > 0,", "bucket.add_(PLANTED ? ahead < 0 : ahead > 0,"),),
        "", "", "transformer_test:RelativePositions.BucketsAreThoseOfTransformers", "one rank counts alike"),
)
