// Adapters of PEFT for encoders and encoder-decoders, with the heads beside them, against
// transformers and peft: logits on one rank and on tensor-parallel ranks, the loss and every
// gradient; in and out byte for byte; over a base without the head; what models train.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/adapters.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/t5/t5_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/their_form.h"

namespace megatron {
namespace {

using Names = std::vector<std::string>;

struct AdaptedCase {
  const char* name;
  const char* base;
  Names targets;
};

void PrintTo(const AdaptedCase& c, std::ostream* out) { *out << c.name; }

const std::vector<AdaptedCase> kAdaptedCases = {
    {"bert_classes_qv", "bert_classes", {"linear_q", "linear_v"}},
    {"roberta_classes_all",
     "roberta_classes",
     {"linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1", "linear_fc2"}},
    {"modernbert_classes_joined",
     "modernbert_classes",
     {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}},
    {"t5_v1_1_qv", "t5_v1_1", {"linear_q", "linear_v", "linear_fc1_up"}},
    {"t5_v1_0_others", "t5_v1_0", {"linear_k", "linear_proj", "linear_fc1", "linear_fc2"}},
};

std::filesystem::path encoder_base(const std::string& name) {
  return std::filesystem::path(MEGATRON_SOURCE_DIR "/tests/golden/encoders") / name;
}
std::filesystem::path encoder_adapter(const std::string& name) {
  return std::filesystem::path(MEGATRON_SOURCE_DIR "/tests/golden/lora") / name;
}

std::map<std::string, at::Tensor> read_golden_of(const std::filesystem::path& folder) {
  return read_golden_tensors(SafetensorsFile(folder / "golden.safetensors"));
}

// The model of a base folder and an adapter in fp64, with gradients, and the inputs of the base's
// golden.
struct AdaptedEncoder {
  AdaptedEncoder(const std::string& base_name, const std::string& adapter_name,
                 const ParallelGroups& groups)
      : golden(read_golden_of(encoder_adapter(adapter_name))),
        base(open_hf_folder(encoder_base(base_name))),
        own_heads(base.model.config),
        adapter(open_peft_folder(encoder_adapter(adapter_name), *base.model.family,
                                 base.model.config)) {
    ModelConfig& config = base.model.config;
    const int64_t tp = groups.tp.size();
    config.padded_vocab_size = (config.vocab_size + tp - 1) / tp * tp;
    model = make_model(config, groups);
    store =
        std::make_unique<PlainParameterStore>(*model, at::kDouble, at::kCPU, /*gradients=*/true);
    LoadOptions options;
    options.convert_dtype = true;
    std::vector<ShardedTensor> weights, adapters;
    model->visit([&](const std::string& name, Parameter& parameter) {
      (adapter.manifest().tensors.contains(name) ? adapters : weights)
          .push_back(sharded_tensor(parameter, groups, name, parameter.value));
    });
    adapter.load(adapters, options);
    for (const std::string& name : replaced_parameters(own_heads, config))
      options.allow_unexpected.push_back(name);
    for (const auto& [name, stored] : adapter.manifest().tensors)
      options.allow_unexpected.push_back(name);
    base.checkpoint.load(weights, options);
    const auto inputs = read_golden_of(encoder_base(base_name));
    const auto column = [&](const char* name) { return inputs.at(name).to(at::kLong); };
    if (classes()) {
      batch.set("text", column("input_ids"));
      batch.set("types", column("token_type_ids"));
      batch.set("padding_mask", column("attention_mask"));
      labels = inputs.contains("class") ? column("class") : at::Tensor();
    } else {
      labels = column("labels");
      batch.set("text_enc", column("input_ids"));
      batch.set("enc_mask", column("attention_mask"));
      batch.set("text_dec", column("decoder_input_ids"));
      batch.set("dec_mask", (labels >= 0).to(at::kLong));
      batch.set("labels", labels.clamp_min(0));
      batch.set("loss_mask", (labels >= 0).to(at::kFloat));
    }
    context = context_for(batch[classes() ? "text" : "text_enc"], /*training=*/false);
    batch.place = context.place;
  }

