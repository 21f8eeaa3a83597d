// T5 and mT5.
#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_common.h"
#include "megatron/models/t5/t5_config.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

constexpr std::string_view kOldArchitecture = "T5WithLMHeadModel";
constexpr std::string_view kBoth = "ForConditionalGeneration", kEncoder = "EncoderModel";
constexpr int64_t kPositions = 512;  // that T5 was trained on; tables of distances have no limit

// -- names, as HfRow has them

const HfRow kT5Ends[] = {
    {"embedding.word_embeddings.weight", {"shared.weight"}},
    {"lm_head.output_layer.weight", {"lm_head.weight"}},
    {"encoder_relative_pos_emb.relative_attention_bias.weight",
     {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"}},
    {"decoder_relative_pos_emb.relative_attention_bias.weight",
     {"decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"}}};

const HfRow kT5Encoder[] = {
    {"encoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
     {"encoder.block.*.layer.0.layer_norm.weight"}},
    {"encoder.layers.*.self_attention.linear_qkv.weight",
     {"encoder.block.*.layer.0.SelfAttention.q.weight",
      "encoder.block.*.layer.0.SelfAttention.k.weight",
      "encoder.block.*.layer.0.SelfAttention.v.weight"},
     HfLayout::kSeparateQKV},
    {"encoder.layers.*.self_attention.linear_proj.weight",
     {"encoder.block.*.layer.0.SelfAttention.o.weight"}},
    {"encoder.layers.*.mlp.linear_fc1.layer_norm_weight",
     {"encoder.block.*.layer.1.layer_norm.weight"}},
    {"encoder.layers.*.mlp.linear_fc2.weight",
     {"encoder.block.*.layer.1.DenseReluDense.wo.weight"}},
    {"encoder.final_layernorm.weight", {"encoder.final_layer_norm.weight"}}};

const HfRow kT5Decoder[] = {
    {"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
     {"decoder.block.*.layer.0.layer_norm.weight"}},
    {"decoder.layers.*.self_attention.linear_qkv.weight",
     {"decoder.block.*.layer.0.SelfAttention.q.weight",
      "decoder.block.*.layer.0.SelfAttention.k.weight",
      "decoder.block.*.layer.0.SelfAttention.v.weight"},
     HfLayout::kSeparateQKV},
    {"decoder.layers.*.self_attention.linear_proj.weight",
     {"decoder.block.*.layer.0.SelfAttention.o.weight"}},
    {"decoder.layers.*.pre_cross_attn_layernorm.weight",
     {"decoder.block.*.layer.1.layer_norm.weight"}},
    {"decoder.layers.*.cross_attention.linear_q.weight",
     {"decoder.block.*.layer.1.EncDecAttention.q.weight"}},
    {"decoder.layers.*.cross_attention.linear_kv.weight",
     {"decoder.block.*.layer.1.EncDecAttention.k.weight",
      "decoder.block.*.layer.1.EncDecAttention.v.weight"},
     HfLayout::kSeparateKV},
    {"decoder.layers.*.cross_attention.linear_proj.weight",
     {"decoder.block.*.layer.1.EncDecAttention.o.weight"}},
    {"decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
     {"decoder.block.*.layer.2.layer_norm.weight"}},
    {"decoder.layers.*.mlp.linear_fc2.weight",
     {"decoder.block.*.layer.2.DenseReluDense.wo.weight"}},
    {"decoder.final_layernorm.weight", {"decoder.final_layer_norm.weight"}}};

bool has_gate(const TransformerConfig& t) { return is_gated(t.activation()); }
bool has_no_gate(const TransformerConfig& t) { return !has_gate(t); }

const HfRow kT5Mlp[] = {{.ours = "encoder.layers.*.mlp.linear_fc1.weight",
                         .theirs = {"encoder.block.*.layer.1.DenseReluDense.wi.weight"},
                         .of = has_no_gate},
                        {.ours = "decoder.layers.*.mlp.linear_fc1.weight",
                         .theirs = {"decoder.block.*.layer.2.DenseReluDense.wi.weight"},
                         .of = has_no_gate},
                        {.ours = "encoder.layers.*.mlp.linear_fc1.weight",
                         .theirs = {"encoder.block.*.layer.1.DenseReluDense.wi_0.weight",
                                    "encoder.block.*.layer.1.DenseReluDense.wi_1.weight"},
                         .layout = HfLayout::kStacked,
                         .of = has_gate},
                        {.ours = "decoder.layers.*.mlp.linear_fc1.weight",
                         .theirs = {"decoder.block.*.layer.2.DenseReluDense.wi_0.weight",
                                    "decoder.block.*.layer.2.DenseReluDense.wi_1.weight"},
                         .layout = HfLayout::kStacked,
                         .of = has_gate}};

// -- keys

// "relu", "gated-gelu", ...; without a gate the exact GELU is "gelu", with one it is the
// approximation by tanh.
void mlp_fields(HfFields& f, TransformerConfig& t, const char* missing) {
  constexpr std::pair<std::string_view, Activation> kKinds[] = {
      {"relu", Activation::kRelu},
      {"gelu_new", Activation::kGeluTanh},
      {"gelu", Activation::kGelu},
      {"gated-gelu", Activation::kGeglu},
      {"gated-silu", Activation::kSwiglu}};
  std::string name;
  if (!f.reading()) {
    for (const auto& [word, kind] : kKinds)
      if (kind == t.activation()) name = word;
    MEGATRON_CHECK(!name.empty(), "models of Hugging Face's T5 have no such activation in the MLP",
                   "\nhint: --relu, --geglu, --swiglu or GELU");
  }
  f.text("feed_forward_proj", name, missing);
  if (!f.reading()) return;
  const auto* row = std::find_if(std::begin(kKinds), std::end(kKinds),
                                 [&](const auto& candidate) { return candidate.first == name; });
  MEGATRON_CHECK(row != std::end(kKinds), f.name(), ": feed_forward_proj \"", name,
                 "\" is not built");
  t.relu = row->second == Activation::kRelu;
  t.openai_gelu = row->second == Activation::kGeluTanh;
  t.geglu = row->second == Activation::kGeglu;
  t.swiglu = row->second == Activation::kSwiglu;
}

// A folder without scale_decoder_outputs scales the input of a tied output layer, if it is of a T5.
void output_fields(HfFields& f, TransformerConfig& t, T5Config& own, bool scales_if_tied) {
  tied(f, t, true);
  const bool is_tied = !t.untie_embeddings_and_output_weights;
  bool scales = own.t5_scale_output && is_tied;
  f.flag("scale_decoder_outputs", scales, is_tied && scales_if_tied);
  if (f.reading()) {
    own.t5_scale_output = scales;
    own.t5_output_bias = !is_tied;
  }
  MEGATRON_CHECK(is_tied || !scales, f.name(),
                 ": scale_decoder_outputs with an output layer of its own is not built");
  MEGATRON_CHECK(!is_tied || !own.t5_output_bias,
                 "models of Hugging Face's T5 have no bias of a tied output layer "
                 "(--t5-no-output-bias)");
}

// Whether the decoder is there. An encoder alone keeps what its config.json says of one.
void t5_stacks_of(HfFields& f, T5Config& own, const std::string& name) {
  const std::string both = cat(name, kBoth), encoder = cat(name, kEncoder);
  if (f.reading()) {
    const std::vector<std::string> given = f.texts("architectures");
    const std::string architecture = given.empty() ? both : given.front();
    MEGATRON_CHECK(
        architecture == both || architecture == encoder || architecture == kOldArchitecture,
        f.name(), ": a ", architecture, " is not built\nhint: expected a model with ", both, " or ",
        encoder, " as its architecture");
    own.t5_encoder_only = architecture == encoder;
  } else {
    f.set("architectures", cat("[\"", own.t5_encoder_only ? encoder : both, "\"]"));
  }
  f.integer("num_layers", own.encoder_num_layers);
  if (own.t5_encoder_only) {
    own.decoder_num_layers = 0;
    if (!f.reading() && !f.find_integer("num_decoder_layers")) {
      f.integer("num_decoder_layers", own.encoder_num_layers);  // its default
      f.set("is_encoder_decoder", "false");
    }
    return;
  }
  f.integer("num_decoder_layers", own.decoder_num_layers, own.encoder_num_layers);
  f.constant("is_encoder_decoder", "true");
}

void t5_fields_of(HfFields& f, ModelConfig& c, const std::string& name, const char* feed_forward,
                  bool scales_if_tied) {
  TransformerConfig& t = c.transformer;
  T5Config& own = c.own.ensure<T5Config>();
  f.integer("vocab_size", c.vocab_size);
  f.integer("d_model", t.hidden_size);
  f.integer("d_kv", t.kv_channels, 64);
  f.integer("d_ff", t.ffn_hidden_size);
  f.integer("num_heads", t.num_attention_heads);
  t5_stacks_of(f, own, name);
  f.integer("relative_attention_num_buckets", own.relative_attention_num_buckets, 32);
  f.integer("relative_attention_max_distance", own.relative_attention_max_distance, 128);
  f.number("layer_norm_epsilon", t.layernorm_epsilon, 1e-6);
  double dropout = t.hidden_dropout;
  f.number("dropout_rate", dropout, 0.1);
  mlp_fields(f, t, feed_forward);
  if (f.reading()) {
    t.hidden_dropout = t.attention_dropout = dropout;
    t.num_layers = own.encoder_num_layers + own.decoder_num_layers;
    t.max_position_embeddings = own.decoder_seq_length = kPositions;
  }
  if (own.t5_encoder_only)
    tied(f, t, true);
  else
    output_fields(f, t, own, scales_if_tied);
}

void t5_preset(TransformerConfig& t) {
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.position_embedding_type = PositionEmbedding::kRelative;
  t.query_pre_attn_scalar = 1.0;  // scores are not scaled
}

// Models of T5 1.1 have an output layer of their own, which transformers 5 does not say of them.
void output_of_files(const HfFamily&, const HfNames& held, ModelConfig& c) {
  const T5Config& own = *c.own.as<T5Config>();
  if (own.t5_encoder_only || own.t5_scale_output || !held("lm_head.weight")) return;
  c.transformer.untie_embeddings_and_output_weights = true;
  c.own.as<T5Config>()->t5_output_bias = true;
}

HfFamily t5_family(std::string_view type, std::string_view architecture,
                   void (*fields)(HfFields&, ModelConfig&)) {
  return {.model_type = type,
          .architecture = architecture,
          .rows = {kT5Ends, kT5Encoder, kT5Decoder, kT5Mlp},
          .preset = t5_preset,
          .fields = fields,
          .prefix = "",
          .layers = "encoder.block.*",
          .waived = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
                     "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"},
          .type = "t5",
          .our_layers = "encoder.layers.*",
          .fit = output_of_files};
}

}  // namespace

std::vector<HfFamily> t5_hf_families() {
  return {t5_family("t5", "T5ForConditionalGeneration",
                    [](HfFields& f, ModelConfig& c) { t5_fields_of(f, c, "T5", "relu", true); }),
          t5_family("mt5", "MT5ForConditionalGeneration", [](HfFields& f, ModelConfig& c) {
            t5_fields_of(f, c, "MT5", "gated-gelu", false);
          })};
}

}  // namespace megatron
