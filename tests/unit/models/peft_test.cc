// Adapters of PEFT against transformers and peft: logits and gradients on one rank and on
// tensor-parallel ranks; in and out byte for byte; merged into the weights; what is refused.
#include "megatron/interop/huggingface/peft.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/dist_checkpointing/verify.h"
#include "megatron/inference/generator.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct Case {
  const char* name;
  const char* base;
  std::vector<std::string> targets;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const std::vector<Case> kCases = {
    {"llama_all",
     "llama2",
     {"linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up",
      "linear_fc2"}},
    {"qwen2_qv", "qwen2", {"linear_q", "linear_v"}},
    {"llama_gate_down", "llama3", {"linear_proj", "linear_fc1_gate", "linear_fc2"}},
    {"gpt2_joined", "gpt2", {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}},
    {"phi3_joined", "phi3", {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}},
    {"qwen2_moe_shared",
     "qwen2_moe",
     {"linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up",
      "linear_fc2"}},
    {"deepseek_v2_attention",
     "deepseek_v2",
     {"linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
      "linear_proj"}},
    {"bamba_states", "bamba", {"linear_q", "linear_proj", "linear_fc2", "in_proj", "out_proj"}},
    {"qwen3_5_outputs", "qwen3_5_text", {"linear_q", "linear_k", "linear_fc1_up", "out_proj"}},
    {"deepseek_v2_lite_attention", "deepseek_v2_lite", {"linear_q_proj", "linear_kv_up_proj"}},
};

fs::path base_of(const Case& c) {
  return fs::path(MEGATRON_SOURCE_DIR "/tests/golden/hf") / c.base;
}
fs::path adapter_of(const Case& c) {
  return fs::path(MEGATRON_SOURCE_DIR "/tests/golden/lora") / c.name;
}

std::map<std::string, at::Tensor> read_golden_file(const fs::path& path) {
  return read_golden_tensors(SafetensorsFile(path));
}

struct LoraGolden {
  explicit LoraGolden(const Case& c)
      : tensors(read_golden_file(adapter_of(c) / "golden.safetensors")) {
    const SafetensorsFile file(adapter_of(c) / "golden.safetensors");
    loss = std::stod(file.header().metadata.at("loss"));
  }
  at::Tensor grad(const std::string& name, at::IntArrayRef shape) const {
    return tensors.at("grad/" + name).view(shape);
  }
  at::Tensor tokens(int64_t count = 0) const {
    const at::Tensor all = tensors.at("tokens").to(at::kLong).unsqueeze(0);
    return count == 0 ? all : all.narrow(1, 0, count);
  }
  std::map<std::string, at::Tensor> tensors;
  double loss = 0;
};

void expect_logits(const at::Tensor& all, const LoraGolden& golden, double tolerance,
                   const std::string& what) {
  const at::Tensor expected = golden.tensors.at("logits");
  const at::Tensor rows = all.index_select(0, golden.tensors.at("positions").to(at::kLong));
  ASSERT_EQ(rows.sizes(), expected.sizes()) << what;
  for (int64_t i = 0; i < expected.size(0); ++i)
    EXPECT_LE((rows[i] - expected[i]).norm().item<double>(),
              tolerance * expected[i].norm().item<double>())
        << what << ", row " << i;
}

at::Tensor logits_of(const LoadModelRequest& request, const LoraGolden& golden) {
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(request, groups);
  const at::Tensor ids = golden.tensors.at("tokens");
  return full_logits(*loaded.model,
                     {ids.const_data_ptr<int32_t>(), static_cast<size_t>(ids.numel())});
}

LoadModelRequest request_for(const Case& c) {
  LoadModelRequest request;
  request.load = base_of(c);
  request.adapter = adapter_of(c);
  request.dtype = at::kFloat;
  return request;
}

class Peft : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = cat(test->test_suite_name(), ".", test->name());
    std::replace(name.begin(), name.end(), '/', '_');
    root_ = fs::path(testing::TempDir()) / name;
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_;
};

class PeftGolden : public Peft, public testing::WithParamInterface<Case> {};

