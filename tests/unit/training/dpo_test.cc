// Preference optimisation against PyTorch: loss, rewards and gradients of all weights and of
// adapters, on one rank, on tensor-parallel ranks and in two pipeline stages; files of preference
// pairs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/dpo_config.h"
#include "megatron/training/tasks/dpo_loss.h"
#include "megatron/training/tasks/preference_data.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/config/lora.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;

const fs::path kGoldens = MEGATRON_SOURCE_DIR "/tests/golden";

struct DpoGolden {
  DpoGolden()
      : tensors(read_golden_tensors(SafetensorsFile(kGoldens / "dpo" / "golden.safetensors"))) {}
  at::Tensor grad(const std::string& kind, const std::string& name, at::IntArrayRef shape) const {
    return tensors.at(kind + "/grad/" + name).view(shape);
  }
  const at::Tensor& operator[](const std::string& name) const { return tensors.at(name); }
  std::map<std::string, at::Tensor> tensors;
};

// The trained model and its reference as one rank holds them, for one of the goldens.
class Models {
 public:
  Models(const std::string& kind, const ParallelGroups& groups, const StageSlice* slice = nullptr)
      : base_(open_hf_folder(kGoldens / "hf" / "llama2")), lora_(kind == "lora") {
    ModelConfig with = base_.model.config;
    std::optional<Checkpoint> adapter;
    if (lora_)
      adapter = open_peft_folder(kGoldens / "lora" / "llama_all", *base_.model.family, with);
    config = with;
    const StageSlice whole{0, with.transformer.num_layers, true, true};
    model = std::make_unique<GPTModel>(with, groups, slice != nullptr ? *slice : whole);
    store = std::make_unique<PlainParameterStore>(*model, at::kFloat, at::kCPU, /*gradients=*/true);
    load(*model, groups, adapter ? &*adapter : nullptr);
    if (lora_) return;
    model->visit([](const std::string&, Parameter& parameter) { parameter.value.mul_(1.1); });
    frozen_ =
        std::make_unique<GPTModel>(base_.model.config, groups, slice != nullptr ? *slice : whole);
    frozen_store_ =
        std::make_unique<PlainParameterStore>(*frozen_, at::kFloat, at::kCPU, /*gradients=*/false);
    load(*frozen_, groups, nullptr);
  }
  GPTModel& reference() { return lora_ ? *model : *frozen_; }
  const HfFamily& family() const { return *base_.model.family; }
  bool lora() const { return lora_; }

  ModelConfig config;
  std::unique_ptr<GPTModel> model;
  std::unique_ptr<PlainParameterStore> store;

 private:
  void load(GPTModel& into, const ParallelGroups& groups, const Checkpoint* adapter) {
    std::vector<ShardedTensor> weights, adapters;
    into.visit([&](const std::string& name, Parameter& parameter) {
      (is_lora_parameter(name) ? adapters : weights)
          .push_back(sharded_tensor(parameter, groups, name, parameter.value));
    });
    LoadOptions options;
    options.convert_dtype = true;
    options.wanted_elsewhere = {"*"};
    base_.checkpoint.load(weights, options);
    if (adapter != nullptr) adapter->load(adapters, options);
  }

  HfFolder base_;
  const bool lora_;
  std::unique_ptr<GPTModel> frozen_;
  std::unique_ptr<PlainParameterStore> frozen_store_;
};

Batch batch_of(const DpoGolden& golden) {
  Batch batch;
  batch.set("tokens", golden["tokens"].to(at::kLong));
  batch.set("labels", golden["labels"].to(at::kLong));
  batch.set("loss_mask", golden["loss_mask"].to(at::kFloat));
  batch.place.position = at::arange(batch["tokens"].size(1), at::kLong);
  batch.place.sample = at::arange(batch["tokens"].size(0), at::kLong);
  return batch;
}

ForwardContext context_of(const Batch& batch) {
  ForwardContext context;
  context.place = batch.place;
  return context;
}

PretrainTask task() {
  Arguments arguments;
  auto& config = own_config<DpoConfig>(arguments.own);
  config.dpo_beta = 0.3;
  config.dpo_label_smoothing = 0.1;
  return find_task("dpo", arguments);
}

// Rewards are small differences of log-probabilities of some 30.
void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(at::allclose(actual.to(at::kDouble), expected, 1e-5, 1e-5))
      << what << ": " << actual << " against " << expected;
}

void expect_step(const StageOutput& output, const DpoGolden& golden, const std::string& kind) {
  EXPECT_EQ(output.loss.weight.item<double>(), 3.0);
  expect_near(output.loss.sum.detach(), golden[kind + "/losses"].sum(), kind + " loss");
  expect_near(output.metrics, golden[kind + "/metrics"], kind + " metrics");
}

