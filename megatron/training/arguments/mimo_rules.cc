#include "megatron/training/arguments/mimo_rules.h"

#include <algorithm>

#include "megatron/base/format.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/training/arguments/encoder_offload_rules.h"
#include "megatron/training/arguments/frozen_media.h"
#include "megatron/training/arguments/model_provider.h"
#include "megatron/transformer/config/lora_modules.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {

constexpr std::string_view kOnBadMedia[] = {"error", "skip"};

void MimoDataConfig::fields(FieldVisitor& v) {
  v.group("mimo");
  v.role(FieldRole::kRun);
  v.field("media_model", media_model,
          "folder of a Hugging Face model, whose config.json and image processor say what media of "
          "rows become");
  v.field(
      "audio_media_model", audio_media_model,
      "folder of a Hugging Face model that hears, whose config.json says what sounds become of a "
      "model that also sees; --media-model then says what images become");
  v.field("pretrained_vision_model", pretrained_vision_model,
          "folder of a Hugging Face model whose encoder of images a new run starts from (CLIP, "
          "SigLIP, or a model that sees); the projector begins at random");
  v.field("pretrained_audio_model", pretrained_audio_model,
          "the same of sounds (Whisper, or a model that hears)");
  v.field("media_root", media_root,
          "folder of the media that rows name; empty: the folder of the row's file");
  v.field(
      "escape_modality_text", escape_modality_text,
      "encode spellings of special tokens in texts as ordinary text; without it they are errors");
  v.field({"loss_at_media", "--no-loss-at-media", true}, loss_at_media,
          "the last row of an image is not trained to predict the text behind it");
  v.field("max_patches_per_sequence", max_patches_per_sequence,
          "patches of the images that are packed into a sequence, at most; 0: no limit");
  v.field("shuffle_window", shuffle_window,
          "shuffle files, and then so many neighbouring samples; 0: all samples are shuffled");
  v.field("max_image_pixels", max_image_pixels, "larger images are errors");
  v.field("max_images_per_sample", max_images_per_sample, "samples with more are errors");
  v.choice(
      "on_bad_media", on_bad_media, kOnBadMedia,
      "media that cannot be decoded: end the run, or are gray (sounds: nothing) in samples that "
      "count nothing");
  v.role(FieldRole::kMachine);
  v.field({"balance_images", "--no-balance-images", true}, balance_images,
          "samples do not change places within a global batch; without it they do, with per-token "
          "losses and --dataloader-type single, so that data-parallel ranks have about as much to "
          "encode");
  v.role(FieldRole::kRun);
  v.field("mock_images", mock_images,
          "images of each sample of --mock-data, as far as there is room; 0: none, one or two");
  v.field("mock_image_patches", mock_image_patches,
          "median of the patches of such images where they keep their sizes; 0: a few");
  v.field("mock_image_sigma", mock_image_sigma,
          "standard deviation of the logarithm of their patches, which is normal");
  v.field("max_bad_media", max_bad_media,
          "with --on-bad-media skip: more such media of a source end the run; default: 100");
}

void MimoDataConfig::validate(Violations& v) const {
  for (const auto& [flag, value] :
       {std::pair{"--max-patches-per-sequence", max_patches_per_sequence},
        std::pair{"--shuffle-window", shuffle_window}, std::pair{"--mock-images", mock_images},
        std::pair{"--mock-image-patches", mock_image_patches}})
    v.require(value >= 0, cat(flag, " is ", value), "0 or more");
  for (const auto& [flag, value] : {std::pair{"--max-image-pixels", max_image_pixels},
                                    std::pair{"--max-images-per-sample", max_images_per_sample}})
    v.require(value > 0, cat(flag, " is ", value), "a positive number");
  v.require(mock_image_sigma >= 0.0, cat("--mock-image-sigma is ", mock_image_sigma), "0 or more");
  v.require(mock_image_sigma == 0.0 || mock_image_patches > 0,
            "--mock-image-sigma has no effect without --mock-image-patches");
  if (!max_bad_media) return;
  v.require(*max_bad_media >= 0, cat("--max-bad-media is ", *max_bad_media), "0 or more");
  v.require(on_bad_media == OnBadMedia::kSkip,
            "--max-bad-media has no effect without --on-bad-media skip");
}

