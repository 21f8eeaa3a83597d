// Models of Hugging Face that read images against transformers: logits of text alone and of samples
// with one image and several, the loss and every gradient; tensor ranks; the same bytes both ways,
// under each spelling of the names; what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/inference/local_links.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/mimo/image_blocks.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
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

// As they are, or pictures [n, 3, h, w] as patches [P, 3 p^2], by patch and in it by channel, row
// and column.
at::Tensor patches_of(const at::Tensor& pixels, int64_t p) {
  if (pixels.dim() == 2) return pixels;
  const int64_t n = pixels.size(0), rows = pixels.size(2) / p, columns = pixels.size(3) / p;
  return pixels.view({n, 3, rows, p, columns, p})
      .permute({0, 2, 4, 1, 3, 5})
      .reshape({n * rows * columns, 3 * p * p});
}

struct HfVision : MediaGolden {
  HfVision(const std::string& name, const ParallelGroups& groups, bool sequence_parallel = false,
           bool divided = false)
      : MediaGolden(name, groups, sequence_parallel, divided) {}
  std::vector<SeenImage> images() const {
    std::vector<SeenImage> out;
    const at::Tensor rows = golden.at("images").to(at::kLong);
    for (int64_t i = 0; i < rows.size(0); ++i) {
      const auto at = [&](int64_t column) { return rows[i][column].item<int64_t>(); };
      if (own.has_own_sizes())
        out.push_back({at(0), at(2), at(3)});
      else
        out.push_back(
            {at(0), own.patch_rows(), own.patch_columns(), at(1), {at(2), at(3)}, {at(4), at(5)}});
    }
    return out;
  }
  // Of an image in the golden's pixels: its pictures, or patches of its own size.
  int64_t parts_of(const SeenImage& image) const {
    return own.has_own_sizes() ? image.rows * image.columns : image.pictures;
  }
  // Ranks take turns with the images.
  PackedImages packed(const at::Tensor& tokens, int64_t image_token, int rank = 0,
                      int ranks = 1) const {
    std::vector<SeenImage> all = images();
    std::vector<at::Tensor> pixels = {golden.at("pixels").narrow(0, 0, 0)};  // of this rank
    int64_t first = 0;
    for (size_t k = 0; k < all.size(); ++k) {
      all[k].owner = static_cast<int>(k) % ranks;
      const int64_t parts = parts_of(all[k]);
      if (all[k].owner == rank) pixels.push_back(golden.at("pixels").narrow(0, first, parts));
      first += parts;
    }
    return pack_images(own, all, patches_of(at::cat(pixels), own.patch_dim), {},
                       {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())},
                       tokens.size(0), image_token, rank, ranks);
  }
  void see(int rank = 0, int ranks = 1) {
    batch.images = std::make_shared<const PackedImages>(
        packed(batch["tokens"], own.image_token_id, rank, ranks));
  }
  at::Tensor logits() {
    return model.logits(model.hidden(batch, {}, context).front()).transpose(0, 1);
  }
};

class HfVisionGolden : public testing::TestWithParam<std::string> {};

TEST_P(HfVisionGolden, LogitsOfTextAlone) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  HfVision v(GetParam(), groups);
  v.set_tokens(v.golden.at("text").to(at::kLong));
  expect_close(v.logits(), v.golden.at("text_logits"), kHfTolerance, 0, "logits");
}

// The gradients of the parameters against those of the golden, by the names of the files.
void expect_gradients(HfVision& v, const std::map<std::string, at::Tensor>& grads) {
  double all = 0;
  size_t compared = 0, given = 0;
  for (const auto& [name, tensor] : v.golden) {
    if (!name.starts_with("grad/")) continue;
    all += tensor.square().sum().item<double>();
    ++given;
  }
  for (const HfTensor& tensor : hf_tensors(*v.folder.model.family, v.folder.model.config)) {
    ASSERT_TRUE(v.golden.contains("grad/" + tensor.name)) << tensor.name;
    const at::Tensor& expected = v.golden.at("grad/" + tensor.name);
    EXPECT_EQ(expected.sizes().vec(), tensor.stored_shape()) << tensor.name;
    expect_close(in_their_form(tensor, grads.at(tensor.ours)).reshape(expected.sizes()), expected,
                 kHfTolerance, std::sqrt(all), "gradient of " + tensor.name);
    ++compared;
  }
  EXPECT_EQ(compared, given);
}

