// Tensors of Megatron-LM's checkpoints with experts, latent attention and multi-token prediction:
// the forms in which they are stored, what is refused, and the goldens that megatron-core wrote.
#include "megatron/interop/torch_dist/torch_dist_model.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/foreign/pickle.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "megatron/interop/load_model.h"
#include "megatron/interop/torch_dist/torch_dist_arguments.h"
#include "megatron/interop/torch_dist/torch_dist_convert.h"
#include "megatron/interop/torch_dist/torch_dist_names.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Named = std::map<std::string, at::Tensor>;

constexpr int64_t kLayers = 2, kExperts = 3, kHidden = 4, kWidth = 6;

TransformerConfig sparse_config() {
  TransformerConfig t;
  t.num_layers = kLayers;
  t.hidden_size = kHidden;
  t.num_attention_heads = 2;
  t.ffn_hidden_size = kWidth;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.swiglu = true;
  t.num_experts = kExperts;
  t.moe_router_topk = 2;
  t.finalize();
  return t;
}

ModelConfig sparse_model() {
  ModelConfig config;
  config.transformer = sparse_config();
  config.vocab_size = config.padded_vocab_size = 8;
  return config;
}

const Named& weights() {
  static const Named all = [] {
    Named named;
    double next = 0.0;
    for (const auto& [name, shape] : parameter_shapes(sparse_model())) {
      named[name] = at::arange(next, next + c10::multiply_integers(shape), at::kFloat).view(shape);
      next += 1000.0;
    }
    return named;
  }();
  return all;
}

// Tensors as Megatron-LM stores them when it keeps one for each layer, expert and half.
Named apart() {
  Named theirs;
  for (const auto& [name, tensor] : weights()) {
    const size_t experts = name.find(".mlp.experts.");
    if (experts == std::string::npos) {
      theirs[name] = tensor;
      continue;
    }
    const size_t end = experts + std::string(".mlp.experts.").size();
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::string key = cat(name.substr(0, end), "experts.", e, ".", name.substr(end));
      if (name.find("linear_fc1") == std::string::npos) {
        theirs[key] = tensor[e];
      } else {
        theirs[key + "_w"] = tensor[e].narrow(0, 0, kWidth);
        theirs[key + "_v"] = tensor[e].narrow(0, kWidth, kWidth);
      }
    }
  }
  return theirs;
}

class TorchDistModel : public testing::Test {
 protected:
  TorchDistModel()
      : directory_(fs::path(testing::TempDir()) /
                   cat("torch_dist_model.",
                       testing::UnitTest::GetInstance()->current_test_info()->name())) {}
  ~TorchDistModel() override { fs::remove_all(directory_); }

  void write(const Named& tensors) {
    fs::remove_all(directory_);
    TorchDistWriter writer(directory_);
    for (const auto& [key, tensor] : tensors) {
      const std::vector<int64_t> shape = tensor.sizes().vec();
      writer.add_tensor(key, DType::kFloat32, shape, {std::vector<int64_t>(shape.size(), 0), shape},
                        tensor.contiguous().data_ptr());
    }
    writer.finish(pickle::dict({}));
  }
  ForeignModel open() const { return open_torch_dist_model(directory_, sparse_config()); }
  // Without the folder.
  std::string open_error() const {
    return error_of([&] { open(); }).substr(directory_.string().size());
  }
  void expect_weights() const {
    const ForeignModel model = open();
    EXPECT_EQ(model.checkpoint.manifest().tensors.size(), weights().size());
    for (const auto& [name, expected] : weights()) {
      const at::Tensor whole = at::zeros_like(expected);
      ShardedTensor tensor;
      tensor.key = name;
      tensor.global_shape = expected.sizes().vec();
      tensor.data = whole.data_ptr();
      load_one(model.checkpoint, tensor);
      EXPECT_TRUE(at::equal(whole, expected)) << name;
    }
  }

  fs::path directory_;
};

