#include "megatron/models/t5/t5_model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/freezing.h"
#include "megatron/models/common/refused_options.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/attention/unpadded_rows.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/transformer/attention/cross_attention.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {
namespace {

// Which use of the embedding a pass makes.
constexpr int64_t kOfEncoder = 0, kOfDecoder = 1;

const ModelConfig& built(const ModelConfig& config, const ParallelGroups& groups) {
  constexpr const char* kModel = "T5";
  refuse_options_of_gpt(config, kModel);
  refuse_option(config.transformer.group_query_attention, "--group-query-attention", kModel);
  refuse_option(!config.transformer.first_input_norm, "--no-first-input-norm", kModel);
  refuse_option(config.transformer.first_last_layers_bf16, "--first-last-layers-bf16", kModel);
  refuse_option(config.transformer.offloads_activations() &&
                    config.transformer.recompute_granularity == RecomputeGranularity::kFull,
                "offloading of activations with --recompute-granularity full", kModel);
  refuse_option(groups.cp.size() > 1 && attends_in_rings(config.transformer),
                "ring attention (--cp-comm-type p2p or a2a+p2p)", kModel);
  return config;
}

// The columns that mark the texts of the stacks.
constexpr const char *kEncoderMask = "enc_mask", *kDecoderMask = "dec_mask";

// A column of one stack, of its rows if it is computed without padding.
at::Tensor column_of(const Batch& batch, const char* column, const char* mask) {
  const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(mask);
  return rows != nullptr ? rows->column(batch[column]) : batch[column];
}

}  // namespace

T5Model::T5Model(const ModelConfig& given, const ParallelGroups& groups, const StageSlice& slice,
                 const EmbeddingTables& tables)
    : Model(built(given, groups), groups, slice),
      own_(config().own.as_or_default<T5Config>()),
      stacks_(t5_stacks(config())) {
  const int64_t border = stacks_.encoder.num_layers, end = slice.first_layer + slice.num_layers,
                encoders = std::min(end, border) - std::min(slice.first_layer, border);
  const bool rows = config().sequence_parallel;
  if (encoders > 0)
    encoder_ = std::make_unique<TransformerBlock>(stacks_.encoder, slice.first_layer, encoders,
                                                  /*final_norm=*/end >= border, rows, groups);
  first_of_decoder_ = std::max(slice.first_layer, border) - border;
  if (end > border && slice.num_layers > 0)
    decoder_ = std::make_unique<TransformerBlock>(
        stacks_.decoder, first_of_decoder_, end - border - first_of_decoder_,
        /*final_norm=*/slice.head, rows, groups, make_layer, /*numbered_after=*/border);
  else if (slice.head && !own_.t5_encoder_only)  // the head without a layer: its norm
    decoder_ = std::make_unique<TransformerBlock>(stacks_.decoder, stacks_.decoder.num_layers, 0,
                                                  /*final_norm=*/true, rows, groups);
  make_groups_of_homes();
  make_embedding(tables);
  make_distances(tables);
  if (encoder_) add("encoder", encoder_.get());
  if (decoder_) add("decoder", decoder_.get());
  if (slice.head && !own_.t5_encoder_only) make_output(tables);
  name_parameters();
  freeze_beside_adapters(*this);
}

T5Model::~T5Model() = default;

namespace {

// The stages of the segments that use a table.
std::set<int> stages_of_table(Parameter* EmbeddingTables::* table, const StageSlice& slice,
                              const TransformerConfig& config, int64_t border) {
  std::set<int> stages;
  const auto layers = [&](int64_t first, int64_t end) {
    for (int64_t layer = first; layer < end; ++layer) stages.insert(slice.stage_of_layer(layer));
  };
  if (table == &EmbeddingTables::encoder_distances) {
    layers(0, border);
  } else if (table == &EmbeddingTables::decoder_distances) {
    layers(border, config.num_layers);
  } else {
    stages = {slice.stage_of_embedding()};
    if (border == config.num_layers) return stages;  // an encoder alone
    stages.insert(slice.stage_of_layer(border));
    if (table == &EmbeddingTables::words && !config.untie_embeddings_and_output_weights)
      stages.insert(slice.stage_of_head());
  }
  return stages;
}

}  // namespace

const ProcessGroup* T5Model::homes(Parameter* EmbeddingTables::* table) const {
  const std::set<int> stages =
      stages_of_table(table, slice(), config().transformer, stacks_.encoder.num_layers);
  if (stages.size() == 1) return nullptr;
  return &groups().stages({stages.begin(), stages.end()});
}