TEST_P(PeftGolden, TargetsFollowFromTheFile) {
  HfModel base = read_hf_config(base_of(GetParam()));
  open_peft_folder(adapter_of(GetParam()), *base.family, base.config);
  EXPECT_EQ(base.config.transformer.lora_targets, GetParam().targets);
}

TEST_P(PeftGolden, Logits) {
  const LoraGolden golden(GetParam());
  expect_logits(logits_of(request_for(GetParam()), golden), golden, 1e-5, "one rank");
}

TEST_P(PeftGolden, LogitsOnTwoTensorParallelRanks) {
  const LoraGolden golden(GetParam());
  std::vector<at::Tensor> parts(2);
  int64_t vocab_size = 0;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    const LoadedModel loaded = load_model(request_for(GetParam()), groups);
    const at::Tensor tokens = golden.tokens();
    parts[static_cast<size_t>(groups.tp.rank())] =
        loaded.model->forward(tokens, context_for(tokens, /*training=*/false)).select(1, 0);
    if (groups.tp.rank() == 0) vocab_size = loaded.config.vocab_size;
  });
  expect_logits(at::cat(parts, 1).narrow(1, 0, vocab_size), golden, 1e-5, "two ranks");
}

// In fp64, as the golden gradients, so that nothing depends on how a processor sums; transformers
// keeps cosines and sines in fp32.
TEST_P(PeftGolden, LossAndGradients) {
  const LoraGolden golden(GetParam());
  const ParallelGroups groups;
  HfFolder base = open_hf_folder(base_of(GetParam()));
  ModelConfig& config = base.model.config;
  const Checkpoint adapter = open_peft_folder(adapter_of(GetParam()), *base.model.family, config);
  GPTModel model(config, groups);
  // In fp64, as the golden gradients but for their norms and angles, which transformers computes in
  // fp32: what remains does not depend on the processor.
  PlainParameterStore store(model, at::kDouble, at::kCPU, /*gradients=*/true);
  std::vector<ShardedTensor> weights, adapters;
  std::map<std::string, at::Tensor> grads;
  model.visit([&](const std::string& name, Parameter& parameter) {
    EXPECT_EQ(parameter.trainable, is_lora_parameter(name)) << name;
    (is_lora_parameter(name) ? adapters : weights)
        .push_back(sharded_tensor(parameter, groups, name, parameter.value));
    grads[name] = store.grad(parameter);
  });
  LoadOptions options;
  options.convert_dtype = true;
  base.checkpoint.load(weights, options);
  adapter.load(adapters, options);
  const at::Tensor text = golden.tokens(40), tokens = text.slice(1, 0, -1).contiguous(),
                   labels = text.slice(1, 1).contiguous();
  const Loss loss = model.loss(tokens, labels, at::ones({1, 39}, at::kDouble),
                               context_for(tokens, /*training=*/false));
  EXPECT_NEAR(loss.sum.item<double>(), golden.loss, 1e-7 * golden.loss);
  RecomputeTape().backward(loss.sum);

  double all = 0.0;
  const std::vector<HfTensor> tensors = peft_tensors(*base.model.family, config);
  EXPECT_EQ(tensors.size(), count_gradients(golden.tensors));
  for (const HfTensor& tensor : tensors)
    all += golden.grad(tensor.name, tensor.shape).square().sum().item<double>();
  for (const HfTensor& tensor : tensors) {
    const at::Tensor ours = grads.at(tensor.ours);
    at::Tensor theirs = at::empty(tensor.shape, ours.options());
    for (const RowRun& run : tensor.runs)
      theirs.narrow(0, run.theirs, run.count).copy_(ours.narrow(0, run.ours, run.count));
    expect_close(theirs, golden.grad(tensor.name, tensor.shape), 1e-5, std::sqrt(all),
                 "gradient of " + tensor.name);
  }
  for (const auto& [name, grad] : grads) {
    if (is_lora_parameter(name)) continue;
    EXPECT_EQ(grad.abs().max().item<double>(), 0.0) << name;
  }
}

