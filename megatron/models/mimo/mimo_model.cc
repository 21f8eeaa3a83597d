#include "megatron/models/mimo/mimo_model.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/freezing.h"
#include "megatron/models/common/refused_options.h"
#include "megatron/models/mimo/image_blocks.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {
namespace {

constexpr const char* kTitle = "a model that reads images or sounds";

ModelConfig built_mimo(const ModelConfig& config, const ParallelGroups& groups) {
  const TransformerConfig& t = config.transformer;
  const MimoConfig own = config.own.as_or_default<MimoConfig>();
  MEGATRON_CHECK(own.sees() || own.hears(), "a model of type mimo without an encoder",
                 "\nhint: --vision-model-type clip, internvit, siglip, qwen2 or "
                 "qwen2_5, or --audio-model-type whisper");
  const auto refuse = [&](bool given, const char* what) { refuse_option(given, what, kTitle); };
  refuse(config.pipeline_vocab_parallel, "--pipeline-vocab-parallel");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  refuse(t.is_quantized(), "--fp8-format or --fp4-format");
  refuse(t.is_hybrid(), "--hybrid-layer-pattern");
  refuse(t.has_moe(), "--num-experts");
  refuse(t.fp32_residual_connection, "--fp32-residual-connection");
  refuse(own.bidirectional_images && groups.cp.size() > 1 && attends_in_rings(t),
         "ring attention (--cp-comm-type p2p or a2a+p2p) with --bidirectional-images");
  MEGATRON_CHECK(own.has_own_sizes() == !t.mrope_section.empty(),
                 "--position-embedding-type mrope is for --vision-model-type qwen2 and qwen2_5, "
                 "and needed for them");
  return language_config(config);
}

// Rows of [s, b] of places i s + j.
at::Tensor rows_of(const at::Tensor& places, int64_t s, int64_t b) {
  return places.remainder(s) * b + places.div(s, "floor");
}

bool trains(Module& module) {
  return std::ranges::any_of(module.parameters(), &Parameter::trainable);
}

}  // namespace

ProjectorShape image_projector(const VisionConfig& own) {
  const bool affine = own.vision_projection_type == VisionProjection::kAffine;
  ProjectorShape out{own.feature_size(),
                     own.vision_projection_ffn_hidden_size,
                     affine,
                     own.vision_projection_bias,
                     activation_of(own.vision_projection_activation),
                     own.vision_projection_norm};
  out.module = "vision_projection.";
  if (affine)
    out.norm = {.kind = Normalization::kRMSNorm,
                .eps = own.vision_layernorm_epsilon,
                .zero_centered = true};
  return out;
}

ProjectorShape sound_projector(const AudioConfig& own) {
  ProjectorShape out{own.audio_feature_size(), own.audio_projection_ffn_hidden_size,
                     own.audio_projection_type == VisionProjection::kAffine,
                     own.audio_projection_bias, activation_of(own.audio_projection_activation)};
  out.module = "audio_projection.";
  return out;
}

ModelConfig language_config(const ModelConfig& config) {
  ModelConfig out = config;
  out.type = "gpt";
  out.own = {};
  return out;
}

MimoModel::MimoModel(const ModelConfig& given, const ParallelGroups& groups,
                     const StageSlice& slice, const EmbeddingTables& tables)
    : Model(given, groups, slice),
      own_(config().own.as_or_default<MimoConfig>()),
      language_model_(built_mimo(config(), groups), groups, slice, tables) {
  make_encoders();
  if (slice.embedding && own_.vision_newlines) {
    image_newline_ = std::make_unique<Parameter>();
    image_newline_->local_shape = image_newline_->global_shape = {config().transformer.hidden_size};
    image_newline_->init = Init::normal(config().transformer.init_method_std);
    image_newline_->role = ParameterRole::kEmbedding;
    if (config().sequence_parallel) image_newline_->placement.partial_grad.insert(Axis::kTensor);
    add("image_newline", image_newline_.get());
  }
  add("language_model", &language_model_);
  name_parameters();
  freeze_beside_adapters(*this);
  // The output layer alone, whose table is that of another segment of the rank, has none.
  const std::vector<Parameter*> all = parameters();
  if (!all.empty()) first_parameter_ = all.front();
}