TEST(TorchDistKeys, AndOurNames) {
  TransformerConfig alike = sparse_config(), listed = alike;
  listed.moe_layer_freq = "[0,1]";
  const auto expect = [](const std::string& name, const TransformerConfig& config,
                         const std::string& key, std::optional<int64_t> layer) {
    const TorchDistPlace place = torch_dist_place(name, config);
    EXPECT_EQ(place.key, key);
    EXPECT_EQ(place.layer, layer) << key;
    const TorchDistKey parsed = parse_torch_dist_key(key);
    EXPECT_EQ(parsed.ours(layer.value_or(parsed.layer.value_or(0))), name);
    EXPECT_EQ(parsed.expert, std::nullopt);
  };
  expect("output_layer.weight", alike, "output_layer.weight", {});
  expect("decoder.layers.1.mlp.router.weight", alike, "decoder.layers.mlp.router.weight", 1);
  expect("decoder.layers.1.mlp.router.weight", listed, "decoder.layers.1.mlp.router.weight", {});
  expect("decoder.layers.12.mlp.experts.linear_fc1.weight", alike,
         "decoder.layers.mlp.experts.experts.linear_fc1.weight", 12);
  expect("mtp.layers.0.eh_proj.weight", alike, "mtp.layers.0.eh_proj.weight", {});
  expect("mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.weight", alike,
         "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight", {});
  const TorchDistKey one =
      parse_torch_dist_key("mtp.layers.1.mtp_model_layer.mlp.experts.experts.7.linear_fc1.bias_v");
  EXPECT_EQ(one.ours(1), "mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.bias");
  EXPECT_EQ(one.expert, 7);
  EXPECT_EQ(one.half, 1);
}

TEST_F(TorchDistModel, LayersAndExpertsMayBeStacked) {
  Named stacks;
  for (const auto& [name, tensor] : weights()) {
    const TorchDistPlace place = torch_dist_place(name, sparse_config());
    at::Tensor& stack = stacks[place.key];
    if (!place.layer)
      stack = tensor;
    else
      stack = stack.defined() ? at::cat({stack, tensor.unsqueeze(0)}) : tensor.unsqueeze(0);
  }
  ASSERT_EQ(stacks.at("decoder.layers.mlp.experts.experts.linear_fc1.weight").sizes(),
            (at::IntArrayRef{kLayers, kExperts, 2 * kWidth, kHidden}));
  write(stacks);
  expect_weights();
  const std::string fc2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight";
  stacks[fc2] = stacks.at(fc2).narrow(1, 0, 2);
  write(stacks);
  EXPECT_EQ(open_error(),
            ": decoder.layers.mlp.experts.experts.linear_fc2.weight (in __0_0.distcp) has shape "
            "[2,4,6] per layer, by the model's arguments it is [3,4,6]\n"
            "detail: decoder.layers.mlp.experts.experts.linear_fc2.weight (in __0_0.distcp) has "
            "shape [2,4,6] per layer, by the model's arguments it is [3,4,6]");
}

TEST_F(TorchDistModel, ExpertsAndHalvesMayBeApart) {
  Named theirs = apart();
  // As layers without Transformer Engine name a norm.
  auto norm = theirs.extract("decoder.layers.1.pre_mlp_layernorm.weight");
  norm.key() = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight";
  theirs.insert(std::move(norm));
  write(theirs);
  expect_weights();
}

TEST_F(TorchDistModel, EveryExpertIsAccountedFor) {
  const Named whole = apart();
  const std::string experts = "decoder.layers.1.mlp.experts.experts.";
  const auto expect = [&](const std::function<void(Named&)>& edit, const std::string& message) {
    Named theirs = whole;
    edit(theirs);
    write(theirs);
    EXPECT_EQ(open_error(), message);
  };
  expect([&](Named& theirs) { theirs.erase(experts + "2.linear_fc2.weight"); },
         ": expert 2 of decoder.layers.1.mlp.experts.linear_fc2.weight is not in the checkpoint, "
         "the model of its arguments has it");
  expect([&](Named& theirs) { theirs.erase(experts + "0.linear_fc1.weight_v"); },
         ": expert 0 of decoder.layers.1.mlp.experts.linear_fc1.weight (rows of up, _v) is not in "
         "the checkpoint, the model of its arguments has it");
  expect(
      [&](Named& theirs) {
        theirs[experts + "3.linear_fc2.weight"] = theirs.at(experts + "2.linear_fc2.weight");
      },
      ": " + experts +
          "3.linear_fc2.weight (in __0_0.distcp) is of expert 3, by the model's "
          "arguments there are 3 experts, from 0");
  expect(
      [&](Named& theirs) {
        at::Tensor& one = theirs.at(experts + "1.linear_fc2.weight");
        one = one.t();
      },
      ": " + experts +
          "1.linear_fc2.weight (in __0_0.distcp) has shape [6,4], by the model's "
          "arguments it is [4,6]");
  expect(
      [&](Named& theirs) {
        at::Tensor& one = theirs.at(experts + "1.linear_fc1.weight_w");
        one = one.narrow(0, 0, 5);
      },
      ": " + experts +
          "1.linear_fc1.weight_w (in __0_0.distcp) has shape [5,4], by the model's "
          "arguments it is [6,4]");
  expect(
      [&](Named& theirs) {
        for (const auto& [name, tensor] : whole)
          if (name.starts_with(experts)) theirs.erase(name);
      },
      ": decoder.layers.1.mlp.experts.linear_fc1.weight is not in the checkpoint, the model of its "
      "arguments has it\n"
      "detail: decoder.layers.1.mlp.experts.linear_fc2.weight is not in the checkpoint, the model "
      "of its arguments has it");
}

