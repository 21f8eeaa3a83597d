// Models of Hugging Face that hear against transformers: logits of text alone and of samples with
// sounds of odd lengths, the loss and every gradient; tensor ranks; greedy tokens; the same bytes
// both ways, under each spelling of the names; what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/inference/local_links.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/media/log_mel.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/media_golden.h"
#include "tests/unit/models/stored_tensors.h"
#include "tests/unit/models/their_form.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// The sound of a row of a golden, as its generator makes it.
std::vector<float> golden_sound(int64_t n, int64_t a, int64_t c) {
  std::vector<float> out(static_cast<size_t>(n));
  for (int64_t t = 0; t < n; ++t) {
    const int64_t p = (a * t + t * t % (1 << 20) * c / 4096) % 65536;
    out[static_cast<size_t>(t)] = static_cast<float>(std::abs(p - 32768)) / 32768 - 0.5F;
  }
  return out;
}

struct HfAudio : MediaGolden {
  HfAudio(const std::string& name, const ParallelGroups& groups, bool sequence_parallel = false,
          bool divided = false)
      : MediaGolden(name, groups, sequence_parallel, divided) {}
  // Of the golden's sounds from sample `first` on, or of all; ranks take turns with them.
  PackedSounds packed(const at::Tensor& tokens, int64_t first = 0, int rank = 0,
                      int ranks = 1) const {
    const at::Tensor rows = golden.at("sounds").to(at::kLong);
    std::vector<SeenSound> sounds;
    std::vector<float> frames;
    for (int64_t i = 0; i < rows.size(0); ++i) {
      const auto at = [&](int64_t column) { return rows[i][column].item<int64_t>(); };
      if (at(0) < first) continue;
      const SeenSound sound = {at(0) - first, mel_frames(at(1)),
                               static_cast<int>(std::ssize(sounds)) % ranks};
      sounds.push_back(sound);
      if (sound.owner != rank) continue;
      const auto bins = static_cast<int>(own.audio_mel_bins);
      const std::vector<float> mel = log_mel(golden_sound(at(1), at(2), at(3)), bins);
      const int64_t rows_of_clip = std::min(own.sound_rows(sound.frames), kAudioRows);
      const std::vector<float> read = frame_rows(mel, bins, 2 * rows_of_clip);
      EXPECT_EQ(std::ssize(read), packed_frames(own, sound.frames) * own.audio_mel_bins);
      frames.insert(frames.end(), read.begin(), read.end());
    }
    return pack_sounds(own, sounds, at::tensor(frames).view({-1, own.audio_mel_bins}),
                       {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())},
                       tokens.size(0), own.audio_token_id, rank, ranks);
  }
  void hear(int rank = 0, int ranks = 1) {
    batch.sounds = std::make_shared<const PackedSounds>(packed(batch["tokens"], 0, rank, ranks));
  }
  at::Tensor logits(const at::Tensor& hidden) {
    const at::NoGradGuard no_grad;
    return model.logits(hidden).transpose(0, 1);
  }
  // At the places that the golden has.
  at::Tensor kept(const at::Tensor& logits) const {
    return logits.flatten(0, 1).index_select(0, golden.at("logit_places").to(at::kLong));
  }
  // The gradients of the parameters against those of the golden, by the names of the files; of
  // those that `grads` has.
  size_t expect_gradients(const std::map<std::string, at::Tensor>& grads) const {
    double all = 0;
    for (const auto& [name, tensor] : golden)
      if (name.starts_with("grad/")) all += tensor.square().sum().item<double>();
    size_t compared = 0;
    for (const HfTensor& tensor : hf_tensors(*folder.model.family, folder.model.config)) {
      const bool fixed = tensor.ours == "audio_model.position_embeddings.weight";
      EXPECT_EQ(golden.contains("grad/" + tensor.name), !fixed) << tensor.name;
      if (fixed || !grads.contains(tensor.ours)) continue;
      const at::Tensor& expected = golden.at("grad/" + tensor.name);
      EXPECT_EQ(expected.sizes().vec(), tensor.stored_shape()) << tensor.name;
      expect_close(in_their_form(tensor, grads.at(tensor.ours)).reshape(expected.sizes()), expected,
                   kHfTolerance, std::sqrt(all), "gradient of " + tensor.name);
      ++compared;
    }
    return compared;
  }
};

class HfAudioGolden : public testing::TestWithParam<std::string> {};

