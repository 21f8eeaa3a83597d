// Models in GGUF files: what llama.cpp's converter wrote of the models of tests/golden/hf gives
// their logits; quantised weights give those of transformers; what is not built is refused by key.
#include "megatron/interop/gguf/gguf_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <mutex>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/chat.h"
#include "megatron/inference/generator.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/load_model.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/gguf_builder.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kFolder = fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/gguf";

LoadModelRequest gguf_request(const fs::path& path) {
  LoadModelRequest request;
  request.load = path;
  request.dtype = at::kFloat;
  return request;
}

at::Tensor gguf_logits(const LoadedModel& loaded, const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  return loaded.model->forward(tokens, context_for(tokens, /*training=*/false))
      .select(1, 0)
      .narrow(1, 0, loaded.config.vocab_size);
}

class GgufModelTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(GgufModelTest, GivesTheLogitsOfTheFolder) {
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  const LoadedModel loaded =
      load_model(gguf_request(kFolder / (GetParam() + std::string(".gguf"))), groups);
  expect_hf_logits(
      golden, [&](const at::Tensor& tokens) { return gguf_logits(loaded, tokens); }, "GGUF");
}

INSTANTIATE_TEST_SUITE_P(Families, GgufModelTest,
                         testing::Values("llama2", "llama3", "qwen3", "phi3", "gpt2", "gpt_neox",
                                         "gpt_neox_sequential", "olmo2", "olmoe",
                                         "deepseek_v2_lite", "deepseek_v3", "glm4_moe"),
                         [](const auto& param) { return std::string(param.param); });

class GgufLogits : public testing::TestWithParam<const char*> {};

TEST_P(GgufLogits, EqualThoseOfTransformers) {
  const SafetensorsFile file(kFolder / (GetParam() + std::string(".safetensors")));
  auto golden = read_golden_tensors(file);
  const at::Tensor tokens = golden["tokens"].to(at::kLong).unsqueeze(0),
                   expected = golden["logits"];
  const fs::path path = kFolder / (GetParam() + std::string(".gguf"));
  const ParallelGroups groups;
  const auto expect_near = [&](const at::Tensor& logits, const char* what) {
    ASSERT_EQ(logits.sizes(), expected.sizes()) << what;
    const double worst =
        ((logits - expected).norm(2, -1) / expected.norm(2, -1)).max().item<double>();
    EXPECT_LT(worst, 1e-5) << what;
  };
  expect_near(gguf_logits(load_model(gguf_request(path), groups), tokens), "one rank");
  std::vector<at::Tensor> parts(2);
  std::mutex mutex;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups two;
    two.tp = ProcessGroup(world, "tp");
    LoadModelRequest request = gguf_request(path);
    const LoadedModel loaded = load_model(request, two);
    const at::Tensor logits =
        loaded.model->forward(tokens, context_for(tokens, /*training=*/false)).select(1, 0);
    const std::lock_guard lock(mutex);
    parts[static_cast<size_t>(two.tp.rank())] = logits;
  });
  expect_near(at::cat(parts, 1).narrow(1, 0, expected.size(1)), "two tensor-parallel ranks");
}

INSTANTIATE_TEST_SUITE_P(Files, GgufLogits,
                         testing::Values("llama_quantized", "mixtral", "qwen2", "gemma2", "gemma3",
                                         "starcoder2", "qwen2_moe", "qwen3_moe", "deepseek_v2",
                                         "gpt_oss_mxfp4"),
                         [](const auto& param) { return std::string(param.param); });

// A tensor of ours in fp32.
std::vector<float> values_of(const HfFolder& folder, const std::string& key) {
  ShardedTensor tensor;
  tensor.key = key;
  tensor.dtype = DType::kFloat32;
  tensor.global_shape = folder.checkpoint.manifest().tensors.at(key).shape;
  std::vector<float> values(num_bytes(tensor.dtype, tensor.global_shape) / sizeof(float));
  tensor.data = reinterpret_cast<std::byte*>(values.data());
  LoadOptions options;
  options.convert_dtype = true;
  options.wanted_elsewhere = {"*"};
  folder.checkpoint.load({&tensor, 1}, options);
  return values;
}

