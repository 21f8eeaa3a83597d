#include "megatron/models/bert/bert_model.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/counted_rows.h"
#include "megatron/models/common/freezing.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/attention/unpadded_rows.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {

namespace {

constexpr int64_t kMostTokenTypes = 1024;
constexpr int64_t kLastFirstPosition = 1024;
constexpr int64_t kMostClasses = 100000;
constexpr int64_t kMostChoices = 1000;
constexpr std::string_view kPoolings[] = {"first", "mean"};

}  // namespace

void BertConfig::fields(FieldVisitor& v) {
  v.group("bert");
  v.role(FieldRole::kArchitecture);
  v.field({"bert_binary_head", "--bert-no-binary-head", true}, bert_binary_head,
          "BERT without the loss of the order of two halves and what only that needs");
  v.field("bert_token_types", bert_token_types,
          "kinds of tokens that have an embedding of their own; default: 2 with the binary head, "
          "else none");
  v.field({"bert_lm_head", "--bert-no-lm-head", true}, bert_lm_head,
          "BERT without the head of masked tokens, as `embed` needs it");
  v.field({"bert_head_bias", "--bert-no-head-bias", true}, bert_head_bias,
          "no bias in the linear layer of the head of masked tokens, and in a pooler of "
          "--bert-pooler-norm; that of the logits stays");
  v.field("bert_pooler", bert_pooler, "a pooler without the binary head, too");
  v.field("bert_pooler_norm", bert_pooler_norm,
          "the pooler is a norm of a GELU, as ModernBERT's, in the place of a tanh");
  v.choice("bert_pooling", bert_pooling, kPoolings,
           "of classes and choices: what the pooler reads, the first token's hidden state or the "
           "mean of a text's");
  v.field("bert_classes", bert_classes,
          "outputs of a classification head, in the place of the heads of pretraining; 1 predicts "
          "a number, 0: there is none");
  v.field("bert_choices", bert_choices,
          "choices of a question of --task multichoice, whose model scores each with a head in the "
          "place of the heads of pretraining; 0: there is none");
  v.field("bert_embedding_norm", bert_embedding_norm, "normalise the sum of the embeddings");
  v.field("bert_first_position", bert_first_position,
          "row of the table of learned positions that position 0 has");
}

void BertConfig::validate(Violations& violations) const {
  const int64_t types = bert_token_types.value_or(2);
  violations.require(types >= 0 && types <= kMostTokenTypes, cat("--bert-token-types is ", types),
                     cat("0 to ", kMostTokenTypes));
  violations.require(!bert_binary_head || types >= 2,
                     cat("--bert-token-types ", types, " is less than the two of the binary head"),
                     "give 2 or more, or --bert-no-binary-head");
  violations.require(bert_classes >= 0 && bert_classes <= kMostClasses,
                     cat("--bert-classes is ", bert_classes), cat("0 to ", kMostClasses));
  violations.require(bert_choices == 0 || (bert_choices > 1 && bert_choices <= kMostChoices),
                     cat("--bert-choices is ", bert_choices), cat("0, or 2 to ", kMostChoices));
  violations.require(bert_choices == 0 || bert_classes == 0,
                     "--bert-classes and --bert-choices are given", "a model has one such head");
  violations.require(bert_pooling == BertPooling::kFirst || bert_classes > 0 || bert_choices > 0 ||
                         !bert_binary_head,
                     "--bert-pooling mean with the binary head is not built");
  violations.require(bert_first_position >= 0 && bert_first_position <= kLastFirstPosition,
                     cat("--bert-first-position is ", bert_first_position),
                     cat("0 to ", kLastFirstPosition));
}

namespace {

const BertConfig& own_of(const ModelConfig& config) {
  return config.own.as_or_default<BertConfig>();
}

}  // namespace

int64_t num_classes(const ModelConfig& config) { return own_of(config).bert_classes; }

int64_t num_choices(const ModelConfig& config) { return own_of(config).bert_choices; }

int64_t text_head_outputs(const ModelConfig& config) {
  return num_choices(config) > 0 ? 1 : num_classes(config);
}

bool has_lm_head(const ModelConfig& config) {
  return own_of(config).bert_lm_head && text_head_outputs(config) == 0;
}

bool has_binary_head(const ModelConfig& config) {
  return own_of(config).bert_binary_head && text_head_outputs(config) == 0;
}

bool has_pooler(const ModelConfig& config) {
  return has_binary_head(config) || text_head_outputs(config) > 0 || own_of(config).bert_pooler;
}

int64_t num_token_types(const ModelConfig& config) {
  const BertConfig& own = own_of(config);
  return own.bert_token_types.value_or(own.bert_binary_head ? 2 : 0);
}