TEST_P(HfAudioGolden, LogitsOfTextAlone) {
  const ParallelGroups groups;
  HfAudio v(GetParam(), groups);
  v.set_tokens(v.golden.at("text").to(at::kLong));
  expect_close(v.logits(v.model.hidden(v.batch, {}, v.context).front()), v.golden.at("text_logits"),
               kHfTolerance, 0, "logits");
}

TEST_P(HfAudioGolden, LogitsAndGradientsWithSounds) {
  const ParallelGroups groups;
  HfAudio v(GetParam(), groups);
  v.hear();
  const StageTensors hidden = v.model.hidden(v.batch, {}, v.context);
  expect_close(v.kept(v.logits(hidden.front())), v.golden.at("logits"), kHfTolerance, 0, "logits");
  const Loss loss = v.model.loss(hidden, v.batch, v.context);
  const at::Tensor mean = loss.sum / loss.weight;
  EXPECT_NEAR(mean.item<double>(), v.golden.at("loss").item<double>(), 1e-5);
  mean.backward();
  std::map<std::string, at::Tensor> grads;
  v.model.visit([&](const std::string& ours, Parameter& parameter) {
    if (parameter.trainable) grads[ours] = v.store.grad(parameter);
    EXPECT_EQ(parameter.trainable, ours != "audio_model.position_embeddings.weight") << ours;
    if (!ours.starts_with("audio_model.") || !ours.ends_with("linear_qkv.bias")) return;
    // Keys have no bias: theirs is zero and has no gradient, not even a rounding.
    const auto of_keys = [&](const at::Tensor& all) { return all.view({2, 3, -1}).select(1, 1); };
    EXPECT_EQ(of_keys(parameter.value).abs().max().item<float>(), 0.0F);
    EXPECT_EQ(of_keys(v.store.grad(parameter)).abs().max().item<float>(), 0.0F);
    EXPECT_GT(v.store.grad(parameter).abs().max().item<float>(), 0.0F);
  });
  size_t given = 0;
  for (const auto& [name, tensor] : v.golden) given += name.starts_with("grad/");
  EXPECT_EQ(v.expect_gradients(grads), given);
  EXPECT_EQ(grads.at("language_model.embedding.word_embeddings.weight")[v.own.audio_token_id]
                .abs()
                .max()
                .item<double>(),
            0.0);
}

// Two tensor ranks, without and with sequence parallelism, which divide sounds or the encoder.
TEST_P(HfAudioGolden, GradientsOnTwoTensorRanks) {
  for (const auto& [sequence_parallel, divided] : {std::pair{false, false}, std::pair{true, false},
                                                   std::pair{false, true}, std::pair{true, true}})
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      ParallelGroups groups;
      groups.tp = ProcessGroup(world, "tp");
      HfAudio v(GetParam(), groups, sequence_parallel, divided);
      divided ? v.hear() : v.hear(groups.tp.rank(), groups.tp.size());
      const Loss loss = v.model.loss(v.model.hidden(v.batch, {}, v.context), v.batch, v.context);
      const at::Tensor mean = loss.sum / loss.weight;
      EXPECT_NEAR(mean.item<double>(), v.golden.at("loss").item<double>(), 1e-5);
      mean.backward();
      std::map<std::string, at::Tensor> grads;
      v.model.visit([&](const std::string& ours, Parameter& parameter) {
        if (!parameter.trainable) return;
        at::Tensor grad = v.store.grad(parameter);
        if (parameter.placement.partial_grad.contains(Axis::kTensor))
          groups.tp.all_reduce(grad)->wait();
        const bool whole = !is_sharded_over(parameter.placement, Axis::kTensor);
        if (whole && ours.starts_with("audio_")) grads[ours] = grad;
      });
      EXPECT_GT(v.expect_gradients(grads), divided ? 10u : 25u);
    });
}