namespace {

// Options of a GPT that a model with images has not.
void validate_built(const Arguments& a, Violations& v) {
  const TransformerConfig& t = a.transformer;
  const auto refuse = [&](bool given, const char* what) {
    if (given) v.add(cat(what, " with --task mimo is not built"), "leave one of them out");
  };
  refuse(a.parallel.hybrid_context_parallel, "--hybrid-context-parallel");
  refuse(a.splits_vocabulary(), "--pipeline-vocab-parallel");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  refuse(t.is_quantized(), "--fp8-format or --fp4-format");
  refuse(t.is_hybrid(), "--hybrid-layer-pattern");
  refuse(t.has_moe(), "--num-experts");
  refuse(t.fp32_residual_connection, "--fp32-residual-connection");
}

// Of a model whose decoder runs as graphs, the encoders eagerly.
void validate_graphs(const Arguments& a, const MimoConfig& own, Violations& v) {
  if (!a.training.uses_cuda_graphs()) return;
  const auto refuse = [&](bool given, const char* what, const char* why) {
    if (given)
      v.add(cat("--cuda-graph-impl local with ", what, " is not built: ", why),
            "leave one of them out");
  };
  refuse(own.bidirectional_images, "--bidirectional-images",
         "where images stand decides on the kernels of attention");
  refuse(own.encodes_apart(), "--encoder-data-parallel-size",
         "features arrive from other ranks in the middle of a pass");
  refuse(own.offloads_encoders(), "--encoder-offload-modules",
         "activations are offloaded in passes that run eagerly as a whole");
}

// Letters V of a layout: encoders on stages of their own.
int64_t parts_of_encoders(const Arguments& a) {
  const std::string& layout = a.pipeline.pipeline_model_parallel_layout;
  Violations others;
  validate_pipeline(a.pipeline, a.parallel.pipeline_model_parallel_size, a.transformer.num_layers,
                    others);
  return layout.empty() || !others.empty() ? 0 : count_layout_letters(layout, 'V');
}

void validate_parts(const Arguments& a, const MimoConfig& own, Violations& v) {
  const int64_t parts = parts_of_encoders(a);
  if (parts <= 1) return;  // all of them
  const auto fits = [&](const char* flag, int64_t layers) {
    v.require(parts == layers,
              cat("--pipeline-model-parallel-layout \"", a.pipeline.pipeline_model_parallel_layout,
                  "\" has ", parts, " V, ", flag, " is ", layers),
              cat("one V for the whole encoder, or ", layers, ", one for each layer"));
  };
  if (own.sees()) fits("--vision-num-layers", own.vision_num_layers);
  if (own.hears()) fits("--audio-num-layers", own.audio_num_layers);
}

}  // namespace

// Adapters of the encoders and of the projectors.
void validate_adapters(const Arguments& a, const MimoConfig& own, Violations& v) {
  std::vector<std::string> modules;
  if (own.sees()) modules = {"vision_model.", "vision_projection."};
  if (own.hears()) modules.insert(modules.end(), {"audio_model.", "audio_projection."});
  for (const std::string& target : a.transformer.lora_targets)
    v.require(!names_module(target) ||
                  std::ranges::any_of(modules, [&](auto& of) { return target.starts_with(of); }),
              cat("--lora-targets ", target, ": the model has no such module"),
              cat("targets of modules begin with ", listed(modules)));
  for (const auto& [module, type] : {std::pair{"vision_projection.", own.vision_projection_type},
                                     std::pair{"audio_projection.", own.audio_projection_type}})
    v.require(type == VisionProjection::kMlp ||
                  std::ranges::find(a.transformer.lora_targets, cat(module, "linear_fc2")) ==
                      a.transformer.lora_targets.end(),
              cat("--lora-targets ", module, "linear_fc2: the projector has one linear"),
              cat(module, "linear_fc1"));
  if (!a.transformer.has_adapters() || own.vision_num_attention_heads <= 0 ||
      own.audio_num_attention_heads <= 0)
    return;
  for (const std::string& module : modules) {
    const TransformerConfig part = own.part(a.transformer, module);
    AdaptableLinears linears = adaptable_linears(part);
    if (module.ends_with("_projection.")) linears = {.attention = false};
    if (part.has_adapters()) validate_lora_targets(part.lora_targets, linears, v);
  }
}