  bool classes() const { return golden.contains("classes"); }
  StageTensors hidden() { return model->hidden(batch, {}, context); }
  at::Tensor class_logits(const StageTensors& states) {
    return dynamic_cast<BertModel&>(*model).class_logits(states.front(), batch["padding_mask"]);
  }
  // Classes [b, c], or logits of the decoder [b, positions, v].
  at::Tensor logits(const StageTensors& states) {
    if (classes()) return class_logits(states);
    const at::Tensor positions = at::tensor({0, 1, 7, 15}, at::kLong);
    const int64_t v = model->config().vocab_size;
    const at::Tensor all = model->logits(states.front()) * batch["dec_mask"].t().unsqueeze(2);
    return all.index_select(0, positions).transpose(0, 1).narrow(2, 0, std::min(v, all.size(2)));
  }
  const at::Tensor& expected() const { return golden.at(classes() ? "classes" : "logits"); }
  at::Tensor mean_loss(const StageTensors& states) {
    if (classes()) return at::cross_entropy_loss(class_logits(states), labels);
    const Loss loss = model->loss(states, batch, context);
    return loss.sum / loss.weight;
  }

  std::map<std::string, at::Tensor> golden;
  HfFolder base;
  const ModelConfig own_heads;  // of the base alone
  const Checkpoint adapter;
  std::unique_ptr<Model> model;
  std::unique_ptr<PlainParameterStore> store;
  Batch batch;
  at::Tensor labels;
  ForwardContext context;
};

class PeftOfEncoders : public testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(testing::TempDir()) / cat("peft_encoders_", getpid());
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  std::filesystem::path root_;
};

class PeftEncoders : public PeftOfEncoders, public testing::WithParamInterface<AdaptedCase> {
 protected:
  // Reads the case's base and adapter, and writes them to a folder.
  void in_and_out(const char* folder, bool merged) {
    const AdaptedCase& c = GetParam();
    import_hf_folder(encoder_base(c.base), root_ / "ours", {}, encoder_adapter(c.name));
    ExportRequest request;
    request.load = root_ / "ours";
    request.folder = root_ / folder;
    request.merge_adapter = merged;
    export_hf_folder(request);
  }
};

TEST_P(PeftEncoders, LogitsLossAndGradients) {
  const AdaptedCase& c = GetParam();
  const ParallelGroups groups;
  AdaptedEncoder e(c.base, c.name, groups);
  EXPECT_EQ(e.base.model.config.transformer.lora_targets, c.targets);
  RecomputeTape tape;
  e.context.tape = &tape;
  const StageTensors states = e.hidden();
  {
    const at::NoGradGuard no_grad;
    expect_close(e.logits(states), e.expected(), kHfTolerance, 0, "logits");
  }
  const at::Tensor loss = e.mean_loss(states);
  EXPECT_NEAR(loss.item<double>(), e.golden.at("loss").item<double>(), 1e-5);
  tape.backward(BackwardRoot(loss), {at::ones_like(loss)});

  std::map<std::string, at::Tensor> grads;
  std::set<std::string> trained;
  e.model->visit([&](const std::string& name, Parameter& parameter) {
    grads[name] = e.store->grad(parameter);
    if (parameter.trainable)
      trained.insert(name);
    else
      EXPECT_EQ(grads[name].abs().max().item<double>(), 0.0) << name;
  });
  double all = 0;
  size_t compared = 0, given = 0;
  for (const auto& [name, tensor] : e.golden)
    if (name.starts_with("grad/")) all += tensor.square().sum().item<double>(), ++given;
  for (const HfTensor& tensor : peft_tensors(*e.base.model.family, e.base.model.config)) {
    EXPECT_EQ(trained.count(tensor.ours), 1U) << tensor.ours;
    if (!e.golden.contains("grad/" + tensor.name)) {
      EXPECT_TRUE(tensor.ours.starts_with("pooler.")) << tensor.name;  // PEFT freezes it by default
      continue;
    }
    expect_close(in_their_form(tensor, grads.at(tensor.ours)), e.golden.at("grad/" + tensor.name),
                 kHfTolerance, std::sqrt(all), "gradient of " + tensor.name);
    ++compared;
  }
  EXPECT_EQ(compared, given);
}

TEST_P(PeftEncoders, LogitsOnTwoTensorParallelRanks) {
  const AdaptedCase& c = GetParam();
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    AdaptedEncoder e(c.base, c.name, groups);
    const at::Tensor logits = e.logits(e.hidden());
    const int64_t own = logits.size(-1), first = e.classes() ? 0 : groups.tp.rank() * own;
    expect_close(logits, e.expected().narrow(-1, first, own), kHfTolerance, 0, "logits");
  });
}