TEST(GgufTensors, AreThoseOfTheFolderWithFurtherLayers) {
  const GgufModel ours = open_gguf(kFolder / "glm4_moe.gguf");
  const HfFolder theirs = open_hf_folder(hf_golden_folder("glm4_moe"));
  EXPECT_EQ(ours.folder.model.config.transformer.mtp_num_layers, 1);
  EXPECT_EQ(architecture_difference(ours.folder.model.config.transformer,
                                    theirs.model.config.transformer),
            "");
  const auto& tensors = theirs.checkpoint.manifest().tensors;
  EXPECT_EQ(ours.folder.checkpoint.manifest().tensors.size(), tensors.size());
  EXPECT_TRUE(tensors.contains("mtp.layers.0.transformer_layer.mlp.router.expert_bias"));
  for (const auto& [key, tensor] : tensors)
    EXPECT_EQ(values_of(ours.folder, key), values_of(theirs, key)) << key;
}

class GgufFiles : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path write(const GgufBuilder& builder) const {
    std::ofstream(root_ / "m.gguf", std::ios::binary) << builder.build();
    return root_ / "m.gguf";
  }
  // Without the path.
  std::string refusal(const GgufBuilder& builder) const {
    const fs::path path = write(builder);
    const std::string text = error_of([&] { open_gguf(path); });
    return text.starts_with(path.string() + ": ") ? text.substr(path.string().size() + 2) : text;
  }
  // A tiny Llama; `except`: a key that it lacks.
  static GgufBuilder llama(std::string_view except = {}, std::string_view architecture = "llama") {
    GgufBuilder b;
    const auto key = [&](const char* name, auto value) {
      const std::string full = std::string(architecture) + "." + name;
      if (full != except) b.key(full, value);
    };
    if (except != "general.architecture") b.key("general.architecture", architecture);
    key("block_count", 1u);
    key("context_length", 64u);
    key("embedding_length", 8u);
    key("feed_forward_length", 16u);
    key("attention.head_count", 2u);
    key("attention.layer_norm_rms_epsilon", 1e-5f);
    return b;
  }
  static GgufBuilder& add_tensors(GgufBuilder& b, std::string_view except = {}) {
    const auto add = [&](std::string_view name, const std::vector<uint64_t>& extents) {
      if (name != except) b.tensor(name, extents);
    };
    add("token_embd.weight", {8, 12});
    add("output_norm.weight", {8});
    add("blk.0.attn_norm.weight", {8});
    add("blk.0.ffn_norm.weight", {8});
    for (const char* name : {"q", "k", "v", "output"})
      add(std::string("blk.0.attn_") + name + ".weight", {8, 8});
    add("blk.0.ffn_gate.weight", {8, 16});
    add("blk.0.ffn_up.weight", {8, 16});
    add("blk.0.ffn_down.weight", {16, 8});
    return b;
  }
  // A tiny model of one layer with latent attention: 2 heads with keys of 2 + 2 and values of 3,
  // a latent of 4, 2 experts.
  static GgufBuilder deepseek(bool split, std::string_view except = {}) {
    GgufBuilder b = llama(except, "deepseek2");
    const auto key = [&](const char* name, auto value) {
      const std::string full = std::string("deepseek2.") + name;
      if (full != except) b.key(full, value);
    };
    key("attention.head_count_kv", split ? 1u : 2u);
    key("attention.kv_lora_rank", 4u);
    key("attention.key_length", split ? 6u : 4u);
    key("attention.value_length", split ? 4u : 3u);
    if (split) key("attention.key_length_mla", 4u);
    if (split) key("attention.value_length_mla", 3u);
    key("rope.dimension_count", 2u);
    key("expert_count", 2u);
    key("expert_used_count", 1u);
    key("expert_feed_forward_length", 4u);
    key("expert_shared_count", 1u);
    key("leading_dense_block_count", 0u);
    return b;
  }
  // All but those of what makes keys and values of the latent.
  static GgufBuilder& add_deepseek_tensors(GgufBuilder& b, std::string_view except = {}) {
    const auto add = [&](std::string_view name, const std::vector<uint64_t>& extents) {
      if (name != except) b.tensor(name, extents);
    };
    add("token_embd.weight", {8, 12});
    add("output_norm.weight", {8});
    add("blk.0.attn_norm.weight", {8});
    add("blk.0.attn_q.weight", {8, 8});
    add("blk.0.attn_kv_a_mqa.weight", {8, 6});
    add("blk.0.attn_kv_a_norm.weight", {4});
    add("blk.0.attn_output.weight", {6, 8});
    add("blk.0.ffn_norm.weight", {8});
    add("blk.0.ffn_gate_inp.weight", {8, 2});
    for (const char* name : {"gate", "up"}) {
      add(std::string("blk.0.ffn_") + name + "_exps.weight", {8, 4, 2});
      add(std::string("blk.0.ffn_") + name + "_shexp.weight", {8, 4});
    }
    add("blk.0.ffn_down_exps.weight", {4, 8, 2});
    add("blk.0.ffn_down_shexp.weight", {4, 8});
    return b;
  }
  const fs::path root_ = fs::path(testing::TempDir()) / ("gguf_model_" + std::to_string(getpid()));
};