void MimoModel::make_encoders() {
  // Each tensor rank has the gradients of its own images and sounds, or of its part of a layer.
  const auto whole = [&](const std::string& name, Parameter& parameter) {
    if (own_.divides_encoders() && name.starts_with("decoder.")) return;
    parameter.placement = {};  // although linears could be divided
    if (groups().tp.size() > 1 && !own_.divides_encoders())
      parameter.placement.partial_grad.insert(Axis::kTensor);
  };
  const auto add_encoder = [&](const char* encoder, Module& model, const char* projection,
                               const EncoderPart& part, ProjectorShape shape,
                               std::unique_ptr<FeatureProjector>& projector) {
    add(encoder, &model);
    model.visit(whole);
    if (!part.ends) return;
    projector = std::make_unique<FeatureProjector>(shape, config().transformer);
    add(projection, projector.get());
    projector->visit(whole);
  };
  const auto part_of = [&](bool given, int64_t layers) {
    return given ? encoder_part(slice(), layers) : EncoderPart{0, 0};
  };
  if (const EncoderPart part = part_of(own_.sees(), own_.vision_num_layers); part.is_there()) {
    vision_model_ =
        std::make_unique<VisionEncoder>(own_, config().transformer, own_, encoder_ranks(), part);
    add_encoder("vision_model", *vision_model_, "vision_projection", part, image_projector(own_),
                vision_projection_);
  }
  if (const EncoderPart part = part_of(own_.hears(), own_.audio_num_layers); part.is_there()) {
    audio_model_ =
        std::make_unique<AudioEncoder>(own_, config().transformer, own_, encoder_ranks(), part);
    add_encoder("audio_model", *audio_model_, "audio_projection", part, sound_projector(own_),
                audio_projection_);
  }
}

EmbeddingTables MimoModel::embedding_tables() { return language_model_.embedding_tables(); }

std::vector<std::string> MimoModel::auxiliary_losses() const {
  return language_model_.auxiliary_losses();
}

TensorFormats MimoModel::media_border(bool behind, const Batch& batch, at::ScalarType dtype) const {
  const int64_t h = config().transformer.hidden_size;
  TensorFormats out;
  const PackedImages* const images = batch.images.get();
  const PackedSounds* const sounds = batch.sounds.get();
  const std::vector<std::vector<int64_t>> parts = parts_of(images, sounds);
  const auto add = [&](std::vector<int64_t> of_medium, int64_t features, int64_t rows,
                       int64_t width, bool frozen, bool projection) {
    if (!behind) {
      out.push_back({{rows, 1, width}, dtype, frozen});
      return;
    }
    if (of_medium.empty()) of_medium = {features};
    for (const int64_t part : of_medium) out.push_back({{part, h}, dtype, frozen && projection});
  };
  if (own_.sees())
    add(parts.front(), images == nullptr ? 0 : images->features,
        images == nullptr ? 0 : images->rows(own_), own_.vision_hidden_size, own_.frozen_vision,
        own_.frozen_vision_projection);
  if (own_.hears())
    add(parts.back(), sounds == nullptr ? 0 : sounds->features(),
        sounds == nullptr ? 0 : sounds->segments->rows, own_.audio_hidden_size, own_.frozen_audio,
        own_.frozen_audio_projection);
  return out;
}

std::vector<std::vector<int64_t>> MimoModel::parts_of(const PackedImages* images,
                                                      const PackedSounds* sounds) const {
  std::vector<std::vector<int64_t>> out;
  if (own_.sees()) out.push_back(images == nullptr ? std::vector<int64_t>() : images->parts);
  if (own_.hears()) out.push_back(sounds == nullptr ? std::vector<int64_t>() : sounds->parts);
  return out;
}

