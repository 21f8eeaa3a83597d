// T5 of Hugging Face against transformers: logits with padding in the batch and distances beyond
// the last bucket, the loss and every gradient; the logits on tensor-parallel ranks and from
// segments; greedy tokens; the same bytes both ways.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/inference/local_links.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/t5/t5_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/their_form.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

fs::path t5_folder(const std::string& name) {
  return fs::path(MEGATRON_SOURCE_DIR "/tests/golden/encoders") / name;
}

StageSlice whole(const std::string& name) {
  const HfModel model = read_hf_config(t5_folder(name));
  return {0, model.config.transformer.num_layers, true, true};
}

// A golden, and the model of its folder with its weights and gradients in fp32.
struct HfT5 {
  HfT5(const std::string& name, const ParallelGroups& groups, const StageSlice& slice,
       const EmbeddingTables& tables = {})
      : HfT5(name, groups, slice, tables, open_hf_folder(t5_folder(name))) {}
  HfT5(const std::string& name, const ParallelGroups& groups, const StageSlice& slice,
       const EmbeddingTables& tables, HfFolder opened)
      : golden(read_golden_tensors(SafetensorsFile(t5_folder(name) / "golden.safetensors"))),
        folder(std::move(opened)),
        model(folder.model.config, groups, slice, tables),
        store(model, at::kFloat, at::kCPU, /*gradients=*/true) {
    load_hf_values(folder, groups, slice, model);
    const at::Tensor labels = golden.at("labels").to(at::kLong);
    batch.set("text_enc", golden.at("input_ids").to(at::kLong));
    batch.set("enc_mask", golden.at("attention_mask").to(at::kLong));
    batch.set("text_dec", golden.at("decoder_input_ids").to(at::kLong));
    batch.set("dec_mask", (labels >= 0).to(at::kLong));
    batch.set("labels", labels.clamp_min(0));
    batch.set("loss_mask", (labels >= 0).to(at::kFloat));
    context = context_for(batch["text_enc"], /*training=*/false);
    batch.place = context.place;
  }
  // [b, s_d, v] of tokens that are predicted.
  at::Tensor logits(const at::Tensor& hidden) {
    return model.logits(hidden).transpose(0, 1) * batch["dec_mask"].unsqueeze(2);
  }

  std::map<std::string, at::Tensor> golden;
  const HfFolder folder;
  T5Model model;
  PlainParameterStore store;
  Batch batch;
  ForwardContext context;
};

class HfT5Golden : public testing::TestWithParam<std::string> {};

TEST_P(HfT5Golden, LogitsAndGradients) {
  const ParallelGroups groups;
  HfT5 t(GetParam(), groups, whole(GetParam()));
  RecomputeTape tape;
  t.context.tape = &tape;
  const StageTensors hidden = t.model.hidden(t.batch, {}, t.context);
  {
    const at::NoGradGuard no_grad;
    expect_close(t.logits(hidden.front()), t.golden.at("logits"), kHfTolerance, 0, "logits");
  }
  const Loss loss = t.model.loss(hidden, t.batch, t.context);
  EXPECT_NEAR((loss.sum / loss.weight).item<double>(), t.golden.at("loss").item<double>(), 1e-5);
  tape.backward(BackwardRoot(loss.sum), {(1 / loss.weight).to(loss.sum)});

  std::map<std::string, at::Tensor> grads;
  t.model.visit([&](const std::string& ours, Parameter& parameter) {
    grads[ours] = t.store.grad(parameter);
  });
  double all = 0;
  size_t compared = 0, given = 0;
  for (const auto& [name, tensor] : t.golden) {
    if (!name.starts_with("grad/")) continue;
    all += tensor.square().sum().item<double>();
    ++given;
  }
  for (const HfTensor& tensor : hf_tensors(*t.folder.model.family, t.folder.model.config)) {
    expect_close(in_their_form(tensor, grads.at(tensor.ours)), t.golden.at("grad/" + tensor.name),
                 kHfTolerance, std::sqrt(all), "gradient of " + tensor.name);
    ++compared;
  }
  EXPECT_EQ(compared, given);
}

TEST_P(HfT5Golden, LogitsOnTwoTensorParallelRanks) {
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    HfT5 t(GetParam(), groups, whole(GetParam()));
    const at::Tensor logits = t.logits(t.model.hidden(t.batch, {}, t.context).front());
    const int64_t own = logits.size(2);
    expect_close(logits, t.golden.at("logits").narrow(2, groups.tp.rank() * own, own), kHfTolerance,
                 0, "logits");
  });
}

// Leaves a rank its part of the batch, behind whose texts there is padding so that lengths divide
// over four halves.
void take_context_part(HfT5& t, const ProcessGroup& cp) {
  for (auto& [name, column] : t.batch.columns()) {
    column = at::constant_pad_nd(column, {0, (4 - column.size(1) % 4) % 4});
    if (name != "enc_mask" && name != "dec_mask") column = zigzag_slice(column, 1, cp);
  }
  t.context.place.position = zigzag_positions(t.batch["enc_mask"].size(1), cp.size(), cp.rank());
  t.batch.place = t.context.place;
}