TEST_F(GgufFiles, LatentAttentionIsInOneTensorOrTwo) {
  constexpr const char* kOurs = "decoder.layers.0.self_attention.linear_kv_up_proj.weight";
  GgufBuilder b = deepseek(false);
  add_deepseek_tensors(b).tensor("blk.0.attn_kv_b.weight", {4, 10});
  const std::vector<float> together = values_of(open_gguf(write(b)).folder, kOurs);
  ASSERT_EQ(together.size(), 40u);
  EXPECT_EQ(together[7], 7.0f / 64);
  std::string keys, values, short_values;
  for (size_t head = 0; head < 2; ++head) {
    for (size_t column = 0; column < 4; ++column)
      for (size_t key = 0; key < 2; ++key)
        keys += GgufBuilder::number(together[(head * 5 + key) * 4 + column]);
    for (size_t i = 0; i < 12; ++i) {
      const std::string value = GgufBuilder::number(together[(head * 5 + 2) * 4 + i]);
      values += value;
      short_values += value.substr(2);  // of bf16
    }
  }
  for (const bool mixed : {false, true}) {
    b = deepseek(true);
    add_deepseek_tensors(b).tensor("blk.0.attn_k_b.weight", {2, 4, 2}, 0, keys);
    b.tensor("blk.0.attn_v_b.weight", {4, 3, 2}, mixed ? 30 : 0, mixed ? short_values : values);
    EXPECT_EQ(values_of(open_gguf(write(b)).folder, kOurs), together) << mixed;
  }
}

TEST_F(GgufFiles, ExpertsAndLatentsThatAreNotBuiltAreRefusedByKey) {
  const auto refused = [&](GgufBuilder b, const std::vector<uint64_t>& values = {4, 3, 2}) {
    add_deepseek_tensors(b).tensor("blk.0.attn_k_b.weight", {2, 4, 2});
    if (!values.empty()) b.tensor("blk.0.attn_v_b.weight", values);
    return refusal(b);
  };
  const auto with = [&](const char* name, auto value) {
    const std::string full = std::string("deepseek2.") + name;
    return deepseek(true, full).key(full, value);
  };
  EXPECT_EQ(refused(deepseek(true)), "");
  EXPECT_THAT(refused(deepseek(true), {}), HasSubstr("tensor blk.0.attn_k_b.weight at byte "));
  EXPECT_THAT(refused(deepseek(true), {}), HasSubstr("is there without blk.0.attn_v_b.weight"));
  EXPECT_THAT(refused(deepseek(true), {3, 3, 2}),
              HasSubstr("do not fit: expected [heads, latent, keys] and [heads, values, latent]"));
  EXPECT_EQ(refused(deepseek(true), {4, 4, 2}),
            "blk.0.attn_k_b.weight has shape [12,4], by its metadata it is [10,4]");
  GgufBuilder b = deepseek(true);
  add_deepseek_tensors(b).tensor("blk.0.attn_v_b.weight", {4, 3, 2});
  EXPECT_EQ(refusal(b),
            "blk.0.attn_k_b.weight is not in the files, the model of its metadata has it");
  EXPECT_THAT(refused(with("expert_count", 0u)),
              HasSubstr("\"deepseek2\" without experts is not built"));
  EXPECT_THAT(refused(with("rope.dimension_count", 4u)),
              HasSubstr("key deepseek2.attention.key_length_mla at byte "));
  EXPECT_THAT(refused(with("rope.dimension_count", 4u)),
              HasSubstr("is 4, expected more than rope.dimension_count, 4"));
  EXPECT_THAT(refused(with("attention.key_length", 4u)), HasSubstr("is 4, only 6 is built"));
  EXPECT_THAT(refused(with("attention.head_count_kv", 2u)), HasSubstr("is 2, only 1 is built"));
  EXPECT_THAT(refused(with("expert_gating_func", 4u)), HasSubstr("is 4, only 1 is built"));
  EXPECT_THAT(refused(with("expert_weights_norm", true)),
              HasSubstr("is true, which is not built with softmax scores"));
  b = with("expert_gating_func", 2u).key("deepseek2.expert_weights_norm", true);
  EXPECT_THAT(refused(b.key("deepseek2.nextn_predict_layers", 1u)),
              HasSubstr("key deepseek2.nextn_predict_layers at byte "));
  EXPECT_THAT(refused(b), HasSubstr("is 1 of 1 layers"));
  EXPECT_THAT(refused(with("attention.temperature_length", 8u)),
              HasSubstr("this setting is not built for the architecture deepseek2"));
}