// Each rank makes those that it belongs to in the same order, whatever its segments are.
void T5Model::make_groups_of_homes() const {
  const TransformerConfig& t = config().transformer;
  const bool relative = t.position_embedding_type == PositionEmbedding::kRelative;
  std::vector<Parameter * EmbeddingTables::*> tables = {&EmbeddingTables::words,
                                                        &EmbeddingTables::positions};
  if (relative)
    tables = {&EmbeddingTables::words, &EmbeddingTables::encoder_distances,
              &EmbeddingTables::decoder_distances};
  for (const auto table : tables)
    if (stages_of_table(table, slice(), t, stacks_.encoder.num_layers).contains(groups().pp.rank()))
      homes(table);
}

void T5Model::make_embedding(const EmbeddingTables& tables) {
  const int uses = (slice().embedding ? 1 : 0) + (starts_decoder() ? 1 : 0);
  if (uses == 0) return;
  embedding_ = make_embedding_of_uses(config(), groups(), tables, uses);
  if (tables.words != nullptr) return;
  const EmbeddingTables own = embedding_->tables();
  for (Parameter* table : own.looked_up())
    table->shared =
        homes(table == own.words ? &EmbeddingTables::words : &EmbeddingTables::positions);
  add("embedding", embedding_.get());
}

void T5Model::make_distances(const EmbeddingTables& tables) {
  if (config().transformer.position_embedding_type != PositionEmbedding::kRelative) return;
  const auto make = [&](bool decoder, Parameter* EmbeddingTables::* of) {
    Parameter* const table = tables.*of;
    auto positions = std::make_unique<RelativePositions>(
        config().transformer, relative_buckets(config(), decoder), groups(), table);
    if (table != nullptr) {
      ++table->uses;
    } else {
      positions->table().shared = homes(of);
      add(decoder ? "decoder_relative_pos_emb" : "encoder_relative_pos_emb", positions.get());
    }
    return positions;
  };
  if (encoder_) encoder_distances_ = make(false, &EmbeddingTables::encoder_distances);
  if (first_of_decoder_ < stacks_.decoder.num_layers && decoder_)
    decoder_distances_ = make(true, &EmbeddingTables::decoder_distances);
}

void T5Model::make_output(const EmbeddingTables& tables) {
  output_ = std::make_unique<OutputProjection>(config(), groups(), slice(), embedding_.get(),
                                               tables.words);
  if (TiedTable* copy = output_->tied_table()) {
    copy->weight().shared = homes(&EmbeddingTables::words);
    add("embedding", copy);
  }
  if (Module* own = output_->output_layer()) {
    add("lm_head.output_layer", own);
    return;
  }
  if (!own_.t5_output_bias) return;
  head_bias_ = std::make_unique<Parameter>();
  head_bias_->local_shape = {config().padded_vocab_size / groups().tp.size()};
  head_bias_->global_shape = {config().padded_vocab_size};
  head_bias_->valid_rows = config().vocab_size;
  head_bias_->placement.shards = {{0, Axis::kTensor, {}}};
  head_bias_->role = ParameterRole::kBias;
  add("lm_head.output_layer.bias", head_bias_.get());
}

EmbeddingTables T5Model::embedding_tables() {
  EmbeddingTables tables = embedding_ ? embedding_->tables() : EmbeddingTables{};
  if (encoder_distances_) tables.encoder_distances = &encoder_distances_->table();
  if (decoder_distances_) tables.decoder_distances = &decoder_distances_->table();
  return tables;
}

TensorFormats T5Model::border(int64_t layers_before, const Batch& batch,
                              at::ScalarType dtype) const {
  const TensorFormat encoder = rows_format(batch, batch.rows_of(kEncoderMask).get(), dtype);
  if (batch.find("tokens").defined())  // decoding
    return {layers_before > stacks_.encoder.num_layers
                ? encoder
                : TensorFormat{{1, batch.place.position.size(0)}, at::kLong}};
  if (layers_before < stacks_.encoder.num_layers) return {encoder};
  const TensorFormat encoded = {encoder.shape, dtype};
  if (layers_before == stacks_.encoder.num_layers) return {encoded};
  const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(kDecoderMask);
  TensorFormat decoder = rows_format(batch, rows.get(), dtype);
  if (rows == nullptr)
    decoder.shape[0] = stacks_.decoder.seq_length / groups().cp.size() /
                       (config().sequence_parallel ? groups().tp.size() : 1);
  if (layers_before == config().transformer.num_layers) return {decoder};
  return {encoded, decoder};
}

