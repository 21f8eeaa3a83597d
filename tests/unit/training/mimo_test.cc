// Training of models that read images: steps without any, frozen parts, made-up samples, rules.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/models/audio/packed_sounds.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/vision/packed_images.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/proving/equivalence.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/error_of.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

using ::testing::HasSubstr;

const std::string kMimoModel =
    "--task mimo --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --vision-model-type "
    "clip --vision-num-layers 2 --vision-hidden-size 16 --vision-ffn-hidden-size 24 "
    "--vision-num-attention-heads 2 --img-h 8 --img-w 8 --patch-dim 4 "
    "--disable-vision-class-token --image-token-id 100 ";
const std::string kMimoRun =
    "--tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 --mock-data "
    "--num-workers 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 "
    "--eval-iters 0 --seed 7 --device cpu ";

Arguments mimo_arguments(const std::string& more = "", int64_t ranks = 1) {
  return parse_line("pretrain " + kMimoModel + kMimoRun + more, ranks);
}

std::shared_ptr<const Dataset> mimo_samples(const Arguments& arguments) {
  const auto tokenizer = make_tokenizer(arguments.tokenizer);
  return build_datasets(find_task(arguments), arguments, *tokenizer).train;
}

// The second step of eight samples has no image on any rank, and on none of them does the encoder's
// gradient stay what it was, or hang.
TEST(Mimo, AStepWithoutImagesHasZeroGradients) {
  const char* kOverlap = " --overlap-grad-reduce --overlap-param-gather";
  for (const auto& [ranks, flags] :
       {std::pair{1, std::string()}, std::pair{2, std::string()},
        std::pair{2, cat("--use-megatron-fsdp --data-parallel-sharding-strategy ",
                         "optim_grads_params", kOverlap)}}) {
    const Arguments a = mimo_arguments(flags, ranks);
    const TrainingTrace trace = trace_training(find_task(a), a, {at::kDouble, 3});
    size_t of_encoder = 0;
    for (const auto& [name, grad] : trace.steps[1].grads) {
      const bool sees = name.starts_with("vision_");
      of_encoder += sees;
      const bool is_zero = !grad.ne(0).any().item<bool>();
      EXPECT_EQ(is_zero, sees) << name;
      if (sees) {
        EXPECT_TRUE(trace.steps[0].grads.at(name).ne(0).any().item<bool>()) << name;
      }
    }
    EXPECT_GT(of_encoder, 20U);
  }
}

// The model of these arguments on one rank, and its micro-batches.
struct BuiltMimo {
  explicit BuiltMimo(const Arguments& arguments)
      : task(find_task(arguments)),
        model(build_model(task, arguments,
                          vocabulary_of(arguments, *make_tokenizer(arguments.tokenizer)), groups,
                          at::kFloat, c10::kCPU, StartPoint{})),
        module(*model.chunks.front().module),
        loader(make_train_loader(arguments, groups, mimo_samples(arguments), 0, c10::kCPU)),
        batches(at::kCPU, groups.cp, 0, task.addition(module.config())) {}
  // The next one with images, or without.
  Batch next(bool sees) {
    Batch batch = batches.make(loader->next());
    while ((batch.images->all_pictures > 0) != sees) batch = batches.make(loader->next());
    return batch;
  }
  const PretrainTask task;
  const ParallelGroups groups;
  TrainedModel model;
  Model& module;
  const std::unique_ptr<DataLoader> loader;
  BatchMaker batches;
};

// Bytes that a forward of training holds until its backward.
int64_t held_by_forward(const std::string& more) {
  BuiltMimo built(mimo_arguments("--vision-num-layers 6 " + more));
  const Batch batch = built.next(/*sees=*/true);
  ForwardContext context;
  context.training = true;
  context.place = batch.place;
  context.position_ids = batch.find("position_ids");
  context.document_ids = batch.document_ids;
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const StageOutput out = built.task.forward_step(built.module, batch, {}, context);
  return meter->live;
}

TEST(Mimo, FrozenPartsHoldNoActivations) {
  const int64_t all = held_by_forward(""), projector = held_by_forward("--freeze vision_model"),
                none = held_by_forward("--freeze vision_model vision_projection");
  // 6 layers of some pictures of 5 rows
  EXPECT_GT(all, projector + int64_t{6} * 5 * 16 * 4 * 4);
  EXPECT_GT(projector, none);
  // As the same model without layers of its encoder, to a few vectors.
  EXPECT_LT(none,
            held_by_forward("--freeze vision_model vision_projection --vision-num-layers 1") + 256);
}