TEST_F(GgufFiles, SettingsComeFromTheMetadata) {
  GgufBuilder b = llama();
  b.key("llama.attention.head_count_kv", 2u).key("llama.rope.freq_base", 5000.0f);
  b.key("llama.rope.scaling.type", "yarn").key("llama.rope.scaling.factor", 4.0f);
  b.key("llama.rope.scaling.original_context_length", 16u);
  const GgufModel model = open_gguf(write(add_tensors(b)));
  const TransformerConfig& t = model.folder.model.config.transformer;
  EXPECT_EQ(t.num_layers, 1);
  EXPECT_EQ(t.kv_channels, 4);
  EXPECT_EQ(t.layernorm_epsilon, 1e-5) << "the number that the 32 bits stand for";
  EXPECT_EQ(t.rotary_base, 5000.0);
  EXPECT_EQ(t.rope_scaling_type, RopeScaling::kYarn);
  EXPECT_EQ(t.rope_scaling_factor, 4.0);
  EXPECT_EQ(t.rope_original_max_position_embeddings, 16);
  EXPECT_EQ(t.max_position_embeddings, 64);
  EXPECT_FALSE(t.untie_embeddings_and_output_weights) << "there is no output.weight";
  EXPECT_EQ(model.folder.model.config.vocab_size, 12);
  EXPECT_EQ(model.folder.model.family->model_type, "llama");
  EXPECT_EQ(gguf_tokenizer(model).tokenizer_type, "NullTokenizer");
}

TEST_F(GgufFiles, SixteenBitsStayUnlessTheFileMixes) {
  const auto dtypes = [&](uint32_t type_of_up, const std::string& data) {
    GgufBuilder b = llama();
    add_tensors(b, "blk.0.ffn_up.weight");
    b.tensor("blk.0.ffn_up.weight", {8, 16}, type_of_up, data);
    return open_gguf(write(b)).folder.checkpoint.manifest().tensors;
  };
  // Half of a parameter in 16 bits, half in 32.
  EXPECT_THAT(
      error_of([&] { dtypes(1, std::string(256, '\0')); }),
      HasSubstr("is stored as F16, other parts of decoder.layers.0.mlp.linear_fc1.weight as "
                "F32"));
  GgufBuilder b = llama();
  b.tensor("token_embd.weight", {8, 12}, 30, std::string(192, '\0'));
  add_tensors(b, "token_embd.weight");
  const auto tensors = open_gguf(write(b)).folder.checkpoint.manifest().tensors;
  EXPECT_EQ(tensors.at("embedding.word_embeddings.weight").dtype, DType::kBFloat16);
  EXPECT_EQ(tensors.at("decoder.final_layernorm.weight").dtype, DType::kFloat32);
}

TEST_F(GgufFiles, WhatIsNotBuiltIsRefusedByKey) {
  GgufBuilder b = llama("general.architecture");
  EXPECT_EQ(refusal(add_tensors(b)), "key general.architecture: is not there");
  b = llama("", "rwkv7");
  EXPECT_THAT(refusal(add_tensors(b)),
              HasSubstr("key general.architecture at byte 56: \"rwkv7\" is not built\nhint: those "
                        "that are: llama, qwen2, qwen3, gemma2"));
  b = llama("", "qwen2").key("qwen2.expert_count", 4u);
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("\"qwen2\" with experts is not built"));
  b = llama("llama.block_count");
  EXPECT_EQ(refusal(add_tensors(b)), "key llama.block_count: is not there");
  b = llama("llama.block_count").key("llama.block_count", "one");
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("is of type STRING, expected an integer"));
  b = llama().key("llama.attention.clamp_kqv", 8.0f);
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("key llama.attention.clamp_kqv at byte "));
  EXPECT_THAT(refusal(b), HasSubstr(": this setting is not built for the architecture llama"));
  b = llama().key("llama.rope.scaling.type", "dynamic");
  EXPECT_THAT(refusal(add_tensors(b)),
              HasSubstr("\"dynamic\" is not built, only none, linear and yarn"));
  b = llama().key("llama.rope.dimension_count", 2u);
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("is 2, expected the size of a head, 4"));
  b = llama().key("llama.attention.causal", false);
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("is false, only true is built"));
  b = llama().key("llama.vocab_size", 13u);
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("is 13, only 12 is built"));
  b = llama("llama.feed_forward_length")
          .key("llama.feed_forward_length", std::vector<uint32_t>{16, 8});
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("differs between layers, which is not built"));
  b = llama().key("general.type", "mmproj");
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("is \"mmproj\", expected a model"));
  b = llama().key("split.count", uint16_t{3});
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("divided into 3 files"));
  EXPECT_THAT(refusal(llama()), HasSubstr("has no tensors, only keys"));
}