TransformerConfig latent_config() {
  TransformerConfig t = sparse_config();
  t.kv_channels = 0;
  t.multi_latent_attention = t.qk_layernorm = true;
  t.q_lora_rank = 3;
  t.qk_head_dim = 4;
  t.qk_pos_emb_head_dim = 2;
  t.rotary_scaling_factor = 4.0;
  t.rope_original_max_position_embeddings = 4096;
  t.mscale_all_dim = 0.5;
  t.moe_layer_freq = "[0]+[1]*1";
  t.moe_router_score_function = RouterScore::kSigmoid;
  t.moe_router_enable_expert_bias = true;
  t.mtp_num_layers = 2;
  t.finalize();
  return t;
}

class TorchDistArguments : public TorchDistModel {
 protected:
  // As read from a checkpoint with these arguments.
  TransformerConfig read(const std::string& args) {
    fs::remove_all(directory_);
    TorchDistWriter writer(directory_);
    const std::pair<std::string, std::string> common[] = {{pickle::text("args"), args}};
    writer.finish(pickle::dict(common));
    return read_torch_dist_arguments(directory_);
  }
  static std::string written(const TransformerConfig& t) {
    ModelConfig config = sparse_model();
    config.transformer = t;
    return pickled_arguments(config, DType::kBFloat16);
  }
};

TEST_F(TorchDistArguments, MeanTheSameModel) {
  for (const TransformerConfig& t : {sparse_config(), latent_config()})
    EXPECT_EQ(architecture_difference(t, read(written(t))), "");
}

TEST_F(TorchDistArguments, WhatMegatronHasNotIsNamed) {
  const auto expect = [](const std::function<void(TransformerConfig&)>& edit,
                         const std::string& what) {
    TransformerConfig t = latent_config();
    edit(t);
    EXPECT_EQ(error_of([&] { written(t); }),
              cat("the model has ", what, ", which Megatron-LM's GPT has not"));
  };
  const std::string yarn =
      "multi-latent attention with other YaRN than from 4096 positions with betas 32 and 1 "
      "(rope_original_max_position_embeddings, yarn_beta_fast, yarn_beta_slow, "
      "yarn_correction_range_round_to_int)";
  expect([](auto& t) { t.rope_original_max_position_embeddings = 2048; }, yarn);
  expect([](auto& t) { t.yarn_beta_slow = 2.0; }, yarn);
  expect([](auto& t) { t.latent_norm_epsilon = 1e-6; },
         "another epsilon in the norms of latents (latent_norm_epsilon)");
  expect([](auto& t) { t.moe_router_group_score = GroupScore::kMax; },
         "groups of experts ranked by their best one (moe_router_group_score)");
  expect(
      [](auto& t) {
        t.moe_latent_size = 2;
        t.add_bias_linear = true;
      },
      "latents of experts projected without the biases of other linears (moe_latent_size)");
}

