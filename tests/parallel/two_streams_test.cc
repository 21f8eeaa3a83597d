// A model that is no GPT under every layout: two tensors of different shapes and one of integers
// cross the borders between stages, and every stage adds auxiliary losses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/proving/equivalence.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/layer/auxiliary_losses.h"

namespace megatron {
namespace {

using testing::HasSubstr;

constexpr int64_t kState = 3;  // width of the second stream
constexpr int64_t kScores = 5;

void declare(Parameter& parameter, std::vector<int64_t> shape, bool partial) {
  parameter.local_shape = parameter.global_shape = std::move(shape);
  parameter.init = Init::normal(0.3);
  if (partial) parameter.placement.partial_grad.insert(Axis::kTensor);
}

// tokens [s, b, h] (rows of this rank), state [b, k]:
//   tokens += kind tanh(state u); tokens += tanh(tokens w); state = tanh(state v + mean tokens)
// The cuts of a recompute tape form a chain. Where tokens += tanh(tokens w) is recomputed, nothing
// may go round it: no gradient crosses from one stream to the other (Streams::kApart).
enum class Streams { kCoupled, kApart, kApartAndRecomputed };

class Layer : public Module {
 public:
  Layer(int64_t h, bool divided) {
    declare(w_, {h, h}, divided);
    declare(u_, {kState, h}, divided);
    declare(v_, {kState, kState}, false);
    add("w", &w_);
    add("u", &u_);
    add("v", &v_);
    add_state("steps", &steps_);
  }

  void forward(at::Tensor& tokens, const at::Tensor& kind, at::Tensor& state,
               const ForwardContext& context, Streams streams, const ProcessGroup& tp) {
    const auto words = [this, losses = context.auxiliary_losses](const at::Tensor& x) {
      const at::Tensor y =
          x + at::tanh(at::matmul(x, differentiable(w_))) * (1 + 0.1 * steps_).to(x.scalar_type());
      if (losses != nullptr)
        losses->add("activity", y.square().mean(2).sum() * 0.5,
                    at::full({}, static_cast<double>(y.size(0) * y.size(1)), y.options()));
      return y;
    };
    const auto across = [&](const at::Tensor& x) {
      return streams == Streams::kCoupled ? x : x.detach();
    };
    const at::Tensor own = copy_to_tensor_model_parallel_region(across(state), tp);
    const at::Tensor factor = kind.to(tokens.scalar_type()).unsqueeze(1);
    const at::Tensor x = tokens + factor * at::tanh(at::matmul(own, differentiable(u_)));
    tokens = streams == Streams::kApartAndRecomputed && context.tape != nullptr
                 ? context.tape->run(words, x)
                 : words(x);
    const at::Tensor sum =
        reduce_from_tensor_model_parallel_region(across(tokens).narrow(2, 0, kState).sum(0), tp);
    state = at::tanh(at::matmul(state, differentiable(v_)) +
                     sum / static_cast<double>(tokens.size(0) * tp.size()));
    if (context.auxiliary_losses != nullptr)
      context.auxiliary_losses->add(
          "state", state.square().sum(),
          at::full({}, static_cast<double>(state.size(0)), state.options()), LossRows::kAll);
  }

  void step_ended(const at::Tensor& skipped) override { steps_ += 1 - skipped; }

 private:
  Parameter w_, u_, v_;
  at::Tensor steps_ = at::zeros({1}, at::kDouble);  // that changed weights
};

class TwoStreams : public Model {
 public:
  TwoStreams(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
             Streams streams, bool wants_losses)
      : Model(config, groups, slice), streams_(streams), wants_losses_(wants_losses) {
    const int64_t h = config.transformer.hidden_size;
    divided_ = config.sequence_parallel;
    if (slice.embedding) {
      declare(table_, {config.vocab_size, h}, divided_);
      declare(start_, {kState}, false);
      add("table", &table_);
      add("start", &start_);
    }
    for (int64_t i = 0; i < slice.num_layers; ++i) {
      layers_.push_back(std::make_unique<Layer>(h, divided_));
      add(cat("layers.", slice.first_layer + i), layers_.back().get());
    }
    if (slice.head) {
      declare(scores_, {h, kScores}, divided_);
      declare(verdict_, {kState}, false);
      add("scores", &scores_);
      add("verdict", &verdict_);
    }
    name_parameters();
  }