TEST_P(PeftEncoders, InAndOutTheSameBytes) {
  const AdaptedCase& c = GetParam();
  in_and_out("theirs", /*merged=*/false);
  for (const char* name : {kPeftSafetensors, kPeftConfig})
    EXPECT_EQ(read_file(root_ / "theirs" / name), read_file(encoder_adapter(c.name) / name))
        << name;
}

// The sums are rounded to bf16, the type of the base; the head keeps its own.
TEST_P(PeftEncoders, MergedIsTheSameModel) {
  const AdaptedCase& c = GetParam();
  in_and_out("merged", /*merged=*/true);
  const at::NoGradGuard no_grad;
  const ParallelGroups groups;
  AdaptedEncoder e(c.base, c.name, groups);
  LoadModelRequest merged;
  merged.load = root_ / "merged";
  merged.dtype = at::kFloat;
  merged.tokenizer_required = false;
  LoadedModel loaded = load_model(merged, groups);
  EXPECT_EQ(loaded.config.transformer.lora_rank, 0);
  e.model = std::move(loaded.model);
  expect_close(e.logits(e.hidden()), e.expected(), 8e-2, 0, "logits");
}

INSTANTIATE_TEST_SUITE_P(Cases, PeftEncoders, testing::ValuesIn(kAdaptedCases),
                         [](const auto& param) { return std::string(param.param.name); });

// PEFT adapts bases that have other heads, in whose place theirs is.
TEST_F(PeftOfEncoders, TheHeadOfTheFileIsTheModels) {
  const std::filesystem::path base = encoder_base("bert"),
                              adapter = encoder_adapter("bert_classes_qv");
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = base;
  request.adapter = adapter;
  request.dtype = at::kFloat;
  request.tokenizer_required = false;
  const LoadedModel loaded = load_model(request, groups);
  EXPECT_EQ(num_classes(loaded.config), 3);
  EXPECT_FALSE(has_lm_head(loaded.config));
  const ConvertResult in = import_hf_folder(base, root_ / "ours", {}, adapter);
  ModelConfig stored = read_stored_config(Checkpoint(in.directory)).model;
  EXPECT_EQ(num_classes(stored), 3);
  LoadModelRequest ours;
  ours.load = root_ / "ours";
  ours.dtype = at::kFloat;
  ours.tokenizer_required = false;
  const LoadedModel again = load_model(ours, groups);
  std::map<std::string, at::Tensor> values;
  loaded.model->visit(
      [&](const std::string& name, Parameter& parameter) { values[name] = parameter.value; });
  size_t compared = 0;
  again.model->visit([&](const std::string& name, Parameter& parameter) {
    EXPECT_TRUE(at::equal(parameter.value, values.at(name))) << name;
    ++compared;
  });
  EXPECT_EQ(compared, values.size());
}

TEST_F(PeftOfEncoders, ConfigurationsNameModulesAndHeads) {
  const auto written = [](const char* base, const Names& targets) {
    HfModel model = read_hf_config(encoder_base(base));
    TransformerConfig& t = model.config.transformer;
    t.lora_rank = 2;
    t.lora_targets = targets;
    t.finalize();
    return nlohmann::ordered_json::parse(write_peft_config(*model.family, model.config, "{}"));
  };
  auto json = written("bert_classes", {"query", "linear_proj"});
  EXPECT_EQ(json["task_type"], "SEQ_CLS");
  EXPECT_EQ(json["modules_to_save"], Names({"classifier", "pooler"}));
  EXPECT_EQ(json["target_modules"], Names({"attention.output.dense", "query"}));
  // "output.dense" alone would be the attention's, too.
  EXPECT_EQ(written("bert_classes", {"linear_fc2"})["target_modules"],
            Names({"0.output.dense", "1.output.dense"}));
  EXPECT_EQ(written("roberta_classes", {"value"})["modules_to_save"], Names({"classifier"}));
  json = written("modernbert_classes", {"linear_qkv"});
  EXPECT_EQ(json["modules_to_save"], Names({"classifier", "head"}));
  json = written("t5_v1_1", {"q", "wi_0", "wo"});
  EXPECT_EQ(json["task_type"], "SEQ_2_SEQ_LM");
  EXPECT_EQ(json["target_modules"], Names({"q", "wi_0", "wo"}));
  EXPECT_FALSE(json.contains("modules_to_save"));
  json = written("bert", {"key"});
  EXPECT_TRUE(json["task_type"].is_null());
  EXPECT_FALSE(json.contains("modules_to_save"));
}

