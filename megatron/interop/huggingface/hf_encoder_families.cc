// Families of encoders.
#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_common.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

// -- names, as HfRow has them

const HfRow kBertEnds[] = {
    {"embedding.word_embeddings.weight", {"bert.embeddings.word_embeddings.weight"}},
    {"embedding.position_embeddings.weight", {"bert.embeddings.position_embeddings.weight"}},
    {"embedding.tokentype_embeddings.weight", {"bert.embeddings.token_type_embeddings.weight"}},
    {"lm_head.dense.@", {"cls.predictions.transform.dense.@"}},
    {"lm_head.layer_norm.@", {"cls.predictions.transform.LayerNorm.@"}},
    {"output_layer.weight", {"cls.predictions.decoder.weight"}},
    {"output_layer.bias", {"cls.predictions.bias"}},
    {"pooler.dense.@", {"bert.pooler.dense.@"}},
    {"binary_head.@", {"cls.seq_relationship.@"}}};

const HfRow kBertLinears[] = {
    {".self_attention.linear_qkv.@",
     {".attention.self.query.@", ".attention.self.key.@", ".attention.self.value.@"},
     HfLayout::kSeparateQKV},
    {".self_attention.linear_proj.@", {".attention.output.dense.@"}},
    {".mlp.linear_fc1.@", {".intermediate.dense.@"}},
    {".mlp.linear_fc2.@", {".output.dense.@"}}};

const HfRow kMegatronBertNorms[] = {
    {".self_attention.linear_qkv.layer_norm_@", {".attention.ln.@"}},
    {".mlp.linear_fc1.layer_norm_@", {".ln.@"}},
    {"encoder.final_layernorm.@", {"bert.encoder.ln.@"}}};

const HfRow kBertNorms[] = {{"embedding.norm.@", {"bert.embeddings.LayerNorm.@"}},
                            {".post_self_attn_layernorm.@", {".attention.output.LayerNorm.@"}},
                            {".post_mlp_layernorm.@", {".output.LayerNorm.@"}}};

// As models that were converted from TensorFlow have them.
const HfRow kOldBertNorms[] = {
    {"embedding.norm.weight", {"bert.embeddings.LayerNorm.gamma"}},
    {"embedding.norm.bias", {"bert.embeddings.LayerNorm.beta"}},
    {".post_self_attn_layernorm.weight", {".attention.output.LayerNorm.gamma"}},
    {".post_self_attn_layernorm.bias", {".attention.output.LayerNorm.beta"}},
    {".post_mlp_layernorm.weight", {".output.LayerNorm.gamma"}},
    {".post_mlp_layernorm.bias", {".output.LayerNorm.beta"}},
    {"lm_head.layer_norm.weight", {"cls.predictions.transform.LayerNorm.gamma"}},
    {"lm_head.layer_norm.bias", {"cls.predictions.transform.LayerNorm.beta"}}};

const HfRow kRoberta[] = {
    {"embedding.word_embeddings.weight", {"roberta.embeddings.word_embeddings.weight"}},
    {"embedding.position_embeddings.weight", {"roberta.embeddings.position_embeddings.weight"}},
    {"embedding.tokentype_embeddings.weight", {"roberta.embeddings.token_type_embeddings.weight"}},
    {"embedding.norm.@", {"roberta.embeddings.LayerNorm.@"}},
    {".post_self_attn_layernorm.@", {".attention.output.LayerNorm.@"}},
    {".post_mlp_layernorm.@", {".output.LayerNorm.@"}},
    {"lm_head.dense.@", {"lm_head.dense.@"}},
    {"lm_head.layer_norm.@", {"lm_head.layer_norm.@"}},
    {"output_layer.weight", {"lm_head.decoder.weight"}},
    {"output_layer.bias", {"lm_head.bias"}},
    {"pooler.dense.@", {"roberta.pooler.dense.@"}}};

// -- keys