TEST(Mimo, PartsAreFrozenByMegatronsNames) {
  const auto frozen = [](const char* flags) { return mimo_arguments(flags).training.freeze; };
  const std::vector<std::string> two = {"vision_model.ln_pre", "language_model", "vision_model"};
  EXPECT_EQ(frozen("--freeze-LM --freeze-ViT --freeze vision_model.ln_pre"), two);
  EXPECT_EQ(frozen("--freeze-vision-projection --freeze vision_projection"),
            std::vector<std::string>{"vision_projection"});
  EXPECT_THAT(error_of([&] { frozen("--freeze-LM --freeze-except vision_projection"); }),
              HasSubstr("several of --freeze"));
}

// Of both encoders, whole and in part.
TEST(Mimo, LayersThatAreComputedAgainGiveTheSameBits) {
  const std::string both =
      "--audio-model-type whisper --audio-num-layers 3 --audio-hidden-size 16 "
      "--audio-ffn-hidden-size 24 --audio-num-attention-heads 2 --audio-mel-bins 4 "
      "--audio-token-id 99 ";
  const auto gradients = [&](const std::string& more) {
    const Arguments a = mimo_arguments(both + more);
    return trace_training(find_task(a), a, {at::kFloat, 1}).steps[0].grads;
  };
  const std::string block =
                        "--encoder-recompute-granularity full --encoder-recompute-method block "
                        "--encoder-recompute-num-layers 3",
                    units = "--encoder-recompute-granularity full --encoder-recompute-num-layers 2",
                    frozen = " --freeze vision_model.decoder.layers.0";
  for (const auto& [own, again] : {std::pair{std::string(), std::string("--recompute-vision")},
                                   std::pair{std::string(), block}, std::pair{frozen, units}}) {
    const LogicalTensors want = gradients(own), got = gradients(again + own);
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, grad] : got) EXPECT_TRUE(grad.equal(want.at(name))) << name;
  }
}

// Of both encoders, also where some layers are computed again, or one encoder is frozen.
TEST(Mimo, ActivationsInHostMemoryGiveTheSameBits) {
  const std::string
      both =
          "--audio-model-type whisper --audio-num-layers 3 --audio-hidden-size 16 "
          "--audio-ffn-hidden-size 24 --audio-num-attention-heads 2 --audio-mel-bins 4 "
          "--audio-token-id 99 ",
      each =
          " --encoder-offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 "
          "mlp_act mlp_fc2",
      block = "--recompute-vision --encoder-recompute-method block",
      frozen = " --freeze audio_model --mimo-encoder-prefetch",
      decoder =
          "--fine-grained-activation-offloading --offload-modules core_attn mlp_act "
          "--min-offloaded-tensor-size 0";
  const auto trace = [&](const std::string& more) {
    const Arguments a = mimo_arguments(both + more);
    return trace_training(find_task(a), a, {at::kFloat, 2});
  };
  for (const auto& [own, flags] :
       {std::pair{std::string(), each}, std::pair{std::string(), block + each},
        std::pair{frozen, each}, std::pair{std::string(), decoder + each}}) {
    const TrainingTrace want = trace(own), got = trace(flags + own);
    for (size_t step = 0; step < want.steps.size(); ++step) {
      for (const auto& [name, number] : got.steps[step].numbers)
        EXPECT_EQ(number.value, want.steps[step].number(name)) << flags << " " << name;
      ASSERT_EQ(got.steps[step].grads.size(), want.steps[step].grads.size());
      for (const auto& [name, grad] : got.steps[step].grads)
        EXPECT_TRUE(grad.equal(want.steps[step].grads.at(name))) << flags << " " << name;
    }
  }
}