// Gradients under our names, of what `models` hold, against those of the golden.
void expect_grads(Models& models, const std::map<std::string, at::Tensor>& grads,
                  const DpoGolden& golden, const std::string& kind) {
  const std::vector<HfTensor> tensors = models.lora() ? peft_tensors(models.family(), models.config)
                                                      : hf_tensors(models.family(), models.config);
  double all = 0;
  for (const HfTensor& tensor : tensors)
    all += golden.grad(kind, tensor.name, tensor.shape).square().sum().item<double>();
  for (const HfTensor& tensor : tensors) {
    const at::Tensor& ours = grads.at(tensor.ours);
    const at::Tensor theirs = at::empty(tensor.shape, ours.options());
    for (const RowRun& run : tensor.runs)
      theirs.narrow(0, run.theirs, run.count).copy_(ours.narrow(0, run.ours, run.count));
    const at::Tensor expected = golden.grad(kind, tensor.name, tensor.shape);
    EXPECT_LE((theirs - expected).norm().item<double>(),
              1e-5 * expected.norm().item<double>() + 1e-8 * std::sqrt(all))
        << kind << " gradient of " << tensor.name;
  }
}

std::map<std::string, at::Tensor> grads_of(GPTModel& model, const PlainParameterStore& store) {
  std::map<std::string, at::Tensor> grads;
  model.visit(
      [&](const std::string& name, Parameter& parameter) { grads[name] = store.grad(parameter); });
  return grads;
}

class Dpo : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(Dpo, LossRewardsAndGradients) {
  const DpoGolden golden;
  const ParallelGroups groups;
  Models models(GetParam(), groups);
  Batch batch = batch_of(golden);
  {
    const at::NoGradGuard no_grad;
    const AdaptersOff off;
    batch.reference =
        task().reference_step(models.reference(), batch, {}, context_of(batch)).loss.sum;
  }
  expect_near(batch.reference, golden[GetParam() + "/reference"], "reference");
  const StageOutput output = task().forward_step(*models.model, batch, {}, context_of(batch));
  expect_step(output, golden, GetParam());
  RecomputeTape().backward(output.loss.sum);
  expect_grads(models, grads_of(*models.model, *models.store), golden, GetParam());
}

TEST_P(Dpo, OnTwoTensorParallelRanks) {
  const DpoGolden golden;
  std::mutex mutex;
  std::map<std::string, at::Tensor> whole;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    Models models(GetParam(), groups);
    Batch batch = batch_of(golden);
    {
      const at::NoGradGuard no_grad;
      const AdaptersOff off;
      batch.reference =
          task().reference_step(models.reference(), batch, {}, context_of(batch)).loss.sum;
    }
    const StageOutput output = task().forward_step(*models.model, batch, {}, context_of(batch));
    RecomputeTape().backward(output.loss.sum);
    models.model->visit([&](const std::string&, Parameter& parameter) {
      if (parameter.placement.partial_grad.contains(Axis::kTensor))
        groups.tp.all_reduce(models.store->grad(parameter))->wait();
    });
    const std::lock_guard lock(mutex);
    expect_step(output, golden, GetParam());
    models.model->visit([&](const std::string& name, Parameter& parameter) {
      at::Tensor& all = whole[name];
      if (!all.defined()) all = at::zeros(parameter.global_shape);
      for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
        at::Tensor to = all, from = models.store->grad(parameter);
        for (size_t d = 0; d < piece.local_offset.size(); ++d) {
          to = to.narrow(static_cast<int64_t>(d), piece.global.offset[d], piece.global.shape[d]);
          from = from.narrow(static_cast<int64_t>(d), piece.local_offset[d], piece.global.shape[d]);
        }
        to.copy_(from);
      }
    });
  });
  const ParallelGroups one;
  Models models(GetParam(), one);
  expect_grads(models, whole, golden, GetParam());
}