// The heads that a model of this architecture has.
void bert_heads(HfFields& f, BertConfig& own, const std::string& name, bool has_pretraining) {
  const std::string both = name + "ForPreTraining", masked = name + "ForMaskedLM",
                    bare = name + "Model";
  if (!f.reading()) {
    MEGATRON_CHECK(own.bert_lm_head || !own.bert_binary_head,
                   "models of Hugging Face have no binary head without that of masked tokens");
    const std::string& architecture = !own.bert_lm_head      ? bare
                                      : own.bert_binary_head ? both
                                                             : masked;
    return f.set("architectures", cat("[\"", architecture, "\"]"));
  }
  const std::string& usual = has_pretraining ? both : masked;
  const std::vector<std::string> given = f.texts("architectures");
  const std::string& architecture = given.empty() ? usual : given.front();
  MEGATRON_CHECK(architecture == usual || architecture == masked || architecture == bare, f.name(),
                 ": a ", architecture, " is not built yet\nhint: expected a model with ",
                 has_pretraining ? both + ", " : "", masked, " or ", bare, " as its architecture");
  own.bert_lm_head = architecture != bare;
  own.bert_pooler = architecture == bare;
  own.bert_binary_head = has_pretraining && architecture == both;
}

// Files that say more of the heads than their architecture: models published with all heads of
// pretraining under the name of one of them, and bare ones without a pooler.
void heads_of_files(const HfFamily& family, const HfNames& held, ModelConfig& c) {
  BertConfig& own = *c.own.as<BertConfig>();
  const bool pooler = held(cat(family.prefix, "pooler.dense.weight"));
  if (!own.bert_lm_head)
    own.bert_pooler = pooler;
  else if (!own.bert_binary_head)
    own.bert_binary_head = pooler && held("cls.seq_relationship.weight");
}

void bert_fields_of(HfFields& f, ModelConfig& c, const std::string& name, bool has_pretraining) {
  TransformerConfig& t = c.transformer;
  if (c.own.as<BertConfig>() == nullptr) c.own = OwnConfig(BertConfig());
  BertConfig& own = *c.own.as<BertConfig>();
  int64_t types = num_token_types(c),
          positions = t.max_position_embeddings + own.bert_first_position;
  MEGATRON_CHECK(f.reading() || types > 0, "a ", name, " of Hugging Face has token types");
  sizes(f, c);
  f.integer("max_position_embeddings", positions, 512);
  MEGATRON_CHECK(positions > own.bert_first_position, f.name(), ": max_position_embeddings ",
                 positions, " leaves no position behind that of the padding token");
  t.max_position_embeddings = positions - own.bert_first_position;
  f.integer("type_vocab_size", types, 2);
  own.bert_token_types = types;
  bert_heads(f, own, name, has_pretraining);
  f.number("layer_norm_eps", t.layernorm_epsilon, 1e-12);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("hidden_dropout_prob", t.hidden_dropout, 0.1);
  f.number("attention_probs_dropout_prob", t.attention_dropout, 0.1);
  plain_activation(f, t, "hidden_act", "gelu");
  // The same function holds for MLP and head there; ours has the exact GELU in the head.
  MEGATRON_CHECK(t.activation() == Activation::kGelu || !own.bert_lm_head,
                 f.reading() ? f.name() : cat("a ", name, " of Hugging Face"),
                 ": hidden_act other than \"gelu\" is not built: the head has the exact GELU",
                 "\nhint: --no-bias-gelu-fusion trains with the exact GELU in the layers, too");
  f.constant("position_embedding_type", "\"absolute\"");
  f.constant("is_decoder", "false");
  f.constant("add_cross_attention", "false");
  tied(f, t, true);
  // Untied, their head has two biases, of which one counts.
  MEGATRON_CHECK(!t.untie_embeddings_and_output_weights,
                 f.reading() ? f.name() : cat("a ", name, " of Hugging Face"),
                 ": tie_word_embeddings false is not built");
}

// The embeddings' norm and the positions of a family, which are no keys.
void embeddings_of_family(HfFields& f, ModelConfig& c, bool norm, int64_t first_position) {
  if (c.own.as<BertConfig>() == nullptr) c.own = OwnConfig(BertConfig());
  BertConfig& own = *c.own.as<BertConfig>();
  if (f.reading()) {
    own.bert_embedding_norm = norm;
    own.bert_first_position = first_position;
  }
  MEGATRON_CHECK(own.bert_embedding_norm == norm, "the model has ", norm ? "no" : "a",
                 " norm of its embeddings (bert_embedding_norm)");
  MEGATRON_CHECK(own.bert_first_position == first_position, "position 0 of the model has row ",
                 own.bert_first_position, " of the table (bert_first_position), here it has ",
                 first_position);
}