// Features before the turn of their micro-batch, of one encoder of two or of both.
TEST(Mimo, FeaturesAheadGiveTheSameBits) {
  const auto trace = [&](const std::string& more) {
    const Arguments a = mimo_arguments(
        "--audio-model-type whisper --audio-num-layers 1 --audio-hidden-size 16 "
        "--audio-ffn-hidden-size 24 --audio-num-attention-heads 2 --audio-mel-bins 4 "
        "--audio-token-id 99 --micro-batch-size 1 " +
        more);
    return trace_training(find_task(a), a, {at::kFloat, 2});
  };
  for (const std::string frozen : {"--freeze vision_model", "--freeze audio_model",
                                   "--freeze-except vision_projection audio_projection"}) {
    const TrainingTrace want = trace(frozen);
    for (const char* depth : {"1", "3", "100"}) {
      const TrainingTrace got =
          trace(cat(frozen, " --mimo-encoder-prefetch --mimo-encoder-prefetch-depth ", depth));
      for (const auto& [name, grad] : want.steps[0].grads)
        EXPECT_TRUE(got.steps[0].grads.at(name).equal(grad)) << name;
      for (const auto& [name, value] : want.weights)
        EXPECT_TRUE(got.weights.at(name).equal(value)) << name;
    }
  }
}

// What is computed ahead is used: the encoder does not run in the forward.
TEST(Mimo, FeaturesAheadAreTaken) {
  BuiltMimo built(mimo_arguments("--mimo-encoder-prefetch --freeze vision_model"));
  Batch batch = built.next(/*sees=*/true);
  const PretrainTask::Ahead ahead = built.task.ahead(built.module);
  EXPECT_EQ(ahead.microbatches, 2);
  ForwardContext context;
  context.place = batch.place;
  const at::NoGradGuard no_grad;
  const auto loss = [&] {
    return built.task.forward_step(built.module, batch, {}, context).loss.sum.item<double>();
  };
  const double before = loss();
  ahead.prepare(batch, /*training=*/false);
  built.module.visit([](const std::string& name, Parameter& parameter) {
    if (name.starts_with("vision_model.decoder")) parameter.value.mul_(1.5);
  });
  EXPECT_EQ(loss(), before);
  ahead.prepare(batch, /*training=*/false);
  EXPECT_NE(loss(), before);
}

// The loss of the first micro-batches with images and without, and all gradients of both; the
// encoders in the forward, or before it, and their backward behind that of the rest.
std::pair<at::Tensor, at::Tensor> loss_and_gradients(const std::string& more, bool before) {
  BuiltMimo built(mimo_arguments(more));
  DistributedDataParallel& store = *built.model.chunks.front().store;
  store.zero_grad(2);
  at::Tensor losses = at::zeros({2});
  for (const bool sees : {true, false}) {
    Batch batch = built.next(sees);
    ForwardContext context;
    context.training = true;
    RecomputeTape encoders, rest;
    context.tape = &encoders;
    at::Tensor media;
    BackwardEnd end;
    if (before) {
      batch = built.module.with_media_encoded(batch, context);
      EXPECT_EQ(batch.images, nullptr);
      EXPECT_EQ(batch.encoded_media.defined(), sees);
      media = batch.encoded_media;
      if (media.requires_grad()) {
        batch.encoded_media = media.detach();
        end = BackwardEnd(batch.encoded_media);
      }
    }
    context.tape = &rest;
    context.place = batch.place;
    context.position_ids = batch.find("position_ids");
    context.document_ids = batch.document_ids;
    const StageOutput out = built.task.forward_step(built.module, batch, {}, context);
    losses[sees] = out.loss.sum.detach();
    rest.backward(out.loss.sum);
    if (end.defined()) encoders.backward(media, end.take_grad());
  }
  store.finish_grad_sync();
  return {losses, store.flat_grads().clone()};
}

TEST(Mimo, MediaEncodedBeforeTheRestGiveTheSameBits) {
  for (const std::string flags :
       {"", "--recompute-vision", "--vision-newlines", "--freeze vision_model",
        "--freeze-except vision_projection", "--freeze vision_model vision_projection",
        "--vision-model-type qwen2_5 --pixel-shuffle --patch-dim 2 --position-embedding-type mrope "
        "--mrope-section 2 1 1 --vision-window-size 8 --vision-activation silu"}) {
    const auto [loss, gradients] = loss_and_gradients(flags, /*before=*/false);
    const auto [loss_before, gradients_before] = loss_and_gradients(flags, /*before=*/true);
    EXPECT_TRUE(at::equal(loss, loss_before)) << flags;
    EXPECT_TRUE(at::equal(gradients, gradients_before)) << flags;
    EXPECT_GT(gradients.abs().sum().item<double>(), 0.0) << flags;
  }
}