ForwardContext T5Model::encoder_context(const Batch& batch, const ForwardContext& given) const {
  const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(kEncoderMask);
  ForwardContext context =
      with_rows(without_padding(given, rows), config().sequence_parallel, groups().tp);
  context.document_rows.reset();
  if (rows == nullptr) context.document_ids = kinds_of_mask(batch[kEncoderMask]);
  return context;
}

ForwardContext T5Model::decoder_context(const Batch& batch, const ForwardContext& given) const {
  const at::Tensor& mask = batch[kDecoderMask];
  const std::shared_ptr<const UnpaddedRows> rows = batch.rows_of(kDecoderMask);
  ForwardContext context = without_padding(given, rows);
  const ProcessGroup& cp = groups().cp;
  if (rows == nullptr)
    context.place.position = zigzag_positions(mask.size(1), cp.size(), cp.rank(), mask.device());
  context = with_rows(context, config().sequence_parallel, groups().tp);
  context.document_rows.reset();
  if (rows == nullptr) {
    const at::Tensor counts = batch.find("loss_mask");
    context.document_ids =
        kinds_of_mask(mask, counts.defined() ? zigzag_gather(counts, 1, cp) : counts);
  }
  return context;
}

namespace {

// What the self-attention of a stack adds to its scores, by distances in the whole sequence of s
// tokens; one backward collects its gradient.
at::Tensor distance_bias(RelativePositions* positions, int64_t s, RecomputeTape* tape) {
  if (positions == nullptr) return {};
  const at::Tensor bias = positions->bias(s);
  return tape != nullptr ? tape->share(bias) : bias;
}

}  // namespace

// What leaves the encoder's part of this segment: its rows, or its output.
at::Tensor T5Model::encode(const Batch& batch, const StageTensors& input,
                           const ForwardContext& given) {
  if (!slice().embedding && !encoder_) return input.front();
  ForwardContext context = encoder_context(batch, given);
  context.distance_bias =
      distance_bias(encoder_distances_.get(), batch[kEncoderMask].size(1), given.tape);
  check_shape("place.position", given.place.position, {batch["text_enc"].size(1)});
  at::Tensor x = slice().embedding ? embedding_->forward(column_of(batch, "text_enc", kEncoderMask),
                                                         context, {}, kOfEncoder)
                                   : input.front();
  if (encoder_) x = encoder_->forward(x, context);
  const bool ends = slice().first_layer + slice().num_layers >= stacks_.encoder.num_layers;
  return ends ? x.to(parameters().front()->value.scalar_type()) : x;
}

at::Tensor T5Model::encoded(const Batch& batch, const ForwardContext& context) {
  MEGATRON_ASSERT(slice().embedding && slice().head, "the encoder of a part of a model");
  return encode(batch, {}, context);
}

at::Tensor t5_decoder_column(const Batch& batch, const char* column) {
  return column_of(batch, column, kDecoderMask);
}

StageTensors T5Model::hidden(const Batch& batch, const StageTensors& input,
                             const ForwardContext& given) {
  MEGATRON_CHECK(given.decoding == nullptr || !own_.t5_encoder_only,
                 "an encoder continues no text: every token sees those after it");
  if (given.decoding != nullptr) return decode(batch, input, given);
  const int64_t end = slice().first_layer + slice().num_layers,
                all = config().transformer.num_layers;
  if (slice().first_layer == all && !slice().embedding)  // the head alone
    return own_.t5_encoder_only
               ? input
               : StageTensors{decoder_->forward(input.front(), decoder_context(batch, given))};
  at::Tensor encoded = encode(batch, input, given);
  if (!decoder_) return {encoded};
  if (given.tape != nullptr) encoded = given.tape->share(encoded);
  ForwardContext context = decoder_context(batch, given);
  context.distance_bias =
      distance_bias(decoder_distances_.get(), batch[kDecoderMask].size(1), given.tape);
  const at::Tensor& mask = batch[kEncoderMask];
  context.encoded = std::make_shared<const EncodedSequence>(
      EncodedSequence{encoded, zigzag_positions(mask.size(1), 1, 0, mask.device()), mask == 0,
                      batch.rows_of(kEncoderMask)});
  const auto embedded = [&] {
    return embedding_->forward(t5_decoder_column(batch, "text_dec"), context, {}, kOfDecoder);
  };
  at::Tensor x = starts_decoder() ? embedded() : input.back();
  x = decoder_->forward(std::move(x), context);
  if (end == all) return {x};
  return {encoded, x};
}