  TensorFormats border(int64_t, const Batch& batch, at::ScalarType dtype) const override {
    const int64_t b = batch.place.sample.size(0);
    return {{{batch.place.position.size(0) / rows().size(), b, config().transformer.hidden_size},
             dtype},
            {{b}, at::kLong},
            {{b, kState}, dtype}};
  }

  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override {
    at::Tensor tokens, kind, state;
    if (slice().embedding) {
      tokens = at::embedding(differentiable(table_), own(batch["tokens"].t()));
      kind = batch["tokens"].sum(1).remainder(3);
      state = differentiable(start_).unsqueeze(0).expand({kind.size(0), kState});
    } else {
      EXPECT_EQ(input.size(), 3u);
      tokens = input[0], kind = input[1], state = input[2];
    }
    for (const std::unique_ptr<Layer>& layer : layers_)
      layer->forward(tokens, kind, state, context, streams_, rows());
    return {tokens, kind, state};
  }

  Loss loss(const StageTensors& hidden, const Batch& batch,
            const ForwardContext& context) override {
    const at::Tensor scores = at::matmul(hidden[0], differentiable(scores_)).log_softmax(2);
    const at::Tensor wanted = own(batch["labels"].t()).remainder(kScores).unsqueeze(2);
    const at::Tensor mask = batch["loss_mask"].to(scores.scalar_type());
    const at::Tensor sum = (scores.gather(2, wanted).squeeze(2) * own(mask.t())).sum().neg();
    if (context.auxiliary_losses != nullptr) {
      const at::Tensor verdict = at::matmul(hidden[2], differentiable(verdict_));
      const at::Tensor truth = batch["tokens"].select(1, 0).remainder(2).to(verdict.scalar_type());
      context.auxiliary_losses->add(
          "second head", (verdict - truth).square().sum(),
          at::full({}, static_cast<double>(truth.size(0)), truth.options()), LossRows::kAll);
    }
    return {reduce_from_tensor_model_parallel_region(sum, rows()), mask.sum()};
  }

  std::vector<std::string> auxiliary_losses() const override {
    if (!wants_losses_) return {};
    return {"activity", "state", "second head"};
  }
  at::Tensor logits(const at::Tensor&) override { throw_error("no logits"); }
  at::Tensor token_losses(const at::Tensor&, const at::Tensor&) override {
    throw_error("no losses of tokens");
  }
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor&, const Batch&) override {
    throw_error("the vocabulary is not divided");
  }
  EmbeddingTables embedding_tables() override { return {}; }

 private:
  // The tensor ranks that divide rows.
  const ProcessGroup& rows() const { return divided_ ? groups().tp : alone_; }
  at::Tensor own(const at::Tensor& x) const { return x.chunk(rows().size(), 0)[rows().rank()]; }