TEST(Mimo, GradientsGoThroughAFrozenLanguageModel) {
  const auto gradients = [](const std::string& more) {
    const Arguments a = mimo_arguments(more);
    return trace_training(find_task(a), a, {at::kDouble, 1}).steps[0].grads;
  };
  const LogicalTensors all = gradients(""), some = gradients("--freeze language_model");
  size_t compared = 0;
  for (const auto& [name, grad] : all) {
    EXPECT_EQ(some.contains(name), name.starts_with("vision_")) << name;
    if (!some.contains(name)) continue;
    EXPECT_TRUE(at::allclose(some.at(name), grad, 1e-12, 1e-14)) << name;
    ++compared;
  }
  EXPECT_GT(compared, 20U);
}

TEST(Mimo, MadeUpSamplesHaveARowForEachFeature) {
  for (const char* flags :
       {"", "--vision-newlines", "--vision-model-type internvit --pixel-shuffle --patch-dim 2",
        "--image-token-id 500",
        "--vision-model-type qwen2 --pixel-shuffle --patch-dim 2 --position-embedding-type mrope "
        "--mrope-section 2 1 1",
        "--vision-model-type qwen2_5 --pixel-shuffle --patch-dim 2 --position-embedding-type mrope "
        "--mrope-section 2 1 1 --vision-window-size 8 --vision-activation silu"}) {
    const Arguments a = mimo_arguments(flags);
    const auto& own = own_config<MimoConfig>(a.own);
    const auto samples = mimo_samples(a);
    int64_t with_images = 0, counted_behind = 0;
    for (int64_t i = 0; i < samples->size(); ++i) {
      const Sample sample = samples->sample(i);
      const std::vector<int64_t> tokens = sample.get<int64_t>("tokens"),
                                 labels = sample.get<int64_t>("labels");
      const std::vector<float> mask = sample.get<float>("loss_mask");
      int64_t rows = 0;
      for (const SampleImage& image : samples->images(i))
        rows += image_tokens(
            own, {0, image.rows, image.columns, image.pictures, image.grid, image.size});
      EXPECT_EQ(std::ranges::count(tokens, own.image_token_id), rows) << flags;
      with_images += rows > 0;
      for (size_t k = 0; k + 1 < tokens.size(); ++k) {
        EXPECT_EQ(tokens[k + 1] == own.image_token_id, labels[k] == own.image_token_id);
        EXPECT_FALSE(labels[k] == own.image_token_id && mask[k] != 0.0F);
        counted_behind += tokens[k] == own.image_token_id && mask[k] > 0;
      }
      EXPECT_FALSE(i / 8 % 3 == 1 && rows > 0);
    }
    EXPECT_GT(with_images, 4) << flags;
    EXPECT_GT(counted_behind, 0) << flags;
  }
}

TEST(Mimo, ShrunkEncodersKeepLayersOfBothKinds) {
  const auto shrunk = [](const std::string& whole) {
    const Arguments a = mimo_arguments(
        "--vision-model-type qwen2_5 --pixel-shuffle --vision-activation silu --patch-dim 2 "
        "--vision-num-layers 8 --vision-window-size 8 --position-embedding-type mrope "
        "--mrope-section 2 1 1 " +
        whole);
    const Arguments small = shrink(a, /*max_axis=*/2).arguments;
    const auto& own = own_config<MimoConfig>(small.own);
    EXPECT_EQ(own.vision_num_layers, 2);
    EXPECT_EQ(own.window_side(), 1);
    return own.vision_whole_picture_layers;
  };
  using Layers = std::vector<int64_t>;
  EXPECT_EQ(shrunk(""), Layers());
  EXPECT_EQ(shrunk("--vision-whole-picture-layers 0 1"), Layers({1}));
  EXPECT_EQ(shrunk("--vision-whole-picture-layers 7"), Layers({1}));
  EXPECT_EQ(shrunk("--vision-whole-picture-layers 0 1 2 3 4 5 6 7"), Layers({0, 1}));
}