TEST_P(HfVisionGolden, LogitsAndGradientsWithImages) {
  const ParallelGroups groups;
  HfVision v(GetParam(), groups);
  v.see();
  const StageTensors hidden = v.model.hidden(v.batch, {}, v.context);
  {
    const at::NoGradGuard no_grad;
    expect_close(v.model.logits(hidden.front()).transpose(0, 1), v.golden.at("logits"),
                 kHfTolerance, 0, "logits");
  }
  const Loss loss = v.model.loss(hidden, v.batch, v.context);
  const at::Tensor mean = loss.sum / loss.weight;
  EXPECT_NEAR(mean.item<double>(), v.golden.at("loss").item<double>(), 1e-5);
  mean.backward();
  std::map<std::string, at::Tensor> grads;
  v.model.visit([&](const std::string& ours, Parameter& parameter) {
    grads[ours] = v.store.grad(parameter);
  });
  expect_gradients(v, grads);
  // A row of I looks nothing up; a tied head computes its logit.
  if (!v.folder.model.config.transformer.untie_embeddings_and_output_weights) return;
  EXPECT_EQ(grads.at("language_model.embedding.word_embeddings.weight")[v.own.image_token_id]
                .abs()
                .max()
                .item<double>(),
            0.0);
}

// The id of I may lie outside of the table.
TEST_P(HfVisionGolden, ImageTokenOutsideOfTheVocabulary) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  HfVision v(GetParam(), groups);
  ModelConfig config = v.folder.model.config;
  config.own.as<MimoConfig>()->image_token_id = 45;
  MimoModel model(config, groups, v.whole, {});
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/false);
  load_hf_values(v.folder, groups, v.whole, model);
  const at::Tensor tokens = v.batch["tokens"],
                   moved = tokens.masked_fill(tokens == v.own.image_token_id, 45);
  v.batch.set("tokens", moved);
  v.batch.images = std::make_shared<const PackedImages>(v.packed(moved, 45));
  expect_close(model.logits(model.hidden(v.batch, {}, v.context).front()).transpose(0, 1),
               v.golden.at("logits"), kHfTolerance, 0, "logits");
}

// Pixels as bytes, with the numbers of their channels.
TEST_P(HfVisionGolden, PixelsOfAByteAreTheirNumbers) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  HfVision v(GetParam(), groups);
  const at::Tensor table = at::randn({3, 256}),
                   bytes = at::randint(0, 256, v.golden.at("pixels").sizes(), at::kByte);
  at::Tensor numbers = at::empty_like(v.golden.at("pixels"));
  const auto channel = [](const at::Tensor& pixels, int64_t c) {
    return pixels.view({pixels.size(0), 3, -1}).select(1, c);
  };
  for (int64_t c = 0; c < 3; ++c)
    channel(numbers, c).copy_(table[c].index({channel(bytes, c).to(at::kLong)}));
  v.golden["pixels"] = numbers;
  v.see();
  const at::Tensor expected = v.logits();
  v.golden["pixels"] = bytes;
  PackedImages images = v.packed(v.batch["tokens"], v.own.image_token_id);
  images.pixel_values = table;
  v.batch.images = std::make_shared<const PackedImages>(std::move(images));
  EXPECT_TRUE(at::equal(v.logits(), expected));
}

// Two tensor ranks, without and with sequence parallelism, which divide images or the encoder.
TEST_P(HfVisionGolden, GradientsOnTwoTensorRanks) {
  for (const auto& [sequence_parallel, divided] : {std::pair{false, false}, std::pair{true, false},
                                                   std::pair{false, true}, std::pair{true, true}})
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      ParallelGroups groups;
      groups.tp = ProcessGroup(world, "tp");
      HfVision v(GetParam(), groups, sequence_parallel, divided);
      divided ? v.see() : v.see(groups.tp.rank(), groups.tp.size());
      const Loss loss = v.model.loss(v.model.hidden(v.batch, {}, v.context), v.batch, v.context);
      const at::Tensor mean = loss.sum / loss.weight;
      EXPECT_NEAR(mean.item<double>(), v.golden.at("loss").item<double>(), 1e-5);
      mean.backward();
      std::map<std::string, at::Tensor> grads;
      v.model.visit([&](const std::string& ours, Parameter& parameter) {
        at::Tensor grad = v.store.grad(parameter);
        if (parameter.placement.partial_grad.contains(Axis::kTensor))
          groups.tp.all_reduce(grad)->wait();
        if (!is_sharded_over(parameter.placement, Axis::kTensor)) grads[ours] = grad;
      });
      double all = 0;
      for (const auto& [name, tensor] : v.golden)
        if (name.starts_with("grad/")) all += tensor.square().sum().item<double>();
      size_t of_encoder = 0;
      for (const HfTensor& tensor : hf_tensors(*v.folder.model.family, v.folder.model.config)) {
        if (!grads.contains(tensor.ours)) continue;
        of_encoder += tensor.ours.starts_with("vision_");
        const at::Tensor& expected = v.golden.at("grad/" + tensor.name);
        expect_close(in_their_form(tensor, grads.at(tensor.ours)).reshape(expected.sizes()),
                     expected, kHfTolerance, std::sqrt(all), "gradient of " + tensor.name);
      }
      EXPECT_GT(of_encoder, divided ? 8u : 15u);
    });
}