// 64 tokens behind a prompt with sounds, with the cache: the rows of the prompt are given.
TEST_P(HfAudioGolden, GreedyTokensBehindSounds) {
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = media_golden_folder(GetParam());
  request.dtype = at::kFloat;
  const LoadedModel loaded = load_model(request, groups);
  auto& model = dynamic_cast<MimoModel&>(*loaded.model);
  const HfAudio v(GetParam(), groups);
  const at::Tensor prompt = v.golden.at("prompt").to(at::kLong).unsqueeze(0);
  const int64_t n = prompt.size(1) - 1;
  const at::Tensor given = prompt.narrow(1, 0, n).contiguous();
  const PackedSounds sounds = v.packed(given, v.golden.at("tokens").size(0) - 1);
  const at::Tensor rows = model.prompt_rows(given, nullptr, nullptr, &sounds).contiguous();
  RequestSpec spec;
  spec.rows = std::make_shared<const GivenRows>(
      GivenRows{n,
                rows.size(1),
                {rows.const_data_ptr<float>(), rows.const_data_ptr<float>() + rows.numel()},
                {},
                {},
                model.text_of_prompt(given)});
  spec.prompt = {static_cast<int32_t>(prompt[0][n].item<int64_t>())};
  spec.sampling.temperature = 0.0;
  const at::Tensor& expected = v.golden.at("generated");
  spec.stop.max_tokens = expected.numel();
  LocalLinks links(1);
  const std::vector<ServedText> texts =
      serve_workload(model, {{{spec}}, n + 1 + expected.numel()}, links, 0);
  ASSERT_EQ(texts.size(), 1u);
  const int32_t* ids = expected.const_data_ptr<int32_t>();
  EXPECT_EQ(texts[0].tokens, std::vector<int32_t>(ids, ids + expected.numel()));
}

INSTANTIATE_TEST_SUITE_P(Families, HfAudioGolden, testing::Values("qwen2_audio", "voxtral"),
                         [](const auto& param) { return param.param; });

// A language model with both encoders: the parts of two models of Hugging Face.
TEST(HfAudioModels, ImagesAndSoundsTogether) {
  const ParallelGroups groups;
  HfAudio heard("qwen2_audio", groups);
  const auto golden = read_golden_tensors(
      SafetensorsFile(media_golden_folder("image_and_sound") / "golden.safetensors"));
  const HfFolder seen = open_hf_folder(media_golden_folder("llava"));
  MimoModel llava(seen.model.config, groups, heard.whole, {});
  PlainParameterStore of_llava(llava, at::kFloat, at::kCPU, /*gradients=*/false);
  load_hf_values(seen, groups, heard.whole, llava);
  ModelConfig config = heard.folder.model.config;
  MimoConfig& own = *config.own.as<MimoConfig>();
  static_cast<VisionConfig&>(own) = *seen.model.config.own.as<MimoConfig>();
  own.image_token_id = 38;
  MimoModel model(config, groups, heard.whole, {});
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/true);
  std::map<std::string, at::Tensor> values;
  for (MimoModel* part : {&llava, &heard.model})
    part->visit([&](const std::string& name, Parameter& p) { values[name] = p.value; });
  model.visit([&](const std::string& name, Parameter& p) { p.value.copy_(values.at(name)); });

  const at::Tensor labels = golden.at("labels").to(at::kLong);
  heard.golden["sounds"] = golden.at("sounds");
  heard.set_tokens(golden.at("tokens").to(at::kLong));
  heard.batch.set("labels", labels.clamp_min(0));
  heard.batch.set("loss_mask", (labels >= 0).to(at::kFloat));
  heard.hear();
  std::vector<SeenImage> images;
  for (const int64_t sample : {0, 1, 1}) images.push_back({sample, 3, 3});
  const at::Tensor tokens = heard.batch["tokens"], patches = golden.at("pixels")
                                                                 .view({3, 3, 3, 4, 3, 4})
                                                                 .permute({0, 2, 4, 1, 3, 5})
                                                                 .reshape({27, 48});
  heard.batch.images = std::make_shared<const PackedImages>(
      pack_images(own, images, patches, {},
                  {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())}, 2, 38));
  const StageTensors hidden = model.hidden(heard.batch, {}, heard.context);
  {
    const at::NoGradGuard no_grad;
    expect_close(model.logits(hidden.front()).transpose(0, 1), golden.at("logits"), kHfTolerance, 0,
                 "logits");
  }
  const Loss loss = model.loss(hidden, heard.batch, heard.context);
  const at::Tensor mean = loss.sum / loss.weight;
  EXPECT_NEAR(mean.item<double>(), golden.at("loss").item<double>(), 1e-5);
  mean.backward();
  std::map<std::string, at::Tensor> grads;
  double all = 0;
  size_t given = 0, compared = 0;
  model.visit([&](const std::string& name, Parameter& p) { grads[name] = store.grad(p); });
  for (const auto& [name, tensor] : golden) {
    if (!name.starts_with("grad/")) continue;
    all += tensor.square().sum().item<double>();
    ++given;
  }
  for (const HfModel* part : {&seen.model, &heard.folder.model})
    for (const HfTensor& tensor : hf_tensors(*part->family, part->config)) {
      const bool sees = tensor.ours.starts_with("vision_");
      if (sees != (part == &seen.model)) continue;
      std::string name = tensor.name;
      if (sees && name.starts_with("multi_")) name = "of_images." + name;
      const auto expected = golden.find("grad/" + name);
      EXPECT_EQ(expected == golden.end(), name == "audio_tower.embed_positions.weight") << name;
      if (expected == golden.end()) continue;
      expect_close(in_their_form(tensor, grads.at(tensor.ours)).reshape(expected->second.sizes()),
                   expected->second, kHfTolerance, std::sqrt(all), "gradient of " + name);
      ++compared;
    }
  EXPECT_EQ(compared, given);
}

