// The training loop with a test task: non-finite losses, and the inputs of the task.
#include "megatron/training/pretrain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/model_provider.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

using testing::HasSubstr;

Arguments tiny(const std::string& run_dir) {
  Arguments a;
  a.transformer.num_layers = 1;
  a.transformer.hidden_size = 16;
  a.transformer.num_attention_heads = 2;
  a.transformer.seq_length = 8;
  a.tokenizer.tokenizer_type = "ByteLevelTokenizer";
  a.data.mock_data = true;
  a.data.num_workers = 0;
  a.optimizer.lr = 1e-3;
  a.training.micro_batch_size = 2;
  a.training.train_iters = 6;
  a.training.eval_iters = 0;
  a.training.log_interval = 1;
  a.training.device = DeviceChoice::kCpu;
  a.training.num_threads = 1;
  a.training.exit_signal_handler = false;
  a.training.run_dir = (std::filesystem::path(testing::TempDir()) / run_dir).string();
  std::filesystem::remove_all(a.training.run_dir);
  a.finalize();
  return a;
}

// The GPT task whose loss is not finite for the samples in [first, last).
PretrainTask broken_task(int64_t first, int64_t last) {
  PretrainTask task = gpt_task();
  const auto forward = task.forward_step;
  task.forward_step = [=](Model& model, const Batch& batch, const StageTensors& input,
                          const ForwardContext& context) {
    StageOutput output = forward(model, batch, input, context);
    const int64_t ordinal = batch.place.sample[0].item<int64_t>();
    if (ordinal >= first && ordinal < last)
      output.loss.sum = output.loss.sum * std::numeric_limits<double>::quiet_NaN();
    return output;
  };
  return task;
}

std::vector<nlohmann::json> train_records(const Arguments& arguments) {
  std::vector<nlohmann::json> out;
  std::ifstream file(std::filesystem::path(arguments.training.run_dir) / "metrics.jsonl");
  for (std::string line; std::getline(file, line);)
    if (auto record = nlohmann::json::parse(line); record["type"] == "train") out.push_back(record);
  return out;
}

TEST(Pretrain, ABadStepIsSkippedAndCounted) {
  const Arguments arguments = tiny("pretrain_bad_step");
  testing::internal::CaptureStdout();
  EXPECT_EQ(pretrain(broken_task(4, 6), arguments), 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              HasSubstr("number of skipped iterations:   1 | number of nan iterations:   1 |"));
  const auto records = train_records(arguments);
  ASSERT_EQ(records.size(), 6u);
  EXPECT_EQ(records[2]["skipped_iterations"], 1);
  EXPECT_FALSE(records[2].contains("grad_norm"));
  EXPECT_EQ(records[3]["skipped_iterations"], 0);
  // The samples of a skipped step are consumed; the schedule does not advance.
  EXPECT_EQ(records[3]["consumed_samples"], 8);
  EXPECT_EQ(records[2]["learning_rate"], records[1]["learning_rate"]);
}

TEST(Pretrain, StopsAfterBadStepsInARow) {
  Arguments arguments = tiny("pretrain_stop");
  arguments.optimizer.max_consecutive_bad_steps = 3;
  testing::internal::CaptureStdout();
  std::string message;
  try {
    pretrain(broken_task(4, 100), arguments);
  } catch (const Error& error) {
    message = error.what();
  }
  testing::internal::GetCapturedStdout();
  EXPECT_THAT(message,
              HasSubstr("iteration 5: loss or gradient was not finite for 3 iterations in a row"));
  EXPECT_THAT(message, HasSubstr("--max-consecutive-bad-steps"));
}