HfFolder opened_t5(const std::string& name, const char* exchange) {
  HfFolder folder = open_hf_folder(t5_folder(name));
  folder.model.config.transformer.cp_comm_type = {exchange};
  return folder;
}

TEST_P(HfT5Golden, LogitsOnTwoContextParallelRanks) {
  for (const char* exchange : {"all_gather", "a2a"})
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      const at::NoGradGuard no_grad;
      ParallelConfig parallel;
      parallel.context_parallel_size = 2;
      const ParallelGroups groups = make_parallel_groups(parallel, world);
      HfT5 t(GetParam(), groups, whole(GetParam()), {}, opened_t5(GetParam(), exchange));
      const int64_t s = t.golden.at("logits").size(1);
      take_context_part(t, groups.cp);
      const at::Tensor hidden = t.model.hidden(t.batch, {}, t.context).front(),
                       logits = zigzag_gather(t.model.logits(hidden), 0, groups.cp);
      expect_close(
          logits.narrow(0, 0, s).transpose(0, 1) * t.batch["dec_mask"].narrow(1, 0, s).unsqueeze(2),
          t.golden.at("logits"), kHfTolerance, 0, cat("logits by ", exchange));
    });
}

// Cut within the encoder, between the stacks and within the decoder.
TEST_P(HfT5Golden, LogitsOfTwoSegments) {
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  const int64_t layers = whole(GetParam()).num_layers;
  HfT5 all(GetParam(), groups, whole(GetParam()));
  for (int64_t cut = 1; cut < layers; ++cut) {
    HfT5 first(GetParam(), groups, {0, cut, true, false}),
        second(GetParam(), groups, {cut, layers - cut, false, true},
               first.model.embedding_tables());
    const StageTensors middle = first.model.hidden(first.batch, {}, first.context);
    if (cut == all.model.config().own.as<T5Config>()->encoder_num_layers) {
      EXPECT_TRUE(at::equal(all.model.encoded(all.batch, all.context), middle.front()));
    }
    const at::Tensor hidden = second.model.hidden(second.batch, middle, second.context).front();
    expect_close(second.logits(hidden), second.golden.at("logits"), kHfTolerance, 0, "logits");
  }
}

// The samples without a hole, together: the encoder reads each once, their texts have one batch.
// Stages cut within the encoder, at its end and within the decoder.
TEST_P(HfT5Golden, GreedyTokensOnOneRankAndOnSeveral) {
  const auto golden =
      read_golden_tensors(SafetensorsFile(t5_folder(GetParam()) / "golden.safetensors"));
  const at::Tensor &ids = golden.at("input_ids"), &mask = golden.at("attention_mask"),
                   &greedy = golden.at("generated");
  ServedWorkload workload;
  workload.positions = 1 + greedy.size(1);
  std::vector<RequestSpec>& requests = workload.waves.emplace_back();
  for (int64_t i = 1; i < ids.size(0); ++i) {
    const int64_t length = mask[i].sum().item<int64_t>();
    const int32_t* first = ids[i].const_data_ptr<int32_t>();
    RequestSpec spec;
    spec.prompt = {0};
    spec.state_input =
        std::make_shared<const StateInput>(StateInput{{first, first + length}, {}, {}});
    spec.sampling.temperature = 0.0;
    spec.stop.max_tokens = greedy.size(1);
    requests.push_back(spec);
  }
  std::vector<std::pair<int, int>> ranks = {{1, 1}, {2, 1}};
  const int64_t layers = whole(GetParam()).num_layers;
  for (int stages = 2; stages <= layers; ++stages)
    if (layers % stages == 0) ranks.insert(ranks.end(), {{1, stages}, {2, stages}});
  for (const auto& [tensor, stages] : ranks) {
    LocalLinks links(tensor * stages);
    std::vector<ServedText> texts;
    const int64_t tensor_ranks = tensor, num_stages = stages;
    run_ranks(tensor * stages, [&](const std::shared_ptr<Backend>& world) {
      ParallelConfig parallel;
      parallel.tensor_model_parallel_size = tensor_ranks;
      parallel.pipeline_model_parallel_size = num_stages;
      const ParallelGroups groups = make_parallel_groups(parallel, world);
      LoadModelRequest request;
      request.load = t5_folder(GetParam());
      request.dtype = at::kFloat;
      const LoadedModel loaded = load_model(request, groups);
      std::vector<ServedText> got = serve_workload(*loaded.model, workload, links, world->rank());
      if (world->rank() == 0) texts = std::move(got);
    });
    ASSERT_EQ(std::ssize(texts), greedy.size(0) - 1);
    for (int64_t i = 0; i < std::ssize(texts); ++i) {
      const int32_t* expected = greedy[i + 1].const_data_ptr<int32_t>();
      EXPECT_EQ(texts[static_cast<size_t>(i)].tokens,
                std::vector<int32_t>(expected, expected + greedy.size(1)))
          << "sample " << i + 1 << " on " << tensor << " tensor ranks and " << stages << " stages";
    }
  }
}