TEST_P(PeftGolden, InAndOutTheSameBytes) {
  const Case& c = GetParam();
  const ConvertResult in = import_hf_folder(base_of(c), root_ / "ours", {}, adapter_of(c));
  EXPECT_TRUE(verify_checkpoint(in.directory).empty());
  ExportRequest request;
  request.load = root_ / "ours";
  request.folder = root_ / "theirs";
  const ConvertResult out = export_hf_folder(request);
  EXPECT_EQ(out.files, (std::vector<std::string>{kPeftSafetensors, kPeftConfig}));
  for (const char* name : {kPeftSafetensors, kPeftConfig})
    EXPECT_EQ(read_file(root_ / "theirs" / name), read_file(adapter_of(c) / name)) << name;
}

TEST_P(PeftGolden, MergedIsTheSameModel) {
  const Case& c = GetParam();
  const LoraGolden golden(c);
  import_hf_folder(base_of(c), root_ / "ours", {}, adapter_of(c));
  LoadModelRequest ours;
  ours.load = root_ / "ours";
  ours.dtype = at::kFloat;
  expect_logits(logits_of(ours, golden), golden, 1e-5, "checkpoint with adapters");
  ExportRequest request;
  request.load = root_ / "ours";
  request.folder = root_ / "merged";
  request.merge_adapter = true;
  export_hf_folder(request);
  LoadModelRequest merged;
  merged.load = root_ / "merged";
  merged.dtype = at::kFloat;
  // The sums are rounded to bf16, the type of the base. Rounding changes what routers choose, too.
  const bool routes = read_hf_config(base_of(c)).config.transformer.has_moe();
  expect_logits(logits_of(merged, golden), golden, routes ? 8e-2 : 5e-2, "merged");
}