TEST(Mimo, AShrunkTableHasTheTokensOfMedia) {
  for (const char* flags : {"--vocab-size 5000 --image-token-id 4999", "--image-token-id 100"}) {
    const Arguments small = shrink(mimo_arguments(flags), /*max_axis=*/2).arguments;
    EXPECT_EQ(own_config<MimoConfig>(small.own).image_token_id, 100) << flags;
    EXPECT_EQ(small.tokenizer.vocab_size, 101) << flags;
  }
}

// Positions of rows and columns want heads of a multiple of 4.
TEST(Mimo, ShrunkHeadsAreAsWideOverFewerRanks) {
  const Arguments a = mimo_arguments(
      "--hidden-size 40 --num-attention-heads 5 --tensor-model-parallel-size 5 "
      "--encoder-tensor-model-parallel-size 5 --vision-model-type qwen2 --pixel-shuffle "
      "--patch-dim 2 --position-embedding-type mrope --mrope-section 2 1 1 "
      "--vision-num-attention-heads 5 --vision-hidden-size 20 --vision-ffn-hidden-size 20",
      5);
  const Arguments small = shrink(a, /*max_axis=*/4).arguments;
  const auto& own = own_config<MimoConfig>(small.own);
  EXPECT_EQ(own.vision_num_attention_heads, small.parallel.tensor_model_parallel_size);
  EXPECT_EQ(own.vision_hidden_size, 4 * own.vision_num_attention_heads);
}

const std::string kAudioModel =
    "--vision-model-type none --audio-model-type whisper --audio-num-layers 1 --audio-hidden-size "
    "8 --audio-ffn-hidden-size 8 --audio-num-attention-heads 2 --audio-mel-bins 4 --audio-token-id "
    "99 ";

TEST(Mimo, MadeUpSoundsHaveARowForEachFeature) {
  for (const char* flags : {"", "--audio-features stacked --seq-length 400",
                            "--vision-model-type clip --seq-length 48"}) {
    const Arguments a = mimo_arguments(kAudioModel + flags);
    const auto& own = own_config<MimoConfig>(a.own);
    const auto samples = mimo_samples(a);
    int64_t with_sounds = 0, with_images = 0;
    for (int64_t i = 0; i < samples->size(); ++i) {
      const std::vector<int64_t> tokens = samples->sample(i).get<int64_t>("tokens");
      int64_t rows = 0;
      for (const SampleSound& sound : samples->sounds(i)) {
        rows += own.sound_features(sound.frames);
        EXPECT_EQ(sound.rows(), packed_frames(own, sound.frames));
      }
      EXPECT_EQ(std::ranges::count(tokens, own.audio_token_id), rows) << flags;
      with_sounds += rows > 0;
      with_images += !samples->images(i).empty();
      if (own.sees()) {
        EXPECT_EQ(std::ranges::count(tokens, own.image_token_id),
                  4 * std::ssize(samples->images(i)));
      }
    }
    EXPECT_GT(with_sounds, 3) << flags;
    EXPECT_EQ(with_images > 0, own.sees()) << flags;
  }
}

// Keys of the encoder of sounds have no bias, whatever an optimizer makes of roundings.
TEST(Mimo, KeyBiasesOfSoundsStayZero) {
  const Arguments a = mimo_arguments(kAudioModel);
  const TrainingTrace trace = trace_training(find_task(a), a, {at::kDouble, 3});
  size_t found = 0;
  for (const auto& [name, value] : trace.weights) {
    if (name == "audio_model.position_embeddings.weight") {
      EXPECT_EQ(value[1][0].item<double>(), std::sin(1.0));
    }
    if (!name.starts_with("audio_model.") || !name.ends_with("linear_qkv.bias")) continue;
    const at::Tensor parts = value.view({2, 3, 4});
    EXPECT_EQ(parts.select(1, 1).abs().max().item<double>(), 0.0);
    EXPECT_GT(parts.select(1, 0).abs().max().item<double>(), 0.0);
    ++found;
  }
  EXPECT_EQ(found, 1U);
}