// What transformers 5 writes, its modules, and a mix of both.
const std::vector<std::vector<std::pair<std::string, std::string>>> kAudioSpellings = {
    {},
    {{"language_model.model.", "model.language_model."},
     {"language_model.lm_head.", "lm_head."},
     {"audio_tower.", "model.audio_tower."},
     {"multi_modal_projector.", "model.multi_modal_projector."}},
    {{"language_model.lm_head.", "lm_head."}, {"audio_tower.", "model.audio_tower."}},
    {{"language_model.model.", "model.language_model."}}};

TEST(HfAudioModels, ThereAndBackAreTheSameUnderEachSpelling) {
  for (const std::string name : {"qwen2_audio", "voxtral"})
    for (size_t spelling = 0; spelling < kAudioSpellings.size(); ++spelling) {
      const fs::path root =
          fs::path(testing::TempDir()) / ("hf_audio_" + name + std::to_string(spelling));
      fs::remove_all(root);
      fs::create_directories(root / "given");
      fs::copy_file(media_golden_folder(name) / "config.json", root / "given" / "config.json");
      std::vector<SafetensorsTensor> renamed;
      const auto tensors =
          read_golden_tensors(SafetensorsFile(media_golden_folder(name) / "model.safetensors"));
      for (const auto& [tensor, value] : tensors) {
        std::string other = tensor;
        for (const auto& [here, there] : kAudioSpellings[spelling])
          if (tensor.starts_with(here)) other = there + tensor.substr(here.size());
        renamed.push_back(
            {other, to_dtype(value.scalar_type()), value.sizes().vec(), value.data_ptr()});
      }
      write_safetensors(root / "given" / "model.safetensors", renamed, {{"format", "pt"}});
      import_hf_folder(root / "given", root / "ours");
      export_hf_folder({root / "ours", {}, root / "theirs", "", 1 << 20});
      const Tensors a = read_stored_tensors(root / "given" / "model.safetensors"),
                    b = read_stored_tensors(root / "theirs" / "model.safetensors");
      ASSERT_EQ(a.size(), b.size()) << name << spelling;
      for (const auto& [tensor, value] : a) {
        ASSERT_TRUE(b.contains(tensor)) << tensor;
        EXPECT_EQ(b.at(tensor).dtype, value.dtype) << tensor;
        EXPECT_EQ(b.at(tensor).shape, value.shape) << tensor;
        EXPECT_TRUE(b.at(tensor).bytes == value.bytes) << tensor;
      }
      EXPECT_EQ(nlohmann::json::parse(read_file(root / "theirs" / "config.json")),
                nlohmann::json::parse(read_file(root / "given" / "config.json")))
          << name;
    }
}

// From nothing positions are those of Whisper; the numbers are of its `sinusoids` in transformers.
TEST(HfAudioModels, PositionsFromNothing) {
  const ParallelGroups groups;
  HfAudio v("qwen2_audio", groups);
  initialize_parameters(v.model, 1, groups);
  at::Tensor table;
  v.model.visit([&](const std::string& name, Parameter& p) {
    if (name == "audio_model.position_embeddings.weight") table = p.value;
  });
  const at::Tensor expected =
      at::tensor({0.0,        0.0,      0.0,       0.0,       1.0,        1.0,
                  1.0,        1.0,      0.841471,  0.0463992, 0.00215443, 1e-4,
                  0.540302,   0.998923, 0.999998,  1.0,       -0.444221,  0.446084,
                  -0.0877919, 0.149339, -0.895917, 0.894991,  -0.996139,  0.988786})
          .view({3, 8});
  expect_close(table.index_select(0, at::tensor({0, 1, 1499}, at::kLong)), expected.to(at::kFloat),
               1e-5, 0, "positions");
}