// Encoders that tensor ranks divide.
void validate_division(const Arguments& a, const MimoConfig& own, Violations& v) {
  const int64_t t = a.parallel.tensor_model_parallel_size,
                e = own.encoder_tensor_model_parallel_size;
  v.require(e >= 1, cat("--encoder-tensor-model-parallel-size is ", e),
            t > 1 ? cat("1 or ", t) : "1");
  if (e <= 1) return;
  if (e != t && !own.encodes_apart()) {
    v.add(cat("--encoder-tensor-model-parallel-size ", e, " beside --tensor-model-parallel-size ",
              t, " is not built: all tensor ranks divide the encoders, or none"),
          cat(t > 1 ? cat("1 or ", t) : "1",
              ", or ranks of the encoders' own with --encoder-data-parallel-size"));
    return;
  }
  const auto divisible = [&](const char* flag, int64_t value) {
    v.require(value % e == 0, cat("--encoder-tensor-model-parallel-size ", e, " does not divide ",
                                  flag, " ", value));
  };
  if (own.sees()) {
    divisible("--vision-num-attention-heads", own.vision_num_attention_heads);
    divisible("--vision-ffn-hidden-size", own.vision_ffn_hidden_size);
  }
  if (own.hears()) {
    divisible("--audio-num-attention-heads", own.audio_num_attention_heads);
    divisible("--audio-ffn-hidden-size", own.audio_ffn_hidden_size);
  }
}

// Features before their micro-batch's turn.
void validate_prefetch(const Arguments& a, MimoConfig own, Violations& v) {
  if (!own.mimo_encoder_prefetch || !v.empty()) return;
  if (own.divides_encoders())
    v.add(
        "--mimo-encoder-prefetch beside --encoder-tensor-model-parallel-size is not built: the "
        "sums of an encoder's layers over tensor ranks would run beside those of the decoder",
        "--encoder-tensor-model-parallel-size 1");
  if (parts_of_encoders(a) > 1)
    v.add(
        "--mimo-encoder-prefetch of an encoder that several stages share is not built: its rows "
        "come from the stage before",
        "one V in --pipeline-model-parallel-layout, for the whole encoder");
  if (a.ddp.strategy() == ShardingStrategy::kOptimGradsParams)
    v.add(
        "--mimo-encoder-prefetch with --data-parallel-sharding-strategy optim_grads_params is not "
        "built: an encoder's values are gathered in the turn of its micro-batch",
        "another strategy");
  find_frozen_media(a.training, a.transformer, own);
  v.require((own.sees() && own.frozen_vision) || (own.hears() && own.frozen_audio),
            "--mimo-encoder-prefetch: no encoder is frozen as a whole, and features of one that is "
            "trained are part of the backward",
            own.sees() ? "--freeze vision_model" : "--freeze audio_model");
}

// Ranks of the encoders' own.
void validate_own_ranks(const Arguments& a, const MimoConfig& own, Violations& v) {
  if (!own.encodes_apart()) return;
  const auto refuse = [&](bool given, const char* what, const char* hint) {
    if (given)
      v.add(cat(what,
                " with --encoder-data-parallel-size is not built: the encoders have ranks of "
                "their own"),
            hint);
  };
  refuse(parts_of_encoders(a) > 0, "V in --pipeline-model-parallel-layout",
         "leave the V out: they are no stage of the language model's pipeline");
  refuse(a.pipeline.account_for_encoder_in_pipeline_split > 0,
         "--account-for-encoder-in-pipeline-split", "leave it out");
  refuse(a.parallel.context_parallel_size > 1, "--context-parallel-size above 1",
         "divide sequences over tensor ranks, with --sequence-parallel");
  refuse(a.ddp.num_distributed_optimizer_instances > 1,
         "--num-distributed-optimizer-instances above 1",
         "leave it out: encoders and language model have other numbers of data-parallel ranks");
  refuse(own.mimo_encoder_prefetch, "--mimo-encoder-prefetch",
         "leave it out: they work ahead of the language model's ranks");
}