// 64 tokens behind a prompt with images, with the cache: the rows of the prompt are given, and come
// in chunks.
TEST_P(HfVisionGolden, GreedyTokensBehindImages) {
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = media_golden_folder(GetParam());
  request.dtype = at::kFloat;
  const LoadedModel loaded = load_model(request, groups);
  auto& model = dynamic_cast<MimoModel&>(*loaded.model);
  HfVision v(GetParam(), groups);
  const at::Tensor prompt = v.golden.at("prompt").to(at::kLong).unsqueeze(0);
  const int64_t last = v.batch["tokens"].size(0) - 1, n = prompt.size(1) - 1;
  std::vector<SeenImage> images;
  int64_t before = 0, pictures = 0;
  for (SeenImage image : v.images()) {
    (image.sample == last ? pictures : before) += v.parts_of(image);
    if (image.sample == last) images.push_back(image);
  }
  for (SeenImage& image : images) image.sample = 0;
  const PackedImages packed = pack_images(
      v.own, images, patches_of(v.golden.at("pixels").narrow(0, before, pictures), v.own.patch_dim),
      {}, {prompt.const_data_ptr<int64_t>(), static_cast<size_t>(n)}, 1, v.own.image_token_id);
  std::vector<int64_t> ends;
  const at::Tensor rows =
      model.prompt_rows(prompt.narrow(1, 0, n).contiguous(), &packed, &ends).contiguous();
  EXPECT_EQ(ends.size(), v.own.bidirectional_images ? static_cast<size_t>(n) : 0U);
  if (v.own.bidirectional_images) {
    EXPECT_THAT(error_of([&] { model.prompt_rows(prompt.narrow(1, 0, n), &packed); }),
                testing::HasSubstr("seen in both directions"));
  }
  RequestSpec spec;
  spec.rows = std::make_shared<const GivenRows>(
      GivenRows{n,
                rows.size(1),
                {rows.const_data_ptr<float>(), rows.const_data_ptr<float>() + rows.numel()},
                ends,
                packed.positions_of(n),
                model.text_of_prompt(prompt.narrow(1, 0, n))});
  EXPECT_EQ(spec.rows->positions.size(), v.own.has_own_sizes() ? static_cast<size_t>(3 * n) : 0U);
  spec.prompt = {static_cast<int32_t>(prompt[0][n].item<int64_t>())};
  spec.sampling.temperature = 0.0;
  const at::Tensor& expected = v.golden.at("generated");
  spec.stop.max_tokens = expected.numel();
  LocalLinks links(1);
  const auto served = [&] {
    return serve_workload(*loaded.model, {{{spec}}, n + 1 + expected.numel()}, links, 0);
  };
  if (v.own.bidirectional_images && v.own.features() > 4) {
    EXPECT_THAT(error_of(served), testing::HasSubstr("16 given rows attend to each other, a step "
                                                     "has room for"));
    return;
  }
  const std::vector<ServedText> texts = served();
  ASSERT_EQ(texts.size(), 1u);
  const int32_t* ids = expected.const_data_ptr<int32_t>();
  EXPECT_EQ(texts[0].tokens, std::vector<int32_t>(ids, ids + expected.numel()));
}

INSTANTIATE_TEST_SUITE_P(Families, HfVisionGolden,
                         testing::Values("llava", "llava_full", "llava_next", "internvl",
                                         "internvl_biases", "gemma3", "gemma3_long", "qwen2_vl",
                                         "qwen2_5_vl"),
                         [](const auto& param) { return param.param; });

fs::path vision_work_folder(const std::string& name) {
  const fs::path folder = fs::path(testing::TempDir()) / ("hf_vision_" + name);
  fs::remove_all(folder);
  return folder;
}

// Writes a folder with other names of the tensors.
void write_renamed(const fs::path& from, const fs::path& to,
                   const std::vector<std::pair<std::string, std::string>>& beginnings) {
  fs::create_directories(to);
  fs::copy_file(from / "config.json", to / "config.json");
  const auto tensors = read_golden_tensors(SafetensorsFile(from / "model.safetensors"));
  std::vector<SafetensorsTensor> renamed;
  for (const auto& [name, value] : tensors) {
    std::string other = name;
    for (const auto& [here, there] : beginnings)
      if (name.starts_with(here)) {
        other = there + name.substr(here.size());
        break;
      }
    renamed.push_back(
        {other, to_dtype(value.scalar_type()), value.sizes().vec(), value.data_ptr()});
  }
  write_safetensors(to / "model.safetensors", renamed, {{"format", "pt"}});
}

// What transformers 5 writes, what 4 wrote, and the modules of both. Of those that Qwen 2-VL lacks
// nothing is renamed.
const std::vector<std::vector<std::pair<std::string, std::string>>> kSpellings = {
    {},
    {{"vision_tower.", "vision_tower.vision_model."}},
    {{"language_model.model.", "model.language_model."},
     {"language_model.lm_head.", "lm_head."},
     {"vision_tower.", "model.vision_tower."},
     {"image_newline", "model.image_newline"},
     {"visual.", "model.visual."},
     {"model.", "model.language_model."},
     {"multi_modal_projector.", "model.multi_modal_projector."}},
    {{"language_model.model.", "model.language_model."},
     {"language_model.lm_head.", "lm_head."},
     {"vision_tower.", "model.vision_tower.vision_model."},
     {"multi_modal_projector.", "model.multi_modal_projector."}}};