TensorFormats MimoModel::border(int64_t layers_before, const Batch& batch,
                                at::ScalarType dtype) const {
  if (layers_before >= 0) return language_model_.border(layers_before, batch, dtype);
  return media_border(/*behind=*/layers_before == -1, batch, dtype);
}

at::Tensor MimoModel::text_of(const at::Tensor& tokens) const {
  at::Tensor out = tokens;
  if (own_.sees()) out = out.masked_fill(tokens == own_.image_token_id, kNoToken);
  if (own_.hears()) out = out.masked_fill(tokens == own_.audio_token_id, kNoToken);
  return out;
}

ParallelGroups MimoModel::encoder_ranks() const {
  ParallelGroups ranks;
  if (own_.divides_encoders()) ranks.tp = groups().tp;
  return ranks;
}

at::Tensor MimoModel::gathered(const at::Tensor& given, int64_t most, int ranks) const {
  const ProcessGroup &tp = groups().tp, &cp = groups().cp;
  // Each has the gradient of its own rows of the sequences.
  const bool copies =
      (own_.divides_encoders() || own_.encodes_apart()) && config().sequence_parallel;
  const at::Tensor features = copies ? copy_to_tensor_model_parallel_region(given, tp) : given;
  if (ranks == 1 || most == 0) return features;
  const bool divided = tp.size() > 1 && !own_.divides_encoders();
  MEGATRON_ASSERT(ranks == (divided ? tp.size() : 1) * cp.size(), "media of ", ranks, " ranks");
  at::Tensor rows = at::constant_pad_nd(features, {0, 0, 0, most - features.size(0)});
  if (divided)
    rows = config().sequence_parallel ? gather_from_sequence_parallel_region(rows, tp)
                                      : gather_rows_from_tensor_model_parallel_region(rows, tp);
  // Each context rank has the gradient of its own tokens.
  return cp.size() > 1 ? gather_from_sequence_parallel_region(rows, cp) : rows;
}

bool MimoModel::every_rank_encodes() const {
  const ParameterStore* store = first_parameter_ != nullptr ? first_parameter_->store : nullptr;
  return store != nullptr && store->communicates_in_passes();
}

namespace {

// Of each medium what a segment gives, of tensors by medium and part: all of it, or the parts that
// cross between modules. Undefined: there are none.
StageTensors joined(const std::vector<std::vector<int64_t>>& parts, const StageTensors& tensors) {
  StageTensors out(parts.size());
  size_t next = 0;
  for (size_t i = 0; i < parts.size() && !tensors.empty(); ++i) {
    const size_t count = std::max<size_t>(parts[i].size(), 1);
    MEGATRON_ASSERT(next + count <= tensors.size(), tensors.size(), " tensors of ", parts.size(),
                    " media");
    out[i] = count == 1 ? tensors[next] : at::cat(at::TensorList(tensors).slice(next, count));
    next += count;
  }
  return out;
}

// The reverse.
StageTensors divided(const std::vector<std::vector<int64_t>>& parts, const StageTensors& media) {
  StageTensors out;
  for (size_t i = 0; i < media.size(); ++i) {
    if (parts[i].empty()) out.push_back(media[i]);
    int64_t first = 0;
    for (const int64_t part : parts[i]) {
      out.push_back(media[i].defined() ? media[i].narrow(0, first, part) : at::Tensor());
      first += part;
    }
  }
  return out;
}

// One medium through the part of its encoder and the projector, of which either may be elsewhere.
template <class Encoder, class Packed>
at::Tensor encoded_medium(Encoder* encoder, FeatureProjector* projector, const Packed& media,
                          const at::Tensor& input, const ForwardContext& context) {
  if (encoder == nullptr) return input;
  const bool arrives = input.defined() && input.requires_grad(),
             through = arrives || trains(*encoder);
  at::Tensor x;
  {
    const c10::AutoGradMode recorded(at::GradMode::is_enabled() && through);
    x = media.ahead != nullptr ? media.ahead->take() : encoder->forward(media, context, input);
  }
  if (projector == nullptr) return x;
  const c10::AutoGradMode recorded(at::GradMode::is_enabled() && (through || trains(*projector)));
  return projector->forward(x);
}

}  // namespace

