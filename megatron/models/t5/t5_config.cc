#include "megatron/models/t5/t5_config.h"

#include "megatron/base/check.h"
#include "megatron/models/model.h"
#include "megatron/transformer/attention/relative_positions.h"

namespace megatron {

void T5Config::fields(FieldVisitor& v) {
  v.group("t5");
  v.role(FieldRole::kArchitecture);
  v.field("encoder_num_layers", encoder_num_layers,
          "layers of the encoder of a T5; 0: given by --num-layers");
  v.field("decoder_num_layers", decoder_num_layers,
          "layers of the decoder of a T5; 0: as many as its encoder has");
  v.field("relative_attention_num_buckets", relative_attention_num_buckets,
          "relative positions: rows of the table of each stack");
  v.field("relative_attention_max_distance", relative_attention_max_distance,
          "relative positions: distance from which all are in the last bucket");
  v.field({"t5_output_bias", "--t5-no-output-bias", true}, t5_output_bias,
          "a tied output layer without a bias");
  v.field("t5_scale_output", t5_scale_output,
          "divide the input of a tied output layer by the square root of hidden_size");
  v.field("t5_encoder_only", t5_encoder_only,
          "the encoder of a T5 without a decoder, as `embed` needs it");
  v.role(FieldRole::kNumerics);
  v.field("encoder_seq_length", encoder_seq_length,
          "tokens per sample of the encoder of a T5, another name of --seq-length");
  v.field("decoder_seq_length", decoder_seq_length, "tokens per sample of the decoder of a T5");
}

void T5Config::validate(Violations& v) const {
  const auto count = [&](const char* flag, int64_t value) {
    v.require(value >= 0, cat(flag, " is ", value), "1 or more");
  };
  count("--encoder-num-layers", encoder_num_layers);
  count("--decoder-num-layers", decoder_num_layers);
  count("--decoder-seq-length", decoder_seq_length);
  count("--encoder-seq-length", encoder_seq_length.value_or(1) - 1);
  const int64_t buckets = relative_attention_num_buckets;
  v.require(buckets >= 4 && buckets % 2 == 0, cat("--relative-attention-num-buckets is ", buckets),
            "an even number, 4 or more");
  v.require(
      relative_attention_max_distance > buckets / 2,
      cat("--relative-attention-max-distance ", relative_attention_max_distance, " is not above ",
          buckets / 2,
          ", half of --relative-attention-num-buckets, up to where each distance has a bucket "
          "of its own"));
}

RelativeBuckets relative_buckets(const ModelConfig& config, bool decoder) {
  const auto& sizes = config.own.as_or_default<T5Config>();
  return {sizes.relative_attention_num_buckets, sizes.relative_attention_max_distance, !decoder};
}

T5Stacks t5_stacks(const ModelConfig& config) {
  const auto& sizes = config.own.as_or_default<T5Config>();
  const int64_t layers = config.transformer.num_layers;
  MEGATRON_CHECK(
      sizes.encoder_num_layers > 0 && (sizes.decoder_num_layers > 0) == !sizes.t5_encoder_only &&
          sizes.encoder_num_layers + sizes.decoder_num_layers == layers,
      "a T5 of ", sizes.encoder_num_layers, " encoder layers and ", sizes.decoder_num_layers,
      " decoder layers has not the ", layers, " layers of num_layers");
  T5Stacks stacks{config.transformer, config.transformer};
  stacks.encoder.causal = false;
  stacks.encoder.num_layers = sizes.encoder_num_layers;
  stacks.decoder.layer_pattern = "*x-";
  stacks.decoder.num_layers = sizes.decoder_num_layers;
  stacks.decoder.seq_length = sizes.decoder_seq_length;
  // One for each layer: those of the decoder follow
  if (std::vector<std::string>& types = stacks.decoder.cp_comm_type; types.size() > 1)
    types.erase(types.begin(), types.begin() + sizes.encoder_num_layers);
  return stacks;
}

}  // namespace megatron