TEST_F(GgufFiles, TensorsAreNamedAsInTheFile) {
  GgufBuilder b = llama();
  EXPECT_EQ(refusal(add_tensors(b, "blk.0.attn_k.weight")),
            "blk.0.attn_k.weight is not in the files, the model of its metadata has it");
  b = llama();
  add_tensors(b).tensor("blk.0.attn_sinks.weight", {8});
  EXPECT_THAT(refusal(b), HasSubstr("tensor blk.0.attn_sinks.weight at byte "));
  EXPECT_THAT(refusal(b), HasSubstr("a model of the architecture llama has no such tensor"));
  b = llama();
  add_tensors(b).tensor("blk.1.attn_norm.weight", {8});
  EXPECT_EQ(refusal(b),
            "blk.1.attn_norm.weight is in the files, the model of its metadata has no such tensor");
  b = llama();
  add_tensors(b, "blk.0.ffn_up.weight").tensor("blk.0.ffn_up.weight", {16, 8});
  EXPECT_EQ(refusal(b), "blk.0.ffn_up.weight has shape [8,16], by its metadata it is [16,8]");
  b = llama();
  add_tensors(b, "blk.0.ffn_up.weight")
      .tensor("blk.0.ffn_up.weight", {8, 16}, 39, std::string(128, 'x'));
  EXPECT_THAT(refusal(b), HasSubstr("which are no whole blocks of 32 of its type MXFP4"));
  b = llama();
  add_tensors(b, "output_norm.weight").tensor("output_norm.weight", {8}, 26, std::string(32, 'x'));
  EXPECT_THAT(refusal(b), HasSubstr("the type I32 is not built\nhint: those that are: F32, F16"));
  b = llama();
  add_tensors(b).tensor("rope_freqs.weight", {2}, 0,
                        GgufBuilder::number(1.0f) + GgufBuilder::number(3.0f));
  EXPECT_THAT(refusal(b), HasSubstr("tensor rope_freqs.weight at byte "));
  EXPECT_THAT(refusal(b), HasSubstr("is not Llama 3's scaling of rotary positions"));
  EXPECT_THAT(error_of([&] { load_model(gguf_request(root_ / "none.gguf"), ParallelGroups()); }),
              HasSubstr("there is no such folder"));
}