StageTensors MimoModel::encoded(const PackedImages* images, const PackedSounds* sounds,
                                const StageTensors& input, const ForwardContext& context) {
  const bool everywhere = every_rank_encodes();
  StageTensors out;
  const StageTensors given = joined(parts_of(images, sounds), input);
  if (own_.sees())
    out.push_back(images == nullptr || (images->all_pictures == 0 && !everywhere)
                      ? at::Tensor()
                      : encoded_medium(vision_model_.get(), vision_projection_.get(), *images,
                                       given.front(), context));
  if (own_.hears())
    out.push_back(sounds == nullptr || (sounds->all_sounds == 0 && !everywhere)
                      ? at::Tensor()
                      : encoded_medium(audio_model_.get(), audio_projection_.get(), *sounds,
                                       given.back(), context));
  return out;
}

namespace {

bool is_ahead(Module* encoder) { return encoder != nullptr && !trains(*encoder); }

}  // namespace

bool MimoModel::encodes_ahead() {
  return is_ahead(vision_model_.get()) || is_ahead(audio_model_.get());
}

void MimoModel::encode_ahead(Batch& batch, bool training) {
  ForwardContext context;
  context.training = training;
  const auto start = [&]<class Encoder, class Packed>(Encoder* encoder,
                                                      std::shared_ptr<const Packed>& media) {
    Packed with = *media;
    with.ahead = ahead_.run(*encoder, [&] { return encoder->forward(*media, context); });
    media = std::make_shared<const Packed>(std::move(with));
  };
  const bool everywhere = every_rank_encodes();
  if (is_ahead(vision_model_.get()) && batch.images != nullptr &&
      (batch.images->all_pictures > 0 || everywhere))
    start(vision_model_.get(), batch.images);
  if (is_ahead(audio_model_.get()) && batch.sounds != nullptr &&
      (batch.sounds->all_sounds > 0 || everywhere))
    start(audio_model_.get(), batch.sounds);
}

at::Tensor MimoModel::placed_images(const at::Tensor& tokens, const PackedImages& images,
                                    at::Tensor features) const {
  const int64_t b = tokens.size(0), s = tokens.size(1), h = config().transformer.hidden_size;
  const c10::AutoGradMode recorded(
      at::GradMode::is_enabled() &&
      (features.requires_grad() || (image_newline_ != nullptr && image_newline_->trainable)));
  features = gathered(features, images.most_features, images.ranks);
  if (images.taken.defined()) features = features.index_select(0, images.taken);
  check_shape("features", features, {images.places.size(0), h});
  at::Tensor placed = at::zeros({s * b, h}, features.options())
                          .index_copy(0, rows_of(images.places, s, b), features);
  if (image_newline_ != nullptr) {
    const at::Tensor ends =
        at::zeros({s * b, 1}, features.options()).index_fill(0, rows_of(images.newlines, s, b), 1);
    placed = placed + ends * differentiable(*image_newline_);
  }
  return placed.view({s, b, h});
}

at::Tensor MimoModel::placed_sounds(const at::Tensor& tokens, const PackedSounds& sounds,
                                    at::Tensor features) const {
  const int64_t b = tokens.size(0), s = tokens.size(1), h = config().transformer.hidden_size;
  const c10::AutoGradMode recorded(at::GradMode::is_enabled() && features.requires_grad());
  features = gathered(features, sounds.most_features, sounds.ranks);
  if (sounds.taken.defined()) features = features.index_select(0, sounds.taken);
  check_shape("features", features, {sounds.places.size(0), h});
  return at::zeros({s * b, h}, features.options())
      .index_copy(0, rows_of(sounds.places, s, b), features)
      .view({s, b, h});
}