TEST_P(Dpo, InTwoPipelineStages) {
  const DpoGolden golden;
  const ParallelGroups groups;
  const StageSlice first{0, 1, true, false}, last{1, 1, false, true};
  Models front(GetParam(), groups, &first), back(GetParam(), groups, &last);
  Batch batch = batch_of(golden);
  const ForwardContext context = context_of(batch);
  {
    const at::NoGradGuard no_grad;
    const AdaptersOff off;
    const StageOutput middle = task().reference_step(front.reference(), batch, {}, context);
    EXPECT_FALSE(middle.loss.sum.defined());
    batch.reference =
        task().reference_step(back.reference(), batch, middle.activation, context).loss.sum;
  }
  const at::Tensor middle =
      task().forward_step(*front.model, batch, {}, context).activation.front();
  const at::Tensor input = middle.detach().set_requires_grad(true);
  const StageOutput output = task().forward_step(*back.model, batch, {input}, context);
  expect_step(output, golden, GetParam());
  RecomputeTape().backward(output.loss.sum);
  RecomputeTape().backward(middle, input.grad());
  std::map<std::string, at::Tensor> grads = grads_of(*front.model, *front.store);
  grads.merge(grads_of(*back.model, *back.store));
  expect_grads(front, grads, golden, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Kinds, Dpo, testing::Values("full", "lora"),
                         [](const auto& param) { return param.param; });

// Tokens over context-parallel ranks: the shares of loss, weight and metrics add up, and so do
// gradients.
TEST(DpoLoss, OverContextParallelRanks) {
  const DpoGolden golden;
  const at::Tensor mask = golden["loss_mask"].to(at::kDouble);
  const at::Tensor losses =
      at::linspace(0.1, 2.0, mask.numel(), at::kDouble).view({mask.size(1), mask.size(0)});
  const at::Tensor reference = golden["full/reference"];
  const DpoOptions options{0.3, 0.1, 0.5};
  const ProcessGroup alone;
  const at::Tensor all = losses.clone().set_requires_grad(true);
  const DpoLoss whole = dpo_loss(all, mask, reference, options, alone);
  RecomputeTape().backward(whole.loss.sum);
  std::mutex mutex;
  double sum = 0, weight = 0;
  at::Tensor metrics = at::zeros({4}, at::kDouble);
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const ProcessGroup cp(world, "cp");
    const int64_t half = mask.size(1) / 2, begin = cp.rank() * half;
    const at::Tensor own = losses.narrow(0, begin, half).clone().set_requires_grad(true);
    const DpoLoss part = dpo_loss(own, mask.narrow(1, begin, half), reference, options, cp);
    RecomputeTape().backward(part.loss.sum);
    EXPECT_TRUE(at::allclose(own.grad(), all.grad().narrow(0, begin, half), 1e-12, 1e-14));
    const std::lock_guard lock(mutex);
    sum += part.loss.sum.item<double>();
    weight += part.loss.weight.item<double>();
    metrics += part.metrics;
  });
  EXPECT_NEAR(sum, whole.loss.sum.item<double>(), 1e-12);
  EXPECT_EQ(weight, 3.0);
  EXPECT_TRUE(at::allclose(metrics, whole.metrics));
}

TEST(DpoLoss, IsTheFormulaAndLeavesEmptyPairsOut) {
  const at::Tensor losses = at::tensor({1.0, 2.0, 5.0, 7.0}, at::kDouble).view({1, 4});
  const at::Tensor mask = at::tensor({1.0, 1.0, 0.0, 0.0}, at::kDouble).view({4, 1});
  const at::Tensor reference = at::tensor({-1.5, -1.75, 0.0, 0.0}, at::kDouble);
  const ProcessGroup alone;
  const DpoLoss out = dpo_loss(losses, mask, reference, {0.5, 0.0, 0.25}, alone);
  const double margin = 0.5 * ((-1.0 + 1.5) - (-2.0 + 1.75));
  EXPECT_NEAR(out.loss.sum.item<double>(), std::log1p(std::exp(-margin)) + 0.25 * 1.0, 1e-12);
  EXPECT_EQ(out.loss.weight.item<double>(), 1.0);
  EXPECT_NEAR(out.metrics[2].item<double>(), margin, 1e-12);
  EXPECT_EQ(out.metrics[3].item<double>(), 1.0);
}

TEST(DpoLoss, RefusesHalfAPair) {
  const ProcessGroup alone;
  EXPECT_EQ(
      error_of([&] { dpo_loss(at::zeros({2, 3}), at::ones({3, 2}), at::zeros({3}), {}, alone); }),
      "a micro-batch of 3 sequences holds no whole number of pairs\n"
      "hint: --micro-batch-size counts sequences, two for each pair");
}

class Preferences : public testing::Test {
 protected:
  void SetUp() override {
    path_ = (fs::path(testing::TempDir()) / "preferences.jsonl").string();
    TokenizerConfig config;
    config.tokenizer_type = "ByteLevelTokenizer";
    tokenizer_ = make_tokenizer(config);
    options_.sequence_length = 64;
  }
  void TearDown() override { fs::remove(path_); }
  PreferenceFile read(const std::string& text) {
    std::ofstream(path_) << text;
    return read_preferences(path_, *tokenizer_, options_);
  }
  std::string error(const std::string& text) {
    const std::string what = error_of([&] { read(text); });
    return what.starts_with(path_) ? what.substr(path_.size()) : what;
  }
  std::string text(const std::vector<int32_t>& ids) const { return tokenizer_->decode(ids); }
  std::string path_;
  std::unique_ptr<Tokenizer> tokenizer_;
  PreferenceOptions options_;
};