void validate_mimo(const Arguments& a, Violations& v) {
  const auto& own = own_config<MimoConfig>(a.own);
  const auto& data = own_config<MimoDataConfig>(a.own);
  validate_built(a, v);
  validate_own_ranks(a, own, v);
  validate_graphs(a, own, v);
  validate_division(a, own, v);
  validate_parts(a, own, v);
  validate_adapters(a, own, v);
  if (!own.sees() && !own.hears())
    v.add("--task mimo without an encoder of images or of sounds",
          "--vision-model-type clip, internvit, siglip, qwen2 or qwen2_5, or "
          "--audio-model-type whisper");
  else if (own.has_own_sizes() != !a.transformer.mrope_section.empty())
    v.add(
        "--position-embedding-type mrope is for --vision-model-type qwen2 and qwen2_5, and "
        "needed for them");
  if (!a.data.mock_data && data.media_model.empty())
    v.add("--media-model is not given",
          "the folder of a Hugging Face model whose config.json and image processor say what media "
          "become");
  v.require(own.sees() || data.pretrained_vision_model.empty(),
            "--pretrained-vision-model is given for a model without an encoder of images",
            "leave --vision-model-type none out: the folder says which it is");
  v.require(own.hears() || data.pretrained_audio_model.empty(),
            "--pretrained-audio-model is given for a model without an encoder of sounds",
            "leave --audio-model-type none out: the folder says which it is");
  const bool both = own.sees() && own.hears();
  v.require(both || data.audio_media_model.empty(),
            "--audio-media-model has no effect: the model does not read both images and sounds",
            "--media-model alone");
  v.require(!both || a.data.mock_data || !data.audio_media_model.empty(),
            "--audio-media-model is not given",
            "the folder of a Hugging Face model whose config.json says what sounds become, beside "
            "--media-model, which says what images become");
  if (!a.data.mock_data && (data.mock_images > 0 || data.mock_image_patches > 0))
    v.add("--mock-images and --mock-image-patches have no effect without --mock-data");
  if (data.mock_image_patches > 0 && !own.has_own_sizes())
    v.add("--mock-image-patches is for images of their own sizes",
          "--vision-model-type qwen2 or qwen2_5; others have --img-h and --img-w");
  if (a.data.reset_position_ids || a.data.reset_attention_mask || a.data.eod_mask_loss ||
      a.data.dataloader_inter_document_masking)
    v.add(
        "--reset-position-ids, --reset-attention-mask, --eod-mask-loss or "
        "--dataloader-inter-document-masking has no effect with --task mimo",
        "leave it out: samples are separated anyway");
  if (own.bidirectional_images && a.parallel.context_parallel_size > 1 &&
      attends_in_rings(a.transformer))
    v.add("ring attention with --bidirectional-images (--cp-comm-type p2p or a2a+p2p) is not built",
          "--cp-comm-type all_gather or a2a");
  const int64_t length = a.transformer.seq_length;
  if (own.sees() && !own.has_own_sizes() && own.patch_dim > 0 && length > 0 &&
      length <= own.features() + 1)
    v.add(cat("--seq-length ", length, " has no room for a picture of ", own.features(),
              " tokens and text"));
  if (own.hears() && own.stacks() && length > 0 && length <= own.sound_features(1) + 1)
    v.add(cat("--seq-length ", length, " has no room for a sound of ", own.sound_features(1),
              " tokens and text"));
  validate_prefetch(a, own, v);
  validate_encoder_offload(a, own, v);
}

namespace {

// One or several for each of the ranks that divide them.
int64_t heads_of_ranks(const MimoConfig& own, const MimoConfig& was, int64_t heads) {
  return own.encoder_tensor_model_parallel_size *
         one_or_several(heads / was.encoder_tensor_model_parallel_size);
}

// Of so many heads, each as wide as it was or as a small one: positions that turn divide it.
int64_t width_of_heads(int64_t heads, int64_t hidden_was, int64_t heads_were) {
  constexpr int64_t kHead = 8;
  return heads * std::min(hidden_was / heads_were, kHead);
}

int64_t width_of_ranks(const MimoConfig& own, int64_t width) {
  return width / own.encoder_tensor_model_parallel_size * own.encoder_tensor_model_parallel_size;
}

// `size`: of the vocabulary.
void shrink_audio(MimoConfig& own, const MimoConfig& was, int64_t size, const Arguments& before,
                  Shrinker& shrinker) {
  if (!own.hears()) return;
  constexpr int64_t kBins = 8;
  if (parts_of_encoders(before) <= 1)
    shrinker.set("--audio-num-layers", own.audio_num_layers, one_or_several(was.audio_num_layers));
  shrinker.set("--audio-num-attention-heads", own.audio_num_attention_heads,
               heads_of_ranks(own, was, was.audio_num_attention_heads));
  shrinker.set("--audio-hidden-size", own.audio_hidden_size,
               width_of_heads(own.audio_num_attention_heads, was.audio_hidden_size,
                              was.audio_num_attention_heads));
  shrinker.set("--audio-ffn-hidden-size", own.audio_ffn_hidden_size,
               width_of_ranks(own, std::min(was.audio_ffn_hidden_size, 2 * own.audio_hidden_size)));
  shrinker.set("--audio-mel-bins", own.audio_mel_bins, std::min(was.audio_mel_bins, kBins));
  if (was.audio_projection_ffn_hidden_size > 0)
    shrinker.set("--audio-projection-ffn-hidden-size", own.audio_projection_ffn_hidden_size,
                 std::min<int64_t>(was.audio_projection_ffn_hidden_size, 24));
  // An id within the table stays there; the last one may be that of images.
  if (was.audio_token_id >= size && was.audio_token_id < likely_vocabulary(before).padded_size)
    shrinker.set("--audio-token-id", own.audio_token_id, size - 2);
}

}  // namespace