TEST(Pretrain, MicroBatchesComeInOrder) {
  Arguments arguments = tiny("pretrain_order");
  arguments.training.global_batch_size = 6;
  arguments.training.train_iters = 2;
  PretrainTask task = gpt_task();
  std::vector<int64_t> seen;
  const auto forward = task.forward_step;
  task.forward_step = [&](Model& model, const Batch& batch, const StageTensors& input,
                          const ForwardContext& context) {
    EXPECT_TRUE(context.training);
    for (int64_t i = 0; i < batch.place.sample.numel(); ++i)
      seen.push_back(batch.place.sample[i].item<int64_t>());
    return forward(model, batch, input, context);
  };
  testing::internal::CaptureStdout();
  pretrain(task, arguments);
  testing::internal::GetCapturedStdout();
  EXPECT_THAT(seen, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
}

// Bytes of a stored tensor, by key.
std::map<std::string, std::string> stored_tensors(const std::filesystem::path& directory) {
  const Checkpoint checkpoint(directory);
  std::map<std::string, std::string> out;
  for (const auto& [key, tensor] : checkpoint.manifest().tensors) {
    std::string bytes(
        static_cast<size_t>(c10::multiply_integers(tensor.shape) * size_of(tensor.dtype)), '\0');
    ShardedTensor wanted;
    wanted.key = key;
    wanted.dtype = tensor.dtype;
    wanted.global_shape = wanted.local_shape = tensor.shape;
    wanted.pieces = {{{std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape},
                      std::vector<int64_t>(tensor.shape.size(), 0)}};
    wanted.flat_end = c10::multiply_integers(tensor.shape);
    wanted.data = bytes.data();
    checkpoint.load({&wanted, 1}, LoadOptions{.allow_unexpected = {"*"}});
    out[key] = std::move(bytes);
  }
  return out;
}

TEST(Pretrain, WhatIsFrozenKeepsItsBitsAndHasNoState) {
  Arguments arguments = tiny("pretrain_freeze");
  const std::filesystem::path save =
      std::filesystem::path(testing::TempDir()) / "pretrain_freeze_save";
  std::filesystem::remove_all(save);
  arguments.training.save = save.string();
  arguments.training.save_interval = 3;
  arguments.training.freeze = {"embedding", "*.linear_fc?.weight"};
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  pretrain(gpt_task(), arguments);
  testing::internal::GetCapturedStdout();
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("7,552 parameters of which 6,288 are frozen, vocabulary "));
  const auto before = stored_tensors(save / "iter_0000003"),
             after = stored_tensors(save / "iter_0000006");
  ASSERT_EQ(before.size(), after.size());
  int frozen = 0;
  for (const auto& [key, bytes] : before) {
    const bool is_frozen = arguments.training.freezes(key);
    frozen += is_frozen;
    EXPECT_EQ(bytes == after.at(key), is_frozen) << key;
    if (key.starts_with("optimizer.")) continue;
    EXPECT_EQ(before.contains("optimizer.state.exp_avg." + key), !is_frozen) << key;
  }
  EXPECT_EQ(frozen, 4) << "two tables and two weights";

  // Another choice needs other states.
  arguments.training.load = save.string();
  arguments.training.freeze = {"embedding"};
  arguments.training.train_iters = 7;
  arguments.training.accept_new_data_order = true;
  std::string message;
  testing::internal::CaptureStdout();
  try {
    pretrain(gpt_task(), arguments);
  } catch (const Error& error) {
    message = error.what();
  }
  testing::internal::GetCapturedStdout();
  EXPECT_THAT(message, HasSubstr("optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"));
}

std::string quietly(const PretrainTask& task, const Arguments& arguments) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  std::string error;
  try {
    pretrain(task, arguments);
  } catch (const Error& caught) {
    error = caught.what();
  }
  testing::internal::GetCapturedStdout();
  const std::string log = testing::internal::GetCapturedStderr();
  return error.empty() ? log : "error: " + error;
}

std::filesystem::path fresh(const char* name) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::remove_all(path);
  return path;
}

