"""Planted bugs of rows without padding. The arguments of Bug, see bugs.py."""
from stack_bugs import bug

UNPADDED_ROWS, UNPADDED_ATTENTION = "megatron/tensor/attention/unpadded_rows.cc", "megatron/tensor/attention/unpadded_attention.cc"
PHILOX, MODEL_ENDS = "megatron/kernels/philox_cpu.cc", "megatron/models/common/embedding.cc"
BERT_MODEL = "megatron/models/bert/bert_model.cc"

PADDING_BUGS = (
    bug("unpadded_dropout_of_first_sample", "without padding all samples of a micro-batch drop what the first one drops",
        ((PHILOX, "d.sample[d.sample_of_row ? row : row % d.batch]", "d.sample[d.sample_of_row && !PLANTED ? row : row % d.batch]"),),
        "dp2_bert", "bert dp2"),
    bug("unpadded_samples_of_first_rank", "under sequence parallelism rows without padding drop by the samples of the first tensor rank's rows",
        ((MODEL_ENDS, "context.place.sample.narrow(0, out.first_row, own)", "context.place.sample.narrow(0, PLANTED ? 0 : out.first_row, own)"),),
        "tp2_sp_bert", "bert tp2 sp"),
    bug("unpadded_first_rows_of_rank", "under sequence parallelism the first row of each tensor rank stands for that of a sample",
        ((BERT_MODEL, "rows.first - groups().tp.rank() * count", "rows.first - (PLANTED ? 0 : groups().tp.rank()) * count"),),
        "tp2_sp_bert", "bert tp2 sp"),
    bug("unpadded_counted_of_one_sample", "without padding the loss counts as many rows as one sample may have",
        ((BERT_MODEL, "most *= rows->samples;", "most *= PLANTED ? 1 : rows->samples;"),),
        "dp2_bert", "bert dp2"),
    bug("unpadded_distances_of_padded", "relative positions of a short text are those of the first tokens of a full one",
        ((UNPADDED_ATTENTION, "queries.length - length, length + key_length - 1", "PLANTED ? 0 : queries.length - length, length + key_length - 1"),),
        "tp2_t5_relative", "t5 relative tp2"),
    bug("unpadded_holes_seen", "without padding a text attends to the padding tokens inside of it",
        ((UNPADDED_ATTENTION, "if (keys.holes[i]) {", "if (keys.holes[i] && !PLANTED) {"),),
        "dp2_bert", "bert dp2"),
    bug("unpadded_cross_keys_by_query", "without padding dropout of cross attention goes by places of the decoder's tokens",
        ((UNPADDED_ATTENTION, "one.key_position = keys.position.narrow(0, key_begin, key_length);",
          "one.key_position = keys.position.narrow(0, key_begin, key_length) + (PLANTED && rows.keys != nullptr ? 1 : 0);"),),
        "tp2_t5", "t5 tp2"),
)
