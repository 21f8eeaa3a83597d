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
    {"binary_head.@", {"cls.seq_relationship.@"}},
    {"classification_head.@", {"classifier.@"}}};

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
    {.ours = "pooler.dense.@",
     .theirs = {"classifier.dense.@"},
     .beside = "classification_head.weight"},
    {"pooler.dense.@", {"roberta.pooler.dense.@"}},
    {"classification_head.@", {"classifier.out_proj.@"}}};

const HfRow kModernBert[] = {
    {"embedding.word_embeddings.weight", {"model.embeddings.tok_embeddings.weight"}},
    {"embedding.norm.@", {"model.embeddings.norm.@"}},
    {".self_attention.linear_qkv.layer_norm_@", {".attn_norm.@"}},
    {".self_attention.linear_qkv.@", {".attn.Wqkv.@"}, HfLayout::kJoinedQKV},
    {".self_attention.linear_proj.@", {".attn.Wo.@"}},
    {".mlp.linear_fc1.layer_norm_@", {".mlp_norm.@"}},
    {".mlp.linear_fc1.@", {".mlp.Wi.@"}},
    {".mlp.linear_fc2.@", {".mlp.Wo.@"}},
    {"encoder.final_layernorm.@", {"model.final_norm.@"}},
    {"lm_head.dense.@", {"head.dense.@"}},
    {"lm_head.layer_norm.@", {"head.norm.@"}},
    {"pooler.dense.@", {"head.dense.@"}},
    {"pooler.layer_norm.@", {"head.norm.@"}},
    {"classification_head.@", {"classifier.@"}},
    {"output_layer.weight", {"decoder.weight"}},
    {"output_layer.bias", {"decoder.bias"}}};

// -- keys

// Says the classes of a model, in whose place it has no heads of pretraining.
void write_classes(HfFields& f, BertConfig& own) {
  f.num_labels(own.bert_classes);
  own.bert_lm_head = true;
  own.bert_binary_head = own.bert_pooler = false;
}

// The heads that a model of this architecture has.
void bert_heads(HfFields& f, BertConfig& own, const std::string& name, bool has_pretraining) {
  const std::string both = name + "ForPreTraining", masked = name + "ForMaskedLM",
                    bare = name + "Model", classes = name + "ForSequenceClassification";
  if (!f.reading()) {
    const bool has_classes = own.bert_classes > 0;
    MEGATRON_CHECK(own.bert_choices == 0, "a multiple-choice head is not written as a ", name);
    MEGATRON_CHECK(has_classes || own.bert_lm_head || !own.bert_binary_head,
                   "models of Hugging Face have no binary head without that of masked tokens");
    MEGATRON_CHECK(!has_classes || own.bert_pooling == BertPooling::kFirst, "classes of a ", name,
                   " of Hugging Face read the first token (bert_pooling)");
    const std::string& architecture = has_classes            ? classes
                                      : !own.bert_lm_head    ? bare
                                      : own.bert_binary_head ? both
                                                             : masked;
    f.set("architectures", cat("[\"", architecture, "\"]"));
    if (has_classes) write_classes(f, own);
    return;
  }
  const std::string& usual = has_pretraining ? both : masked;
  const std::vector<std::string> given = f.texts("architectures");
  const std::string& architecture = given.empty() ? usual : given.front();
  MEGATRON_CHECK(architecture == usual || architecture == masked || architecture == bare ||
                     architecture == classes,
                 f.name(), ": a ", architecture, " is not built yet\nhint: expected a model with ",
                 has_pretraining ? both + ", " : "", masked, ", ", classes, " or ", bare,
                 " as its architecture");
  own.bert_lm_head = architecture != bare;
  own.bert_pooler = architecture == bare;
  own.bert_binary_head = has_pretraining && architecture == both;
  if (architecture == classes) f.num_labels(own.bert_classes);
}

// Files that say more of the heads than their architecture: models published with all heads of
// pretraining under the name of one of them, and bare ones without a pooler.
void heads_of_files(const HfFamily& family, const HfNames& held, ModelConfig& c) {
  BertConfig& own = *c.own.as<BertConfig>();
  if (own.bert_classes > 0) return;
  const bool pooler = held(cat(family.prefix, "pooler.dense.weight"));
  if (!own.bert_lm_head)
    own.bert_pooler = pooler;
  else if (!own.bert_binary_head)
    own.bert_binary_head = pooler && held("cls.seq_relationship.weight");
}

