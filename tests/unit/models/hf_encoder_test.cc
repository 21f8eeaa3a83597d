// Encoders of Hugging Face against transformers: logits of both heads with padding in the batch,
// the loss and every gradient; the logits on tensor- and context-parallel ranks and from two
// segments; the same bytes both ways.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/their_form.h"

namespace megatron {
namespace {

std::filesystem::path encoder_folder(const std::string& name) {
  return std::filesystem::path(MEGATRON_SOURCE_DIR "/tests/golden/encoders") / name;
}

HfFolder opened(const std::string& name, const char* cp_comm_type) {
  HfFolder folder = open_hf_folder(encoder_folder(name));
  folder.model.config.transformer.cp_comm_type = {cp_comm_type};
  return folder;
}

int64_t num_layers(const std::string& name) {
  return read_hf_config(encoder_folder(name)).config.transformer.num_layers;
}

// A golden, and the model of its folder with its weights and gradients in fp32 or `dtype`.
struct HfEncoder {
  HfEncoder(const std::string& name, const ParallelGroups& groups, const char* cp_comm_type = "p2p")
      : HfEncoder(name, groups, {0, num_layers(name), true, true}, {}, cp_comm_type) {}
  HfEncoder(const std::string& name, const ParallelGroups& groups, const StageSlice& slice,
            const EmbeddingTables& tables, const char* cp_comm_type = "p2p")
      : HfEncoder(name, groups, slice, tables, opened(name, cp_comm_type)) {}
  HfEncoder(const std::string& name, const ParallelGroups& groups, const StageSlice& slice,
            const EmbeddingTables& tables, HfFolder opened_folder,
            at::ScalarType dtype = at::kFloat)
      : golden(read_golden_tensors(SafetensorsFile(encoder_folder(name) / "golden.safetensors"))),
        folder(std::move(opened_folder)),
        model(folder.model.config, groups, slice, tables),
        store(model, dtype, at::kCPU, /*gradients=*/true) {
    load_hf_values(folder, groups, slice, model);
    const at::Tensor labels = golden.at("labels").to(at::kLong);
    batch.set("text", golden.at("input_ids").to(at::kLong));
    batch.set("types", golden.at("token_type_ids").to(at::kLong));
    batch.set("padding_mask", golden.at("attention_mask").to(at::kLong));
    batch.set("labels", labels.clamp_min(0));
    batch.set("loss_mask", (labels >= 0).to(at::kFloat));
    batch.set("is_random", golden.at("next_sentence_label").to(at::kLong).unsqueeze(1));
    batch.set("sample_weight", at::ones({labels.size(0), 1}));
    context = context_for(batch["text"], /*training=*/false);
    batch.place = context.place;
  }
  // [b, s, v] of tokens that are not padding.
  at::Tensor logits(const at::Tensor& hidden) {
    return model.logits(hidden).transpose(0, 1) * batch["padding_mask"].unsqueeze(2);
  }

