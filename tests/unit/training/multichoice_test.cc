// Multiple choice against transformers and scikit-learn, and what is refused.
#include <gtest/gtest.h>

#include <map>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/task_heads.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

const std::string kEncoderGoldens = MEGATRON_SOURCE_DIR "/tests/golden/encoders/";

ModelConfig with_choices(ModelConfig config, int64_t choices) {
  config.own.as<BertConfig>()->bert_choices = choices;
  return config;
}

// The model in bert/ with the head of the golden, and the golden's questions one after the other.
struct MultichoiceGolden {
  MultichoiceGolden()
      : tensors(read_golden_tensors(SafetensorsFile(kEncoderGoldens + "multichoice.safetensors"))),
        folder(open_hf_folder(kEncoderGoldens + "bert")),
        model(with_choices(folder.model.config, tensors.at("scores").size(1)), groups,
              {0, folder.model.config.transformer.num_layers, true, true}, {}),
        store(model, at::kFloat, at::kCPU, /*gradients=*/true) {
    std::vector<ShardedTensor> wanted;
    model.visit([&](const std::string& name, Parameter& parameter) {
      wanted.push_back(sharded_tensor(parameter, groups, name, parameter.value));
      grads[name] = store.grad(parameter);
    });
    LoadOptions options;
    options.convert_dtype = true;
    options.allow_missing = options.allow_unexpected = heads_of_task("multichoice");
    folder.checkpoint.load(wanted, options);
    model.visit([&](const std::string& name, Parameter& parameter) {
      if (name.starts_with("multichoice_head."))
        parameter.value.copy_(tensors.at("head." + name.substr(name.find('.') + 1)));
    });
    const int64_t s = tensors.at("input_ids").size(2), rows = tensors.at("input_ids").numel() / s;
    const auto of_rows = [&](const char* name) {
      return tensors.at(name).to(at::kLong).view({rows, s});
    };
    batch.set("text", of_rows("input_ids"));
    batch.set("types", of_rows("token_type_ids"));
    batch.set("padding_mask", of_rows("attention_mask"));
    batch.set("target", tensors.at("labels")
                            .to(at::kFloat)
                            .unsqueeze(1)
                            .expand_as(tensors.at("scores"))
                            .reshape({rows, 1}));
    batch.set("sample_weight", at::ones({rows, 1}));
    context.place.position = at::arange(s);
    context.place.sample = at::arange(rows);
    batch.place = context.place;
  }

  const ParallelGroups groups;
  std::map<std::string, at::Tensor> tensors, grads;
  const HfFolder folder;
  BertModel model;
  PlainParameterStore store;
  Batch batch;
  ForwardContext context;
};

PretrainTask multichoice() {
  Arguments arguments;
  own_config<BertConfig>(arguments.own).bert_choices = 4;
  return find_task("multichoice", arguments);
}

TEST(Multichoice, ScoresLossAccuracyAndGradientsAreThoseOfTransformers) {
  MultichoiceGolden golden;
  const at::Tensor& expected = golden.tensors.at("scores");
  {
    const at::NoGradGuard no_grad;
    const at::Tensor hidden = golden.model.hidden(golden.batch, {}, golden.context).front();
    const at::Tensor scores = golden.model.class_logits(hidden, {}).view_as(expected);
    EXPECT_LE((scores - expected).norm().item<double>(), 1e-5 * expected.norm().item<double>());
  }
  const StageOutput output =
      multichoice().forward_step(golden.model, golden.batch, {}, golden.context);
  const double questions = output.loss.weight.item<double>();
  EXPECT_EQ(questions, static_cast<double>(expected.size(0)));
  EXPECT_NEAR(output.loss.sum.item<double>() / questions, golden.tensors.at("loss").item<double>(),
              1e-5);
  EXPECT_NEAR(output.metrics.item<double>() / questions,
              golden.tensors.at("accuracy").item<double>(), 1e-6);
  RecomputeTape().backward(output.loss.sum / output.loss.weight);
  for (const auto& [name, gradient] : golden.tensors) {
    if (!name.starts_with("grad/")) continue;
    const at::Tensor& actual = golden.grads.at(name.substr(5));
    // That of the head's bias, which the softmax over choices removes, is rounding alone.
    EXPECT_LE((actual - gradient).norm().item<double>(),
              1e-5 * gradient.norm().item<double>() + 1e-6)
        << name;
  }
}

// Padding samples behind the last question, and a question cut off by the end of the data.
TEST(Multichoice, QuestionsWithoutAllOfTheirChoicesCountNothing) {
  const at::NoGradGuard no_grad;
  MultichoiceGolden golden;
  const PretrainTask task = multichoice();
  const auto outcome = [&](const at::Tensor& weight) {
    golden.batch.set("sample_weight", weight);
    return task.forward_step(golden.model, golden.batch, {}, golden.context);
  };
  const int64_t rows = golden.batch["text"].size(0);
  at::Tensor whole = at::ones({rows, 1}), part = whole.clone();
  whole.narrow(0, rows - 4, 4).zero_();
  part.narrow(0, rows - 1, 1).zero_();
  const StageOutput without = outcome(whole), cut = outcome(part);
  EXPECT_EQ(without.loss.weight.item<double>(), static_cast<double>(rows / 4 - 1));
  for (const auto& [a, b] : {std::pair{without.loss.sum, cut.loss.sum},
                             {without.loss.weight, cut.loss.weight},
                             {without.metrics, cut.metrics}})
    EXPECT_TRUE(at::equal(a, b));
}

TEST(Multichoice, RefusesWhatSplitsQuestions) {
  const auto error = [](const char* flags) {
    return error_of([&] {
      parse_line(cat("pretrain --task multichoice --mock-data --tokenizer-type NullTokenizer "
                     "--vocab-size 99 "
                     "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 "
                     "--max-position-embeddings 16 --train-iters 1 --lr 1e-2 --device cpu ",
                     flags),
                 2);
    });
  };
  EXPECT_EQ(error("--micro-batch-size 8"), "");
  EXPECT_EQ(error("--micro-batch-size 6 --bert-choices 3"), "");
  const std::string hint =
      "\nhint: a sample is a question with one of its choices: give the number of questions times "
      "that of their choices";
  const auto refused = [&](const char* flags, const std::string& message) {
    EXPECT_NE(error(flags).find(message), std::string::npos) << error(flags);
  };
  refused("--micro-batch-size 6", "--micro-batch-size 6 is no multiple of --bert-choices 4" + hint);
  refused("--micro-batch-size 8 --eval-micro-batch-size 2",
          "--eval-micro-batch-size 2 is no multiple of --bert-choices 4" + hint);
  refused("--micro-batch-size 4 --dataloader-type cyclic",
          "--task multichoice with --dataloader-type cyclic");
  refused("--micro-batch-size 4 --bert-classes 3",
          "--task multichoice has no use for --bert-classes");
  refused("--micro-batch-size 4 --bert-classes 3 --bert-choices 4",
          "--bert-classes and --bert-choices are given");
  refused("--micro-batch-size 4 --bert-choices 1", "--bert-choices is 1");
  refused("--micro-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel",
          "--task multichoice with --sequence-parallel or --context-parallel-size is not built");
}

}  // namespace
}  // namespace megatron