TEST_F(TorchDistArguments, WhatIsNotBuiltIsNamed) {
  const auto with = [](const std::string& name, std::string value) {
    const std::pair<std::string, std::string> args[] = {{pickle::text(name), std::move(value)}};
    return pickle::dict(args);
  };
  for (const char* layer : {"mlp", "shared_expert"}) {
    const std::string name = cat("moe_", layer, "_glu_interleave_size");
    EXPECT_EQ(error_of([&] { read(with(name, pickle::integer(32))); }),
              cat(directory_.string(), ": args: ", name, " is set, which is not built"));
    EXPECT_EQ(error_of([&] { read(with(name, pickle::none())); }), "");
  }
  // Choices of evaluation, too
  const std::pair<std::string, std::string> args[] = {
      {pickle::text("num_experts"), pickle::integer(4)},
      {pickle::text("moe_router_load_balancing_type"), pickle::text("sinkhorn")}};
  EXPECT_TRUE(read(pickle::dict(args)).uses_sinkhorn());
}

// -- letters

TransformerConfig letters_config() {
  TransformerConfig t = sparse_config();
  t.num_experts = 0;
  t.hybrid_layer_pattern = "MG*|-";
  t.num_layers = 4;
  t.mamba_num_heads = 4;
  t.mamba_head_dim = 2;
  t.mamba_state_dim = 3;
  t.mamba_num_groups = 2;
  t.linear_num_key_heads = 2;
  t.linear_num_value_heads = 4;
  t.linear_key_head_dim = 3;
  t.linear_value_head_dim = 2;
  t.attention_output_gate = true;
  t.layernorm_zero_centered_gamma = true;
  t.untie_embeddings_and_output_weights = true;
  t.seq_length = t.max_position_embeddings = 16;
  t.finalize();
  return t;
}

class TorchDistLetters : public TorchDistArguments {
 protected:
  // A checkpoint of random bf16 weights, and it as Megatron-LM's.
  void SetUp() override {
    ModelConfig config = sparse_model();
    config.transformer = letters_config();
    const ParallelGroups groups;
    GPTModel model(config, groups);
    PlainParameterStore store(model, at::kBFloat16, at::kCPU, /*gradients=*/false);
    SaveRequest save;
    save.root = ours_;
    save.iteration = 3;
    model.visit([&](const std::string& name, Parameter& parameter) {
      parameter.value.copy_(1 + 0.1 * at::randn(parameter.value.sizes()));
      weights_[name] = parameter.value;
      save.tensors.push_back(sharded_tensor(parameter, groups, name, parameter.value));
    });
    TokenizerConfig tokenizer;
    tokenizer.tokenizer_type = "NullTokenizer";
    tokenizer.vocab_size = 8;
    save.files.emplace_back("config.yaml", model_yaml(config, tokenizer));
    save_checkpoint(save);
    ExportRequest request;
    request.load = ours_;
    request.folder = directory_;
    theirs_ = export_torch_dist(request).directory;
  }
  void TearDown() override { fs::remove_all(ours_); }

  static std::map<std::string, std::vector<int64_t>> stored(const fs::path& directory) {
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const auto& [key, tensor] :
         open_torch_dist(directory, [](std::string_view) { return true; }).manifest.tensors)
      shapes[key] = tensor.shape;
    return shapes;
  }

  const fs::path ours_ = directory_.string() + ".ours";
  fs::path theirs_;
  Named weights_;
};