namespace {

ModelConfig bidirectional(ModelConfig config) {
  const TransformerConfig& t = config.transformer;
  const auto refuse = [](bool given, const char* flag) {
    MEGATRON_CHECK(!given, flag, " is not built for BERT");
  };
  refuse(config.pipeline_vocab_parallel, "--pipeline-vocab-parallel");
  refuse(t.position_embedding_type == PositionEmbedding::kRelative,
         "--position-embedding-type relative");
  refuse(t.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear,
         "--cross-entropy-fusion-impl linear");
  refuse(t.final_logit_softcapping > 0, "--final-logit-softcapping");
  refuse(t.logits_scaling != 1.0, "--logits-scaling");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  for (const int64_t side : t.window_size)
    MEGATRON_CHECK(side >= 0, "--window-size ", listed(t.window_size, {}, " "),
                   ": tokens of a BERT see those before and behind them, and both sides of a "
                   "window have a limit");
  refuse(config.sequence_parallel && text_head_outputs(config) > 0,
         "--bert-classes or --bert-choices with --sequence-parallel");
  config.transformer.causal = false;
  return config;
}

constexpr const char* kPaddingMask = "padding_mask";

// The document of each token: that of the text, and others for holes of it and for padding.
at::Tensor padding_documents(const at::Tensor& padding_mask, const at::Tensor& document_ids) {
  const at::Tensor kinds = kinds_of_mask(padding_mask);
  return document_ids.defined() ? at::where(padding_mask != 0, document_ids, -kinds) : kinds;
}

// The segment for the output projection, which the head of masked tokens alone needs.
StageSlice slice_of_output(StageSlice slice, const ModelConfig& config) {
  slice.head = slice.head && has_lm_head(config);
  return slice;
}

EmbeddingExtras embedding_extras(const ModelConfig& config) {
  return {own_of(config).bert_first_position, own_of(config).bert_embedding_norm};
}

// A linear layer of the heads, all of which every tensor rank has.
std::unique_ptr<ColumnParallelLinear> head_linear(const char* name, const ModelConfig& config,
                                                  int64_t outputs, const ParallelGroups& groups,
                                                  bool bias = true) {
  const int64_t h = config.transformer.hidden_size;
  LinearOptions options;
  options.bias = bias;
  options.divided = false;
  options.sequence_parallel = config.sequence_parallel;
  options.init = config.transformer.weight_init(outputs, h);
  return std::make_unique<ColumnParallelLinear>(name, h, outputs, options, groups);
}

}  // namespace

// Rows of this rank -> the input of the output projection, and the bias of its logits.
struct BertModel::LMHead : Module {
  LMHead(const ModelConfig& config, const ParallelGroups& groups)
      : dense(head_linear("lm_head.dense", config, config.transformer.hidden_size, groups,
                          own_of(config).bert_head_bias)),
        layer_norm(config.transformer.hidden_size,
                   norm_options(config.transformer, config.sequence_parallel)) {
    add("dense", dense.get());
    add("layer_norm", &layer_norm);
    bias.local_shape = {config.padded_vocab_size / groups.tp.size()};
    bias.global_shape = {config.padded_vocab_size};
    bias.valid_rows = config.vocab_size;
    bias.placement.shards = {{0, Axis::kTensor, {}}};
    bias.role = ParameterRole::kBias;
  }

  at::Tensor forward(const at::Tensor& x) {
    return layer_norm.forward(activate(dense->forward(x), Activation::kGelu));
  }

  std::unique_ptr<ColumnParallelLinear> dense;
  Norm layer_norm;
  Parameter bias;
};