at::Tensor MimoModel::placed_features(const at::Tensor& tokens, const PackedImages* images,
                                      const PackedSounds* sounds, const StageTensors& input,
                                      const ForwardContext& context) {
  const StageTensors media = encoded(images, sounds, input, context);
  at::Tensor seen, heard;
  if (own_.sees() && media.front().defined()) seen = placed_images(tokens, *images, media.front());
  if (own_.hears() && media.back().defined()) heard = placed_sounds(tokens, *sounds, media.back());
  if (!seen.defined()) return heard;
  return heard.defined() ? seen + heard : seen;
}

ForwardContext MimoModel::with_images(const Batch& batch, const ForwardContext& context) const {
  ForwardContext out = context;
  if (batch.images != nullptr && batch.images->positions.defined())
    out.position_ids = batch.images->positions;
  if (!own_.bidirectional_images || batch.images == nullptr || batch.images->all_pictures == 0)
    return out;
  const at::Tensor& tokens = batch["tokens"];
  if (const auto& blocks = batch.images->blocks;
      blocks != nullptr && tokens.is_cuda() && groups().cp.size() == 1) {
    if (blocks->tokens == 0) return out;  // images of one token
    out.token_blocks = blocks;
    // Made once for all layers that need it.
    out.mask_of_blocks = [tokens, token = own_.image_token_id, documents = context.document_ids,
                          mask = std::make_shared<at::Tensor>()] {
      if (!mask->defined()) *mask = image_block_mask(tokens, token, documents);
      return *mask;
    };
    return out;
  }
  out.attention_mask = image_block_mask(zigzag_gather(tokens, 1, groups().cp), own_.image_token_id,
                                        context.document_ids);
  out.mask_is_causal = true;
  out.document_ids.reset();
  out.document_rows.reset();
  return out;
}

StageTensors MimoModel::hidden(const Batch& batch, const StageTensors& input,
                               const ForwardContext& given) {
  MEGATRON_CHECK(given.cp == nullptr, "--hybrid-context-parallel is not built for ", kTitle);
  const PackedImages* const images = batch.images.get();
  const PackedSounds* const sounds = batch.sounds.get();
  if (slice().encodes_alone()) {
    StageTensors media = divided(parts_of(images, sounds), encoded(images, sounds, input, given));
    const at::ScalarType type = first_parameter_->value.scalar_type();
    const TensorFormats formats = border(slice().layers_through(), batch, type);
    for (size_t i = 0; i < media.size(); ++i)
      if (!media[i].defined())
        media[i] = at::zeros(formats[i].shape, first_parameter_->value.options());
    return media;
  }
  const ForwardContext context = with_images(batch, given);
  if (!slice().embedding) return language_model_.hidden(batch, input, context);
  const at::Tensor& tokens = batch["tokens"];
  Batch text = batch;
  text.set("tokens", text_of(tokens));
  at::Tensor media = batch.encoded_media;
  if (!media.defined()) media = placed_features(tokens, images, sounds, input, context);
  return language_model_.hidden_with(text, std::move(media), {}, context);
}

Batch MimoModel::with_media_encoded(const Batch& batch, const ForwardContext& context) {
  MEGATRON_ASSERT(!own_.bidirectional_images, "blocks of tokens are not those of any micro-batch");
  const PackedImages* const images = batch.images.get();
  Batch out = batch;
  out.encoded_media = placed_features(batch["tokens"], images, batch.sounds.get(), {}, context);
  if (images != nullptr && images->positions.defined()) out.set("position_ids", images->positions);
  out.images = nullptr;
  out.sounds = nullptr;
  return out;
}