// Voxtral Mini with the keys that its first releases left out.
TEST(HfAudioModels, PublishedConfigurationOfVoxtral) {
  const HfModel model = parse_hf_config(R"({"architectures": ["VoxtralForConditionalGeneration"],
    "audio_config": {"model_type": "voxtral_encoder", "num_key_value_heads": 20},
    "audio_token_id": 24, "hidden_size": 3072, "model_type": "voxtral",
    "projector_hidden_act": "gelu", "text_config": {"model_type": "llama"},
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "vocab_size": 131072})",
                                        "config.json");
  const MimoConfig& own = *model.config.own.as<MimoConfig>();
  const TransformerConfig& t = model.config.transformer;
  EXPECT_EQ(t.num_layers, 30);
  EXPECT_EQ(t.query_groups(), 8);
  EXPECT_EQ(t.kv_channels, 128);
  EXPECT_EQ(t.rotary_base, 1e8);
  EXPECT_EQ(t.layernorm_epsilon, 1e-5);
  EXPECT_EQ(own.audio_feature_size(), 5120);
  EXPECT_EQ(own.sound_features(1), 375);
  EXPECT_EQ(own.sound_features(3001), 750);
  EXPECT_FALSE(own.sees());
}

TEST(HfAudioModels, WhatIsNotBuiltIsNamed) {
  const auto error = [&](const char* family, const char* part, const char* key,
                         const nlohmann::json& value) {
    auto json = nlohmann::json::parse(read_file(media_golden_folder(family) / "config.json"));
    (*part == '\0' ? json : json[part])[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("qwen2_audio", "audio_config", "scale_embedding", true),
            "config.json: audio_config: scale_embedding true is not built, only false");
  EXPECT_EQ(error("qwen2_audio", "audio_config", "encoder_layerdrop", 0.1),
            "config.json: audio_config: encoder_layerdrop 0.1 is not built, only 0.0");
  EXPECT_EQ(error("qwen2_audio", "audio_config", "model_type", "whisper"),
            "config.json: audio_config: model_type \"whisper\" is not built, only "
            "\"qwen2_audio_encoder\"");
  EXPECT_EQ(error("voxtral", "audio_config", "intermediate_size", 24),
            "config.json: audio_config: intermediate_size 24 is not four times hidden_size 8: the "
            "projector reads features of four rows");
  EXPECT_EQ(error("voxtral", "", "audio_token_id", nullptr), "config.json: has no audio_token_id");
  const ModelConfig config = read_hf_config(media_golden_folder("voxtral")).config;
  EXPECT_THAT(error_of([&] { write_hf_config(*find_hf_family("qwen2_audio"), config, "{}"); }),
              testing::HasSubstr("no language model that is built"));
  EXPECT_THAT(error_of([&] { write_hf_config(*find_hf_family("llava"), config, "{}"); }),
              testing::HasSubstr("audio_model_type is whisper, not none"));
}

TEST(HfAudioModels, SoundsThatDoNotFitAreNamed) {
  const MimoConfig own =
      *read_hf_config(media_golden_folder("qwen2_audio")).config.own.as<MimoConfig>();
  const auto error = [&](int64_t frames, std::vector<int64_t> tokens) {
    return error_of([&] {
      pack_sounds(own, {{{0, frames}}}, at::zeros({packed_frames(own, frames), 80}), tokens, 1, 9);
    });
  };
  EXPECT_EQ(error(100, {9, 9, 1, 2}),
            "sample 0 of the micro-batch has 2 audio tokens (id 9), its 1 sound has 25 features");
  EXPECT_EQ(error(1, {1, 2}), "a sound of 1 frames (of 10 ms) has no feature\nhint: at least 3");
  EXPECT_EQ(error(3001, {1, 2}), "a sound of 3001 frames (of 10 ms): at most 3000, 30 s");
  EXPECT_EQ(own.sound_features(3000), 750);
  EXPECT_EQ(own.sound_features(3), 1);
}

}  // namespace
}  // namespace megatron