// A padding token that ends a decoder's text, and whose label counts, attends to those before it.
TEST(HfT5s, TextsThatEndInPaddingTokensHaveTheLossOfOneRank) {
  std::vector<double> losses;
  for (const int ranks : {1, 2})
    run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
      const at::NoGradGuard no_grad;
      ParallelConfig parallel;
      parallel.context_parallel_size = ranks;
      const ParallelGroups groups = make_parallel_groups(parallel, world);
      HfT5 t("t5_v1_1", groups, whole("t5_v1_1"), {}, opened_t5("t5_v1_1", "all_gather"));
      at::Tensor mask = t.batch["dec_mask"].clone();
      for (int64_t i = 0; i < mask.size(0); ++i)
        mask[i].index_fill_(0, at::tensor({int64_t{1}, mask[i].sum().item<int64_t>() - 1}), 0);
      t.batch.set("dec_mask", mask);
      take_context_part(t, groups.cp);
      const Loss loss = t.model.loss(t.model.hidden(t.batch, {}, t.context), t.batch, t.context);
      groups.cp.all_reduce(loss.sum)->wait();
      if (world->rank() == 0) losses.push_back(loss.sum.item<double>());
    });
  EXPECT_NEAR(losses[1], losses[0], 1e-6 * losses[0]);
}

INSTANTIATE_TEST_SUITE_P(Families, HfT5Golden, testing::Values("t5_v1_0", "t5_v1_1", "mt5"),
                         [](const auto& param) { return param.param; });

fs::path t5_work_folder(const std::string& name) {
  const fs::path folder = fs::path(testing::TempDir()) / ("hf_t5_" + name);
  fs::remove_all(folder);
  return folder;
}

TEST(HfT5s, ThereAndBackAreTheSame) {
  for (const std::string name : {"t5_v1_0", "t5_v1_1", "mt5", "t5_sentence"}) {
    const fs::path root = t5_work_folder(name);
    import_hf_folder(t5_folder(name), root / "ours");
    export_hf_folder({root / "ours", {}, root / "theirs", "", 1 << 20});
    const auto a = read_golden_tensors(SafetensorsFile(t5_folder(name) / "model.safetensors")),
               b = read_golden_tensors(SafetensorsFile(root / "theirs" / "model.safetensors"));
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [tensor, value] : a) {
      ASSERT_TRUE(b.contains(tensor)) << tensor;
      EXPECT_TRUE(at::equal(b.at(tensor), value)) << tensor;
    }
    // Also without the file that was read.
    const auto theirs = nlohmann::json::parse(read_file(t5_folder(name) / "config.json"));
    const HfModel model = read_hf_config(t5_folder(name));
    for (const std::string& text : {read_file(root / "theirs" / "config.json"),
                                    write_hf_config(*model.family, model.config, "{}")}) {
      const auto json = nlohmann::json::parse(text);
      for (const char* key :
           {"architectures", "d_model", "d_kv", "d_ff", "num_heads", "num_layers",
            "is_encoder_decoder", "num_decoder_layers", "relative_attention_num_buckets",
            "relative_attention_max_distance", "layer_norm_epsilon", "feed_forward_proj",
            "tie_word_embeddings", "vocab_size"})
        EXPECT_EQ(json[key], theirs[key]) << name << " " << key;
    }
  }
}

TEST(HfT5s, WhatIsNotBuiltIsNamed) {
  const auto text = read_file(t5_folder("t5_v1_0") / "config.json");
  const auto error = [&](const char* key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(text);
    json[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "config.json"); });
  };
  EXPECT_EQ(error("architectures", {"T5ForTokenClassification"}),
            "config.json: a T5ForTokenClassification is not built\nhint: expected a model with "
            "T5ForConditionalGeneration or T5EncoderModel as its architecture");
  EXPECT_EQ(error("architectures", {"T5WithLMHeadModel"}), "");
  EXPECT_EQ(error("feed_forward_proj", "gated-relu"),
            "config.json: feed_forward_proj \"gated-relu\" is not built");
  EXPECT_EQ(error("tie_word_embeddings", false),
            "config.json: scale_decoder_outputs with an output layer of its own is not built");
  EXPECT_NE(error("is_encoder_decoder", false), "");
  EXPECT_NE(error("model_type", "umt5"), "");
  ModelConfig config = read_hf_config(t5_folder("t5_v1_0")).config;
  const auto not_written = [&] {
    return error_of([&] { write_hf_config(*find_hf_family("t5"), config, "{}"); });
  };
  EXPECT_EQ(not_written(), "");
  config.own.as<T5Config>()->t5_output_bias = true;
  EXPECT_EQ(
      not_written(),
      "models of Hugging Face's T5 have no bias of a tied output layer (--t5-no-output-bias)");
  config.own.as<T5Config>()->t5_output_bias = false;
  config.transformer.query_pre_attn_scalar.reset();
  EXPECT_EQ(not_written(),
            "a t5 model of Hugging Face cannot express this model: query_pre_attn_scalar is 6, not "
            "1");
}

}  // namespace
}  // namespace megatron
