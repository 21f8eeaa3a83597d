#include "megatron/training/arguments/t5_rules.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/format.h"
#include "megatron/datasets/masked/t5_dataset.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/training/arguments/layer_division.h"
#include "megatron/training/arguments/model_provider.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

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

// What the decoder's length is a multiple of: both halves of the part of a context rank have tokens
// of every tensor rank.
int64_t unit_of_decoder(const ParallelConfig& p, bool divided_over_tensor) {
  const int64_t cp = p.context_parallel_size;
  return (cp > 1 ? 2 * cp : 1) * (divided_over_tensor ? p.tensor_model_parallel_size : 1);
}

void decoder_divides(const Arguments& a, int64_t length, Violations& v) {
  const int64_t tp = a.parallel.tensor_model_parallel_size, cp = a.parallel.context_parallel_size;
  if (tp < 1 || cp < 1) return;  // a rule of its own reports it
  const int64_t unit = unit_of_decoder(a.parallel, a.parallel.sequence_parallel);
  const std::string hint = cat("--decoder-seq-length ", (length / unit + 1) * unit);
  if (cp > 1 && length % (2 * cp) != 0)
    v.add(cat("--decoder-seq-length ", length, " is not divisible by ", 2 * cp,
              ", twice --context-parallel-size ", cp),
          hint);
  if (a.parallel.sequence_parallel && length % (cp * tp) != 0)
    v.add(cat("--decoder-seq-length ", length, " is not divisible by --tensor-model-parallel-size ",
              tp, cp > 1 ? cat(" x --context-parallel-size ", cp) : "",
              ", which --sequence-parallel splits it over"),
          hint);
}

// Of --cp-comm-type with a value for each layer, those of some layers along each stack.
void keep_exchanges(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  const std::vector<std::string>& had = before.transformer.cp_comm_type;
  if (had.size() <= 1) return;
  const auto &own = own_config<T5Config>(a.own), &was = own_config<T5Config>(before.own);
  std::vector<std::string> types;
  const auto add = [&](int64_t first, int64_t layers, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      types.push_back(had.at(static_cast<size_t>(first + i * layers / count)));
  };
  add(0, was.encoder_num_layers, own.encoder_num_layers);
  add(was.encoder_num_layers, was.decoder_num_layers, own.decoder_num_layers);
  if (a.transformer.num_layers != before.transformer.num_layers)
    shrinker.note("--cp-comm-type of some layers of each stack");
  a.transformer.cp_comm_type = std::move(types);
}

// The segments that were before, at and behind the border stay so: of each stack that one has a few
// layers, or all where the depth has to stay.
void keep_border(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  auto& own = own_config<T5Config>(a.own);
  const int64_t border = own_config<T5Config>(before.own).encoder_num_layers;
  const bool shrinks = a.transformer.num_layers != before.transformer.num_layers;
  const StageLayout stages = divide_layers(before, likely_vocabulary(before), provide_model("t5"));
  std::string layout = "E";
  const auto add = [&](char letter, int64_t layers) {
    if (layers > 0)
      layout.append(static_cast<size_t>(shrinks ? one_or_several(layers) : layers), letter);
  };
  for (const StageSlice& segment : stages.segments()) {
    if (!segment.embedding) layout += '|';
    const int64_t end = segment.first_layer + segment.num_layers;
    add('e', std::min(border, end) - segment.first_layer);
    add('t', end - std::max(border, segment.first_layer));
  }
  layout += 'L';
  shrinker.set("--encoder-num-layers", own.encoder_num_layers, count_layout_letters(layout, 'e'));
  shrinker.set("--decoder-num-layers", own.decoder_num_layers, count_layout_letters(layout, 't'));
  a.transformer.num_layers = own.encoder_num_layers + own.decoder_num_layers;
  a.pipeline.num_virtual_stages_per_pipeline_rank = {};
  shrinker.note(cat("--pipeline-model-parallel-layout \"", layout, "\""));
  a.pipeline.pipeline_model_parallel_layout = std::move(layout);
}

}  // namespace

void finalize_t5(Arguments& a) {
  auto& own = own_config<T5Config>(a.own);
  TransformerConfig& t = a.transformer;
  const bool one_spelling = own.encoder_num_layers == 0 || t.num_layers == 0;
  if (own.encoder_num_layers == 0) own.encoder_num_layers = t.num_layers;
  if (own.decoder_num_layers == 0 && !own.t5_encoder_only)
    own.decoder_num_layers = own.encoder_num_layers;
  if (one_spelling) t.num_layers = own.encoder_num_layers + own.decoder_num_layers;
  if (own.encoder_seq_length && t.seq_length == 0) t.seq_length = *own.encoder_seq_length;
  if (own.encoder_seq_length == t.seq_length) own.encoder_seq_length = {};
  if (t.max_position_embeddings == 0)
    t.max_position_embeddings = std::max(t.seq_length, own.decoder_seq_length);
}