// A base model trained, then adapters over it: the base keeps its bits, adapters alone have states,
// and a run that stops and goes on ends with the bits of one that did not.
TEST(Pretrain, AdaptersAreTrainedOverABase) {
  Arguments base = tiny("pretrain_base");
  base.training.save = fresh("pretrain_base_save").string();
  quietly(gpt_task(), base);
  const auto weights = stored_tensors(std::filesystem::path(base.training.save) / "iter_0000006");

  Arguments arguments = tiny("pretrain_lora");
  arguments.transformer.lora_rank = 2;
  arguments.transformer.lora_targets = {"linear_q", "linear_fc2"};
  arguments.transformer.finalize();
  arguments.training.load = base.training.save;
  arguments.training.finetune = arguments.training.no_load_optim = true;
  arguments.training.save = fresh("pretrain_lora_save").string();
  arguments.training.save_interval = 4;
  // Of A: 2 ranks x (16 + 64) inputs; of B: (16 + 16) outputs x 2.
  EXPECT_THAT(quietly(gpt_task(), arguments), HasSubstr("of which 7,552 are frozen"));
  const auto after =
      stored_tensors(std::filesystem::path(arguments.training.save) / "iter_0000006");
  for (const auto& [key, bytes] : weights) {
    if (key.starts_with("optimizer.")) continue;
    EXPECT_TRUE(after.at(key) == bytes) << key;
  }
  int adapters = 0;
  for (const auto& [key, bytes] : after) {
    if (key.starts_with("optimizer.")) {
      EXPECT_NE(key.find(".lora_"), std::string::npos) << key;
      continue;
    }
    if (key.find(".lora_") == std::string::npos) continue;
    ++adapters;
    EXPECT_NE(bytes, std::string(bytes.size(), '\0')) << key << " was not trained";
  }
  EXPECT_EQ(adapters, 4);

  Arguments again = arguments;
  again.training.finetune = again.training.no_load_optim = false;
  again.training.load = arguments.training.save;
  again.training.ckpt_step = 4;
  again.training.save = fresh("pretrain_lora_again").string();
  EXPECT_THAT(quietly(gpt_task(), again), HasSubstr("resuming from"));
  EXPECT_TRUE(stored_tensors(std::filesystem::path(again.training.save) / "iter_0000006") == after);

  // Checkpoints of adapters alone, over the same base.
  Arguments alone = arguments;
  alone.training.load.clear();
  alone.training.finetune = alone.training.no_load_optim = false;
  alone.training.pretrained_checkpoint = base.training.save;
  alone.training.save_frozen = false;
  alone.training.save = fresh("pretrain_lora_alone").string();
  EXPECT_THAT(quietly(gpt_task(), alone), HasSubstr("starting from the weights of"));
  auto adapters_alone = after;
  std::erase_if(adapters_alone,
                [](const auto& item) { return item.first.find(".lora_") == std::string::npos; });
  EXPECT_TRUE(stored_tensors(std::filesystem::path(alone.training.save) / "iter_0000006") ==
              adapters_alone);
  Arguments resumed = alone;
  resumed.training.load = alone.training.save;
  resumed.training.ckpt_step = 4;
  resumed.training.save = fresh("pretrain_lora_alone_again").string();
  EXPECT_THAT(quietly(gpt_task(), resumed), HasSubstr("resuming from"));
  EXPECT_TRUE(stored_tensors(std::filesystem::path(resumed.training.save) / "iter_0000006") ==
              adapters_alone);
  resumed.training.pretrained_checkpoint.clear();
  EXPECT_THAT(quietly(gpt_task(), resumed),
              HasSubstr(" was saved without its frozen weights (--no-save-frozen)\n"
                        "hint: name what they were loaded from with --pretrained-checkpoint"));

  // Without the flags the checkpoint does not fit, and the message names what is left over.
  Arguments plain = base;
  plain.training.load = arguments.training.save;
  plain.training.save = fresh("pretrain_lora_plain").string();
  plain.training.finetune = plain.training.no_load_optim = true;
  EXPECT_THAT(quietly(gpt_task(), plain), HasSubstr("lora_A.weight"));
}