void bert_fields_of(HfFields& f, ModelConfig& c, const std::string& name, bool has_pretraining) {
  TransformerConfig& t = c.transformer;
  BertConfig& own = c.own.ensure<BertConfig>();
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
  BertConfig& own = c.own.ensure<BertConfig>();
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

// -- ModernBERT

// The head of its architecture: that of masked tokens, or of classes, whose pooler is that head's
// linear layer and norm, or none.
void modern_head(HfFields& f, BertConfig& own) {
  const std::string masked = "ModernBertForMaskedLM", bare = "ModernBertModel",
                    classes = "ModernBertForSequenceClassification";
  if (!f.reading()) {
    const bool has_classes = own.bert_classes > 0;
    MEGATRON_CHECK(own.bert_choices == 0, "a multiple-choice head is not written as a ModernBERT");
    MEGATRON_CHECK(has_classes || !(own.bert_binary_head || own.bert_pooler),
                   "a ModernBERT of Hugging Face has neither a binary head nor a pooler");
    MEGATRON_CHECK(!has_classes || own.bert_pooler_norm,
                   "classes of a ModernBERT of Hugging Face read a pooler with a norm "
                   "(bert_pooler_norm)");
    f.set("architectures", cat("[\"",
                               has_classes        ? classes
                               : own.bert_lm_head ? masked
                                                  : bare,
                               "\"]"));
    if (has_classes) write_classes(f, own);
    return;
  }
  const std::vector<std::string> given = f.texts("architectures");
  const std::string& architecture = given.empty() ? masked : given.front();
  MEGATRON_CHECK(architecture == masked || architecture == bare || architecture == classes,
                 f.name(), ": a ", architecture, " is not built yet\nhint: expected a model with ",
                 masked, ", ", classes, " or ", bare, " as its architecture");
  own.bert_lm_head = architecture != bare;
  own.bert_pooler = own.bert_binary_head = false;
  own.bert_pooler_norm = true;
  if (architecture == classes) f.num_labels(own.bert_classes);
}

// What classes are read from.
void modern_pooling(HfFields& f, BertConfig& own) {
  std::string pooling = own.bert_pooling == BertPooling::kMean ? "mean" : "cls";
  f.text("classifier_pooling", pooling, "cls");
  MEGATRON_CHECK(pooling == "cls" || pooling == "mean", f.name(), ": classifier_pooling \"",
                 pooling, "\" is not built, only \"cls\" and \"mean\"");
  own.bert_pooling = pooling == "mean" ? BertPooling::kMean : BertPooling::kFirst;
}

// local_attention counts the tokens of both sides. layer_types, or every n-th layer from the first
// on attends to all tokens.
void modern_windows(HfFields& f, TransformerConfig& t) {
  int64_t width = t.window_size.empty() ? 128 : 2 * t.window_size[0];
  MEGATRON_CHECK(f.reading() || t.window_size.empty() || t.window_size[0] == t.window_size[1],
                 "windows of a ModernBERT of Hugging Face are as wide to the left as to the right, "
                 "the model has --window-size ",
                 t.window_size.empty() ? 0 : t.window_size[0], " ",
                 t.window_size.empty() ? 0 : t.window_size[1]);
  f.integer("local_attention", width, 128);
  const int64_t every = f.reading() ? f.find_integer("global_attn_every_n_layers").value_or(3) : 3;
  MEGATRON_CHECK(every > 0, f.name(), ": global_attn_every_n_layers ", every, " is not positive");
  if (!f.reading()) f.erase("global_attn_every_n_layers");
  const int64_t side = width / 2;
  layer_windows(f, t, side + 1, [&](int64_t i) { return i % every != 0; });
  if (!f.reading()) return;
  if (t.window_size.empty())
    t.rotary_base_local.reset();
  else
    t.window_size = {side, side};
}

void modern_bert_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  BertConfig& own = c.own.ensure<BertConfig>();
  MEGATRON_CHECK(f.reading() || num_token_types(c) == 0,
                 "a ModernBERT of Hugging Face has no token types");
  own.bert_token_types = 0;
  embeddings_of_family(f, c, /*norm=*/true, /*first_position=*/0);
  sizes(f, c);
  f.integer("max_position_embeddings", t.max_position_embeddings, 8192);
  modern_head(f, own);
  f.number("norm_eps", t.layernorm_epsilon, 1e-5);
  f.flag("norm_bias", t.norm_bias, false);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("embedding_dropout", t.hidden_dropout, 0.0);
  f.number("attention_dropout", t.attention_dropout, 0.0);
  f.constant("hidden_activation", "\"gelu\"");
  linear_biases(f, t);
  f.flag("classifier_bias", own.bert_head_bias, false);
  f.constant("classifier_activation", "\"gelu\"");
  f.constant("decoder_bias", "true");
  modern_pooling(f, own);
  tied(f, t, true);
  f.constant("rope_scaling", "null");  // there it scales the positions of windowed layers, too
  f.rope(t, {.theta = 160000,
             .legacy_theta = "global_rope_theta",
             .local_theta = 10000,
             .legacy_local_theta = "local_rope_theta"});
  MEGATRON_CHECK(t.rotary_percent == 1.0, f.name(), ": partial_rotary_factor ", t.rotary_percent,
                 " is not built, only 1");
  modern_windows(f, t);
}

void modern_bert_preset(TransformerConfig& t) {
  t.position_embedding_type = PositionEmbedding::kRope;
  t.exact_geglu = true;
  t.first_input_norm = false;
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
          {.model_type = "modernbert",
           .architecture = "ModernBertForMaskedLM",
           .rows = {kModernBert},
           .preset = modern_bert_preset,
           .fields = modern_bert_fields,
           .waived = {},
           .type = "bert",
           .our_layers = "encoder.layers.*",
           .bare_architecture = "ModernBertModel"},
          roberta_family("roberta", "RobertaForMaskedLM", "RobertaModel",
                         [](HfFields& f, ModelConfig& c) { roberta_fields(f, c, "Roberta"); }),
          roberta_family("xlm-roberta", "XLMRobertaForMaskedLM", "XLMRobertaModel",
                         [](HfFields& f, ModelConfig& c) { roberta_fields(f, c, "XLMRoberta"); }),
          roberta_family("camembert", "CamembertForMaskedLM", "CamembertModel",
                         [](HfFields& f, ModelConfig& c) { roberta_fields(f, c, "Camembert"); })};
}

}  // namespace megatron