// A byte-level vocabulary with special tokens and a template.
GgufBuilder& add_vocabulary(GgufBuilder& b, std::string_view except = {}) {
  const std::vector<std::string> tokens = {"a",      "b",      "c",  "ab", "<|end|>", "<|user|>",
                                           "\u0120", "\u010a", "ca", "bb", "cc",      "aa"};
  const auto key = [&](const char* name, const auto& value) {
    if (name != except) b.key(name, value);
  };
  key("tokenizer.ggml.model", "gpt2");
  key("tokenizer.ggml.pre", "gpt-2");
  key("tokenizer.ggml.tokens", tokens);
  key("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1, 1, 1, 3, 3, 1, 1, 1, 1, 1, 1});
  key("tokenizer.ggml.merges", std::vector<std::string>{"a b", "c a"});
  key("tokenizer.ggml.eos_token_id", 4u);
  key("tokenizer.chat_template",
      "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{{ eos_token }}");
  return b;
}

TEST_F(GgufFiles, TokenizerAndTemplateComeOutOfTheFile) {
  GgufBuilder b = llama();
  const fs::path path = write(add_tensors(add_vocabulary(b)));
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(gguf_request(path), groups);
  EXPECT_THAT(loaded.tokenizer->encode("<|user|>cab<|end|>"), ElementsAre(5, 2, 3, 4));
  EXPECT_EQ(loaded.tokenizer->eod(), 4);
  EXPECT_THAT(loaded.end_of_text, ElementsAre(4));
  EXPECT_EQ(loaded.directory, path);
  const Chat chat(*loaded.tokenizer, loaded.chat_templates, "", loaded.end_of_text);
  Conversation conversation;
  conversation.messages = {chat_message("user", "ab")};
  conversation.is_assistant = {false};
  EXPECT_EQ(chat.prompt(conversation, "here"), "<|user|>ab<|end|><|end|>");
  EXPECT_THAT(chat.stop_tokens(), ElementsAre(4));
  // A checkpoint of ours holds them, and so does a folder of Hugging Face made of it.
  const ConvertResult ours = import_gguf(path, root_ / "ours");
  EXPECT_EQ(ours.num_tensors, 11);
  export_hf_folder(
      {.load = root_ / "ours", .ckpt_step = {}, .folder = root_ / "theirs", .model_type = ""});
  for (const fs::path& copy : {root_ / "ours", root_ / "theirs"}) {
    const LoadedModel again = load_model(gguf_request(copy), groups);
    EXPECT_EQ(again.tokenizer->fingerprint(), loaded.tokenizer->fingerprint()) << copy;
    EXPECT_EQ(Chat(*again.tokenizer, again.chat_templates, "", again.end_of_text)
                  .prompt(conversation, "here"),
              "<|user|>ab<|end|><|end|>");
    const at::Tensor tokens = at::tensor({5, 2, 3, 4}, at::kLong).unsqueeze(0);
    EXPECT_TRUE(at::equal(gguf_logits(again, tokens), gguf_logits(loaded, tokens))) << copy;
  }
}

TEST_F(GgufFiles, ATokenizerThatIsNotBuiltOrDamagedIsRefusedByKey) {
  const auto problem = [&](GgufBuilder b) {
    const fs::path path = write(add_tensors(b));
    const std::string text = open_gguf(path).tokenizer_problem;
    EXPECT_EQ(error_of([&] { load_model(gguf_request(path), ParallelGroups()); }), text);
    LoadModelRequest without = gguf_request(path);
    without.tokenizer_required = false;
    EXPECT_THAT(load_model(without, ParallelGroups()).warnings,
                ElementsAre("no tokenizer: " + text));
    return text;
  };
  GgufBuilder b = llama();
  add_vocabulary(b, "tokenizer.ggml.model").key("tokenizer.ggml.model", "t5");
  EXPECT_THAT(problem(b), HasSubstr("key tokenizer.ggml.model at byte "));
  EXPECT_THAT(problem(b), HasSubstr("\"t5\" is not built, only \"gpt2\" and \"llama\""));
  b = llama();
  add_vocabulary(b, "tokenizer.ggml.pre").key("tokenizer.ggml.pre", "future");
  EXPECT_THAT(problem(b), HasSubstr("\"future\" is not built\nhint: those that are: default"));
  b = llama();
  b.key("tokenizer.ggml.model", "llama");
  b.key("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "ab"});
  EXPECT_THAT(problem(b), HasSubstr("key tokenizer.ggml.scores: is not there: tokens without "
                                    "scores cannot be merged"));
  b = llama();
  add_vocabulary(b, "tokenizer.ggml.token_type")
      .key("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1});
  EXPECT_THAT(problem(b), HasSubstr("key tokenizer.ggml.token_type at byte "));
  EXPECT_THAT(problem(b), HasSubstr("has 2 elements for 12 tokens"));
  b = llama();
  add_vocabulary(b, "tokenizer.ggml.tokens");
  EXPECT_THAT(problem(b), HasSubstr("key tokenizer.ggml.tokens: is not there"));
  b = llama();
  add_vocabulary(b, "tokenizer.ggml.tokens")
      .key("tokenizer.ggml.tokens", std::vector<std::string>(13, "x"));
  EXPECT_THAT(problem(b), HasSubstr("elements for 13 tokens"));
  b = llama();
  add_vocabulary(b, "tokenizer.ggml.eos_token_id").key("tokenizer.ggml.eos_token_id", 12u);
  EXPECT_THAT(refusal(add_tensors(b)), HasSubstr("key tokenizer.ggml.eos_token_id at byte "));
  b = llama();
  add_vocabulary(b, "tokenizer.chat_template")
      .key("tokenizer.chat_template", std::string(17 << 20, ' '));
  EXPECT_THAT(problem(b), HasSubstr("key tokenizer.chat_template at byte "));
  EXPECT_THAT(problem(b), HasSubstr("is 17825792 bytes long, expected at most 16777216"));
}

}  // namespace
}  // namespace megatron