  std::map<std::string, at::Tensor> golden;
  const HfFolder folder;
  BertModel model;
  PlainParameterStore store;
  Batch batch;
  ForwardContext context;
};

std::map<std::string, at::Tensor> gradients_of_loss(HfEncoder& e, at::Tensor& hidden) {
  RecomputeTape tape;
  e.context.tape = &tape;
  const StageTensors states = e.model.hidden(e.batch, {}, e.context);
  hidden = states.front().detach();
  const Loss loss = e.model.loss(states, e.batch, e.context);
  tape.backward(BackwardRoot(loss.sum), {(1 / loss.weight).to(loss.sum)});
  std::map<std::string, at::Tensor> grads;
  e.model.visit([&](const std::string& ours, Parameter& parameter) {
    grads[ours] = e.store.grad(parameter);
  });
  return grads;
}

// Every gradient of the golden, after the backward.
void expect_gradients(HfEncoder& e) {
  std::map<std::string, at::Tensor> grads;
  e.model.visit([&](const std::string& ours, Parameter& parameter) {
    grads[ours] = e.store.grad(parameter);
  });
  double all = 0;
  for (const auto& [name, tensor] : e.golden)
    if (name.starts_with("grad/")) all += tensor.square().sum().item<double>();
  for (const HfTensor& tensor : hf_tensors(*e.folder.model.family, e.folder.model.config))
    expect_close(in_their_form(tensor, grads.at(tensor.ours)), e.golden.at("grad/" + tensor.name),
                 kHfTolerance, std::sqrt(all), "gradient of " + tensor.name);
}

class HfEncoderGolden : public testing::TestWithParam<std::string> {};

TEST_P(HfEncoderGolden, LogitsAndGradients) {
  const ParallelGroups groups;
  HfEncoder e(GetParam(), groups);
  const bool binary = e.golden.contains("order");
  RecomputeTape tape;
  const at::Tensor totals = at::zeros({1, 2}, at::kDouble);
  AuxiliaryLosses losses({.names = e.model.auxiliary_losses(),
                          .totals = totals,
                          .gradient = [](const at::Tensor& sum, const at::Tensor& own, LossRows,
                                         std::string_view) { return (1 / own).to(sum); }},
                         tape);
  e.context.tape = &tape;
  if (binary) e.context.auxiliary_losses = &losses;
  const StageTensors hidden = e.model.hidden(e.batch, {}, e.context);
  {
    const at::NoGradGuard no_grad;
    expect_close(e.logits(hidden.front()), e.golden.at("logits"), kHfTolerance, 0, "logits");
    if (binary)
      expect_close(e.model.order_logits(hidden.front()), e.golden.at("order"), kHfTolerance, 0,
                   "logits of the order");
  }
  const Loss loss = e.model.loss(hidden, e.batch, e.context);
  double mean = (loss.sum / loss.weight).item<double>();
  if (binary) mean += (totals[0][0] / totals[0][1]).item<double>();
  EXPECT_NEAR(mean, e.golden.at("loss").item<double>(), 1e-5);
  tape.backward(BackwardRoot(loss.sum), {(1 / loss.weight).to(loss.sum)});

  expect_gradients(e);
}

TEST_P(HfEncoderGolden, LogitsOnTwoTensorParallelRanks) {
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    HfEncoder e(GetParam(), groups);
    const at::Tensor logits = e.logits(e.model.hidden(e.batch, {}, e.context).front());
    const int64_t own = logits.size(2);
    expect_close(logits, e.golden.at("logits").narrow(2, groups.tp.rank() * own, own), kHfTolerance,
                 0, "logits");
  });
}

void expect_logits_on_context_parallel_ranks(const std::string& name, const char* cp_comm_type) {
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.cp = ProcessGroup(world, "cp");
    HfEncoder e(name, groups, cp_comm_type);
    for (const char* column : {"text", "types"})
      e.batch.set(column, zigzag_slice(e.batch[column], 1, groups.cp));
    e.context.place.position = zigzag_slice(e.context.place.position, 0, groups.cp);
    const at::Tensor hidden = e.model.hidden(e.batch, {}, e.context).front();
    e.batch.set("padding_mask", zigzag_slice(e.batch["padding_mask"], 1, groups.cp));
    expect_close(e.logits(hidden), zigzag_slice(e.golden.at("logits"), 1, groups.cp), kHfTolerance,
                 0, "logits");
  });
}

// A ring has no windows.
TEST_P(HfEncoderGolden, LogitsOnTwoContextParallelRanks) {
  const bool windows =
      !read_hf_config(encoder_folder(GetParam())).config.transformer.window_size.empty();
  if (!windows) expect_logits_on_context_parallel_ranks(GetParam(), "p2p");
  for (const char* type : {"all_gather", "a2a"})
    expect_logits_on_context_parallel_ranks(GetParam(), type);
}

TEST_P(HfEncoderGolden, LogitsOfTwoSegments) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  const int64_t half = num_layers(GetParam()) / 2;
  HfEncoder first(GetParam(), groups, {0, half, true, false}, {}),
      second(GetParam(), groups, {half, half, false, true}, first.model.embedding_tables());
  const StageTensors middle = first.model.hidden(first.batch, {}, first.context);
  const at::Tensor hidden = second.model.hidden(second.batch, middle, second.context).front();
  expect_close(second.logits(hidden), second.golden.at("logits"), kHfTolerance, 0, "logits");
}