// With the layers behind the one whose output is taken and the norm behind them, which the model
// does not compute with.
TEST(HfVisionModels, ThereAndBackAreTheSameUnderEachSpelling) {
  const std::map<std::string, size_t> carried = {
      {"llava", 18},       {"llava_full", 2},      {"llava_next", 18},
      {"internvl", 0},     {"internvl_biases", 0}, {"gemma3", 0},
      {"gemma3_long", 11}, {"qwen2_vl", 0},        {"qwen2_5_vl", 0}};
  for (const auto& [name, count] : carried)
    for (size_t spelling = 0; spelling < kSpellings.size(); ++spelling) {
      const fs::path root = vision_work_folder(name + std::to_string(spelling));
      write_renamed(media_golden_folder(name), root / "given", kSpellings[spelling]);
      const HfFolder open = open_hf_folder(root / "given");
      EXPECT_EQ(open.carried.size(), count);
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
      const auto given = nlohmann::json::parse(read_file(root / "given" / "config.json")),
                 back = nlohmann::json::parse(read_file(root / "theirs" / "config.json"));
      EXPECT_EQ(back, given) << name;
    }
}

TEST(HfVisionModels, AProjectorOfAnotherWidthIsNamed) {
  const fs::path folder = vision_work_folder("projector"), golden = media_golden_folder("llava");
  fs::create_directories(folder);
  fs::copy_file(golden / "config.json", folder / "config.json");
  std::vector<SafetensorsTensor> written;
  auto tensors = read_golden_tensors(SafetensorsFile(golden / "model.safetensors"));
  for (auto& [name, value] : tensors) {
    if (name == "multi_modal_projector.linear_1.weight")
      value = value.narrow(1, 0, 10).contiguous();
    written.push_back({name, to_dtype(value.scalar_type()), value.sizes().vec(), value.data_ptr()});
  }
  write_safetensors(folder / "model.safetensors", written, {{"format", "pt"}});
  EXPECT_EQ(error_of([&] { open_hf_folder(folder); }),
            folder.string() +
                ": multi_modal_projector.linear_1.weight has shape [16,10], by config.json it is "
                "[16,12]");
}

// A configuration without the one that was read has the layers that are computed.
TEST(HfVisionModels, AConfigurationOfItsOwn) {
  const HfModel model = read_hf_config(media_golden_folder("llava"));
  const auto json = nlohmann::json::parse(write_hf_config(*model.family, model.config, "{}"));
  EXPECT_EQ(json["vision_config"]["num_hidden_layers"], 2);
  EXPECT_EQ(json["vision_feature_layer"], -1);
  EXPECT_EQ(json["text_config"]["model_type"], "llama");
  EXPECT_EQ(json["image_token_index"], 39);
  EXPECT_TRUE(parse_hf_config(json.dump(), "config.json").carried ==
              (std::vector<std::string>{"vision_tower.post_layernorm.weight",
                                        "vision_tower.post_layernorm.bias"}));
}

// Gemma 3 4B as it is published.
TEST(HfVisionModels, PublishedConfigurationOfGemma3) {
  const HfModel model = parse_hf_config(R"({"architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
    "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
    "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
    "patch_size": 14, "vision_use_head": false}})",
                                        "config.json");
  const MimoConfig& own = *model.config.own.as<MimoConfig>();
  const TransformerConfig& t = model.config.transformer;
  EXPECT_EQ(model.config.vocab_size, 262208);
  EXPECT_EQ(t.num_attention_heads, 8);
  EXPECT_EQ(t.max_position_embeddings, 131072);
  EXPECT_EQ(t.window(1), (std::vector<int64_t>{1023, 0}));
  EXPECT_TRUE(t.window(6).empty());
  EXPECT_FALSE(t.untie_embeddings_and_output_weights);
  EXPECT_EQ(own.vision_pooling, 4);
  EXPECT_EQ(own.features(), 256);
  EXPECT_EQ(own.encoder_rows(), 4096);
  EXPECT_EQ(own.image_token_id, 262144);
}