// With adapters the reference is the model without them; otherwise it is a frozen copy of the
// start, also after a resume.
TEST(Pretrain, PreferencesAgainstTheStart) {
  Arguments base = tiny("pretrain_dpo_base");
  base.training.save = fresh("pretrain_dpo_base_save").string();
  quietly(gpt_task(), base);
  for (const bool lora : {false, true}) {
    Arguments arguments = tiny(lora ? "pretrain_dpo_lora" : "pretrain_dpo");
    if (lora) {
      arguments.transformer.lora_rank = 2;
      arguments.transformer.finalize();
    }
    arguments.transformer.hidden_dropout = arguments.transformer.attention_dropout = 0;
    arguments.optimizer.lr = 1e-2;
    arguments.training.load = base.training.save;
    arguments.training.finetune = arguments.training.no_load_optim = true;
    arguments.training.save = fresh("pretrain_dpo_save").string();
    arguments.training.save_interval = 4;
    const PretrainTask task = find_task("dpo", {});
    EXPECT_THAT(quietly(task, arguments), HasSubstr("starting from the weights of"));
    auto records = train_records(arguments);
    ASSERT_EQ(records.size(), 6u);
    // At first the model is its reference: no margin, and the loss is log 2.
    EXPECT_NEAR(records[0]["dpo loss"].get<double>(), std::log(2.0), 1e-6);
    EXPECT_NEAR(records[0]["rewards margin"].get<double>(), 0.0, 1e-6);
    EXPECT_NE(records[5]["rewards margin"].get<double>(), 0.0);
    const double last = records[5]["dpo loss"].get<double>();
    EXPECT_NEAR(
        records[5]["rewards chosen"].get<double>() - records[5]["rewards rejected"].get<double>(),
        records[5]["rewards margin"].get<double>(), 1e-6);

    Arguments again = arguments;
    again.training.finetune = again.training.no_load_optim = false;
    again.training.load = arguments.training.save;
    again.training.ckpt_step = 4;
    again.training.save = fresh("pretrain_dpo_again").string();
    std::filesystem::remove_all(again.training.run_dir);
    if (!lora) {
      EXPECT_THAT(quietly(task, again),
                  HasSubstr("needs the weights that its run started from, as the reference model\n"
                            "hint: name them with --pretrained-checkpoint"));
      again.training.pretrained_checkpoint = base.training.save;
      std::filesystem::remove_all(again.training.run_dir);
    }
    EXPECT_THAT(quietly(task, again), HasSubstr("resuming from"));
    records = train_records(again);
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[1]["dpo loss"].get<double>(), last) << (lora ? "adapters" : "full");
  }
}