// In fp32 nothing but the order of sums differs.
TEST_F(Peft, MergedInFp32IsTheSameToRounding) {
  for (const Case& c : kCases) {
    const LoraGolden golden(c);
    const fs::path base = root_ / c.base;
    fs::copy(base_of(c), base);
    std::vector<SafetensorsTensor> list;
    std::map<std::string, at::Tensor> wide;
    for (const auto& item : fs::directory_iterator(base_of(c))) {
      if (item.path().extension() == ".safetensors") fs::remove(base / item.path().filename());
      if (!item.path().filename().string().starts_with("model")) continue;
      if (item.path().extension() != ".safetensors") continue;
      for (const auto& [name, tensor] : read_golden_file(item.path()))
        wide[name] = tensor.to(at::kFloat);
    }
    fs::remove(base / kHfIndex);
    for (const auto& [name, tensor] : wide)
      list.push_back({name, DType::kFloat32, tensor.sizes().vec(), tensor.const_data_ptr()});
    write_safetensors(base / kHfSafetensors, list);
    const fs::path ours = root_ / (std::string(c.base) + "_ours");
    import_hf_folder(base, ours, {}, adapter_of(c));
    ExportRequest request;
    request.load = ours;
    request.folder = root_ / (std::string(c.base) + "_merged");
    request.merge_adapter = true;
    export_hf_folder(request);
    LoadModelRequest merged;
    merged.load = request.folder;
    expect_logits(logits_of(merged, golden), golden, 1e-4, cat(c.name, " merged in fp32"));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, PeftGolden, testing::ValuesIn(kCases),
                         [](const auto& param) { return std::string(param.param.name); });

// What our own runs write: one adapter of a fused linear becomes copies, and the configuration is
// made anew.
TEST_F(Peft, OneAdapterForSeveralModulesIsWrittenWithCopies) {
  ModelConfig config = read_hf_config(base_of(kCases[0])).config;
  config.transformer.lora_rank = 2;
  config.transformer.lora_alpha = 3.0;
  config.transformer.lora_targets = {"linear_qkv"};
  const HfFamily& llama = *find_hf_family("llama");
  const std::vector<HfTensor> tensors = peft_tensors(llama, config);
  ASSERT_EQ(tensors.size(), 2 * 3 * 2U);
  EXPECT_EQ(tensors[0].name, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
  for (const size_t i : {0, 2, 4}) {
    EXPECT_EQ(tensors[i].ours, "decoder.layers.0.self_attention.linear_qkv.lora_A.weight");
    EXPECT_EQ(tensors[i].runs[0].ours, 0);
  }
  const ordered_json json = ordered_json::parse(write_peft_config(llama, config, "{}"));
  EXPECT_EQ(json["target_modules"], ordered_json({"k_proj", "q_proj", "v_proj"}));
  EXPECT_EQ(json["lora_alpha"].dump(), "3");
  EXPECT_EQ(json["r"], 2);
  EXPECT_EQ(json["fan_in_fan_out"], false);
}

void expect_names_of(const HfModel& model, int64_t linears, const char* name) {
  std::map<std::string, int64_t> rows, expected;
  std::set<std::string> names;
  for (const HfTensor& tensor : peft_tensors(*model.family, model.config)) {
    EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
    if (!tensor.ours.ends_with(kLoraB)) continue;
    expected[tensor.ours] = tensor.our_shape[0];
    for (const RowRun& run : tensor.runs) rows[tensor.ours] += run.count;
  }
  EXPECT_EQ(static_cast<int64_t>(expected.size()), linears) << name;
  EXPECT_EQ(rows, expected) << name;
}

// Every family has a name for each linear, and all rows of lora_B have a place.
TEST_F(Peft, EveryFamilyHasNames) {
  for (const char* name : {"llama2", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi3",
                           "gemma2", "gemma3", "olmo2", "starcoder2"}) {
    HfModel model = read_hf_config(fs::path(MEGATRON_SOURCE_DIR "/tests/golden/hf") / name);
    TransformerConfig& t = model.config.transformer;
    t.lora_rank = 2;
    t.lora_targets = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"};
    expect_names_of(model, 4 * t.num_layers, name);
  }
}

// The same of layers with states, whose in_proj may be several modules, and of gated attention.
TEST_F(Peft, FamiliesWithStatesHaveNames) {
  for (const char* name : {"mamba2", "nemotron_h", "bamba", "granitemoehybrid", "qwen3_5_text"}) {
    HfModel model = read_hf_config(fs::path(MEGATRON_SOURCE_DIR "/tests/golden/hf") / name);
    TransformerConfig& t = model.config.transformer;
    t.lora_rank = 2;
    if (std::string(name) == "granitemoehybrid")  // gate and up are one module
      t.lora_targets = {"q_proj",     "k_proj",     "v_proj",  "o_proj",
                        "linear_fc1", "linear_fc2", "in_proj", "out_proj"};
    t.finalize();  // else all linears
    expect_names_of(model, 2 * t.num_layers, name);
    Violations violations;
    t.validate(violations);
    EXPECT_TRUE(violations.empty()) << violations.messages().front();
  }
}

// Modules that are one linear of ours share an adapter: the files hold its first factor for each.
TEST_F(Peft, ModulesOfOneLinearShareAFactor) {
  HfModel model = read_hf_config(fs::path(MEGATRON_SOURCE_DIR "/tests/golden/hf") / "qwen3_5_text");
  ModelConfig config = model.config;
  config.transformer.lora_rank = 2;
  config.transformer.lora_targets = {"in_proj"};
  std::map<std::string, at::Tensor> tensors, shared;
  for (const HfTensor& tensor : peft_tensors(*model.family, config)) {
    at::Tensor& value = tensors[tensor.name];
    value = at::randn(tensor.shape, at::kFloat);
    if (!tensor.ours.ends_with(kLoraA)) continue;
    value = shared.try_emplace(tensor.ours, value).first->second;
  }
  EXPECT_EQ(shared.size(), 3u);
  EXPECT_EQ(tensors.size(), 3u * 4 * 2);
  const auto open = [&] {
    std::vector<SafetensorsTensor> list;
    for (const auto& [name, value] : tensors)
      list.push_back({name, DType::kFloat32, value.sizes().vec(), value.data_ptr()});
    write_safetensors(root_ / kPeftSafetensors, list);
    std::ofstream(root_ / kPeftConfig) << write_peft_config(*model.family, config, "{}");
    ModelConfig read = model.config;
    const Checkpoint checkpoint = open_peft_folder(root_, *model.family, read);
    EXPECT_EQ(read.transformer.lora_targets, std::vector<std::string>{"in_proj"});
    return checkpoint;
  };
  EXPECT_EQ(ordered_json::parse(write_peft_config(*model.family, config, "{}"))["target_modules"],
            ordered_json({"in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z"}));
  const Checkpoint checkpoint = open();
  for (const auto& [ours, expected] : shared) {
    const at::Tensor back = at::empty_like(expected);
    ShardedTensor wanted;
    wanted.key = ours;
    wanted.global_shape = expected.sizes().vec();
    wanted.data = back.data_ptr();
    load_one(checkpoint, wanted);
    EXPECT_TRUE(at::equal(back, expected)) << ours;
  }
  const std::string one = "base_model.model.model.layers.1.linear_attn.in_proj_z.lora_A.weight";
  tensors.at(one) = tensors.at(one) + 1;
  EXPECT_EQ(error_of(open).substr(root_.string().size()),
            ": " + one +
                " is not in the file or differs from base_model.model.model.layers.1.linear_attn."
                "in_proj_qkv.lora_A.weight: adapters of modules that are one linear of ours share "
                "this factor");
}

TEST_F(Peft, NamesOfModulesAreLongerWhereOthersShareThem) {
  ModelConfig config = read_hf_config(base_of(kCases[3])).config;
  config.transformer.lora_rank = 2;
  config.transformer.lora_targets = {"linear_proj"};
  const HfFamily& gpt2 = *find_hf_family("gpt2");
  ordered_json json = ordered_json::parse(write_peft_config(gpt2, config, "{}"));
  EXPECT_EQ(json["target_modules"], ordered_json({"attn.c_proj"}));
  EXPECT_EQ(json["fan_in_fan_out"], true);
  config.transformer.lora_targets = {"linear_proj", "linear_fc2"};
  json = ordered_json::parse(write_peft_config(gpt2, config, "{}"));
  EXPECT_EQ(json["target_modules"], ordered_json({"c_proj"}));
}

// PEFT shall not give routed experts adapters of its own.
TEST_F(Peft, NamesOfModulesAreLongerWhereRoutedExpertsShareThem) {
  ModelConfig config = read_hf_config(base_of(kCases[5])).config;
  config.transformer.lora_rank = 2;
  config.transformer.lora_targets = {"linear_q", "linear_fc2"};
  const ordered_json json =
      ordered_json::parse(write_peft_config(*find_hf_family("qwen2_moe"), config, "{}"));
  EXPECT_EQ(json["target_modules"],
            ordered_json({"mlp.down_proj", "q_proj", "shared_expert.down_proj"}));
}

TEST_F(Peft, PartsOfAJoinedModuleHaveNoForm) {
  ModelConfig config = read_hf_config(base_of(kCases[4])).config;
  config.transformer.lora_rank = 2;
  config.transformer.lora_targets = {"linear_q", "linear_v"};
  EXPECT_EQ(error_of([&] { peft_tensors(*find_hf_family("phi3"), config); }),
            "a phi3 model of Hugging Face has model.layers.0.self_attn.qkv_proj as one module, "
            "adapters of its parts (linear_q) cannot be expressed in PEFT's format\n"
            "hint: train with --lora-targets linear_qkv, or merge the adapters: --merge-adapter");
}

TEST_F(Peft, RankStabilizedScalesAreRead) {
  const fs::path folder = root_ / "adapter";
  fs::copy(adapter_of(kCases[0]), folder);
  ordered_json json = ordered_json::parse(read_file(folder / kPeftConfig));
  json["use_rslora"] = true;
  std::ofstream(folder / kPeftConfig) << json;
  HfModel base = read_hf_config(base_of(kCases[0]));
  open_peft_folder(folder, *base.family, base.config);
  EXPECT_DOUBLE_EQ(*base.config.transformer.lora_alpha, 12.0);  // 6 / sqrt(4) = 12 / 4
  EXPECT_EQ(write_peft_config(*base.family, base.config, read_file(folder / kPeftConfig)),
            read_file(folder / kPeftConfig));
}

TEST_F(Peft, RefusesWhatIsNotBuiltAndWhatDoesNotFit) {
  const fs::path folder = root_ / "adapter";
  fs::copy(adapter_of(kCases[0]), folder);
  const std::string name = folder.string();
  const auto open = [&](const Case& base) {
    HfModel model = read_hf_config(base_of(base));
    open_peft_folder(folder, *model.family, model.config);
  };
  const auto with = [&](const char* key, const ordered_json& value) {
    ordered_json json = ordered_json::parse(read_file(adapter_of(kCases[0]) / kPeftConfig));
    json[key] = value;
    std::ofstream(folder / kPeftConfig) << json;
    return error_of([&] { open(kCases[0]); });
  };
  EXPECT_EQ(with("use_dora", true), name + "/adapter_config.json: use_dora true is not built");
  EXPECT_EQ(with("modules_to_save", {"lm_head"}),
            name + "/adapter_config.json: modules_to_save [\"lm_head\"] is not built");
  EXPECT_EQ(with("rank_pattern", {{"q_proj", 4}}),
            name + "/adapter_config.json: rank_pattern {\"q_proj\":4} is not built");
  EXPECT_EQ(with("bias", "all"), name + "/adapter_config.json: bias \"all\" is not built");
  EXPECT_EQ(with("peft_type", "IA3"),
            name + "/adapter_config.json: peft_type is IA3, LORA is built");
  EXPECT_EQ(with("r", 0), name + "/adapter_config.json: r is not a positive integer");
  EXPECT_EQ(with("lora_alpha", nullptr),
            name + "/adapter_config.json: lora_alpha is not a positive number");
  EXPECT_NE(
      with("r", 3).find(": base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight has "
                        "shape [4,16], by adapter_config.json and the base model it is "
                        "[3,16]"),
      std::string::npos);
  EXPECT_EQ(with("r", 4), "");
  EXPECT_NE(error_of([&] { open(kCases[3]); })
                .find("holds no adapter of a linear of a gpt2 model\ndetail: its first tensor is "
                      "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
            std::string::npos);

  std::map<std::string, at::Tensor> tensors = read_golden_file(folder / kPeftSafetensors);
  const auto write = [&] {
    std::vector<SafetensorsTensor> list;
    for (const auto& [key, tensor] : tensors)
      list.push_back({key, DType::kFloat32, tensor.sizes().vec(), tensor.const_data_ptr()});
    write_safetensors(folder / kPeftSafetensors, list);
  };
  tensors.erase("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight");
  tensors["base_model.model.lm_head.lora_A.weight"] = at::zeros({4, 16});
  write();
  EXPECT_EQ(error_of([&] { open(kCases[0]); }),
            name +
                ": base_model.model.model.layers.1.mlp.up_proj.lora_B.weight is not in the file, "
                "although other layers have it\n"
                "detail: base_model.model.lm_head.lora_A.weight is in the file, the base model has "
                "no such module, or the adapter no such part");
  fs::remove(folder / kPeftSafetensors);
  EXPECT_EQ(error_of([&] { open(kCases[0]); }),
            name +
                ": holds no adapter_model.safetensors\nhint: a folder that PEFT's "
                "save_pretrained() wrote is expected");
  std::ofstream(folder / "adapter_model.bin") << "x";
  EXPECT_EQ(error_of([&] { open(kCases[0]); }),
            name +
                ": holds no adapter_model.safetensors\nhint: adapter_model.bin is a pickle, "
                "which is never read; save the adapter as safetensors");
}

TEST_F(Peft, RefusesAdaptersOverAdaptersAndMergingNone) {
  import_hf_folder(base_of(kCases[0]), root_ / "ours", {}, adapter_of(kCases[0]));
  LoadModelRequest request = request_for(kCases[0]);
  request.load = root_ / "ours";
  const ParallelGroups groups;
  EXPECT_NE(error_of([&] { load_model(request, groups); }).find(" holds adapters already"),
            std::string::npos);
  import_hf_folder(base_of(kCases[0]), root_ / "plain");
  ExportRequest merge;
  merge.load = root_ / "plain";
  merge.folder = root_ / "out";
  merge.merge_adapter = true;
  EXPECT_NE(
      error_of([&] { export_hf_folder(merge); }).find(" holds no adapters (--lora-rank is 0)"),
      std::string::npos);
}

}  // namespace
}  // namespace megatron