TEST(HfVisionModels, WhatGemma3HasNotIsNamed) {
  const auto text = read_file(media_golden_folder("gemma3") / "config.json");
  const auto error = [&](const char* part, const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    (*part == '\0' ? json : json[part])[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("text_config", "model_type", "llama"),
            "config.json: text_config: a language model of the type \"llama\" is not built beside "
            "images\nhint: types that are: gemma3_text");
  EXPECT_EQ(error("vision_config", "model_type", "clip_vision_model"),
            "config.json: vision_config: model_type \"clip_vision_model\" is not built, only "
            "\"siglip_vision_model\"");
  EXPECT_EQ(error("", "mm_tokens_per_image", 9),
            "config.json: mm_tokens_per_image 9 of 4 x 4 patches is not built, only the square of "
            "a divisor of 4");
  EXPECT_EQ(error("text_config", "use_bidirectional_attention", true),
            "config.json: text_config: use_bidirectional_attention true is not built, only false");
  const HfModel gemma3 = read_hf_config(media_golden_folder("gemma3"));
  EXPECT_THAT(error_of([&] { write_hf_config(*find_hf_family("llava"), gemma3.config, "{}"); }),
              testing::StartsWith("no language model that is built beside images can express "));
  const auto own = nlohmann::json::parse(write_hf_config(*gemma3.family, gemma3.config, "{}"));
  EXPECT_EQ(own["mm_tokens_per_image"], 4);
  EXPECT_EQ(own["image_token_index"], 39);
  EXPECT_EQ(own["text_config"]["model_type"], "gemma3_text");
}

// LLaVA 1.5 7B as it is published: keys that are left out have the defaults of their classes.
TEST(HfVisionModels, PublishedConfiguration) {
  const HfModel model = parse_hf_config(R"({"architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100, "image_token_index": 32000, "model_type": "llava", "pad_token_id": 32001,
    "projector_hidden_act": "gelu", "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
    "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064},
    "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0",
    "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
    "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
    "patch_size": 14, "projection_dim": 768, "vocab_size": 32000},
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064})",
                                        "config.json");
  const MimoConfig& own = *model.config.own.as<MimoConfig>();
  EXPECT_EQ(model.config.transformer.num_layers, 32);
  EXPECT_EQ(model.config.transformer.ffn_hidden_size, 11008);
  EXPECT_EQ(model.config.vocab_size, 32064);
  EXPECT_EQ(own.vision_num_layers, 23);
  EXPECT_EQ(own.features(), 576);
  EXPECT_EQ(own.vision_activation, VisionActivation::kQuickGelu);
  EXPECT_EQ(model.carried.size(), 18u);
}

TEST(HfVisionModels, WhatIsNotBuiltIsNamed) {
  const auto text = read_file(media_golden_folder("llava") / "config.json");
  const auto error = [&](const char* part, const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    (*part == '\0' ? json : json[part])[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("text_config", "model_type", "gpt2"),
            "config.json: text_config: a language model of the type \"gpt2\" is not built beside "
            "images\nhint: types that are: llama, mistral, qwen2, qwen3");
  EXPECT_EQ(error("vision_config", "model_type", "pixtral"),
            "config.json: vision_config: model_type \"pixtral\" is not built, only "
            "\"clip_vision_model\"");
  EXPECT_EQ(error("vision_config", "hidden_act", "swish"),
            "config.json: vision_config: hidden_act \"swish\" is not built");
  EXPECT_EQ(error("", "vision_feature_layer", {-2, -5}),
            "config.json: vision_feature_layer is [-2,-5], expected a whole number");
  EXPECT_EQ(error("", "vision_feature_layer", -4),
            "config.json: vision_feature_layer -4 is no output of the 3 layers of the encoder");
  EXPECT_EQ(error("", "vision_feature_select_strategy", "half"),
            "config.json: vision_feature_select_strategy \"half\" is not known");
  EXPECT_EQ(error("vision_config", "patch_size", 5),
            "config.json: a picture of --img-h 12 and --img-w 12 is not divisible into patches of "
            "--patch-dim 5");
}

TEST(HfVisionModels, PlaceholdersAndFeaturesAreAsMany) {
  const ParallelGroups groups;
  HfVision v("llava", groups);
  at::Tensor tokens = v.batch["tokens"].clone();
  const int64_t first = tokens[1].eq(39).nonzero()[0].item<int64_t>();
  tokens[1][first] = 5;
  const auto error = [&](const std::vector<SeenImage>& of) {
    return error_of([&] {
      pack_images(v.own, of, at::zeros({std::ssize(of) * 9, 48}), {},
                  {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())}, 2, 39);
    });
  };
  EXPECT_EQ(error({{0, 3, 3}, {1, 3, 3}, {1, 3, 3}}),
            "sample 1 of the micro-batch has 17 image tokens (id 39), its 2 images have 18 "
            "features");
  EXPECT_EQ(error({{0, 3, 4}}),
            "a picture of 3 x 4 patches: the encoder has learned positions of 3 x 3\nhint: resize "
            "it to 12 x 12");
}