TEST(Pretrain, PreferencesNeedWholePairs) {
  Arguments arguments = tiny("pretrain_dpo_odd");
  arguments.training.micro_batch_size = 3;
  arguments.training.global_batch_size = 3;
  arguments.transformer.z_loss_coeff = 0.1;
  arguments.training.task = "dpo";
  const auto refusal = [&] {
    Violations violations;
    arguments.validate(violations);
    try {
      violations.throw_if_any();
    } catch (const UsageError& error) {
      return "error: " + std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(
      refusal(),
      "error: --micro-batch-size 3 is odd, preference optimisation needs whole pairs\n"
      "hint: it counts sequences, two for each pair\n"
      "--z-loss-coeff cannot be used with --task dpo, whose loss needs plain log-probabilities");
}

TEST(Pretrain, FreezingByNames) {
  TrainingConfig config;
  const std::vector<std::string> names = {"embedding.word_embeddings.weight",
                                          "decoder.layers.1.mlp.linear_fc1.weight",
                                          "decoder.layers.11.mlp.linear_fc1.bias"};
  const auto message = [&] {
    try {
      config.check_freezing(names);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(), "");
  EXPECT_FALSE(config.freezes(names[0]));
  config.freeze = {"decoder.layers.1"};
  EXPECT_TRUE(config.freezes(names[1]));
  EXPECT_FALSE(config.freezes(names[2])) << "a name ends before a dot";
  config.freeze = {"*.linear_fc[12]", "embed*"};
  EXPECT_TRUE(config.freezes(names[0]) && config.freezes(names[2]));
  EXPECT_EQ(message(),
            "--freeze leaves nothing to train\nhint: if that is wanted, say --freeze-all-layers");
  config.freeze = {"decoder.layers.2"};
  EXPECT_THAT(
      message(),
      HasSubstr(
          "--freeze decoder.layers.2 matches no parameter\nhint: the names of this model run from "
          "embedding.word_embeddings.weight to decoder.layers.11.mlp.linear_fc1.bias"));
  config.freeze.clear();
  config.freeze_except = {"*.bias"};
  EXPECT_EQ(message(), "");
  EXPECT_TRUE(config.freezes(names[1]));
  EXPECT_FALSE(config.freezes(names[2]));
  config.freeze_except = {"*.scale"};
  EXPECT_THAT(message(), HasSubstr("--freeze-except *.scale matches no parameter"));
  config = {};
  config.freeze_all_layers = true;
  EXPECT_EQ(message(), "");
  EXPECT_TRUE(config.freezes(names[0]));
}

TEST(Pretrain, FactorsOfLearningRatesByNames) {
  const std::vector<std::string> names = {"embedding.word_embeddings.weight",
                                          "decoder.layers.1.mlp.linear_fc1.weight",
                                          "decoder.layers.1.mlp.linear_fc1.bias"};
  OptimizerConfig config;
  StartConfig start;
  const auto message = [&](std::vector<std::string> factors) {
    config.lr_factors = std::move(factors);
    try {
      check_lr_factors(config, start, names);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message({"embedding=2", "decoder.layers.1.mlp=0.5", "*.bias=3"}), "");
  EXPECT_EQ(message({"embedding=2", "decoder.layers.2=0.5"}),
            "--lr-factors decoder.layers.2 matches no parameter\nhint: the names of this model run "
            "from embedding.word_embeddings.weight to decoder.layers.1.mlp.linear_fc1.bias");
  start.freeze = {"embedding", "*.weight"};
  EXPECT_EQ(message({"decoder=2"}), "") << "frozen in part";
  EXPECT_EQ(message({"decoder=2", "embedding=2"}),
            "--lr-factors embedding names frozen parameters alone\nhint: leave it out, or freeze "
            "less");

  config.lr_factors = {"decoder.layers.1=0.5", "decoder=4", "*.linear_fc[12].bias=8"};
  TestModel model;
  for (const std::string& name : names) model.declare(name, {2});
  set_lr_factors(config, model);
  EXPECT_EQ(model[0].lr_factor, 1.0);
  EXPECT_EQ(model[1].lr_factor, 0.5) << "of the longer name";
  EXPECT_EQ(model[2].lr_factor, 8.0);
}

// The whole way from the flag to the weights, and through a checkpoint.
TEST(Pretrain, FactorsOfLearningRatesMoveTheirParameters) {
  const auto run = [](const char* name, double lr, std::vector<std::string> factors,
                      const std::string& load = "") {
    Arguments arguments = tiny(cat("pretrain_", name));
    const auto save = std::filesystem::path(testing::TempDir()) / cat(name, "_save");
    std::filesystem::remove_all(save);
    arguments.training.save = save.string();
    arguments.training.train_iters = 2;
    arguments.training.save_interval = 1;
    arguments.training.load = load;
    if (!load.empty()) arguments.training.ckpt_step = 1;
    arguments.optimizer.lr = lr;
    arguments.optimizer.lr_decay_style = LrDecayStyle::kConstant;
    arguments.optimizer.lr_factors = std::move(factors);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    pretrain(gpt_task(), arguments);
    testing::internal::GetCapturedStdout();
    testing::internal::GetCapturedStderr();
    return save;
  };
  const auto step = [](const std::filesystem::path& save, int number) {
    return stored_tensors(save / cat("iter_000000", number));
  };
  const std::vector<std::string> factors = {"decoder.layers.0.mlp=0.1"};
  const std::filesystem::path save = run("lr_chosen", 1e-2, factors);
  const auto plain = step(run("lr_plain", 1e-2, {}), 1),
             all = step(run("lr_all", 1e-2 * 0.1, {}), 1), chosen = step(save, 1);
  ASSERT_EQ(chosen.size(), plain.size()) << "factors are no state";
  for (const auto& [key, bytes] : chosen) {
    const bool scaled = key.starts_with("decoder.layers.0.mlp.");
    EXPECT_TRUE(bytes == (scaled ? all : plain).at(key)) << key;
    EXPECT_EQ(bytes == plain.at(key), !scaled) << key;
  }
  EXPECT_TRUE(step(run("lr_resumed", 1e-2, factors, save.string()), 2) == step(save, 2));
}

TEST(Pretrain, UnknownTask) {
  Arguments arguments;
  arguments.training.task = "gtp";
  try {
    find_task(arguments);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("--task gtp is unknown\nhint: known tasks: gpt"));
  }
  arguments.training.task = "gpt";
  EXPECT_EQ(find_task(arguments).name, "gpt");
}

}  // namespace
}  // namespace megatron
