// Adapters of PEFT on the modules of a model that reads images, against transformers and peft: out
// of a folder and back, logits and gradients on one rank and on tensor ranks, merged, served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/verify.h"
#include "megatron/inference/adapters.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/inference/local_links.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/load_model.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/transformer/config/lora.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/media_golden.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using testing::HasSubstr;

const fs::path kAdapter = MEGATRON_SOURCE_DIR "/tests/golden/lora/llava_modules";
constexpr const char* kBehind = ".vision_tower.encoder.layers.2.";  // the layer that is not taken

std::map<std::string, at::Tensor> read_all(const fs::path& file) {
  return read_golden_tensors(SafetensorsFile(file));
}

struct Adapted {
  Adapted(const ParallelGroups& groups, bool divided)
      : inputs(read_all(media_golden_folder("llava") / "golden.safetensors")),
        golden(read_all(kAdapter / "golden.safetensors")),
        base(open_hf_folder(media_golden_folder("llava"))),
        adapter(open_peft_folder(kAdapter, *base.model.family, base.model.config)),
        config(MediaGolden::with_ranks(base.model.config, false, divided ? groups.tp.size() : 1)),
        model(config, groups, {0, config.transformer.num_layers, true, true}, {}),
        store(model, at::kDouble, at::kCPU, /*gradients=*/true) {
    std::vector<ShardedTensor> weights, adapters;
    model.visit([&](const std::string& name, Parameter& parameter) {
      EXPECT_EQ(parameter.trainable, is_lora_parameter(name)) << name;
      (is_lora_parameter(name) ? adapters : weights)
          .push_back(sharded_tensor(parameter, groups, name, parameter.value));
    });
    LoadOptions options;
    options.convert_dtype = true;
    base.checkpoint.load(weights, options);
    adapter.load(adapters, options);
    const at::Tensor tokens = inputs.at("tokens").to(at::kLong),
                     labels = inputs.at("labels").to(at::kLong);
    batch.set("tokens", tokens);
    batch.set("labels", labels.clamp_min(0));
    batch.set("loss_mask", (labels >= 0).to(at::kDouble));
    context = context_for(tokens, /*training=*/true);
    batch.place = context.place;
  }
  // Pictures [n, 3, h, w] of images of a rank.
  PackedImages packed(const std::vector<SeenImage>& images, const at::Tensor& pixels,
                      const at::Tensor& tokens, int rank = 0, int ranks = 1) const {
    const MimoConfig& own = *config.own.as<MimoConfig>();
    const int64_t p = own.patch_dim;
    const at::Tensor patches =
        pixels.view({pixels.size(0), 3, own.patch_rows(), p, own.patch_columns(), p})
            .permute({0, 2, 4, 1, 3, 5})
            .reshape({-1, 3 * p * p});
    return pack_images(own, images, patches, {},
                       {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())},
                       tokens.size(0), own.image_token_id, rank, ranks);
  }
  // The images of the golden, one of one picture and one of two, which ranks take in turn.
  void see(int rank = 0, int ranks = 1) {
    const at::Tensor pixels = inputs.at("pixels");
    const std::vector<SeenImage> images = {{0, 3, 3, 1, {}, {}, 0},
                                           {1, 3, 3, 2, {}, {}, ranks - 1}};
    const at::Tensor of_rank = ranks == 1  ? pixels
                               : rank == 0 ? pixels.narrow(0, 0, 1)
                                           : pixels.narrow(0, 1, 2);
    batch.images =
        std::make_shared<const PackedImages>(packed(images, of_rank, batch["tokens"], rank, ranks));
  }
  // Loss, and gradients of adapters by our names, summed over tensor ranks where they are partial.
  std::map<std::string, at::Tensor> gradients(const ProcessGroup& tp) {
    const SafetensorsFile file(kAdapter / "golden.safetensors");
    const Loss loss = model.loss(model.hidden(batch, {}, context), batch, context);
    const at::Tensor mean = loss.sum / loss.weight;
    EXPECT_NEAR(mean.item<double>(), std::stod(file.header().metadata.at("loss")), 1e-6);
    RecomputeTape().backward(mean);
    std::map<std::string, at::Tensor> out;
    model.visit([&](const std::string& name, Parameter& parameter) {
      if (!parameter.trainable) return;
      at::Tensor grad = store.grad(parameter);
      if (parameter.placement.partial_grad.contains(Axis::kTensor)) tp.all_reduce(grad)->wait();
      if (tp.size() == 1 || !is_sharded_over(parameter.placement, Axis::kTensor)) out[name] = grad;
    });
    return out;
  }
  // Returns how many were compared.
  int64_t expect_gradients(const std::map<std::string, at::Tensor>& grads) {
    int64_t compared = 0;
    for (const HfTensor& tensor : peft_tensors(*base.model.family, config)) {
      if (!grads.contains(tensor.ours)) continue;
      const at::Tensor expected = golden.at("grad/" + tensor.name).view(tensor.shape);
      at::Tensor theirs = at::empty(tensor.shape, at::kDouble);
      for (const RowRun& run : tensor.runs)
        theirs.narrow(0, run.theirs, run.count)
            .copy_(grads.at(tensor.ours).narrow(0, run.ours, run.count));
      expect_close(theirs, expected, 1e-5, expected.norm().item<double>(), tensor.name);
      ++compared;
    }
    return compared;
  }

  std::map<std::string, at::Tensor> inputs, golden;
  HfFolder base;
  Checkpoint adapter;
  const ModelConfig config;
  MimoModel model;
  PlainParameterStore store;
  Batch batch;
  ForwardContext context;
};