// Of a 1 x 2 grid of tiles of 2 x 2 features, nothing padded: the whole picture, then the rows of
// both tiles, each with its end.
TEST(HfVisionModels, RowsOfTilesEndWithNewlines) {
  VisionConfig config;
  config.vision_model_type = VisionModel::kClip;
  config.vision_class_token = false;
  config.vision_newlines = true;
  config.img_h = config.img_w = 8;
  config.patch_dim = 4;
  const std::vector<int64_t> tokens(14, 7);
  const auto pack = [&](const SeenImage& image, size_t count) {
    return pack_images(config, {&image, 1}, at::zeros({image.pictures * 4, 48}), {},
                       {tokens.data(), count}, 1, 7);
  };
  const PackedImages two = pack({0, 2, 2, 3, {1, 2}, {100, 200}}, 14);
  const auto list = [](const at::Tensor& x) {
    return std::vector<int64_t>(x.const_data_ptr<int64_t>(),
                                x.const_data_ptr<int64_t>() + x.numel());
  };
  EXPECT_EQ(list(two.taken), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11}));
  EXPECT_EQ(list(two.newlines), (std::vector<int64_t>{8, 13}));
  // Without tiles one end.
  EXPECT_EQ(list(pack({0, 2, 2, 1}, 5).newlines), (std::vector<int64_t>{4}));
  EXPECT_EQ(error_of([&] { pack({0, 2, 2, 4, {1, 2}, {100, 200}}, 14); }),
            "an image of 4 pictures: expected its 1 x 2 tiles and the whole of it");
}

TEST(HfVisionModels, CellsOfTwoByTwoFeatures) {
  const at::Tensor four = at::arange(32, at::kFloat).view({1, 4, 4, 2}),
                   cells = shuffled_pixels(four);
  EXPECT_TRUE(at::equal(cells[0], at::tensor({0, 1, 2, 3, 8, 9, 10, 11}, at::kFloat)));
  EXPECT_TRUE(at::equal(cells[1], at::tensor({4, 5, 6, 7, 12, 13, 14, 15}, at::kFloat)));
  const at::Tensor flat = shuffled_pixels(at::arange(8, at::kFloat).view({1, 2, 4, 1}));
  EXPECT_TRUE(at::equal(flat, at::tensor({0, 1, 4, 5, 2, 3, 6, 7}, at::kFloat).view({2, 4})));
}

// Branches of InternViT begin at 0.1, whatever the seed; only they.
TEST(HfVisionModels, FactorsOfBranchesBeginSmall) {
  const ParallelGroups groups;
  MimoModel model(read_hf_config(media_golden_folder("internvl")).config, groups,
                  {0, 2, true, true}, {});
  const PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/false);
  initialize_parameters(model, 5, groups);
  int64_t factors = 0;
  model.visit([&](const std::string& name, Parameter& parameter) {
    if (!name.ends_with("_layer_scale")) return;
    ++factors;
    EXPECT_TRUE(at::equal(parameter.value, at::full({12}, 0.1f))) << name;
  });
  EXPECT_EQ(factors, 4);
}