TEST(HfEncoderGolden, HiddenStatesOfAModelWithoutAHead) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  for (const char* name : {"bert_model", "modernbert_model"}) {
    HfEncoder e(name, groups);
    const at::Tensor hidden = e.model.hidden(e.batch, {}, e.context).front();
    expect_close(hidden.transpose(0, 1) * e.batch["padding_mask"].unsqueeze(2),
                 e.golden.at("hidden"), kHfTolerance, 0, "hidden states");
    EXPECT_EQ(has_pooler(e.model.config()), e.golden.contains("pooled")) << name;
    if (has_pooler(e.model.config()))
      expect_close(e.model.pooled(hidden), e.golden.at("pooled"), kHfTolerance, 0, "pooled");
    EXPECT_EQ(error_of([&] { e.model.logits(hidden); }),
              "this BERT has no head of masked tokens (bert_lm_head)");
  }
}

class HfClassesGolden : public testing::TestWithParam<std::string> {};

TEST_P(HfClassesGolden, LogitsAndGradients) {
  const ParallelGroups groups;
  HfEncoder e(GetParam(), groups);
  ASSERT_EQ(num_classes(e.model.config()), 3);
  RecomputeTape tape;
  e.context.tape = &tape;
  const at::Tensor hidden = e.model.hidden(e.batch, {}, e.context).front();
  const at::Tensor logits = e.model.class_logits(hidden, e.batch["padding_mask"]);
  expect_close(logits.detach(), e.golden.at("classes"), kHfTolerance, 0, "classes");
  const at::Tensor loss = at::cross_entropy_loss(logits, e.golden.at("class").to(at::kLong));
  EXPECT_NEAR(loss.item<double>(), e.golden.at("loss").item<double>(), 1e-5);
  tape.backward(BackwardRoot(loss), {at::ones_like(loss)});
  expect_gradients(e);
}

TEST_P(HfClassesGolden, LogitsOnTwoTensorParallelRanks) {
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    HfEncoder e(GetParam(), groups);
    const at::Tensor hidden = e.model.hidden(e.batch, {}, e.context).front();
    expect_close(e.model.class_logits(hidden, e.batch["padding_mask"]), e.golden.at("classes"),
                 kHfTolerance, 0, "classes");
  });
}

INSTANTIATE_TEST_SUITE_P(Families, HfClassesGolden,
                         testing::Values("bert_classes", "megatron_bert_classes", "roberta_classes",
                                         "modernbert_classes"),
                         [](const auto& param) { return param.param; });

TEST(HfEncoderGolden, ClassesOfTheFirstTokenOfAModernBert) {
  const ParallelGroups groups;
  HfFolder folder = opened("modernbert_classes", "p2p");
  folder.model.config.own.as<BertConfig>()->bert_pooling = BertPooling::kFirst;
  HfEncoder first("modernbert_classes", groups, {0, 4, true, true}, {}, std::move(folder));
  const at::NoGradGuard no_grad;
  expect_close(first.model.class_logits(first.model.hidden(first.batch, {}, first.context).front(),
                                        first.batch["padding_mask"]),
               first.golden.at("classes_first"), kHfTolerance, 0, "classes of the first token");
}

INSTANTIATE_TEST_SUITE_P(Families, HfEncoderGolden,
                         testing::Values("megatron_bert", "bert", "roberta", "modernbert",
                                         "modernbert_biases"),
                         [](const auto& param) { return param.param; });

namespace fs = std::filesystem;

// What import and export make of a folder has the tensors and the architecture of a golden's.
void expect_there_and_back(const fs::path& folder, const fs::path& root, const std::string& name) {
  import_hf_folder(folder, root / "ours");
  export_hf_folder({root / "ours", {}, root / "theirs", "", 1 << 20});
  const SafetensorsFile before(encoder_folder(name) / "model.safetensors"),
      after(root / "theirs" / "model.safetensors");
  const auto a = read_golden_tensors(before), b = read_golden_tensors(after);
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [tensor, value] : a) {
    ASSERT_TRUE(b.contains(tensor)) << tensor;
    EXPECT_TRUE(at::equal(b.at(tensor), value)) << tensor;
  }
  const auto json = nlohmann::json::parse(read_file(root / "theirs" / "config.json"));
  const auto theirs = nlohmann::json::parse(read_file(encoder_folder(name) / "config.json"));
  for (const char* key :
       {"architectures", "type_vocab_size", "hidden_act", "layer_norm_eps",
        "max_position_embeddings", "pad_token_id", "hidden_activation", "norm_eps", "norm_bias",
        "attention_bias", "mlp_bias", "local_attention", "layer_types", "rope_parameters",
        "embedding_dropout", "attention_dropout", "tie_word_embeddings"})
    EXPECT_EQ(json.value(key, nlohmann::json()), theirs.value(key, nlohmann::json())) << key;
}

