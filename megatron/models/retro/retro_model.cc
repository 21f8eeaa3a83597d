#include "megatron/models/retro/retro_model.h"

#include <algorithm>
#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/refused_options.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"

namespace megatron {
namespace {

// Which use of the embedding a pass makes.
constexpr int64_t kOfTokens = 0, kOfNeighbors = 1;

const ModelConfig& built_retro(const ModelConfig& config) {
  constexpr const char* kModel = "a model with retrieval";
  refuse_options_of_gpt(config, kModel);
  refuse_option(config.transformer.has_adapters(), "--lora-rank", kModel);
  refuse_option(config.transformer.is_quantized(), "--fp8-format or --fp4-format", kModel);
  refuse_option(config.transformer.offloads_activations(), "offloading of activations", kModel);
  refuse_option(config.transformer.position_embedding_type == PositionEmbedding::kRelative,
                "--position-embedding-type relative", kModel);
  refuse_option(config.transformer.is_hybrid(), "--hybrid-layer-pattern", kModel);
  return config;
}

// Layers [first, end) of the decoder as a block; null: none, and no final norm.
std::unique_ptr<TransformerBlock> block_of(const RetroStacks& stacks, int64_t first, int64_t end,
                                           bool final_norm, bool sequence_parallel,
                                           const ParallelGroups& groups) {
  if (first >= end && !final_norm) return nullptr;
  return std::make_unique<TransformerBlock>(stacks.decoder, first,
                                            std::max<int64_t>(end - first, 0), final_norm,
                                            sequence_parallel, groups);
}

}  // namespace

RetroModel::RetroModel(const ModelConfig& given, const ParallelGroups& groups,
                       const StageSlice& slice, const EmbeddingTables& tables)
    : Model(built_retro(given), groups, slice),
      own_(config().own.as_or_default<RetroConfig>()),
      stacks_(retro_stacks(config())) {
  const int64_t begin = slice.first_layer, end = begin + slice.num_layers,
                first = stacks_.first - 1;  // from 0
  const bool rows = config().sequence_parallel;
  const bool here = begin <= first && first < end;
  if (here) {
    before_ = block_of(stacks_, begin, first, /*final_norm=*/false, rows, groups);
    first_ = std::make_unique<FirstRetroLayer>(stacks_, rows, groups);
  }
  after_ = block_of(stacks_, here ? first + 1 : begin, end, slice.head, rows, groups);
  make_embedding(tables);
  if (before_) add("decoder", before_.get());
  if (first_) add("decoder", first_.get());
  if (after_) add("decoder", after_.get());
  if (slice.head) make_output(tables);
  name_parameters();
}

RetroModel::~RetroModel() = default;

// The stages of the segments that use a table.
const ProcessGroup* RetroModel::homes(bool words) const {
  std::set<int> stages = {slice().stage_of_embedding(), slice().stage_of_layer(stacks_.first - 1)};
  if (words && !config().transformer.untie_embeddings_and_output_weights)
    stages.insert(slice().stage_of_head());
  if (stages.size() == 1) return nullptr;
  return &groups().stages({stages.begin(), stages.end()});
}

void RetroModel::make_embedding(const EmbeddingTables& tables) {
  const int uses = (slice().embedding ? 1 : 0) + (has_first() ? 1 : 0);
  if (uses == 0) return;
  embedding_ = make_embedding_of_uses(config(), groups(), tables, uses);
  if (tables.words != nullptr) return;
  const EmbeddingTables own = embedding_->tables();
  for (Parameter* table : own.looked_up()) table->shared = homes(table == own.words);
  add("embedding", embedding_.get());
}

void RetroModel::make_output(const EmbeddingTables& tables) {
  output_ = std::make_unique<OutputProjection>(config(), groups(), slice(), embedding_.get(),
                                               tables.words);
  if (TiedTable* copy = output_->tied_table()) {
    copy->weight().shared = homes(/*words=*/true);
    add("embedding", copy);
  }
  if (Module* own = output_->output_layer()) add("output_layer", own);
}

EmbeddingTables RetroModel::embedding_tables() {
  return embedding_ ? embedding_->tables() : EmbeddingTables{};
}

bool RetroModel::passes_encoded(int64_t layers_before) const {
  return stacks_.first <= layers_before && layers_before < stacks_.last;
}

TensorFormats RetroModel::border(int64_t layers_before, const Batch& batch,
                                 at::ScalarType dtype) const {
  const TensorFormat rows = rows_format(batch, nullptr, dtype);
  if (!passes_encoded(layers_before)) return {rows};
  const ChunkedRows chunks(batch.place.position.size(0), own_.retro_chunk_length);
  TensorFormat encoded = rows;
  encoded.shape[0] =
      own_.retrieved_length() / (config().sequence_parallel ? groups().tp.size() : 1);
  encoded.shape[1] = own_.retro_num_neighbors * chunks.l * batch.place.sample.size(0);
  encoded.dtype = dtype;
  return {encoded, rows};
}

// Samples are numbered by sample, chunk and neighbour, for dropout; places of tokens are theirs in
// the neighbour.
ForwardContext RetroModel::retrieved_context(const at::Tensor& neighbors,
                                             const ForwardContext& given) const {
  const int64_t l = neighbors.size(1), k = neighbors.size(2), r = neighbors.size(3);
  const auto options = given.place.position.options();
  const at::Tensor chunk = samples_of_chunks(given.place.sample, l);  // [l b]
  ForwardContext out;
  out.training = given.training;
  out.place.sample = (chunk.unsqueeze(0) * k + at::arange(k, options).unsqueeze(1)).flatten();
  out.place.position = at::arange(r, options);
  out.discarded = given.discarded;
  out.tape = given.tape;
  return with_rows(out, config().sequence_parallel, groups().tp);
}

// [b, l, k, r] -> [r, k l b, h]
at::Tensor RetroModel::embed_neighbors(const at::Tensor& tokens, const ForwardContext& retrieved) {
  const at::Tensor ids = tokens.permute({2, 1, 0, 3}).reshape({-1, tokens.size(3)});  // [k l b, r]
  return embedding_->forward(ids, retrieved, {}, kOfNeighbors);
}

at::Tensor RetroModel::decode(const Batch& batch, const ForwardContext& given) {
  MEGATRON_CHECK(
      given.retrieved != nullptr && given.retrieved->decoded != nullptr,
      "a model with retrieval continues texts with neighbours alone, which a server does "
      "not look up\nhint: megatron generate --retro-project-dir or --neighbors");
  MEGATRON_ASSERT(has_first() && slice().embedding && slice().head, "a part of a model is decoded");
  ForwardContext context = with_rows(given, /*sequence_parallel=*/false, groups().tp);
  at::Tensor x = embedding_->forward(batch["tokens"], context, {}, kOfTokens);
  if (before_) x = before_->forward(std::move(x), context);
  const std::shared_ptr<const DecodedChunks> chunks = given.retrieved->decoded;
  ForwardContext retrieved;
  at::Tensor neighbors;
  if (chunks->tokens.size(0) > 0) {
    const at::Tensor tokens = chunks->tokens.unsqueeze(1);  // each chunk is a sample of one
    ForwardContext of_chunks;
    of_chunks.place = {at::arange(tokens.size(0), given.place.sample.options()),
                       given.place.position};
    retrieved = retrieved_context(tokens, of_chunks);
    neighbors = embed_neighbors(tokens, retrieved);
  }
  FirstRetroLayer::Result result = first_->decode(x, neighbors, context, retrieved);
  context.retrieved = std::make_shared<const RetrievedChunks>(chunks, result.encoded);
  return after_->forward(std::move(result.x), context);
}

StageTensors RetroModel::hidden(const Batch& batch, const StageTensors& input,
                                const ForwardContext& given) {
  if (given.decoding != nullptr) return {decode(batch, given)};
  MEGATRON_CHECK(given.cp == nullptr && groups().cp.size() == 1,
                 "--context-parallel-size above 1 is not built for a model with retrieval, whose "
                 "chunks would lie on several ranks");
  const int64_t end = slice().first_layer + slice().num_layers;
  ForwardContext context = with_rows(given, config().sequence_parallel, groups().tp);
  at::Tensor x = slice().embedding ? embedding_->forward(batch["tokens"], context, {}, kOfTokens)
                                   : input.back();
  at::Tensor encoded;  // undefined: not yet, or no more
  if (passes_encoded(slice().first_layer) && !slice().embedding) {
    MEGATRON_ASSERT(input.size() == 2, input.size(), " tensors from the previous segment");
    encoded = input.front();
    if (given.tape != nullptr) encoded = given.tape->share(encoded);
  }
  if (before_) x = before_->forward(std::move(x), context);
  if (has_first()) {
    const at::Tensor& tokens = batch["neighbor_tokens"];
    const ForwardContext retrieved = retrieved_context(tokens, given);
    FirstRetroLayer::Result result = first_->forward(x, embed_neighbors(tokens, retrieved),
                                                     batch["neighbor_mask"], context, retrieved);
    x = std::move(result.x);
    encoded = std::move(result.encoded);
  }
  if (encoded.defined())
    context.retrieved = std::make_shared<const RetrievedChunks>(
        encoded, batch["neighbor_mask"],
        ChunkedRows(given.place.position.size(0), own_.retro_chunk_length),
        own_.retrieved_length());
  if (after_) x = after_->forward(std::move(x), context);
  if (passes_encoded(end)) return {encoded, x};
  return {x};
}

at::Tensor RetroModel::logits(const at::Tensor& hidden) {
  return output_->linear().forward(hidden);
}

at::Tensor RetroModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(), config().vocab_size,
                                      config().transformer.z_loss_coeff, groups().tp, nullptr);
}

Loss RetroModel::loss(const StageTensors& states, const Batch& batch, const ForwardContext&) {
  const at::Tensor losses = token_losses(states.front(), batch["labels"]);
  const at::Tensor mask = batch["loss_mask"].t().to(losses.scalar_type());
  return {(losses * mask).sum(), mask.sum()};
}

std::unique_ptr<VocabularyPass> RetroModel::begin_loss(const at::Tensor&, const Batch&) {
  throw_error("--pipeline-vocab-parallel is not built for a model with retrieval");
}

const ModelType& retro_model_type() {
  static const ModelType type = {.name = "retro",
                                 .title = "Retro",
                                 .make = make_model_of<RetroModel>,
                                 .ends_cost = retro_ends_cost,
                                 .config = OwnConfig(RetroConfig()),
                                 .layer_cost = retro_layer_cost,
                                 .decodes = false,
                                 .not_served =
                                     "each chunk of its texts reads neighbours that are "
                                     "looked up before it goes on, and a server looks "
                                     "nothing up between the steps of its requests",
                                 .origin = {"gpt",
                                            {"decoder.layers.*.pre_cross_attn_layernorm.*",
                                             "decoder.layers.*.cross_attention.*"}}};
  return type;
}

}  // namespace megatron