TEST(HfVisionModels, WhatInternvlHasNotIsNamed) {
  const auto text = read_file(media_golden_folder("internvl") / "config.json");
  const auto error = [&](const char* part, const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    (*part == '\0' ? json : json[part])[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("vision_config", "use_mean_pooling", false),
            "config.json: vision_config: use_mean_pooling false is not built, only true");
  EXPECT_EQ(error("vision_config", "use_qk_norm", true),
            "config.json: vision_config: use_qk_norm true is not built, only false");
  EXPECT_EQ(error("vision_config", "patch_size", {4, 2}),
            "config.json: vision_config: patches of 4 x 2 are not built, only squares");
  EXPECT_EQ(error("vision_config", "image_size", {16, 12}),
            "config.json: --pixel-shuffle of 4 x 3 patches: both numbers must be even");
  EXPECT_EQ(error("", "downsample_ratio", 0.25),
            "config.json: downsample_ratio 0.25 is not built, only 0.5");
  const HfModel internvl = read_hf_config(media_golden_folder("internvl")),
                next = read_hf_config(media_golden_folder("llava_next"));
  EXPECT_EQ(error_of([&] { write_hf_config(*find_hf_family("llava"), next.config, "{}"); }),
            "a llava has no image_newline (--vision-newlines)");
  EXPECT_EQ(error_of([&] { write_hf_config(*find_hf_family("llava"), internvl.config, "{}"); }),
            "models of Hugging Face's LLaVA have CLIP as their encoder, without pixel shuffle");
}

TEST(HfVisionModels, WhatIsNotBuiltBesideImagesIsNamed) {
  const ParallelGroups groups;
  ModelConfig config = read_hf_config(media_golden_folder("llava")).config;
  config.transformer.mtp_num_layers = 1;
  EXPECT_EQ(error_of([&] { MimoModel(config, groups, {0, 2, true, true}, {}); }),
            "--mtp-num-layers is not built for a model that reads images or sounds");
  config = read_hf_config(media_golden_folder("llava")).config;
  config.own = {};
  EXPECT_EQ(
      error_of([&] { MimoModel(config, groups, {0, 2, true, true}, {}); }),
      "a model of type mimo without an encoder\nhint: --vision-model-type clip, internvit, siglip, "
      "qwen2 or qwen2_5, or --audio-model-type whisper");
}

// 3 words, 4 x 6 patches, 2 words, 2 x 2 patches, 2 words; and the same behind another document.
TEST(HfVisionModels, PositionsOfTimeRowsAndColumns) {
  VisionConfig config;
  config.vision_model_type = VisionModel::kQwen2;
  config.vision_class_token = false;
  config.pixel_shuffle = true;
  config.patch_dim = 2;
  const std::vector<int64_t> tokens = {1, 1, 1, 9, 9, 9, 9, 9, 9, 1, 1, 9, 1, 1},
                             t = {0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9, 10},
                             h = {0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10},
                             w = {0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10};
  const std::vector<SeenImage> images = {{0, 4, 6}, {0, 2, 2}};
  const auto list = [](const at::Tensor& x) {
    const at::Tensor own = x.contiguous();
    return std::vector<int64_t>(own.const_data_ptr<int64_t>(),
                                own.const_data_ptr<int64_t>() + own.numel());
  };
  const PackedImages packed = pack_images(config, images, at::zeros({28, 24}), {}, tokens, 1, 9);
  EXPECT_EQ(list(packed.positions.select(2, 0)), t);
  EXPECT_EQ(list(packed.positions.select(2, 1)), h);
  EXPECT_EQ(list(packed.positions.select(2, 2)), w);
  // Places of the first picture: rows 0 0 1 1 ..., columns 0 1 0 1 2 3 ...
  const at::Tensor places = packed.patch_places.select(0, 0).narrow(0, 0, 24);
  EXPECT_EQ(list(places.select(1, 0)), (std::vector<int64_t>{0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1,
                                                             2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3}));
  EXPECT_EQ(list(places.select(1, 1)), (std::vector<int64_t>{0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5,
                                                             0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5}));
  std::vector<int64_t> two = {1, 9, 1}, ids = {0, 1, 2};
  two.insert(two.end(), tokens.begin(), tokens.end());
  for (int64_t i = 0; i < std::ssize(tokens); ++i) ids.push_back(i);
  const std::vector<SeenImage> all = {{0, 2, 2}, {0, 4, 6}, {0, 2, 2}};
  const PackedImages documents =
      pack_images(config, all, at::zeros({32, 24}), {}, two, 1, 9, 0, 1, ids);
  std::vector<int64_t> expected = {0, 1, 2};
  expected.insert(expected.end(), w.begin(), w.end());
  EXPECT_EQ(list(documents.positions.select(2, 2)), expected);
  EXPECT_EQ(
      error_of([&] { pack_images(config, {{{0, 3, 2}}}, at::zeros({6, 24}), {}, tokens, 1, 9); }),
      "a picture of 3 x 2 patches: both numbers must be even");
}

// Of 5 x 7 merged cells and windows of 4 x 4, as transformers orders them; behind it a picture of
// one cell.
TEST(HfVisionModels, PatchesGoThroughTheEncoderByWindows) {
  VisionConfig config;
  config.vision_model_type = VisionModel::kQwen25;
  config.vision_class_token = false;
  config.pixel_shuffle = true;
  config.patch_dim = 14;
  config.vision_window_size = 112;
  const std::vector<int64_t> tokens(36, 9);
  const auto list = [](const at::Tensor& x) {
    const at::Tensor own = x.to(at::kLong).contiguous();
    return std::vector<int64_t>(own.const_data_ptr<int64_t>(),
                                own.const_data_ptr<int64_t>() + own.numel());
  };
  const PackedImages packed =
      pack_images(config, {{{0, 10, 14}, {0, 2, 2}}}, at::zeros({144, 1176}), {}, tokens, 1, 9);
  const std::vector<int64_t> order = {0,  1,  2,  3,  7,  8,  9,  10, 14, 15, 16, 17,
                                      21, 22, 23, 24, 4,  5,  6,  11, 12, 13, 18, 19,
                                      20, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35};
  EXPECT_EQ(list(packed.window_order), order);
  EXPECT_EQ(list(packed.windows->offsets),
            (std::vector<int64_t>{0, 64, 112, 128, 140, 144, 144, 144, 144}));
  EXPECT_EQ(list(packed.segments->offsets), (std::vector<int64_t>{0, 140, 144}));
  EXPECT_EQ(packed.windows->rows, packed.segments->rows);
  // The features are put back: token k is that of block k.
  for (int64_t k = 0; k < 36; ++k) EXPECT_EQ(order[list(packed.taken)[k]], k);
  // The fifth block lies at the right of the fourth, in the first row; its rows are 64 to 67.
  const at::Tensor places = packed.patch_places.select(0, 0).narrow(0, 64, 4);
  EXPECT_EQ(list(places), (std::vector<int64_t>{0, 8, 0, 9, 1, 8, 1, 9}));
  // On a rank without pictures there are no rows.
  const std::vector<SeenImage> others = {{.rows = 2, .columns = 2, .owner = 1}};
  const PackedImages none =
      pack_images(config, others, at::zeros({0, 1176}), {}, std::vector<int64_t>{9, 1}, 1, 9, 0, 2);
  EXPECT_EQ(none.windows->rows, 0);
}

// Qwen2.5-VL 7B as it is published, with the keys of transformers 4.
TEST(HfVisionModels, PublishedConfigurationOfQwen25Vl) {
  const std::string text = R"({"architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
    "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": true,
    "use_sliding_window": false, "vision_config": {"depth": 32, "hidden_act": "silu",
    "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    "temporal_patch_size": 2}, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064})";
  const HfModel model = parse_hf_config(text, "config.json");
  const MimoConfig& own = *model.config.own.as<MimoConfig>();
  EXPECT_EQ(model.config.transformer.mrope_section, (std::vector<int64_t>{16, 24, 24}));
  EXPECT_EQ(own.vision_ffn_hidden_size, 3420);
  EXPECT_EQ(own.window_side(), 4);
  EXPECT_EQ(own.vision_projection_ffn_hidden_size, 5120);
  const TransformerConfig encoder = own.encoder(model.config.transformer);
  for (int64_t layer = 1; layer <= 32; ++layer)
    EXPECT_EQ(encoder.attends_within_parts(layer), layer % 8 != 0) << layer;

  const auto error = [&](const char* part, const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    (*part == '\0' ? json : json[part])[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  const char* vision = "vision_config";
  EXPECT_EQ(error(vision, "window_size", 100),
            "config.json: --vision-window-size 100 is not divisible into features of two by two "
            "patches of --patch-dim 14\nhint: a positive multiple of 28");
  EXPECT_EQ(error(vision, "fullatt_block_indexes", {7, 32}),
            "config.json: --vision-whole-picture-layers has 32, the encoder has 32 layers\nhint: "
            "each of 0 to 31 at most once");
  EXPECT_EQ(error(vision, "deepstack_visual_indexes", {5}),
            "config.json: vision_config: deepstack_visual_indexes is not known, so that it cannot "
            "be said what it changes\nhint: remove it if it changes nothing");
  EXPECT_THAT(error("", "num_experts_per_tok", 2),
              testing::StartsWith("config.json: num_experts_per_tok is not known, so that"));
  EXPECT_EQ(error(vision, "out_hidden_size", 2048),
            "config.json: vision_config: out_hidden_size is 2048, that of the language model is "
            "3584");
  EXPECT_EQ(error(vision, "hidden_act", "gelu"),
            "config.json: --vision-activation silu is for --vision-model-type qwen2_5, and needed "
            "for it");
  EXPECT_EQ(error(vision, "rope_parameters", {{"rope_type", "axial"}, {"rope_theta", 100.0}}),
            "config.json: vision_config: rope_parameters: rope_theta 100.0 is not built, only "
            "10000.0");
  EXPECT_EQ(error("", "layer_types", {"full_attention", "sliding_attention"}),
            "config.json: layer_types has sliding_attention, without use_sliding_window only "
            "full_attention");
  EXPECT_EQ(error_of([&] { write_hf_config(*find_hf_family("qwen2_vl"), model.config, "{}"); }),
            "a qwen2_vl has the encoder of Qwen 2 (--vision-model-type qwen2)");
  const auto own_text = nlohmann::json::parse(write_hf_config(*model.family, model.config, "{}"));
  EXPECT_EQ(own_text["vision_config"]["fullatt_block_indexes"], nlohmann::json({7, 15, 23, 31}));
  EXPECT_EQ(own_text["vision_config"]["intermediate_size"], 3420);
}

// Qwen2-VL 2B as it is published, with the keys of transformers 4.
TEST(HfVisionModels, PublishedConfigurationOfQwen2Vl) {
  const HfModel model = parse_hf_config(R"({"architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 1536, "image_token_id": 151655, "initializer_range": 0.02,
    "intermediate_size": 8960, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2_vl", "num_attention_heads": 12, "num_hidden_layers": 28,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24],
    "type": "mrope"}, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": true,
    "use_sliding_window": false, "video_token_id": 151656, "vision_config": {"depth": 32,
    "embed_dim": 1280, "hidden_size": 1536, "in_chans": 3, "mlp_ratio": 4, "num_heads": 16,
    "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
    "vision_end_token_id": 151653, "vision_start_token_id": 151652, "vision_token_id": 151654,
    "vocab_size": 151936})",
                                        "config.json");
  const MimoConfig& own = *model.config.own.as<MimoConfig>();
  const TransformerConfig& t = model.config.transformer;
  EXPECT_EQ(t.mrope_section, (std::vector<int64_t>{16, 24, 24}));
  EXPECT_EQ(t.rotary_base, 1000000.0);
  EXPECT_TRUE(t.window_size.empty());
  EXPECT_FALSE(t.untie_embeddings_and_output_weights);
  EXPECT_EQ(own.vision_ffn_hidden_size, 5120);
  EXPECT_EQ(own.feature_size(), 5120);
  EXPECT_EQ(own.patch_elements(), 1176);
}

}  // namespace
}  // namespace megatron