TensorFormats T5Model::sequence_border(int64_t layers_before, const SequenceInput& input,
                                       at::ScalarType dtype) const {
  if (layers_before == config().transformer.num_layers) return {};
  Batch batch;
  batch.place = {at::zeros({1}, at::kLong), at::zeros({input.ids.size(0)}, at::kLong)};
  return {border(layers_before, batch, dtype).front()};
}

StageTensors T5Model::begin_sequence(const SequenceInput& input, const StageTensors& before,
                                     DecodingState& state, int64_t slot, int64_t num_slots) {
  const int64_t all = config().transformer.num_layers;
  if (slice().first_layer == all && !slice().embedding) return {};  // the head alone
  const int64_t n = input.ids.size(0), most = stacks_.encoder.seq_length;
  MEGATRON_CHECK(n > 0 && n <= most, "an input of ", n, " tokens: the encoder reads 1 to ", most,
                 " (seq_length)");
  Batch batch;
  batch.set("text_enc", input.ids.unsqueeze(0));
  batch.set(kEncoderMask, at::ones_like(batch["text_enc"]));
  ForwardContext context;
  context.place = {at::zeros({1}, input.ids.options()), at::arange(n, input.ids.options())};
  at::Tensor encoded = encode(batch, before, context);
  if (decoder_) decoder_->keep_encoded(encoded, state, {slot, num_slots, most});
  if (slice().first_layer + slice().num_layers == all) return {};
  return {std::move(encoded)};
}

// Tokens [1, t] of several sequences, which segments of the encoder pass on, -> [t, 1, h]
StageTensors T5Model::decode(const Batch& batch, const StageTensors& input,
                             const ForwardContext& given) {
  const at::Tensor rows = slice().embedding ? batch["tokens"] : input.front();
  if (!decoder_) return {rows};
  ForwardContext context = with_rows(given, /*sequence_parallel=*/false, groups().tp);
  int64_t positions = 0;
  for (const RaggedPart& part : given.decoding->batch.rows.parts())
    positions = std::max(positions, part.first + part.count);
  context.distance_bias = distance_bias(decoder_distances_.get(), positions, nullptr);
  const at::Tensor x = starts_decoder() ? embedding_->forward(rows, context, {}, kOfDecoder) : rows;
  decoder_->keep_encoded(x.narrow(0, 0, 0).to(parameters().front()->value.scalar_type()),
                         given.decoding->state,
                         {0, given.decoding->batch.num_slots, stacks_.encoder.seq_length});
  return {decoder_->forward(x, context)};
}

at::Tensor T5Model::logits(const at::Tensor& hidden) {
  MEGATRON_CHECK(output_ != nullptr, "an encoder alone has no output layer (t5_encoder_only)");
  const bool scaled =
      own_.t5_scale_output && !config().transformer.untie_embeddings_and_output_weights;
  const double root = std::sqrt(static_cast<double>(config().transformer.hidden_size));
  const at::Tensor logits = output_->linear().forward(scaled ? hidden / root : hidden);
  return head_bias_ != nullptr ? logits.add_(differentiable(*head_bias_)) : logits;
}

at::Tensor T5Model::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return token_losses_and_hits(hidden, labels, nullptr);
}

at::Tensor T5Model::token_losses_and_hits(const at::Tensor& hidden, const at::Tensor& labels,
                                          at::Tensor* hits) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(), config().vocab_size,
                                      config().transformer.z_loss_coeff, groups().tp, hits);
}

Loss T5Model::loss(const StageTensors& states, const Batch& batch, const ForwardContext&) {
  const at::Tensor losses = token_losses(states.front(), t5_decoder_column(batch, "labels"));
  const at::Tensor mask = t5_decoder_column(batch, "loss_mask").t().to(losses.scalar_type());
  return {(losses * mask).sum(), mask.sum()};
}

std::unique_ptr<VocabularyPass> T5Model::begin_loss(const at::Tensor&, const Batch&) {
  throw_error("--pipeline-vocab-parallel is not built for T5");
}

const ModelType& t5_model_type() {
  static const ModelType type = {.name = "t5",
                                 .title = "T5",
                                 .make = make_model_of<T5Model>,
                                 .ends_cost = t5_ends_cost,
                                 .config = OwnConfig(T5Config()),
                                 .layer_cost = t5_layer_cost,
                                 .decodes = false};
  return type;
}

}  // namespace megatron