fs::path empty_folder(const std::string& name) {
  const fs::path folder = fs::path(testing::TempDir()) / ("hf_encoder_" + name);
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

TEST(HfEncoders, ThereAndBackAreTheSame) {
  for (const char* name : {"megatron_bert", "bert", "roberta", "bert_model", "modernbert",
                           "modernbert_biases", "modernbert_model", "modernbert_classes",
                           "bert_classes", "megatron_bert_classes", "roberta_classes"})
    expect_there_and_back(encoder_folder(name), empty_folder(name), name);
}

// Names as TensorFlow has them, and all heads of pretraining under the name of one of them.
TEST(HfEncoders, ReadsPublishedForms) {
  const fs::path root = empty_folder("published"), folder = root / "folder";
  fs::create_directories(folder);
  std::string bytes = read_file(encoder_folder("bert") / "model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  std::string header = bytes.substr(sizeof(header_bytes), header_bytes);
  header = replaced(header, "LayerNorm.weight", "LayerNorm.gamma");
  header = replaced(header, "LayerNorm.bias", "LayerNorm.beta");
  header.resize(header_bytes, ' ');
  write_file_atomically(folder / "model.safetensors",
                        bytes.replace(sizeof(header_bytes), header_bytes, header));
  auto json = nlohmann::json::parse(read_file(encoder_folder("bert") / "config.json"));
  json["architectures"] = {"BertForMaskedLM"};
  write_file_atomically(folder / "config.json", json.dump());
  expect_there_and_back(folder, root, "bert");
}

TEST(HfEncoders, WhatIsNotBuiltIsNamed) {
  const auto text = read_file(encoder_folder("megatron_bert") / "config.json");
  const auto error = [&](const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    json[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("architectures", {"MegatronBertForQuestionAnswering"}),
            "config.json: a MegatronBertForQuestionAnswering is not built yet\nhint: expected a "
            "model with MegatronBertForPreTraining, MegatronBertForMaskedLM, "
            "MegatronBertForSequenceClassification or MegatronBertModel as its architecture");
  EXPECT_EQ(error("hidden_act", "gelu_new"),
            "config.json: hidden_act other than \"gelu\" is not built: the head has the exact "
            "GELU\nhint: --no-bias-gelu-fusion trains with the exact GELU in the layers, too");
  EXPECT_EQ(error("tie_word_embeddings", false),
            "config.json: tie_word_embeddings false is not built");
  EXPECT_NE(error("position_embedding_type", "relative_key"), "");
  EXPECT_NE(error("is_decoder", true), "");
}

// As folders that were written before transformers 5 have them.
TEST(HfEncoders, ReadsOldKeysOfModernBert) {
  auto json = nlohmann::json::parse(read_file(encoder_folder("modernbert") / "config.json"));
  const HfModel now = parse_hf_config(json.dump(), "config.json");
  for (const char* key : {"rope_parameters", "layer_types"}) json.erase(key);
  json["global_rope_theta"] = 160.0;
  json["local_rope_theta"] = 10.0;
  json["global_attn_every_n_layers"] = 3;
  const auto old = [&] { return parse_hf_config(json.dump(), "config.json").config.transformer; };
  EXPECT_EQ(architecture_difference(now.config.transformer, old()), "");
  EXPECT_EQ(old().window_size, (std::vector<int64_t>{3, 3}));
  EXPECT_TRUE(old().window(1).empty() && !old().window(2).empty() && old().window(4).empty());
  json["global_attn_every_n_layers"] = 2;
  EXPECT_TRUE(old().window(1).empty() && !old().window(2).empty() && !old().window(4).empty());
  for (const char* key : {"global_rope_theta", "local_rope_theta", "local_attention"})
    json.erase(key);
  EXPECT_EQ(old().rotary_base, 160000);
  EXPECT_EQ(old().rotary_base_local, 10000);
  EXPECT_EQ(old().window_size, (std::vector<int64_t>{64, 64}));
}

TEST(HfEncoders, WhatIsNotBuiltOfModernBertIsNamed) {
  const auto text = read_file(encoder_folder("modernbert") / "config.json");
  const auto error = [&](const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    json[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("architectures", {"ModernBertForTokenClassification"}),
            "config.json: a ModernBertForTokenClassification is not built yet\nhint: expected a "
            "model with ModernBertForMaskedLM, ModernBertForSequenceClassification or "
            "ModernBertModel as its architecture");
  EXPECT_EQ(error("hidden_activation", "silu"),
            "config.json: hidden_activation \"silu\" is not built, only \"gelu\"");
  EXPECT_EQ(error("classifier_activation", "relu"),
            "config.json: classifier_activation \"relu\" is not built, only \"gelu\"");
  EXPECT_EQ(error("decoder_bias", false),
            "config.json: decoder_bias false is not built, only true");
  EXPECT_EQ(error("attention_bias", true),
            "config.json: attention_bias without mlp_bias, or the reverse, is not built");
  EXPECT_EQ(error("classifier_pooling", "max"),
            "config.json: classifier_pooling \"max\" is not built, only \"cls\" and \"mean\"");
  EXPECT_EQ(error("local_attention", -2),
            "config.json: local_attention is -2, expected 0 to 2147483647");
  EXPECT_EQ(error("layer_types", {"full_attention", "chunked", "chunked", "full_attention"}),
            "config.json: layers of the type \"chunked\" are not built");
  EXPECT_EQ(error("rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}).substr(0, 26),
            "config.json: rope_scaling ");
  auto rope = nlohmann::json::parse(text)["rope_parameters"];
  rope["sliding_attention"]["rope_type"] = "linear";
  rope["sliding_attention"]["factor"] = 2.0;
  EXPECT_EQ(error("rope_parameters", rope),
            "config.json: scaled rotary positions of sliding layers are not built");
  rope = nlohmann::json::parse(text)["rope_parameters"];
  rope["full_attention"]["partial_rotary_factor"] = 0.5;
  EXPECT_EQ(error("rope_parameters", rope),
            "config.json: partial_rotary_factor 0.5 is not built, only 1");
}

TEST(HfEncoders, AModernBertThatIsNoneIsNotWritten) {
  const HfModel model = read_hf_config(encoder_folder("modernbert"));
  const auto error = [&](const auto& change) {
    ModelConfig config = model.config;
    change(config, config.transformer, *config.own.as<BertConfig>());
    return error_of([&] { write_hf_config(*model.family, config, "{}"); });
  };
  EXPECT_EQ(error([](auto&, auto&, auto&) {}), "");
  EXPECT_EQ(error([](auto&, auto& t, auto&) { t.window_size = {3, 2}; }),
            "windows of a ModernBERT of Hugging Face are as wide to the left as to the right, the "
            "model has --window-size 3 2");
  EXPECT_EQ(error([](auto&, auto&, auto& own) { own.bert_token_types = 2; }),
            "a ModernBERT of Hugging Face has no token types");
  EXPECT_EQ(error([](auto&, auto&, auto& own) { own.bert_pooler = true; }),
            "a ModernBERT of Hugging Face has neither a binary head nor a pooler");
  EXPECT_EQ(error([](auto&, auto&, auto& own) { own.bert_choices = 4; }),
            "a multiple-choice head is not written as a ModernBERT");
  EXPECT_EQ(
      error([](auto&, auto&, auto& own) { own.bert_classes = 3, own.bert_pooler_norm = false; }),
      "classes of a ModernBERT of Hugging Face read a pooler with a norm (bert_pooler_norm)");
  EXPECT_EQ(error([](auto&, auto& t, auto&) { t.first_input_norm = true; }),
            "a modernbert model of Hugging Face cannot express this model: first_input_norm is "
            "true, not false");
  EXPECT_EQ(error([](auto&, auto& t, auto&) { t.exact_geglu = false, t.geglu = true; }),
            "a modernbert model of Hugging Face cannot express this model: exact_geglu is false, "
            "not true");
  EXPECT_NE(error([](auto&, auto& t, auto&) { t.kv_channels = 6; }), "");
}

TEST(HfEncoders, ClassesThatNoFamilyHasAreNotWritten) {
  const HfModel model = read_hf_config(encoder_folder("roberta_classes"));
  const auto error = [&](const auto& change) {
    ModelConfig config = model.config;
    change(*config.own.as<BertConfig>());
    return error_of([&] { write_hf_config(*model.family, config, "{}"); });
  };
  EXPECT_EQ(error([](BertConfig&) {}), "");
  EXPECT_EQ(error([](BertConfig& own) { own.bert_pooling = BertPooling::kMean; }),
            "classes of a Roberta of Hugging Face read the first token (bert_pooling)");
  EXPECT_EQ(error([](BertConfig& own) { own.bert_classes = 0, own.bert_choices = 4; }),
            "a multiple-choice head is not written as a Roberta");
}

// A BERT pretrained here says its two token types by having a binary head.
TEST(HfEncoders, TokenTypesOfABinaryHeadAreWritten) {
  const HfModel model = read_hf_config(encoder_folder("megatron_bert"));
  ModelConfig config = model.config;
  ASSERT_TRUE(config.own.as<BertConfig>()->bert_binary_head);
  config.own.as<BertConfig>()->bert_token_types.reset();
  const std::string text = write_hf_config(*model.family, config, "{}");
  EXPECT_EQ(nlohmann::json::parse(text)["type_vocab_size"], 2);
}

TEST(HfEncoders, AFamilyThatDoesNotFitIsNotWritten) {
  const auto error = [](const char* golden, const char* family) {
    const HfModel model = read_hf_config(encoder_folder(golden));
    return error_of([&] { write_hf_config(*find_hf_family(family), model.config, "{}"); });
  };
  EXPECT_EQ(error("bert", "megatron-bert"),
            "the model has a norm of its embeddings (bert_embedding_norm)");
  EXPECT_EQ(error("megatron_bert", "bert"),
            "the model has no norm of its embeddings (bert_embedding_norm)");
  EXPECT_EQ(error("roberta", "bert"),
            "position 0 of the model has row 2 of the table (bert_first_position), here it has 0");
  EXPECT_NE(error("bert", "roberta"), "");
  EXPECT_EQ(error("roberta", "camembert"), "");
}

// The texts of a golden in one sample, each of which sees itself alone and has its own positions,
// against one sample for each, with padding behind it.
TEST(HfEncoders, PackedTextsAreThoseApart) {
  for (const std::string name : {"bert", "modernbert"}) {
    const ParallelGroups groups;
    const StageSlice whole = {0, num_layers(name), true, true};
    HfEncoder apart(name, groups, whole, {}, opened(name, "p2p"), at::kDouble),
        packed(name, groups, whole, {}, opened(name, "p2p"), at::kDouble);
    const int64_t samples = apart.batch["text"].size(0), s = apart.batch["text"].size(1);
    const at::Tensor ends = (apart.batch["padding_mask"] * at::arange(1, s + 1)).amax(1);
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < samples; ++i) lengths.push_back(ends[i].item<int64_t>());
    apart.batch.set("types", at::zeros_like(apart.batch["types"]));
    apart.batch.set("padding_mask",
                    (at::arange(s) < at::tensor(lengths).unsqueeze(1)).to(at::kLong));
    packed.batch = {};
    const auto join = [&](const at::Tensor& column) {
      std::vector<at::Tensor> parts;
      for (int64_t i = 0; i < samples; ++i)
        parts.push_back(column[i].narrow(0, 0, lengths[static_cast<size_t>(i)]));
      return at::cat(parts).unsqueeze(0);
    };
    for (const char* column : {"text", "labels", "loss_mask"})
      packed.batch.set(column, join(apart.batch[column]));
    packed.context = context_for(packed.batch["text"], /*training=*/false);
    packed.context.position_ids = join(at::arange(s).expand({samples, s}));
    packed.context.document_ids = join(at::arange(samples).unsqueeze(1).expand({samples, s}));
    packed.batch.place = packed.context.place;
    at::Tensor hidden, hidden_apart;
    const auto grads = gradients_of_loss(packed, hidden),
               grads_apart = gradients_of_loss(apart, hidden_apart);
    expect_close(hidden.transpose(0, 1), join(hidden_apart.transpose(0, 1)), 1e-11, 0, name);
    for (const auto& [parameter, grad] : grads_apart)
      expect_close(grads.at(parameter), grad, 1e-11, 1.0, name + " gradient of " + parameter);
  }
}

}  // namespace
}  // namespace megatron