BertModel::BertModel(const ModelConfig& given, const ParallelGroups& groups,
                     const StageSlice& slice, const EmbeddingTables& tables)
    : Model(bidirectional(given), groups, slice),
      embedding_(slice.embedding ? std::make_unique<LanguageModelEmbedding>(
                                       config(), groups, embedding_extras(config()))
                                 : nullptr),
      encoder_(config().transformer, slice.first_layer, slice.num_layers,
               /*final_norm=*/slice.head, config().sequence_parallel, groups),
      output_(config(), groups, slice_of_output(slice, config()), embedding_.get(), tables.words) {
  const int64_t h = config().transformer.hidden_size;
  const bool tied =
      has_lm_head(config()) && !config().transformer.untie_embeddings_and_output_weights;
  if (embedding_) {
    if (tied && !slice.head && groups.embd.size() > 1) embedding_->weight().shared = &groups.embd;
    add("embedding", embedding_.get());
  } else if (tables.words != nullptr && slice.head) {
    tables.words->shared = nullptr;  // both ends are on this rank
  }
  if (const int64_t types = num_token_types(config()); embedding_ && types > 0) {
    const TransformerConfig& t = config().transformer;
    token_types_ = std::make_unique<Embedding>(types, t.hidden_size, t.embedding_init(types));
    token_types_->set_sequence_parallel(config().sequence_parallel);
    add("embedding.tokentype_embeddings", token_types_.get());
  }
  add("encoder", &encoder_);
  if (slice.head && has_lm_head(config())) {
    lm_head_ = std::make_unique<LMHead>(config(), groups);
    add("lm_head", lm_head_.get());
    if (Module* copy = output_.tied_table()) add("embedding", copy);
    if (Module* own = output_.output_layer()) add("output_layer", own);
    add("output_layer.bias", &lm_head_->bias);
  }
  if (slice.head && has_pooler(config())) {
    const BertConfig& own = own_of(config());
    pooler_ = head_linear("pooler.dense", config(), h, groups,
                          !own.bert_pooler_norm || own.bert_head_bias);
    add("pooler.dense", pooler_.get());
    if (own.bert_pooler_norm) {
      pooler_norm_ =
          std::make_unique<Norm>(h, norm_options(config().transformer, config().sequence_parallel));
      add("pooler.layer_norm", pooler_norm_.get());
    }
  }
  if (slice.head && has_binary_head(config())) {
    binary_head_ = head_linear("binary_head", config(), 2, groups);
    add("binary_head", binary_head_.get());
  }
  if (const int64_t outputs = text_head_outputs(config()); slice.head && outputs > 0) {
    const char* name = num_choices(config()) > 0 ? "multichoice_head" : "classification_head";
    text_head_ = head_linear(name, config(), outputs, groups);
    add(name, text_head_.get());
  }
  name_parameters();
  if (text_head_outputs(config()) > 0)
    freeze_beside_adapters(*this, {"pooler.", "classification_head.", "multichoice_head."});
  else
    freeze_beside_adapters(*this);
}

BertModel::~BertModel() = default;

EmbeddingTables BertModel::embedding_tables() {
  return embedding_ ? embedding_->tables() : EmbeddingTables{};
}

std::vector<std::string> BertModel::auxiliary_losses() const {
  std::vector<std::string> names = megatron::auxiliary_losses(config().transformer);
  if (has_binary_head(config())) names.emplace_back("sop loss");
  return names;
}

StageTensors BertModel::hidden(const Batch& batch, const StageTensors& input,
                               const ForwardContext& given) {
  MEGATRON_CHECK(given.decoding == nullptr,
                 "an encoder continues no text: every token sees those after it");
  const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(kPaddingMask);
  ForwardContext context =
      with_rows(without_padding(given, rows), config().sequence_parallel, groups().tp);
  if (const at::Tensor mask = batch.find(kPaddingMask); mask.defined() && rows == nullptr) {
    context.document_ids = padding_documents(mask, given.document_ids);
    context.document_rows.reset();
  }
  if (!embedding_) return {encoder_.forward(input.front(), context)};
  const at::Tensor text = batch.find("text"), padded = text.defined() ? text : batch["tokens"];
  const at::Tensor tokens = rows != nullptr ? rows->column(padded) : padded;
  at::Tensor types;
  if (token_types_) {
    at::Tensor kinds = batch.find("types");
    if (kinds.defined() && rows != nullptr) kinds = rows->column(kinds);
    types =
        token_types_->forward(own_rows(kinds.defined() ? kinds : at::zeros_like(tokens), context));
  }
  return {encoder_.forward(embedding_->forward(tokens, context, types), context)};
}

TensorFormats BertModel::border(int64_t, const Batch& batch, at::ScalarType dtype) const {
  return {rows_format(batch, batch.rows_of(kPaddingMask).get(), dtype)};
}

at::Tensor BertModel::logits(const at::Tensor& hidden) {
  MEGATRON_CHECK(lm_head_ != nullptr, "this BERT has no head of masked tokens (bert_lm_head)");
  return output_.linear().forward(lm_head_->forward(hidden)).add_(differentiable(lm_head_->bias));
}

at::Tensor BertModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(), config().vocab_size,
                                      config().transformer.z_loss_coeff, groups().tp);
}

Loss BertModel::loss(const StageTensors& states, const Batch& batch, const ForwardContext& given) {
  const at::Tensor& hidden = states.front();
  if (binary_head_ && given.auxiliary_losses != nullptr)
    add_order_loss(hidden, batch, with_rows(given, config().sequence_parallel, groups().tp));
  at::Tensor labels = batch["labels"], mask = batch["loss_mask"];
  int64_t most = batch.most_counted;
  if (const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(kPaddingMask)) {
    labels = rows->column(labels);
    mask = rows->column(mask);
    most *= rows->samples;
  }
  const CountedRows counted =
      counted_rows(hidden, labels, mask, most, config().sequence_parallel, groups().tp);
  const at::Tensor losses =
      vocab_parallel_cross_entropy(logits(counted.hidden), counted.labels, config().vocab_size,
                                   config().transformer.z_loss_coeff, groups().tp);
  return {(losses * counted.weights).sum(), counted.weights.sum()};
}