TEST(MediaPeft, LogitsAndGradientsOfAdaptersOnEachModule) {
  const ParallelGroups groups;
  Adapted a(groups, false);
  EXPECT_EQ(a.config.transformer.lora_targets,
            (std::vector<std::string>{"linear_q", "linear_v", "vision_model.linear_q",
                                      "vision_model.linear_v", "vision_model.linear_proj",
                                      "vision_model.linear_fc1", "vision_projection.linear_fc2"}));
  a.see();
  {
    const at::NoGradGuard no_grad;
    const at::Tensor logits =
        a.model.logits(a.model.hidden(a.batch, {}, a.context).front()).select(1, 1);
    expect_close(logits.index_select(0, a.golden.at("positions").to(at::kLong)),
                 a.golden.at("logits").to(at::kDouble), 1e-5, 0, "logits");
  }
  EXPECT_EQ(a.expect_gradients(a.gradients(groups.tp)), 26);
}

// Ranks that divide images have partial gradients of the encoder's adapters; divided layers as any.
TEST(MediaPeft, GradientsOnTwoTensorRanks) {
  for (const bool divided : {false, true})
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      ParallelGroups groups;
      groups.tp = ProcessGroup(world, "tp");
      Adapted a(groups, divided);
      divided ? a.see() : a.see(groups.tp.rank(), groups.tp.size());
      EXPECT_GE(a.expect_gradients(a.gradients(groups.tp)), divided ? 8 : 20);
    });
}

// With the cache, behind rows that the adapted encoder and projector made.
TEST(MediaPeft, GreedyTokensBehindImages) {
  const ParallelGroups groups;
  Adapted a(groups, false);
  LoadModelRequest request;
  request.load = media_golden_folder("llava");
  request.adapter = kAdapter;
  request.dtype = at::kFloat;
  const LoadedModel loaded = load_model(request, groups);
  const at::Tensor prompt = a.inputs.at("prompt").to(at::kLong).unsqueeze(0);
  const int64_t n = prompt.size(1) - 1, pictures = 2;
  const PackedImages images = a.packed(
      {{0, 3, 3, pictures}}, a.inputs.at("pixels").narrow(0, 1, pictures), prompt.narrow(1, 0, n));
  auto& model = dynamic_cast<MimoModel&>(*loaded.model);
  const at::Tensor given = prompt.narrow(1, 0, n).contiguous(),
                   rows = model.prompt_rows(given, &images).contiguous();
  const float* values = rows.const_data_ptr<float>();
  RequestSpec spec;
  spec.rows = std::make_shared<const GivenRows>(GivenRows{
      n, rows.size(1), {values, values + rows.numel()}, {}, {}, model.text_of_prompt(given)});
  spec.prompt = {static_cast<int32_t>(prompt[0][n].item<int64_t>())};
  spec.sampling.temperature = 0.0;
  const at::Tensor& expected = a.golden.at("generated");
  spec.stop.max_tokens = expected.numel();
  LocalLinks links(1);
  const std::vector<ServedText> texts =
      serve_workload(*loaded.model, {{{spec}}, n + 1 + expected.numel()}, links, 0);
  ASSERT_EQ(texts.size(), 1U);
  const int32_t* ids = expected.const_data_ptr<int32_t>();
  EXPECT_EQ(texts[0].tokens, std::vector<int32_t>(ids, ids + expected.numel()));
}