// Keys of megatron-core 0.16.1: MambaMixer and GatedDeltaNet, sharded_state_dict().
TEST_F(TorchDistLetters, HaveTheKeysOfMegatron) {
  const std::string m = "decoder.layers.0.mixer.", g = "decoder.layers.1.self_attention.",
                    a = "decoder.layers.2.self_attention.", f = "decoder.layers.3.mlp.";
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"embedding.word_embeddings.weight", {8, 4}},
      {m + "in_proj.layer_norm_weight", {4}},
      {m + "in_proj.weight.z", {8, 4}},
      {m + "in_proj.weight.x", {8, 4}},
      {m + "in_proj.weight.B", {6, 4}},
      {m + "in_proj.weight.C", {6, 4}},
      {m + "in_proj.weight.dt", {4, 4}},
      {m + "conv1d.weight.x", {8, 1, 4}},
      {m + "conv1d.weight.B", {6, 1, 4}},
      {m + "conv1d.weight.C", {6, 1, 4}},
      {m + "conv1d.bias.x", {8}},
      {m + "conv1d.bias.B", {6}},
      {m + "conv1d.bias.C", {6}},
      {m + "dt_bias", {4}},
      {m + "A_log", {4}},
      {m + "D", {4}},
      {m + "norm.weight", {8}},
      {m + "out_proj.weight", {4, 8}},
      {g + "in_proj.layer_norm_weight", {4}},
      {g + "in_proj.weight.query", {6, 4}},
      {g + "in_proj.weight.key", {6, 4}},
      {g + "in_proj.weight.value", {8, 4}},
      {g + "in_proj.weight.z", {8, 4}},
      {g + "in_proj.weight.beta", {4, 4}},
      {g + "in_proj.weight.alpha", {4, 4}},
      {g + "conv1d.weight.query", {6, 1, 4}},
      {g + "conv1d.weight.key", {6, 1, 4}},
      {g + "conv1d.weight.value", {8, 1, 4}},
      {g + "dt_bias", {4}},
      {g + "A_log", {4}},
      {g + "out_norm.weight", {2}},
      {g + "out_proj.weight", {4, 8}},
      {a + "linear_qkv.layer_norm_weight", {4}},
      {a + "linear_qkv.weight", {16, 4}},
      {a + "linear_proj.weight", {4, 4}},
      {f + "linear_fc1.layer_norm_weight", {4}},
      {f + "linear_fc1.weight", {12, 4}},
      {f + "linear_fc2.weight", {4, 6}},
      {"decoder.final_norm.weight", {4}},
      {"output_layer.weight", {8, 4}}};
  EXPECT_EQ(stored(theirs_), expected);
  // The weight of the norm in a gated delta net is from 1, as those of other norms.
  const at::Tensor norm = at::empty({2}, at::kBFloat16);
  ShardedTensor wanted;
  wanted.key = g + "out_norm.weight";
  wanted.dtype = DType::kBFloat16;
  wanted.global_shape = {2};
  wanted.data = norm.data_ptr();
  const Checkpoint theirs(theirs_,
                          open_torch_dist(theirs_, [](std::string_view) { return true; }).manifest);
  load_one(theirs, wanted);
  EXPECT_TRUE(at::equal(norm, weights_.at(wanted.key) - 1));
}

TEST_F(TorchDistLetters, ComeBackInEveryBit) {
  const TransformerConfig config = read_torch_dist_arguments(theirs_);
  EXPECT_EQ(architecture_difference(config, letters_config()), "");
  EXPECT_EQ(config.hybrid_layer_pattern, "MG*-") << "without the segments of a pipeline";
  const ForeignModel model = open_torch_dist_model(theirs_, config);
  ASSERT_EQ(model.checkpoint.manifest().tensors.size(), weights_.size());
  for (const auto& [name, expected] : weights_) {
    const at::Tensor back = at::empty_like(expected);
    ShardedTensor wanted;
    wanted.key = name;
    wanted.dtype = to_dtype(expected.scalar_type());
    wanted.global_shape = expected.sizes().vec();
    wanted.data = back.data_ptr();
    LoadOptions options;
    options.convert_dtype = true;
    options.wanted_elsewhere = {"*"};
    model.checkpoint.load({&wanted, 1}, options);
    EXPECT_TRUE(at::equal(back, expected)) << name;
  }
}

TEST_F(TorchDistLetters, EveryPartOfRowsIsAccountedFor) {
  const std::string mixer = "decoder.layers.0.mixer.";
  const auto all = stored(theirs_);
  const auto expect = [&](const std::function<void(Named&)>& edit, const std::string& message) {
    Named theirs;
    for (const auto& [key, shape] : all) theirs[key] = at::zeros(shape);
    edit(theirs);
    write(theirs);
    EXPECT_EQ(error_of([&] { open_torch_dist_model(directory_, letters_config()); }),
              message.empty() ? "" : directory_.string() + message);
  };
  expect([](Named&) {}, "");
  expect([&](Named& theirs) { theirs.erase(mixer + "in_proj.weight.dt"); },
         ": the rows dt of " + mixer +
             "in_proj.weight are not in the checkpoint, the model of its arguments has them");
  expect([&](Named& theirs) { theirs[mixer + "conv1d.weight.B"] = at::zeros({5, 1, 4}); },
         ": " + mixer +
             "conv1d.weight.B (in __0_0.distcp) has shape [5,1,4], by the model's arguments it is "
             "[6,1,4]");
  expect([&](Named& theirs) { theirs[mixer + "in_proj.weight.query"] = at::zeros({6, 4}); },
         ": " + mixer +
             "in_proj.weight.query (in __0_0.distcp) is of rows that the model of its arguments "
             "has not");
}