void shrink_mimo(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  auto& own = own_config<MimoConfig>(a.own);
  const auto& was = own_config<MimoConfig>(before.own);
  if (was.divides_encoders() && !was.encodes_apart())
    shrinker.set("--encoder-tensor-model-parallel-size", own.encoder_tensor_model_parallel_size,
                 a.parallel.tensor_model_parallel_size);
  const bool named = parts_of_encoders(before) > 1;  // layers that the layout of stages names
  if (!named)
    shrinker.set("--vision-num-layers", own.vision_num_layers,
                 one_or_several(was.vision_num_layers));
  shrinker.set("--vision-num-attention-heads", own.vision_num_attention_heads,
               heads_of_ranks(own, was, was.vision_num_attention_heads));
  shrinker.set("--vision-hidden-size", own.vision_hidden_size,
               width_of_heads(own.vision_num_attention_heads, was.vision_hidden_size,
                              was.vision_num_attention_heads));
  shrinker.set(
      "--vision-ffn-hidden-size", own.vision_ffn_hidden_size,
      width_of_ranks(own, std::min(was.vision_ffn_hidden_size, 2 * own.vision_hidden_size)));
  if (was.vision_projection_ffn_hidden_size > 0)
    shrinker.set("--vision-projection-ffn-hidden-size", own.vision_projection_ffn_hidden_size,
                 std::min<int64_t>(was.vision_projection_ffn_hidden_size, 24));
  // Two by two patches, or a side longer where one is.
  int64_t rows = std::min<int64_t>(was.patch_rows(), 2),
          columns = std::min<int64_t>(was.patch_columns(), 2);
  const bool high = was.patch_rows() > was.patch_columns(),
             wide = was.patch_columns() > was.patch_rows();
  constexpr int64_t kPatch = 4;
  shrinker.set("--patch-dim", own.patch_dim, std::min(was.patch_dim, kPatch));
  if (was.has_windows()) {  // of one feature, so that a picture has several
    shrinker.set("--vision-window-size", own.vision_window_size, 2 * own.patch_dim);
    // Layers of both kinds, where there were
    const auto whole = std::ssize(was.vision_whole_picture_layers);
    own.vision_whole_picture_layers.clear();
    for (int64_t layer = whole < was.vision_num_layers ? own.vision_num_layers - 1 : 0;
         whole > 0 && layer < own.vision_num_layers; ++layer)
      own.vision_whole_picture_layers.push_back(layer);
  }
  if (was.vision_pooling > 1) {  // features in both directions of the picture
    shrinker.set("--vision-pooling", own.vision_pooling, int64_t{2});
    rows *= 2;
    columns *= 2;
  }
  shrinker.set("--img-h", own.img_h, own.patch_dim * (high ? 2 * rows : rows));
  shrinker.set("--img-w", own.img_w, own.patch_dim * (wide ? 2 * columns : columns));
  const int64_t layers =
      std::max(own.sees() ? own.vision_num_layers : 0, own.hears() ? own.audio_num_layers : 0);
  if (own.recomputes_encoders())
    shrinker.set("--encoder-recompute-num-layers", own.encoder_recompute_num_layers,
                 std::min(was.encoder_recompute_num_layers, layers));
  auto& data = own_config<MimoDataConfig>(a.own);
  shrinker.set("--mock-image-patches", data.mock_image_patches, int64_t{0});
  data.mock_image_sigma = 0.0;
  // An id within the table stays there.
  const int64_t size = a.tokenizer.vocab_size.value_or(1);
  if (own.sees() && was.image_token_id >= size &&
      was.image_token_id < likely_vocabulary(before).padded_size)
    shrinker.set("--image-token-id", own.image_token_id, size - 1);
  shrink_audio(own, was, size, before, shrinker);
  // Room for a picture, a sound and text
  constexpr int64_t kText = 4, kFrames = 13;
  const int64_t least =
      (own.sees() ? own.features() : 0) + (own.hears() ? own.sound_features(kFrames) : 0) + kText;
  if (a.transformer.seq_length < least) a.transformer.seq_length = least;
}

}  // namespace megatron