TEST(Mimo, FrozenEncodersCostAThird) {
  const auto costs = [](const std::string& more) {
    const MediaCosts of = media_costs(
        mimo_arguments(kAudioModel + "--vision-model-type clip --seq-length 48 " + more));
    return std::pair(of.image({.rows = 2, .columns = 2}),
                     of.sound({.frames = 8, .frames_of_clip = 8, .bins = 4}));
  };
  const auto [image, sound] = costs("");
  EXPECT_EQ(costs("--freeze vision_model"), std::pair(image / 3, sound));
  EXPECT_EQ(costs("--freeze audio_model"), std::pair(image, sound / 3));
  EXPECT_EQ(costs("--freeze vision_model.decoder vision_projection"), std::pair(image, sound));
}

// By what the encoder computes, and not by patches, of which a large picture has fewer than it
// costs.
TEST(Mimo, SamplesAreDealtByWhatTheirImagesCost) {
  const Arguments a = mimo_arguments(
      "--vision-model-type qwen2 --pixel-shuffle --patch-dim 2 --position-embedding-type mrope "
      "--mrope-section 2 1 1 --seq-length 128 --mock-image-patches 100 --mock-image-sigma 1 "
      "--global-batch-size 96",
      2);
  const auto samples = mimo_samples(a);
  const MediaCosts of = media_costs(a);
  std::vector<int64_t> costs(96), patches(96), read;
  for (int64_t i = 0; i < 96; ++i)
    for (const SampleImage& image : samples->images(i)) {
      costs[static_cast<size_t>(i)] += of.image(image);
      patches[static_cast<size_t>(i)] += image.patches();
    }
  const auto loader = make_train_loader(a, ParallelGroups(), samples, 0, c10::kCPU);
  while (std::ssize(read) < 48) {
    const auto batch = loader->next();
    read.insert(read.end(), batch->ordinals.begin(), batch->ordinals.end());
  }
  EXPECT_EQ(read, balanced_samples(costs, 0, 2));
  EXPECT_NE(read, balanced_samples(patches, 0, 2));
}

const std::string kBoth = " --vision-model-type clip --audio-token-id 500 --audio-num-layers 3";