  const Streams streams_;
  const bool wants_losses_;
  bool divided_ = false;
  const ProcessGroup alone_;
  Parameter table_, start_, scores_, verdict_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

PretrainTask two_streams(Streams streams = Streams::kCoupled, bool wants_losses = true) {
  PretrainTask task = gpt_task();
  task.model_provider = [=](const Arguments& arguments, const Vocabulary& vocabulary,
                            const ParallelGroups& groups, const StageSlice& slice,
                            const std::vector<Model*>&) -> std::unique_ptr<Model> {
    ModelConfig config;
    config.transformer = arguments.transformer;
    config.vocab_size = vocabulary.size;
    config.padded_vocab_size = vocabulary.padded_size;
    config.sequence_parallel = arguments.parallel.sequence_parallel && groups.tp.size() > 1;
    return std::make_unique<TwoStreams>(config, groups, slice, streams, wants_losses);
  };
  return task;
}

constexpr int kSteps = 3;
constexpr const char* kCommon =
    "--tokenizer-type NullTokenizer --vocab-size 31 --mock-data --num-workers 0 --num-layers 8 "
    "--hidden-size 8 --num-attention-heads 2 --seq-length 12 --max-position-embeddings 12 "
    "--global-batch-size 16 --train-iters 3 --lr 1e-2 --clip-grad 1.0 "
    "--eval-iters 0 --seed 7 --eod-mask-loss --device cpu ";

Arguments arguments_of(const std::string& flags, int world_size = 1) {
  const bool given = flags.find("--micro-batch-size") != std::string::npos;
  return parse_run(cat(kCommon, given ? "" : "--micro-batch-size 2 ", flags), world_size);
}

std::string differences(const TrainingTrace& trace, const TrainingTrace& reference) {
  std::string text;
  for (const std::string& fault : trace.faults) text += cat("  ", fault, "\n");
  for (const Comparison& c : compare_traces(trace, reference, 1e-10))
    if (!c.holds()) text += cat("  ", c.name, ": ", c.difference, " > ", c.allowed, "\n");
  return text;
}

struct Row {
  const char* name;
  int world_size;
  const char* flags;
};

constexpr Row kRows[] = {
    {"PP2", 2, "--pipeline-model-parallel-size 2"},
    {"PP4", 4, "--pipeline-model-parallel-size 4"},
    {"PP2Interleaved", 2,
     "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"},
    {"PP4Interleaved", 4,
     "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"},
    {"PP2ZeroBubble", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"},
    {"PP4ZeroBubble", 4, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1"},
    {"PP2ZeroBubbleV", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"},
    {"DP2", 2, ""},
    {"DP2Distributed", 2, "--use-distributed-optimizer"},
    {"TP2", 2, "--tensor-model-parallel-size 2"},
    {"TP2SP", 2, "--tensor-model-parallel-size 2 --sequence-parallel"},
    {"TP2SPPP2DP2", 8,
     "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"},
    {"MicroBatchOf4", 1, "--micro-batch-size 4"},
};

class Layouts : public testing::TestWithParam<Row> {};

TEST_P(Layouts, EqualOneRank) {
  static const TrainingTrace reference =
      trace_training(two_streams(), arguments_of(""), {at::kDouble, kSteps});
  const Arguments arguments = arguments_of(GetParam().flags, GetParam().world_size);
  EXPECT_EQ(differences(trace_training(two_streams(), arguments, {at::kDouble, kSteps}), reference),
            "");
}

TEST_P(Layouts, EqualOneRankWithRecomputation) {
  static const TrainingTrace reference =
      trace_training(two_streams(Streams::kApart), arguments_of(""), {at::kDouble, kSteps});
  const Arguments arguments = arguments_of(GetParam().flags, GetParam().world_size);
  EXPECT_EQ(differences(trace_training(two_streams(Streams::kApartAndRecomputed), arguments,
                                       {at::kDouble, kSteps}),
                        reference),
            "");
}

// Each micro-batch is divided by its own weight, so that only layouts with the same ones are equal.
TEST_P(Layouts, EqualOneRankByMeansOfMicroBatches) {
  if (GetParam().world_size == 1) GTEST_SKIP() << "other micro-batches";
  const std::string flags = "--no-calculate-per-token-loss ";
  static const TrainingTrace reference =
      trace_training(two_streams(), arguments_of(flags), {at::kDouble, kSteps});
  const Arguments arguments = arguments_of(flags + GetParam().flags, GetParam().world_size);
  EXPECT_EQ(differences(trace_training(two_streams(), arguments, {at::kDouble, kSteps}), reference),
            "");
}

INSTANTIATE_TEST_SUITE_P(TwoStreams, Layouts, testing::ValuesIn(kRows),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(TwoStreams, AuxiliaryLossesAreTrained) {
  const Arguments arguments = arguments_of("");
  const TrainingTrace with = trace_training(two_streams(), arguments, {at::kDouble, 1});
  const TrainingTrace without = trace_training(
      two_streams(Streams::kCoupled, /*wants_losses=*/false), arguments, {at::kDouble, 1});
  EXPECT_EQ(with.steps[0].number("loss"), without.steps[0].number("loss"))
      << "the main loss does not include them";
  auto auxiliary = with.steps[0].numbers;
  for (const auto& [name, number] : without.steps[0].numbers) auxiliary.erase(name);
  EXPECT_FALSE(auxiliary.empty());
  for (const auto& [name, loss] : auxiliary) EXPECT_GT(loss.value, 1e-3) << name;
  // Only the second head's loss reaches its weights: d/dv sum (x v - y)^2 / W
  EXPECT_FALSE(without.steps[0].grads.contains("verdict") &&
               without.steps[0].grads.at("verdict").abs().max().item<double>() > 0);
  EXPECT_GT(with.steps[0].grads.at("verdict").abs().max().item<double>(), 1e-4);
}

TEST(TwoStreams, AuxiliaryLossesAreLogged) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / "auxiliary_losses";
  std::filesystem::remove_all(folder);
  const Arguments arguments = arguments_of(cat("--log-interval 1 --run-dir ", folder.string()));
  testing::internal::CaptureStdout();
  EXPECT_EQ(pretrain(two_streams(), arguments), 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              testing::AllOf(HasSubstr("activity: "), HasSubstr("second head: ")));
  std::ifstream file(folder / "metrics.jsonl");
  const std::string records{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(records, HasSubstr("\"activity\":"));
}

// Losses of the iterations of a run, by iteration.
std::map<int64_t, double> losses_of(const Arguments& arguments) {
  std::filesystem::remove_all(arguments.training.run_dir);
  testing::internal::CaptureStdout();
  EXPECT_EQ(pretrain(two_streams(), arguments), 0);
  testing::internal::GetCapturedStdout();
  std::map<int64_t, double> losses;
  std::ifstream file(std::filesystem::path(arguments.training.run_dir) / "metrics.jsonl");
  for (std::string line; std::getline(file, line);)
    if (const auto record = nlohmann::json::parse(line); record["type"] == "train")
      losses[record["iteration"]] = record["lm loss"];
  return losses;
}

TEST(ModuleState, IsStoredRestoredAndToldOfEveryStep) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "module_state";
  std::filesystem::remove_all(folder);
  const std::string common =
      cat("--log-interval 1 --lr-decay-iters 3 --run-dir ", (folder / "run").string(), " ");
  const std::map<int64_t, double> whole = losses_of(arguments_of(common));
  ASSERT_EQ(whole.size(), 3u);
  const std::string saving = cat(common, "--save ", (folder / "saved").string(), " ");
  losses_of(arguments_of(cat(saving, "--exit-interval 2")));
  const Checkpoint checkpoint = Checkpoint::open_verified(folder / "saved" / "iter_0000002");
  EXPECT_TRUE(checkpoint.manifest().tensors.contains("layers.7.steps"));
  const std::map<int64_t, double> rest =
      losses_of(arguments_of(cat(saving, "--load ", (folder / "saved").string())));
  EXPECT_EQ(rest.at(3), whole.at(3));
}

TEST(AuxiliaryLosses, ARecomputedLossCountsOnceAndIsTrained) {
  RecomputeTape tape;
  const at::Tensor totals = at::zeros({2, 2}, at::kDouble);
  AuxiliaryLosses losses(
      {.names = {"a", "b"},
       .totals = totals,
       .gradient = [](const at::Tensor&, const at::Tensor&, LossRows,
                      std::string_view) { return at::full({}, 10.0, at::kDouble); }},
      tape);
  const at::Tensor x = at::tensor({1.0, 2.0}, at::kDouble).set_requires_grad(true);
  const at::Tensor weight = at::full({}, 4.0, at::kDouble);
  const at::Tensor y = tape.run(
      [&](const at::Tensor& in) {
        losses.add("b", (in * in).sum(), weight);
        return in * 3.0;
      },
      x * 1.0);
  losses.add("b", y.sum(), weight);
  tape.backward(y.sum());
  EXPECT_TRUE(at::equal(totals, at::tensor({0.0, 0.0, 5.0 + 9.0, 8.0}, at::kDouble).view({2, 2})));
  // d (sum 3x + 10 (sum x^2 + sum 3x)) = 3 + 20 x + 30
  EXPECT_TRUE(at::allclose(x.grad(), at::tensor({53.0, 73.0}, at::kDouble)));
}

}  // namespace
}  // namespace megatron