TEST_F(TorchDistLetters, ArgumentsThatAreNotBuiltAreNamed) {
  const auto error = [&](std::initializer_list<std::pair<const char*, std::string>> given) {
    std::vector<std::pair<std::string, std::string>> args;
    for (const auto& [name, value] : given) args.emplace_back(pickle::text(name), value);
    return error_of([&] { read(pickle::dict(args)); });
  };
  const std::string args = directory_.string() + ": args: ";
  EXPECT_EQ(error({{"is_hybrid_model", pickle::boolean(true)}}),
            args + "is_hybrid_model is set without hybrid_layer_pattern, which is not built");
  EXPECT_TRUE(error({{"hybrid_override_pattern", pickle::text("M/*-")}}).starts_with(args));
  const std::pair<std::string, std::string> old[] = {
      {pickle::text("hybrid_override_pattern"), pickle::text("M-")},
      {pickle::text("mamba_head_dim"), pickle::integer(32)}};
  EXPECT_EQ(read(pickle::dict(old)).hybrid_layer_pattern, "M-");
  EXPECT_EQ(read(pickle::dict(old)).mamba_head_dim, 32);
  const auto refused = [](const std::function<void(TransformerConfig&)>& edit) {
    TransformerConfig t = letters_config();
    edit(t);
    return error_of([&] { written(t); });
  };
  EXPECT_EQ(refused([](auto& t) { t.mamba_dt_limit = {"0.1", "inf"}; }),
            "the model has limits of time steps (mamba_dt_limit), which Megatron-LM's GPT has not");
  EXPECT_EQ(refused([](auto& t) { t.mamba_norm_epsilon = 1e-6; }),
            "the model has another epsilon in the norms of Mamba-2 (mamba_norm_epsilon), which "
            "Megatron-LM's GPT has not");
  EXPECT_EQ(refused([](auto& t) { t.residual_multiplier = 0.5; }),
            "the model has multipliers of embeddings, branches or logits (embedding_multiplier, "
            "residual_multiplier, logits_scaling), which Megatron-LM's GPT has not");
}

// Sinks, biases, and experts whose halves are stored one by one.
TEST(TorchDistGolden, GptOssHasTheLogitsOfMegatronCore) {
  const fs::path folder = MEGATRON_SOURCE_DIR "/tests/golden/torch_dist/gpt_oss";
  auto golden = read_golden_tensors(SafetensorsFile(folder / "golden.safetensors"));
  LoadModelRequest request;
  request.load = folder;
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(request, groups);
  EXPECT_EQ(loaded.config.transformer.softmax_type, SoftmaxType::kLearnable);
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = golden.at("tokens").to(at::kLong).unsqueeze(0),
                   expected = golden.at("logits");
  const at::Tensor logits = loaded.model->forward(tokens, context_for(tokens, /*training=*/false))
                                .select(1, 0)
                                .narrow(1, 0, expected.size(1));
  EXPECT_LT(((logits - expected).norm(2, -1) / expected.norm(2, -1)).max().item<double>(), 1e-4);
}

// Logits do not show the weights of multi-token prediction.
TEST(TorchDistGolden, TheLossOfMultiTokenPrediction) {
  const fs::path folder = MEGATRON_SOURCE_DIR "/tests/golden/torch_dist/mla";
  auto golden = read_golden_tensors(SafetensorsFile(folder / "golden.safetensors"));
  LoadModelRequest request;
  request.load = folder;
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(request, groups);
  ASSERT_EQ(loaded.config.transformer.mtp_num_layers, 1);
  const at::Tensor text = golden.at("tokens").to(at::kLong).unsqueeze(0);
  EXPECT_NEAR(mtp_loss(*loaded.model, text), golden.at("mtp_losses").item<double>(), 1e-5);
}

}  // namespace
}  // namespace megatron