TEST(Mimo, RefusesWhatContradicts) {
  const auto refused = [](const std::string& more, const std::string& message) {
    EXPECT_THAT(error_of([&] { mimo_arguments(more); }), HasSubstr(message));
  };
  refused("--vision-model-type none", "--task mimo without an encoder of images or of sounds");
  refused("--seq-length 5", "--seq-length 5 has no room for a picture of 4 tokens and text");
  refused(kAudioModel + "--audio-features stacked",
          "--seq-length 24 has no room for a sound of 375 tokens and text");
  refused(kAudioModel + "--audio-hidden-size 9", "--audio-hidden-size 9: positions are sines");
  refused(kAudioModel + "--vision-model-type clip --audio-token-id 100",
          "--image-token-id and --audio-token-id are 100");
  refused("--reset-position-ids", "has no effect with --task mimo");
  refused("--max-patches-per-sequence -1", "--max-patches-per-sequence is -1");
  refused("--encoder-recompute-num-layers 3", "--encoder-recompute-num-layers 3: expected 1 to 2");
  refused("--encoder-recompute-num-layers 0", "--encoder-recompute-num-layers 0: expected 1 to 2");
  refused("--encoder-recompute-granularity selective", "none, full");
  const std::string host = "--encoder-offload-modules ";
  refused(host + "attn_norm moe_act",
          host +
              "moe_act: a layer of an encoder has no such input\nhint: modules: attn_norm, "
              "qkv_linear, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, mlp_fc2");
  refused(host + "mlp_act --recompute-vision",
          host + "mlp_act has no effect: --encoder-recompute-granularity full saves only");
  for (const char* frozen_encoder : {" --freeze vision_model", " --freeze-except vision_projection",
                                     " --lora-rank 2 --lora-targets linear_q"})
    refused(host + "core_attn" + frozen_encoder,
            host.substr(0, host.size() - 1) + " has no effect: no encoder is trained");
  const std::string ahead = "--mimo-encoder-prefetch ", frozen = "--freeze vision_model ";
  refused(ahead, "no encoder is frozen as a whole, and features of one that is trained");
  refused(ahead + "--freeze vision_model.conv1", "\nhint: --freeze vision_model");
  refused(ahead + "--lora-rank 2 --lora-targets vision_model.linear_q", "no encoder is frozen");
  refused(ahead + frozen + "--mimo-encoder-prefetch-depth 0", "depth is 0");
  refused(
      ahead + frozen + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
      "optim_grads_params is not built: an encoder's values are gathered in the turn");
  const auto of_two = [](const std::string& more) {
    return error_of([&] { mimo_arguments("--tensor-model-parallel-size 2 " + more, 2); });
  };
  const std::string divided = "--encoder-tensor-model-parallel-size 2";
  refused(divided, divided + " beside --tensor-model-parallel-size 1 is not built");
  EXPECT_THAT(of_two("--encoder-tensor-model-parallel-size 0"), HasSubstr("\nhint: 1 or 2"));
  EXPECT_THAT(of_two(divided + " --vision-num-attention-heads 1"),
              HasSubstr(divided + " does not divide --vision-num-attention-heads 1"));
  EXPECT_THAT(of_two(divided + " --vision-ffn-hidden-size 25"),
              HasSubstr(divided + " does not divide --vision-ffn-hidden-size 25"));
  EXPECT_THAT(of_two(divided + " " + kAudioModel + " --audio-num-attention-heads 1"),
              HasSubstr(divided + " does not divide --audio-num-attention-heads 1"));
  EXPECT_THAT(of_two(divided + " " + ahead + frozen), HasSubstr("would run beside those of the"));
  EXPECT_THAT(error_of([&] {
                mimo_arguments(
                    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout VV|EttL " +
                        ahead + frozen,
                    2);
              }),
              HasSubstr("that several stages share is not built"));
  const std::string apart = "--encoder-data-parallel-size 1 ";
  const auto of_three = [&](const std::string& more) {
    return error_of([&] { mimo_arguments(apart + more, 3); });
  };
  refused(apart,
          "1 ranks, of which the encoders take 1, leave 0 for the language model, not a multiple "
          "of its 1\nhint: start 1 + a multiple of 1 ranks");
  EXPECT_THAT(of_three("--tensor-model-parallel-size 2 --encoder-tensor-model-parallel-size 2"),
              HasSubstr("leave 1 for the language model, not a multiple of its 2"));
  EXPECT_THAT(of_three("--context-parallel-size 2"),
              HasSubstr("--context-parallel-size above 1 with --encoder-data-parallel-size is not "
                        "built"));
  EXPECT_THAT(of_three("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout V|EttL"),
              HasSubstr("V in --pipeline-model-parallel-layout with --encoder-data-parallel-size"));
  EXPECT_THAT(of_three("--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
              HasSubstr("--num-distributed-optimizer-instances above 1 with"));
  EXPECT_THAT(of_three("--encoder-tensor-model-parallel-size 2 --vision-num-attention-heads 1"),
              HasSubstr(divided + " does not divide --vision-num-attention-heads 1"));
  EXPECT_THAT(of_three("--freeze vision_model " + ahead),
              HasSubstr("--mimo-encoder-prefetch with --encoder-data-parallel-size is not built"));
  refused("--encoder-data-parallel-size -1", "--encoder-data-parallel-size is -1");
  const std::string stages = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout ";
  EXPECT_THAT(error_of([&] { mimo_arguments(stages + "VVV|EttL", 2); }),
              HasSubstr("\"VVV|EttL\" has 3 V, --vision-num-layers is 2\nhint: one V for the whole "
                        "encoder, or 2, one for each layer"));
  EXPECT_THAT(error_of([&] { mimo_arguments(stages + "VV|EttL " + kAudioModel + kBoth, 2); }),
              HasSubstr("\"VV|EttL\" has 2 V, --audio-num-layers is 3"));
  EXPECT_THAT(
      error_of([&] {
        parse_line(
            "pretrain --task gpt --num-layers 2 --hidden-size 8 "
            "--num-attention-heads 1 --seq-length 8 " +
                stages + "V|EttL " + kMimoRun,
            2);
      }),
      HasSubstr("\"V|EttL\" has V, encoders of images or sounds, which --task gpt has not"));
  EXPECT_THAT(error_of([&] {
                parse_line(
                    "pretrain --task gpt --num-layers 3 --hidden-size 8 "
                    "--num-attention-heads 1 --seq-length 8 --pipeline-model-parallel-size 2 "
                    "--account-for-encoder-in-pipeline-split 1 " +
                        kMimoRun,
                    2);
              }),
              HasSubstr("--account-for-encoder-in-pipeline-split has no effect with --task gpt"));
  refused("--max-images-per-sample 0", "--max-images-per-sample is 0");
  refused("--max-bad-media 3", "--max-bad-media has no effect without --on-bad-media skip");
  refused("--on-bad-media skip --max-bad-media -1", "--max-bad-media is -1");
  refused("--num-experts 2", "--num-experts with --task mimo is not built");
  const std::string adapted = "--lora-rank 2 --lora-targets ";
  refused(adapted + "audio_model.linear_q",
          "--lora-targets audio_model.linear_q: the model has no such module");
  refused(adapted + "vision_model.linear_fc1_gate",
          "--lora-targets linear_fc1_gate: the MLP of this model is not gated");
  refused(adapted + "vision_projection.linear_q",
          "--lora-targets linear_q: this model has no attention");
  EXPECT_THAT(
      error_of([&] { mimo_arguments("--bidirectional-images --context-parallel-size 2", 2); }),
      HasSubstr("ring attention with --bidirectional-images (--cp-comm-type p2p or "
                "a2a+p2p) is not built"));
  refused("--mtp-num-layers 1", "--mtp-num-layers with --task mimo is not built");
  const std::string graphs = "--cuda-graph-impl local ";
  refused(graphs + "--bidirectional-images",
          "--cuda-graph-impl local with --bidirectional-images is not built: where images stand");
  refused(graphs + "--encoder-offload-modules mlp_fc2",
          "--cuda-graph-impl local with --encoder-offload-modules is not built");
  const std::string qwen2 = "--vision-model-type qwen2 --pixel-shuffle ",
                    mrope = "--position-embedding-type mrope --mrope-section ";
  const char* for_qwen = "mrope is for --vision-model-type qwen2 and qwen2_5, and needed for them";
  refused(qwen2, for_qwen);
  refused(mrope + "2 1 1", for_qwen);
  refused("--vision-model-type qwen2 " + mrope + "2 1 1",
          "--vision-model-type qwen2 without --pixel-shuffle is not built");
  refused(qwen2 + mrope + "2 1 1 --vision-num-attention-heads 8",
          "qwen2 with heads of 2: rotary positions of rows and columns need a multiple of 4");
  refused(qwen2 + mrope + "2 1", "--mrope-section has 2 values for 3 pairs");
  refused(qwen2 + mrope + "2 1 3", "--mrope-section has 3 values for 6 pairs");
  refused(qwen2 + mrope + "2 1 1 --rotary-interleaved", "--mrope-section goes with");
  refused(qwen2 + "--position-embedding-type mrope", "mrope without --mrope-section");
  refused(qwen2 + "--mrope-section 2 1 1 --position-embedding-type none", "--mrope-section goes");
  const std::string qwen2_5 =
      "--vision-model-type qwen2_5 --pixel-shuffle --vision-activation "
      "silu " +
      mrope + "2 1 1 --vision-window-size ";
  refused(qwen2_5 + "0", "--vision-window-size 0 is not divisible into features of two by two");
  refused(qwen2_5 + "12", "--vision-window-size 12 is not divisible into features of two by two");
  refused(qwen2_5 + "8 --vision-whole-picture-layers 0 2",
          "--vision-whole-picture-layers has 2, the encoder has 2 layers");
  refused(qwen2_5 + "8 --vision-whole-picture-layers 1 1",
          "--vision-whole-picture-layers has 1 twice");
  refused(qwen2_5 + "8 --vision-activation gelu", "--vision-activation silu is for");
  refused(qwen2_5 + "8 --vision-projection-activation silu",
          "--vision-projection-activation silu is not built");
  refused("--vision-window-size 8",
          "--vision-window-size and --vision-whole-picture-layers have no effect with "
          "--vision-model-type clip");
  EXPECT_THAT(error_of([&] {
                parse_line(
                    "pretrain --task gpt --num-layers 1 --hidden-size 8 "
                    "--num-attention-heads 1 --seq-length 8 " +
                    mrope + "2 1 1 " + kMimoRun);
              }),
              HasSubstr("--position-embedding-type mrope has no effect with --task gpt"));
  EXPECT_THAT(error_of([&] { parse_line("pretrain --task gpt --media-root x " + kMimoRun); }),
              HasSubstr("--media-root has no effect with --task gpt"));
}

}  // namespace
}  // namespace megatron