class MediaPeftFolder : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  const fs::path root_ = fs::path(testing::TempDir()) / "media_peft";
};

// Without those of the layer behind the one that is taken.
TEST_F(MediaPeftFolder, InAndOutTheSameTensors) {
  const ConvertResult in =
      import_hf_folder(media_golden_folder("llava"), root_ / "ours", {}, kAdapter);
  EXPECT_TRUE(verify_checkpoint(in.directory).empty());
  ExportRequest request;
  request.load = root_ / "ours";
  request.folder = root_ / "theirs";
  export_hf_folder(request);
  EXPECT_EQ(read_file(root_ / "theirs" / kPeftConfig), read_file(kAdapter / kPeftConfig));
  std::map<std::string, at::Tensor> expected = read_all(kAdapter / kPeftSafetensors);
  std::erase_if(expected,
                [](const auto& one) { return one.first.find(kBehind) != std::string::npos; });
  const std::map<std::string, at::Tensor> own = read_all(root_ / "theirs" / kPeftSafetensors);
  ASSERT_EQ(own.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(at::equal(own.at(name), tensor)) << name;

  // What a run of ours writes, which has no adapter_config.json: modules by names that PEFT finds.
  const HfModel model = [&] {
    HfModel base = read_hf_config(media_golden_folder("llava"));
    open_peft_folder(kAdapter, *base.family, base.config);
    return base;
  }();
  const ordered_json json =
      ordered_json::parse(write_peft_config(*model.family, model.config, "{}"));
  EXPECT_TRUE(json["task_type"].is_null());
  EXPECT_EQ(json["target_modules"],
            ordered_json({"fc1", "linear_2", "out_proj", "q_proj", "v_proj"}));
}

TEST_F(MediaPeftFolder, MergedIsTheSameModel) {
  import_hf_folder(media_golden_folder("llava"), root_ / "ours", {}, kAdapter);
  ExportRequest request;
  request.load = root_ / "ours";
  request.folder = root_ / "merged";
  request.merge_adapter = true;
  export_hf_folder(request);
  const ParallelGroups groups;
  const at::NoGradGuard no_grad;
  Adapted a(groups, false);
  a.see();
  HfFolder folder = open_hf_folder(root_ / "merged");
  MimoModel model(folder.model.config, groups, {0, 2, true, true}, {});
  const PlainParameterStore store(model, at::kDouble, at::kCPU, /*gradients=*/false);
  load_hf_values(folder, groups, {0, 2, true, true}, model);
  const at::Tensor logits = model.logits(model.hidden(a.batch, {}, a.context).front()).select(1, 1);
  // Sums are rounded to bf16, the type of the base.
  expect_close(logits.index_select(0, a.golden.at("positions").to(at::kLong)),
               a.golden.at("logits").to(at::kDouble), 5e-2, 0, "merged");
}

TEST_F(MediaPeftFolder, WhatDoesNotFitIsNamed) {
  HfModel model = read_hf_config(media_golden_folder("llava"));
  // Of a layer that no model of this folder has a first one of
  fs::copy(kAdapter, root_ / "other");
  std::map<std::string, at::Tensor> tensors = read_all(kAdapter / kPeftSafetensors);
  std::vector<SafetensorsTensor> list;
  const std::string name =
      "base_model.model.model.vision_tower.encoder.layers.2.mlp.fc2.lora_A.weight";
  tensors[name] = at::ones({2, 20});
  for (const auto& [key, tensor] : tensors)
    list.push_back({key, DType::kFloat32, tensor.sizes().vec(), tensor.const_data_ptr()});
  write_safetensors(root_ / "other" / kPeftSafetensors, list);
  EXPECT_THAT(error_of([&] { open_peft_folder(root_ / "other", *model.family, model.config); }),
              HasSubstr(name + " is in the file, the base model has no such module"));
  // Requests take adapters behind what encoders have computed.
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = media_golden_folder("llava");
  const LoadedModel loaded = load_model(request, groups);
  EXPECT_THAT(
      error_of([&] { ServedAdapter(loaded, kAdapter); }),
      HasSubstr("adapters of requests are of the language model, media are encoded without"));
}

}  // namespace
}  // namespace megatron
