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

// A golden, and the model of its folder with its weights and gradients in fp32.
struct HfEncoder {
  HfEncoder(const std::string& name, const ParallelGroups& groups,
            const StageSlice& slice = {0, 2, true, true}, const EmbeddingTables& tables = {})
      : golden(read_golden_tensors(SafetensorsFile(encoder_folder(name) / "golden.safetensors"))),
        folder(open_hf_folder(encoder_folder(name))),
        model(folder.model.config, groups, slice, tables),
        store(model, at::kFloat, at::kCPU, /*gradients=*/true) {
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

TEST_P(HfEncoderGolden, LogitsOnTwoContextParallelRanks) {
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.cp = ProcessGroup(world, "cp");
    HfEncoder e(GetParam(), groups);
    for (const char* column : {"text", "types"})
      e.batch.set(column, zigzag_slice(e.batch[column], 1, groups.cp));
    e.context.place.position = zigzag_slice(e.context.place.position, 0, groups.cp);
    const at::Tensor hidden = e.model.hidden(e.batch, {}, e.context).front();
    e.batch.set("padding_mask", zigzag_slice(e.batch["padding_mask"], 1, groups.cp));
    expect_close(e.logits(hidden), zigzag_slice(e.golden.at("logits"), 1, groups.cp), kHfTolerance,
                 0, "logits");
  });
}

TEST_P(HfEncoderGolden, LogitsOfTwoSegments) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  HfEncoder first(GetParam(), groups, {0, 1, true, false}),
      second(GetParam(), groups, {1, 1, false, true}, first.model.embedding_tables());
  const StageTensors middle = first.model.hidden(first.batch, {}, first.context);
  const at::Tensor hidden = second.model.hidden(second.batch, middle, second.context).front();
  expect_close(second.logits(hidden), second.golden.at("logits"), kHfTolerance, 0, "logits");
}

TEST(HfEncoderGolden, HiddenStatesOfAModelWithoutAHead) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  HfEncoder e("bert_model", groups);
  const at::Tensor hidden = e.model.hidden(e.batch, {}, e.context).front();
  expect_close(hidden.transpose(0, 1) * e.batch["padding_mask"].unsqueeze(2), e.golden.at("hidden"),
               kHfTolerance, 0, "hidden states");
  expect_close(e.model.pooled(hidden), e.golden.at("pooled"), kHfTolerance, 0, "pooled");
  EXPECT_EQ(error_of([&] { e.model.logits(hidden); }),
            "this BERT has no head of masked tokens (bert_lm_head)");
}

INSTANTIATE_TEST_SUITE_P(Families, HfEncoderGolden,
                         testing::Values("megatron_bert", "bert", "roberta"),
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
  for (const char* key : {"architectures", "type_vocab_size", "hidden_act", "layer_norm_eps",
                          "max_position_embeddings", "pad_token_id"})
    EXPECT_EQ(json[key], theirs[key]) << key;
}

fs::path empty_folder(const std::string& name) {
  const fs::path folder = fs::path(testing::TempDir()) / ("hf_encoder_" + name);
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

TEST(HfEncoders, ThereAndBackAreTheSame) {
  for (const char* name : {"megatron_bert", "bert", "roberta", "bert_model"})
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
            "model with MegatronBertForPreTraining, MegatronBertForMaskedLM or MegatronBertModel "
            "as its architecture");
  EXPECT_EQ(error("hidden_act", "gelu_new"),
            "config.json: hidden_act other than \"gelu\" is not built: the head has the exact "
            "GELU\nhint: --no-bias-gelu-fusion trains with the exact GELU in the layers, too");
  EXPECT_EQ(error("tie_word_embeddings", false),
            "config.json: tie_word_embeddings false is not built");
  EXPECT_NE(error("position_embedding_type", "relative_key"), "");
  EXPECT_NE(error("is_decoder", true), "");
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

}  // namespace
}  // namespace megatron