void validate_t5(const Arguments& a, Violations& v) {
  const auto& own = own_config<T5Config>(a.own);
  const TransformerConfig& t = a.transformer;
  if (own.t5_encoder_only) {
    v.add(cat("--task ", a.training.task, " with --t5-encoder-only: an encoder alone has no loss"),
          "a model with both stacks");
    return;
  }
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
          a.training.task == "seq2seq" ? "the tokens of the longest target, and its end"
          : t.seq_length < kT5MinSequenceLength
              ? ""
              : cat("--decoder-seq-length ",
                    t5_needs(t.seq_length, a.masked.mask_prob).decoder_positions,
                    " is enough for every sample"));
  const bool relative = t.position_embedding_type == PositionEmbedding::kRelative;
  const T5Config plain;
  if (!relative && (own.relative_attention_num_buckets != plain.relative_attention_num_buckets ||
                    own.relative_attention_max_distance != plain.relative_attention_max_distance))
    v.add(
        "--relative-attention-num-buckets or --relative-attention-max-distance has an effect only "
        "with --position-embedding-type relative",
        "leave it out");
  if (t.untie_embeddings_and_output_weights && (!own.t5_output_bias || own.t5_scale_output))
    v.add("--t5-no-output-bias or --t5-scale-output has an effect only on a tied output layer",
          "leave it out, or --untie-embeddings-and-output-weights");
  if (!relative && t.max_position_embeddings < own.decoder_seq_length)
    v.add(cat("--max-position-embeddings ", t.max_position_embeddings,
              " is below --decoder-seq-length ", own.decoder_seq_length));
  decoder_divides(a, own.decoder_seq_length, v);
  if (a.parallel.context_parallel_size > 1 && attends_in_rings(t))
    v.add(cat("ring attention with --task ", a.training.task,
              " (--cp-comm-type p2p or a2a+p2p) is not built"),
          "--cp-comm-type all_gather or a2a");
  validate_layout(a, own, v);
}

void shrink_t5(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  auto& own = own_config<T5Config>(a.own);
  const auto& was = own_config<T5Config>(before.own);
  TransformerConfig& t = a.transformer;
  if (a.parallel.pipeline_model_parallel_size > 1) {
    if (!names_layers_of_stages(a.pipeline)) keep_border(a, before, shrinker);
  } else if (t.num_layers != before.transformer.num_layers) {
    shrinker.set("--encoder-num-layers", own.encoder_num_layers,
                 one_or_several(was.encoder_num_layers));
    shrinker.set("--decoder-num-layers", own.decoder_num_layers,
                 one_or_several(was.decoder_num_layers));
    t.num_layers = own.encoder_num_layers + own.decoder_num_layers;
  }
  keep_exchanges(a, before, shrinker);
  const int64_t encoder = before.transformer.seq_length,
                rows = t.is_quantized() ? t.quantization(1).alignment() : int64_t{1},
                unit = std::lcm(unit_of_decoder(a.parallel, /*divided_over_tensor=*/true),
                                rows * a.parallel.context_parallel_size),
                needed = t5_needs(t.seq_length, a.masked.mask_prob).decoder_positions;
  int64_t length = t.seq_length;
  if (was.decoder_seq_length < encoder) length = std::max(needed, t.seq_length / 2);
  if (was.decoder_seq_length > encoder || length > t.seq_length) length = 2 * t.seq_length;
  if (was.decoder_seq_length != encoder) {
    length = (length + unit - 1) / unit * unit;
    if (length == t.seq_length) length += unit;
  }
  shrinker.set("--decoder-seq-length", own.decoder_seq_length, length);
  if (t.position_embedding_type == PositionEmbedding::kRelative) {
    // Few enough that there are distances in the last one.
    constexpr int64_t kBuckets = 8, kDistance = 7;
    shrinker.set("--relative-attention-num-buckets", own.relative_attention_num_buckets,
                 std::min(own.relative_attention_num_buckets, kBuckets));
    shrinker.set("--relative-attention-max-distance", own.relative_attention_max_distance,
                 std::min(own.relative_attention_max_distance, kDistance));
  }
  t.max_position_embeddings = std::max(t.seq_length, length);
}

}  // namespace megatron