std::vector<int64_t> MimoModel::prompt_ends(const at::Tensor& tokens) const {
  if (!own_.bidirectional_images) return {};
  const at::Tensor of_image = tokens.eq(own_.image_token_id).flatten().to(at::kCPU).contiguous();
  const bool* image = of_image.const_data_ptr<bool>();
  std::vector<int64_t> ends(static_cast<size_t>(of_image.numel()));
  int64_t end = std::ssize(ends);  // of the run of image tokens that the next one belongs to
  for (int64_t i = std::ssize(ends) - 1; i >= 0; --i) {
    if (!image[i]) end = i;
    ends[static_cast<size_t>(i)] = std::max(end, i + 1);
  }
  return ends;
}

at::Tensor MimoModel::prompt_rows(const at::Tensor& tokens, const PackedImages* images,
                                  std::vector<int64_t>* ends, const PackedSounds* sounds) {
  MEGATRON_CHECK(!own_.bidirectional_images || ends != nullptr || images == nullptr ||
                     images->all_pictures == 0,
                 "prompts with images that are seen in both directions (--bidirectional-images, "
                 "gemma3) are not built here");
  if (ends != nullptr) *ends = prompt_ends(tokens);
  MEGATRON_CHECK(
      config().transformer.position_embedding_type != PositionEmbedding::kLearnedAbsolute,
      "rows of a prompt for a model with learned positions are not built");
  MEGATRON_ASSERT(tokens.size(0) == 1 && !config().sequence_parallel, "rows of several prompts");
  MEGATRON_CHECK(!own_.divides_encoders() || groups().tp.size() == 1,
                 "rows of a prompt from encoders that tensor ranks divide "
                 "(--encoder-tensor-model-parallel-size) are not built");
  const at::NoGradGuard no_grad;
  PackedImages encoded;
  if (picture_graphs_ && images != nullptr) {
    if (const at::Tensor features = picture_graphs_->forward(*images); features.defined()) {
      encoded = *images;
      encoded.ahead = FeaturesAhead::of(features);
      images = &encoded;
    }
  }
  const at::Tensor placed = placed_features(tokens, images, sounds, {}, {});
  if (placed.defined()) return placed.squeeze(1).to(at::kFloat);
  return at::zeros({tokens.size(1), config().transformer.hidden_size},
                   tokens.options().dtype(at::kFloat));
}

void MimoModel::use_picture_graphs() {
  if (vision_model_ && vision_projection_ && groups().tp.size() == 1)
    picture_graphs_ = std::make_unique<PictureGraphs>(*vision_model_);
}

void MimoModel::forget_picture_graphs() {
  if (picture_graphs_) picture_graphs_->clear();
}

std::vector<int32_t> MimoModel::text_of_prompt(const at::Tensor& tokens) const {
  const at::Tensor
      text = text_of(tokens),
      ids = at::where(text == kNoToken, -1, text).flatten().to(at::kCPU, at::kInt).contiguous();
  return {ids.const_data_ptr<int32_t>(), ids.const_data_ptr<int32_t>() + ids.numel()};
}

at::Tensor MimoModel::logits(const at::Tensor& hidden) { return language_model_.logits(hidden); }

at::Tensor MimoModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return language_model_.token_losses(hidden, labels);
}

Loss MimoModel::loss(const StageTensors& states, const Batch& batch,
                     const ForwardContext& context) {
  return language_model_.loss(states, batch, context);
}

std::unique_ptr<VocabularyPass> MimoModel::begin_loss(const at::Tensor&, const Batch&) {
  throw_error(cat("--pipeline-vocab-parallel is not built for ", kTitle));
}

const ModelType& mimo_model_type() {
  static const ModelType type = {.name = "mimo",
                                 .title = "MIMO",
                                 .make = make_model_of<MimoModel>,
                                 .ends_cost = mimo_ends_cost,
                                 .config = OwnConfig(MimoConfig()),
                                 .layer_cost = mimo_layer_cost,
                                 .language_model = "language_model.",
                                 .unplanned = mimo_unplanned};
  return type;
}

}  // namespace megatron