TEST_F(PeftOfEncoders, RefusesWhatDoesNotFit) {
  const std::filesystem::path folder = root_ / "adapter";
  std::filesystem::copy(encoder_adapter("t5_v1_1_qv"), folder);
  const auto open = [&](const char* base) {
    HfModel model = read_hf_config(encoder_base(base));
    open_peft_folder(folder, *model.family, model.config);
  };
  auto json = nlohmann::ordered_json::parse(read_file(folder / kPeftConfig));
  json["modules_to_save"] = {"lm_head"};
  std::ofstream(folder / kPeftConfig) << json;
  EXPECT_EQ(
      error_of([&] { open("t5_v1_1"); }),
      cat(folder.string(), "/adapter_config.json: modules_to_save [\"lm_head\"] is not built"));
  std::filesystem::remove_all(folder);
  std::filesystem::copy(encoder_adapter("bert_classes_qv"), folder);
  EXPECT_NE(error_of([&] {
              open("roberta_classes");
            }).find("holds no adapter of a linear of a roberta model"),
            std::string::npos);
  LoadModelRequest request;
  request.load = encoder_base("t5_v1_1");
  request.tokenizer_required = false;
  const ParallelGroups groups;
  const LoadedModel base = load_model(request, groups);
  EXPECT_NE(error_of([&] { ServedAdapter(base, encoder_adapter("t5_v1_1_qv")); })
                .find(": adapters of requests are not built for models that read an input of each "
                      "sequence\nhint: merge the adapter"),
            std::string::npos);
}

Names targets_of(Names given, const AdaptableLinears& model = {}) {
  return written_out_lora_targets(given, model);
}

TEST_F(PeftOfEncoders, TargetsHaveTheNamesOfTheirFamilies) {
  EXPECT_EQ(targets_of({"query", "value"}), Names({"linear_q", "linear_v"}));
  EXPECT_EQ(targets_of({"q", "k", "v", "o", "wi", "wo"}),
            Names({"linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1", "linear_fc2"}));
  EXPECT_EQ(targets_of({"wi_0", "wi_1"}, {.gated = true}),
            Names({"linear_fc1_gate", "linear_fc1_up"}));
  Violations violations;
  validate_lora_targets(targets_of({"dense"}), {}, violations);
  ASSERT_EQ(violations.messages().size(), 1U);
  EXPECT_NE(violations.messages().front().find("--lora-targets dense is not known"),
            std::string::npos);
}

// What a model with adapters trains: the adapters, and new heads.
TEST_F(PeftOfEncoders, NewHeadsAreTrainedBesideAdapters) {
  const auto trained = [](const char* base, const auto& change) {
    ModelConfig config = read_hf_config(encoder_base(base)).config;
    config.transformer.lora_rank = 2;
    change(config);
    config.transformer.finalize();
    config.padded_vocab_size = config.vocab_size;
    std::set<std::string> modules;
    const ParallelGroups groups;
    make_model(config, groups)->visit([&](const std::string& name, Parameter& parameter) {
      if (parameter.trainable && !is_lora_parameter(name))
        modules.insert(name.substr(0, name.find('.')));
    });
    return modules;
  };
  using Modules = std::set<std::string>;
  const auto same = [](ModelConfig&) {};
  EXPECT_EQ(trained("bert", same), Modules());
  EXPECT_EQ(trained("t5_v1_1", same), Modules());
  EXPECT_EQ(trained("bert_classes", same), Modules({"classification_head", "pooler"}));
  EXPECT_EQ(trained("bert", [](ModelConfig& c) { c.own.as<BertConfig>()->bert_choices = 4; }),
            Modules({"multichoice_head", "pooler"}));
}

}  // namespace
}  // namespace megatron