void megatron_bert_fields(HfFields& f, ModelConfig& c) {
  embeddings_of_family(f, c, /*norm=*/false, /*first_position=*/0);
  bert_fields_of(f, c, "MegatronBert", /*has_pretraining=*/true);
}

void bert_fields(HfFields& f, ModelConfig& c) {
  embeddings_of_family(f, c, /*norm=*/true, /*first_position=*/0);
  bert_fields_of(f, c, "Bert", /*has_pretraining=*/true);
}

// Positions count from the one behind the padding token's id.
void roberta_fields(HfFields& f, ModelConfig& c, const char* name) {
  const BertConfig* own = c.own.as<BertConfig>();
  int64_t pad = own == nullptr ? 1 : own->bert_first_position - 1;
  MEGATRON_CHECK(f.reading() || pad >= 0,
                 "position 0 of the model has row 0 of the table "
                 "(bert_first_position), in RoBERTa models that is none of a text");
  f.integer("pad_token_id", pad, 1);
  embeddings_of_family(f, c, /*norm=*/true, pad + 1);
  bert_fields_of(f, c, name, /*has_pretraining=*/false);
}

void residual_norms(TransformerConfig& t) { t.norm_placement = kResidualPlacement; }

HfFamily roberta_family(std::string_view type, std::string_view masked, std::string_view bare,
                        void (*fields)(HfFields&, ModelConfig&)) {
  return {.model_type = type,
          .architecture = masked,
          .rows = {kRoberta, kBertLinears},
          .preset = residual_norms,
          .fields = fields,
          .prefix = "roberta.",
          .layers = "roberta.encoder.layer.*",
          .waived = {"roberta.embeddings.position_ids", "lm_head.decoder.bias",
                     "roberta.pooler.dense.*"},
          .type = "bert",
          .our_layers = "encoder.layers.*",
          .bare_architecture = bare,
          .fit = heads_of_files};
}

}  // namespace

std::vector<HfFamily> encoder_hf_families() {
  return {{.model_type = "megatron-bert",
           .architecture = "MegatronBertForPreTraining",
           .rows = {kBertEnds, kBertLinears, kMegatronBertNorms},
           .preset = [](TransformerConfig&) {},
           .fields = megatron_bert_fields,
           .prefix = "bert.",
           .layers = "bert.encoder.layer.*",
           .waived = {"bert.embeddings.position_ids", "cls.predictions.decoder.bias",
                      "bert.pooler.dense.*"},
           .type = "bert",
           .our_layers = "encoder.layers.*",
           .bare_architecture = "MegatronBertModel",
           .fit = heads_of_files},
          {.model_type = "bert",
           .architecture = "BertForPreTraining",
           .rows = {kBertEnds, kBertLinears, kBertNorms, kOldBertNorms},
           .preset = residual_norms,
           .fields = bert_fields,
           .prefix = "bert.",
           .layers = "bert.encoder.layer.*",
           .waived = {"bert.embeddings.position_ids", "cls.predictions.decoder.bias",
                      "bert.pooler.dense.*"},
           .type = "bert",
           .our_layers = "encoder.layers.*",
           .bare_architecture = "BertModel",
           .fit = heads_of_files},
          roberta_family("roberta", "RobertaForMaskedLM", "RobertaModel",
                         [](HfFields& f, ModelConfig& c) { roberta_fields(f, c, "Roberta"); }),
          roberta_family("xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaModel",
                         [](HfFields& f, ModelConfig& c) { roberta_fields(f, c, "XLMRoberta"); }),
          roberta_family("camembert", "CamembertForMaskedLM", "CamembertModel",
                         [](HfFields& f, ModelConfig& c) { roberta_fields(f, c, "Camembert"); })};
}

}  // namespace megatron