at::Tensor BertModel::pooled(const at::Tensor& hidden, const at::Tensor& text,
                             const UnpaddedRows* rows) {
  MEGATRON_ASSERT(pooler_ != nullptr, "this segment has no pooler");
  at::Tensor x;
  if (own_of(config()).bert_pooling == BertPooling::kFirst) {
    x = rows == nullptr ? hidden.narrow(0, 0, 1).clone()  // a view would keep all rows
                        : first_rows(hidden, *rows);
  } else if (text.defined()) {
    const at::Tensor counted = (text != 0).to(hidden.scalar_type()).t().unsqueeze(2);  // [s, b, 1]
    const at::Tensor all = rows == nullptr ? hidden : rows->with_padding(hidden.squeeze(1));
    x = (all * counted).sum(0, /*keepdim=*/true) / counted.sum(0, /*keepdim=*/true).clamp_min(1);
  } else {
    x = hidden.mean(0, /*keepdim=*/true);
  }
  const at::Tensor y = pooler_->forward(x);
  return (pooler_norm_ ? pooler_norm_->forward(activate(y, Activation::kGelu)) : at::tanh(y))
      .squeeze(0);
}

at::Tensor BertModel::own_first(const UnpaddedRows& rows, int64_t count) const {
  return count == rows.rows ? rows.first : rows.first - groups().tp.rank() * count;
}

at::Tensor BertModel::holds_first(const UnpaddedRows& rows, int64_t count) const {
  const at::Tensor own = own_first(rows, count);
  return (own >= 0).logical_and(own < count);
}

at::Tensor BertModel::first_rows(const at::Tensor& hidden, const UnpaddedRows& rows) const {
  const int64_t n = hidden.size(0);
  return take_rows(hidden.squeeze(1), at::where(holds_first(rows, n), own_first(rows, n), n))
      .unsqueeze(0);
}

at::Tensor BertModel::order_logits(const at::Tensor& hidden, const UnpaddedRows* rows) {
  MEGATRON_ASSERT(binary_head_ != nullptr, "this segment has no binary head");
  return binary_head_->forward(pooled(hidden, {}, rows).unsqueeze(0)).squeeze(0);
}

at::Tensor BertModel::class_logits(const at::Tensor& hidden, const at::Tensor& text,
                                   const ForwardContext* training, const UnpaddedRows* rows) {
  MEGATRON_ASSERT(text_head_ != nullptr, "this segment has no head of classes or of choices");
  at::Tensor x = pooled(hidden, text, rows).unsqueeze(0);
  if (const TransformerConfig& t = config().transformer; training != nullptr && training->training)
    x = dropout(x, t.hidden_dropout, random_key(t.seed, "classification_dropout"),
                {training->place.sample, training->place.position.narrow(0, 0, 1)});
  return text_head_->forward(x).squeeze(0);
}

// Every rank computes the head on the first of its rows, and that of position 0 counts; without
// padding those of the samples whose first row it holds count. So nothing is sent.
void BertModel::add_order_loss(const at::Tensor& hidden, const Batch& batch,
                               const ForwardContext& context) {
  const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(kPaddingMask);
  const at::Tensor order = order_logits(hidden, rows.get());
  const at::Tensor losses = -order.to(order.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
                                 .log_softmax(1)
                                 .gather(1, batch["is_random"])
                                 .squeeze(1);
  const at::Tensor counts =
      rows != nullptr ? holds_first(*rows, hidden.size(0)) : context.rows.position[0] == 0;
  const at::Tensor weight = batch["sample_weight"].squeeze(1).to(losses.scalar_type()) * counts;
  context.auxiliary_losses->add("sop loss", (losses * weight).sum(), weight.sum(),
                                config().sequence_parallel ? LossRows::kOwn : LossRows::kAll);
}

std::unique_ptr<VocabularyPass> BertModel::begin_loss(const at::Tensor&, const Batch&) {
  throw_error("--pipeline-vocab-parallel is not built for BERT");
}

const ModelType& bert_model_type() {
  static const ModelType type = {.name = "bert",
                                 .title = "BERT",
                                 .make = make_model_of<BertModel>,
                                 .ends_cost = bert_ends_cost,
                                 .config = OwnConfig(BertConfig()),
                                 .decodes = false};
  return type;
}

}  // namespace megatron
