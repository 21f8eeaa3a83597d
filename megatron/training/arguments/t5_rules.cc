#include "megatron/training/arguments/t5_rules.h"

#include <algorithm>

#include "megatron/base/format.h"
#include "megatron/datasets/masked/t5_dataset.h"
#include "megatron/models/t5/t5_config.h"

namespace megatron {

void finalize_t5(Arguments& a) {
  auto& own = own_config<T5Config>(a.own);
  TransformerConfig& t = a.transformer;
  const bool one_spelling = own.encoder_num_layers == 0 || t.num_layers == 0;
  if (own.encoder_num_layers == 0) own.encoder_num_layers = t.num_layers;
  if (own.decoder_num_layers == 0) own.decoder_num_layers = own.encoder_num_layers;
  if (one_spelling) t.num_layers = own.encoder_num_layers + own.decoder_num_layers;
  if (own.encoder_seq_length && t.seq_length == 0) t.seq_length = *own.encoder_seq_length;
  if (own.encoder_seq_length == t.seq_length) own.encoder_seq_length = {};
  if (t.max_position_embeddings == 0)
    t.max_position_embeddings = std::max(t.seq_length, own.decoder_seq_length);
}

void validate_t5(const Arguments& a, Violations& v) {
  const auto& own = own_config<T5Config>(a.own);
  const TransformerConfig& t = a.transformer;
  const int64_t layers = own.encoder_num_layers + own.decoder_num_layers;
  if (t.num_layers != layers)
    v.add(cat("--num-layers ", t.num_layers, " and --encoder-num-layers ", own.encoder_num_layers,
              " with ", own.decoder_num_layers, " decoder layers are both given"),
          "--num-layers or --encoder-num-layers for the encoder, --decoder-num-layers for the "
          "decoder");
  if (own.encoder_seq_length)
    v.add(cat("--seq-length ", t.seq_length, " and --encoder-seq-length ", *own.encoder_seq_length,
              " are both given"),
          "leave one of them out");
  if (own.decoder_seq_length < 2)
    v.add("--decoder-seq-length is not given",
          t.seq_length < 4 ? ""
                           : cat("--decoder-seq-length ",
                                 t5_needs(t.seq_length, a.masked.mask_prob).decoder_positions,
                                 " is enough for every sample"));
  if (t.max_position_embeddings < own.decoder_seq_length)
    v.add(cat("--max-position-embeddings ", t.max_position_embeddings,
              " is below --decoder-seq-length ", own.decoder_seq_length));
  const int64_t tp = a.parallel.tensor_model_parallel_size;
  if (a.parallel.sequence_parallel && tp > 0 && own.decoder_seq_length % tp != 0)
    v.add(cat("--decoder-seq-length ", own.decoder_seq_length,
              " is not divisible by --tensor-model-parallel-size ", tp,
              ", which --sequence-parallel splits it over"),
          cat("--decoder-seq-length ", (own.decoder_seq_length / tp + 1) * tp));
  const auto refuse = [&](bool given, const char* flag) {
    if (given) v.add(cat(flag, " with --task t5 is not built"), "leave one of them out");
  };
  refuse(a.parallel.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size above 1");
  refuse(a.parallel.context_parallel_size > 1, "--context-parallel-size above 1");
}

void shrink_t5(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  auto& own = own_config<T5Config>(a.own);
  const auto& was = own_config<T5Config>(before.own);
  TransformerConfig& t = a.transformer;
  if (t.num_layers != before.transformer.num_layers) {
    shrinker.set("--encoder-num-layers", own.encoder_num_layers,
                 one_or_several(was.encoder_num_layers));
    shrinker.set("--decoder-num-layers", own.decoder_num_layers,
                 one_or_several(was.decoder_num_layers));
    t.num_layers = own.encoder_num_layers + own.decoder_num_layers;
  }
  const int64_t encoder = before.transformer.seq_length, tp = a.parallel.tensor_model_parallel_size,
                needed = t5_needs(t.seq_length, a.masked.mask_prob).decoder_positions;
  int64_t length = t.seq_length;
  if (was.decoder_seq_length < encoder) length = std::max(needed, t.seq_length / 2);
  if (was.decoder_seq_length > encoder || length > t.seq_length) length = 2 * t.seq_length;
  if (was.decoder_seq_length != encoder) {
    length = (length + tp - 1) / tp * tp;
    if (length == t.seq_length) length += tp;
  }
  shrinker.set("--decoder-seq-length", own.decoder_seq_length, length);
  t.max_position_embeddings = std::max(t.seq_length, length);
}

}  // namespace megatron
