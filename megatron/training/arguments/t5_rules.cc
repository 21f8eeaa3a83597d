#include "megatron/training/arguments/t5_rules.h"

#include <algorithm>

#include "megatron/base/format.h"
#include "megatron/datasets/masked/t5_dataset.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/pipeline_parallel/stage_layout.h"

namespace megatron {

namespace {

// The letters of a layout of stages say which layer belongs to which stack.
void validate_layout(const Arguments& a, const T5Config& own, Violations& v) {
  const std::string& layout = a.pipeline.pipeline_model_parallel_layout;
  Violations others;
  validate_pipeline(a.pipeline, a.parallel.pipeline_model_parallel_size, a.transformer.num_layers,
                    others);
  if (layout.empty() || !others.empty()) return;  // their own rule reports it
  const int64_t letters = count_layout_letters(layout, 'e');
  if (letters != own.encoder_num_layers)
    v.add(cat("--pipeline-model-parallel-layout \"", layout, "\" has ", letters,
              " e, the encoder has ", own.encoder_num_layers, " layers"),
          "e for each layer of the encoder, then t for each of the decoder");
}

// The encoder's layers when the row of layers has shrunk: those segments stay before, at and behind
// the border that were.
int64_t fewer_encoder_layers(int64_t encoder, int64_t before, int64_t after, int64_t segments) {
  const int64_t had = before / segments, has = after / segments, whole = encoder / had,
                rest = encoder % had;
  return whole * has + (rest == 0 ? 0 : std::clamp<int64_t>(rest * has / had, 1, has - 1));
}

}  // namespace

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
  if (t.seq_length > 0 && t.seq_length < kT5MinSequenceLength)
    v.add(cat("--seq-length ", t.seq_length, " has no room for a sample of an encoder-decoder"),
          cat("--seq-length ", kT5MinSequenceLength, " or more"));
  if (own.decoder_seq_length < 2)
    v.add("--decoder-seq-length is not given",
          t.seq_length < kT5MinSequenceLength
              ? ""
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
  if (a.parallel.context_parallel_size > 1)
    v.add("--context-parallel-size above 1 with --task t5 is not built", "leave one of them out");
  validate_layout(a, own, v);
}

void shrink_t5(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  auto& own = own_config<T5Config>(a.own);
  const auto& was = own_config<T5Config>(before.own);
  TransformerConfig& t = a.transformer;
  const int64_t pp = a.parallel.pipeline_model_parallel_size,
                layers = before.transformer.num_layers;
  if (t.num_layers != layers && pp == 1) {
    shrinker.set("--encoder-num-layers", own.encoder_num_layers,
                 one_or_several(was.encoder_num_layers));
    shrinker.set("--decoder-num-layers", own.decoder_num_layers,
                 one_or_several(was.decoder_num_layers));
    t.num_layers = own.encoder_num_layers + own.decoder_num_layers;
  } else if (t.num_layers != layers) {
    const int64_t segments = pp * make_stage_layout(a.pipeline, pp, t.num_layers).num_chunks();
    shrinker.set("--encoder-num-layers", own.encoder_num_layers,
                 fewer_encoder_layers(was.encoder_num_layers, layers, t.num_layers, segments));
    shrinker.set("--decoder-num-layers", own.decoder_num_layers,
                 t.num_layers - own.encoder_num_layers);
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