TEST_F(Preferences, Texts) {
  const PreferenceFile file = read(
      "{\"prompt\": \"a\", \"chosen\": \"bc\", \"rejected\": \"d\", \"score\": 3}\n\n"
      "{\"prompt\": \"e\", \"chosen\": \"f\", \"rejected\": \"g\"}");
  ASSERT_EQ(file.pairs.size(), 2U);
  EXPECT_THAT(file.pairs[0].prompt, ElementsAre('a'));
  EXPECT_THAT(file.pairs[0].chosen, ElementsAre('b', 'c', 256));
  EXPECT_THAT(file.pairs[0].rejected, ElementsAre('d', 256));
  EXPECT_THAT(file.pairs[1].rejected, ElementsAre('g', 256));
  EXPECT_EQ(file.num_long, 0);
}

TEST_F(Preferences, LongPairsAreLeftOutAndCounted) {
  options_.sequence_length = 3;
  const PreferenceFile file = read(
      "{\"prompt\": \"a\", \"chosen\": \"bc\", \"rejected\": \"d\"}\n"
      "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"cde\"}\n");
  EXPECT_EQ(file.pairs.size(), 1U);
  EXPECT_EQ(file.num_long, 1);
  EXPECT_EQ(error("{\"prompt\": \"aaaa\", \"chosen\": \"bc\", \"rejected\": \"d\"}"),
            ": holds no pair of responses that fits --seq-length 3 (1 are longer)");
}

std::string render(const std::string& messages, bool add_generation_prompt) {
  std::string out;
  for (const auto& message : nlohmann::json::parse(messages))
    out += "<" + message["role"].get<std::string>().substr(0, 1) + ">" +
           message["content"].get<std::string>() + "|";
  return out + (add_generation_prompt ? "<a>" : "");
}

TEST_F(Preferences, Messages) {
  options_.render = render;
  const std::string yes = R"({"role": "assistant", "content": "yes"})",
                    no = R"({"role": "assistant", "content": "no"})",
                    ask = R"({"role": "user", "content": "?"})";
  for (const std::string& line :
       {"{\"prompt\": [" + ask + "], \"chosen\": [" + yes + "], \"rejected\": [" + no + "]}",
        "{\"chosen\": [" + ask + "," + yes + "], \"rejected\": [" + ask + "," + no + "]}"}) {
    const PreferenceFile file = read(line);
    EXPECT_EQ(text(file.pairs[0].prompt), "<u>?|<a>");
    EXPECT_EQ(text(file.pairs[0].chosen), "yes|");
    EXPECT_EQ(text(file.pairs[0].rejected), "no|");
  }
  EXPECT_EQ(error("{\"chosen\": [" + yes + "], \"rejected\": [" + no + "]}"),
            ":1: has no message before the responses");
  EXPECT_EQ(error("{\"chosen\": [" + ask + "], \"rejected\": [" + ask + "]}"),
            ":1: \"chosen\" has no message after the prompt");
  options_.render = [](const std::string& messages, bool prompt) {
    return prompt ? "x" : render(messages, false);
  };
  EXPECT_EQ(
      error("{\"prompt\": [" + ask + "], \"chosen\": [" + yes + "], \"rejected\": [" + no + "]}"),
      ":1: with \"chosen\" the chat template does not continue the text of the prompt\n"
      "hint: it changes earlier turns, or opens the model's turn in another way than it writes "
      "one");
}

TEST_F(Preferences, RefusesOtherForms) {
  EXPECT_EQ(error("\n[1]"), ":2: is no JSON object");
  EXPECT_EQ(error("{\"chosen\": \"a\"}"), ":1: has no \"rejected\"");
  EXPECT_EQ(
      error("{\"chosen\": \"a\", \"rejected\": \"b\"}"),
      ":1: \"prompt\", \"chosen\" and \"rejected\" must be three texts, or lists of messages");
  EXPECT_EQ(error("{\"prompt\": \"\", \"chosen\": \"a\", \"rejected\": \"b\"}"),
            ":1: the prompt is empty");
  EXPECT_EQ(error("{\"prompt\": [{}], \"chosen\": [{}], \"rejected\": [{}]}"),
            ":1: holds messages, which need a chat template\n"
            "hint: give --chat-template, or a tokenizer whose folder has one");
  EXPECT_EQ(error(""), ": holds no pair of responses");
}

}  // namespace
}  // namespace megatron
