// Models whose layers are letters of --hybrid-layer-pattern.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/training/planning/layout_check.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/planning/letter_costs.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/start_notes.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kCommon =
    "--hidden-size 24 --ffn-hidden-size 36 --num-attention-heads 4 --seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 101 --mock-data --num-workers 0 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --clip-grad 1.0 --eval-iters 0 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --device cpu --train-samples 1000 --log-interval "
    "1 ";

fs::path folder(const std::string& name) {
  const fs::path path = fs::path(testing::TempDir()) / ("hybrid_" + name);
  fs::remove_all(path);
  return path;
}

struct TrainedRun {
  // Losses and gradient norms as they were written, by iteration.
  std::vector<std::string> records;
  fs::path checkpoint;
};

TrainedRun train(const std::string& name, const std::string& flags) {
  const fs::path saved = folder(name), log = folder(name + "_log");
  const Arguments arguments = parse_run(
      cat(kCommon, flags, " --save ", saved.string(), " --run-dir ", log.string()), /*ranks=*/1);
  set_quiet(true);
  testing::internal::CaptureStdout();
  try {
    pretrain(find_task(arguments), arguments);
  } catch (const Error&) {
    testing::internal::GetCapturedStdout();
    throw;
  }
  testing::internal::GetCapturedStdout();
  set_quiet(false);
  TrainedRun run;
  std::ifstream file(log / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const auto record = nlohmann::json::parse(line);
    if (record["type"] == "train")
      run.records.push_back(cat(record["iteration"].dump(), " ", record["lm loss"].dump(), " ",
                                record["grad_norm"].dump()));
  }
  run.checkpoint = find_checkpoints(saved).at(0).directory;
  return run;
}

// Every tensor of a checkpoint, optimizer states included.
std::map<std::string, std::string> tensors_of(const fs::path& directory) {
  const Checkpoint checkpoint(directory);
  std::map<std::string, std::string> out;
  for (const auto& [name, held] : checkpoint.manifest().tensors) {
    ShardedTensor wanted;
    wanted.key = name;
    wanted.dtype = held.dtype;
    wanted.global_shape = held.shape;
    int64_t elements = 1;
    for (const int64_t size : held.shape) elements *= size;
    std::string& bytes = out[name];
    bytes.resize(static_cast<size_t>(elements * size_of(held.dtype)));
    wanted.data = bytes.data();
    LoadOptions options;
    options.allow_unexpected = {"*"};
    checkpoint.load({&wanted, 1}, options);
  }
  return out;
}

// The name of a tensor of a GPT in the model of the letters *- over and over.
std::string in_letters(const std::string& name) {
  std::smatch found;
  static const std::regex layer("decoder\\.layers\\.([0-9]+)\\.(self_attention|mlp)");
  if (std::regex_search(name, found, layer)) {
    const int number = 2 * std::stoi(found[1]) + (found[2] == "mlp");
    return cat(found.prefix().str(), "decoder.layers.", number, ".", found[2].str(),
               found.suffix().str());
  }
  return std::regex_replace(name, std::regex("final_layernorm"), "final_norm");
}

// A GPT and the pattern *-*- go on from the same checkpoint, weights and moments.
TEST(Hybrid, PairsOfLettersTrainAsAGPTInEveryBit) {
  const std::string gpt = "--num-layers 2 ", letters = "--hybrid-layer-pattern *-*- ";
  const TrainedRun start = train("start", gpt + "--exit-interval 3");
  const std::string load =
      cat("--exit-interval 6 --load ", start.checkpoint.parent_path().string());
  const TrainedRun as_gpt = train("gpt", gpt + load), as_letters = train("letters", letters + load);
  ASSERT_EQ(as_gpt.records.size(), 3u);
  EXPECT_EQ(as_gpt.records, as_letters.records);
  const auto before = tensors_of(as_gpt.checkpoint), after = tensors_of(as_letters.checkpoint);
  EXPECT_EQ(before.size(), after.size());
  for (const auto& [name, bytes] : before) {
    const auto found = after.find(in_letters(name));
    ASSERT_NE(found, after.end()) << name;
    EXPECT_TRUE(bytes == found->second) << name;
  }
  // The test compares something: the steps changed the weights.
  EXPECT_NE(before.at("decoder.final_layernorm.weight"),
            tensors_of(start.checkpoint).at("decoder.final_layernorm.weight"));
}

TEST(Hybrid, ChecksWhichLettersACheckpointHas) {
  const TrainedRun gpt = train("of_gpt", "--num-layers 2 --exit-interval 1");
  const std::string from_gpt =
      cat("--exit-interval 2 --load ", gpt.checkpoint.parent_path().string());
  const auto error = [&](const std::string& flags) {
    return error_of([&] { train("refused", flags); });
  };
  EXPECT_THAT(error("--hybrid-layer-pattern *-*-- " + from_gpt),
              HasSubstr("is of a GPT of 2 layers, but --hybrid-layer-pattern *-*-- has 2 layers of "
                        "attention and 3 of MLPs or experts\nhint: 2 of each, in any order"));
  // In any order.
  const TrainedRun letters = train("of_letters", "--hybrid-layer-pattern -**- " + from_gpt);
  const std::string from_letters =
      cat("--exit-interval 3 --load ", letters.checkpoint.parent_path().string());
  EXPECT_THAT(error("--hybrid-layer-pattern -*-* " + from_letters),
              HasSubstr("is of the layers -**-, the run has -*-*: at position 3 '*' and '-'\nhint: "
                        "--hybrid-layer-pattern -**-"));
  EXPECT_THAT(error("--num-layers 2 " + from_letters),
              HasSubstr("is of the layers -**-, the run has no --hybrid-layer-pattern"));
  // Segments of the pipeline are no difference.
  train("other_segments", "--hybrid-layer-pattern -*|*- " + from_letters);
}

// What zero-bubble schedules plan with.
TEST(Hybrid, SchedulesKnowTheCostsOfSegments) {
  const Arguments arguments =
      parse_run(cat(kCommon, "--pipeline-model-parallel-size 2 --hybrid-layer-pattern *-*-*-|- ",
                    "--pipeline-schedule zb-auto"),
                2);
  const LayoutPlan plan = make_layout_plan(arguments, {101, 128}, /*on_gpu=*/false,
                                           find_task(arguments).model_provider);
  const ScheduleCosts costs = arguments.pipeline.shape(plan.stages, 4).costs;
  ASSERT_EQ(costs.passes.size(), 2u);
  EXPECT_EQ(costs.passes[0][0].forward, 1.0);
  EXPECT_LT(costs.passes[1][0].forward, 0.75);  // one MLP of four, and the output layer
}

// As many residual connections in one model as in the other.
TEST(Hybrid, OutputsStartAsThoseOfAGPT) {
  TransformerConfig gpt, letters;
  gpt.num_layers = 3;
  letters.hybrid_layer_pattern = "*-*|-*-";
  letters.finalize();
  EXPECT_EQ(letters.num_layers, 6);
  EXPECT_EQ(letters.weight_init(8, 8, /*output=*/true).std,
            gpt.weight_init(8, 8, /*output=*/true).std);
}

// Every pair of neighbours of each segment, and its ends.
TEST(Hybrid, AProofHasTheSameNeighbours) {
  const auto tiny = [](const std::string& pattern, const std::string& flags, int ranks) {
    const Arguments whole = parse_run(
        cat("--tokenizer-type NullTokenizer --vocab-size 101 --mock-data --lr 1e-3 --train-iters 5 "
            "--hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 1 "
            "--max-position-embeddings 512 --global-batch-size 8 --hybrid-layer-pattern ",
            pattern, " ", flags),
        ranks);
    return shrink(whole, /*max_axis=*/4, /*num_steps=*/2).arguments.transformer;
  };
  EXPECT_EQ(tiny("*-*-*-*-*-*-*-*-", "", 1).hybrid_layer_pattern, "*-*-");
  EXPECT_EQ(tiny("*-*-*-*-----", "", 1).hybrid_layer_pattern, "*-*--");
  EXPECT_EQ(tiny("**-*-*-||----|*-*", "--pipeline-model-parallel-size 2", 2).hybrid_layer_pattern,
            "**-*-||--|*-*");
  // Those that cost has divided are named.
  EXPECT_EQ(tiny("*-*-*-*-*-*-", "--pipeline-model-parallel-size 2", 2).hybrid_layer_pattern,
            "*-*-|*-*-");
  const TransformerConfig experts =
      tiny("*E*E*-*-*E", "--num-experts 4 --pipeline-model-parallel-size 2", 2);
  EXPECT_EQ(experts.num_layers, std::ssize(experts.hybrid_letters()));
  EXPECT_EQ(experts.num_moe_layers(experts.num_layers), experts.count_hybrid_letter('E'));
}

// Megatron-LM's numbers for a sample of 8192 tokens, with H P channels where it takes 2 h.
TEST(Hybrid, CountsTheOperationsOfLetters) {
  const auto flops = [](const std::string& flags, int64_t vocabulary) {
    const Arguments arguments = parse_run(
        cat("--tokenizer-type NullTokenizer --mock-data --lr 1e-3 --train-iters 5 --seq-length "
            "8192 "
            "--position-embedding-type none --micro-batch-size 1 --global-batch-size 1 "
            "--disable-bias-linear --normalization RMSNorm "
            "--untie-embeddings-and-output-weights --group-query-attention --kv-channels 128 "
            "--vocab-size 1000 ",
            flags),
        1);
    return 8192 * model_flops_per_token(find_task(arguments).model_provider, arguments,
                                        {vocabulary, vocabulary});
  };
  // Nemotron-H 8B.
  EXPECT_EQ(flops("--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- "
                  "--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 "
                  "--num-query-groups 8 --mamba-num-heads 128 --squared-relu",
                  131072),
            382630046466048);
  EXPECT_EQ(flops("--hybrid-layer-pattern M-M*M-M- --hidden-size 2688 --ffn-hidden-size 1856 "
                  "--num-attention-heads 32 --num-query-groups 2 --mamba-num-heads 64 "
                  "--squared-relu",
                  131072),
            29558770237440);
  EXPECT_EQ(flops("--hybrid-layer-pattern G-G-G-*- --hidden-size 4096 --ffn-hidden-size 12288 "
                  "--num-attention-heads 16 --num-query-groups 4 --kv-channels 256 --swiglu",
                  248320),
            93639413858304);
}

Arguments parse_letters(const std::string& flags, int ranks) {
  return parse_run(cat(kCommon, flags), ranks);
}

std::string stages_of(const std::string& flags, int ranks) {
  const Arguments arguments = parse_letters(flags, ranks);
  const StageLayout layout =
      make_layout_plan(arguments, {101, 128}, /*on_gpu=*/false, find_task(arguments).model_provider)
          .stages;
  return pattern_of_segments(arguments.transformer.hybrid_letters(), layout.layer_counts());
}

TEST(Hybrid, DividesLayersByBarsOrByCost) {
  const std::string pp2 = "--pipeline-model-parallel-size 2 --hybrid-layer-pattern ";
  EXPECT_EQ(stages_of(pp2 + "*|---*-", 2), "*|---*-");
  EXPECT_EQ(stages_of(pp2 + "*||---*|-", 2), "*||---*|-");
  // An MLP of width 2400 takes longer than seven layers of attention.
  EXPECT_EQ(stages_of("--ffn-hidden-size 2400 " + pp2 + "-*******", 2), "-|*******");
  EXPECT_THAT(stages_of("--ffn-hidden-size 2400 --num-virtual-stages-per-pipeline-rank 2 "
                        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern=--*****",
                        2),
              testing::StartsWith("-|-"));
}

// On a GPU without kernels of scans, as this build says.
TEST(Hybrid, AStartOnAGpuSaysWhatHasNoKernel) {
  const auto notes = [](const std::string& flags, bool on_gpu) {
    const Arguments arguments = parse_letters(
        "--attention-dropout 0 --mamba-num-heads 4 --mamba-head-dim 64 --mamba-num-groups 1 " +
            flags,
        1);
    return start_notes(arguments, {101, 128}, on_gpu, find_task(arguments).model_provider);
  };
  EXPECT_THAT(notes("--bf16 --hybrid-layer-pattern M-", true),
              testing::ElementsAre(
                  HasSubstr("the scan of Mamba-2 layers runs as tensor operations: its kernel is "
                            "for Hopper GPUs")));
  EXPECT_THAT(notes("--hybrid-layer-pattern M-", false), testing::IsEmpty());
}

// What `check` shows of one layer of each letter.
TEST(Hybrid, CheckShowsWhatLettersCost) {
  const auto plan_of = [](const std::string& flags, int ranks) {
    const Arguments arguments = parse_letters(
        cat("--hybrid-layer-pattern M-M*G- --mamba-num-heads 4 --mamba-head-dim 4 "
            "--mamba-state-dim 6 --mamba-num-groups 2 --linear-num-key-heads 2 "
            "--linear-num-value-heads 4 --linear-key-head-dim 4 --linear-value-head-dim 6 ",
            flags),
        ranks);
    return make_layout_plan(arguments, {101, 128}, /*on_gpu=*/false,
                            find_task(arguments).model_provider);
  };
  const LayoutPlan plan = plan_of("", 1);
  const std::vector<LetterCosts> letters = letter_costs(plan);
  std::string order;
  int64_t parameters = 0;
  for (const LetterCosts& one : letters) {
    order += cat(one.letter, one.layers);
    parameters += one.layers * one.parameters;
    EXPECT_EQ(one.sent, 0.0) << one.letter;
    EXPECT_GT(one.forward_ms, 0.0) << one.letter;
    EXPECT_GT(one.backward_ms, one.forward_ms) << one.letter;
  }
  EXPECT_EQ(order, "M2-2*1G1");
  // in_proj with its norm, the convolution, three numbers for each head, norm and out_proj.
  const int64_t h = 24, d = 16, mixed = 2 * d + 2 * 12 + 4;
  EXPECT_EQ(letters[0].parameters, 2 * h + h * mixed + 5 * (d + 24) + 3 * 4 + d + d * h);
  EXPECT_EQ(letters[0].saved, plan.layer_cost(1).saved().total());
  // The rest: words, positions and the last norm.
  const LayoutReport report = make_layout_report(plan);
  EXPECT_EQ(parameters + h * (128 + 16 + 2), report.parameters);
  const std::string text = layout_text(plan, report);
  EXPECT_THAT(text,
              testing::ContainsRegex("G gated delta net +1 +[0-9,]+ +[0-9.]+ +0\\.0 +[0-9.]+"));
  EXPECT_THAT(layout_json(plan, report), HasSubstr("\"letter\": \"M\""));

  // Over tensor ranks: as many parameters, half of the time, and rows are exchanged.
  const std::vector<LetterCosts> divided =
      letter_costs(plan_of("--tensor-model-parallel-size 2 --sequence-parallel", 2));
  for (size_t i = 0; i < letters.size(); ++i) {
    EXPECT_EQ(divided[i].parameters, letters[i].parameters);
    EXPECT_DOUBLE_EQ(2 * divided[i].forward_ms, letters[i].forward_ms);
    EXPECT_LT(divided[i].saved, letters[i].saved);
    EXPECT_GT(divided[i].sent, 0.0);
  }
}

// Without attention there are no groups of keys and values that anything could be divided by.
TEST(Hybrid, ExpertsWithoutAttentionHaveCosts) {
  EXPECT_EQ(stages_of("--num-attention-heads 0 --attention-dropout 0 --disable-bias-linear "
                      "--position-embedding-type none --num-experts 4 --moe-router-topk 2 "
                      "--mamba-num-heads 4 --mamba-head-dim 6 --mamba-num-groups 2 "
                      "--mamba-state-dim 4 --pipeline-model-parallel-size 2 "
                      "--hybrid-layer-pattern MEME",
                      2),
            "ME|ME");
}

TEST(Hybrid, RefusesWhatItCannotTrain) {
  const auto error = [](const std::string& flags, int ranks = 1) {
    return error_of([&] { parse_letters(flags, ranks); });
  };
  const auto pattern = [&](const std::string& text) {
    return error("--hybrid-layer-pattern " + text);
  };
  EXPECT_THAT(pattern("*-X-"),
              HasSubstr("--hybrid-layer-pattern \"*-X-\": 'X' at position 3 is no letter of a layer"
                        "\nhint: letters of layers: M Mamba-2, G gated delta net, * attention, - "
                        "MLP, E experts, + latent attention; | ends a segment of the pipeline"));
  EXPECT_THAT(pattern("*D"), HasSubstr("'D' at position 2: sparse attention is not built"));
  EXPECT_THAT(pattern("*-/*-"),
              HasSubstr("'/' at position 3: layers of multi-token prediction in a pattern are not "
                        "built"));
  EXPECT_THAT(pattern("|"), HasSubstr("has no layers"));
  EXPECT_THAT(pattern("*-- --num-layers 2"),
              HasSubstr("--num-layers 2 is not the number of letters of --hybrid-layer-pattern "
                        "\"*--\", 3\nhint: leave --num-layers out"));
  EXPECT_THAT(pattern("*E"), HasSubstr("has E, experts, without --num-experts"));
  EXPECT_THAT(pattern("*- --num-experts 4"),
              HasSubstr("--num-experts has no effect on a --hybrid-layer-pattern without E"));
  EXPECT_THAT(pattern("*E --num-experts 4 --moe-layer-freq 2"),
              HasSubstr("--moe-layer-freq 2 with --hybrid-layer-pattern"));
  EXPECT_THAT(pattern("+-"),
              HasSubstr("has +, latent attention, without --multi-latent-attention"));
  EXPECT_THAT(pattern("*- --parallel-residual"),
              HasSubstr("--parallel-residual with --hybrid-layer-pattern is not built"));
  EXPECT_THAT(pattern("*- --norm-placement post"),
              HasSubstr("--norm-placement other than pre with --hybrid-layer-pattern"));
  EXPECT_THAT(pattern("*- --mtp-num-layers 1"), HasSubstr("--mtp-num-layers with"));
  EXPECT_THAT(pattern("*- --task bert"), HasSubstr("--hybrid-layer-pattern with --task bert"));
  EXPECT_THAT(error("--num-layers 2 --is-hybrid-model"),
              HasSubstr("which layers it has is said by --hybrid-layer-pattern"));
  parse_letters(
      "--hybrid-override-pattern *- --is-hybrid-model --spec "
      "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
      1);

  const std::string pp2 = "--pipeline-model-parallel-size 2 --hybrid-layer-pattern ";
  EXPECT_THAT(error(pp2 + "*-|*-|-", 2),
              HasSubstr("--hybrid-layer-pattern has 3 segments, which is not divisible by "
                        "--pipeline-model-parallel-size 2\nhint: \"*-|*--\" or \"*|-|*-|-\"; or "
                        "without |: layers are then divided by cost"));
  EXPECT_THAT(error(pp2 + "*|- --pipeline-schedule zb-v", 2),
              HasSubstr("has 2 segments, the schedule takes 2 x --pipeline-model-parallel-size 2\n"
                        "hint: \"*|||-\"; or without |"));
  EXPECT_THAT(error(pp2 + "*-|*- --decoder-first-pipeline-num-layers 1", 2),
              HasSubstr("--decoder-first-pipeline-num-layers cannot be combined with | in "
                        "--hybrid-layer-pattern"));
  EXPECT_THAT(error(pp2 + "*-*- --pipeline-model-parallel-layout Ett|ttL", 2),
              HasSubstr("--pipeline-model-parallel-layout cannot be combined with"));
  EXPECT_THAT(error(pp2 + "*-*- --account-for-loss-in-pipeline-split", 2),
              HasSubstr("--account-for-loss-in-pipeline-split cannot be combined with"));
  EXPECT_THAT(error(pp2 + "*-*- --num-layers-per-virtual-pipeline-stage 1", 2),
              HasSubstr("--num-layers-per-virtual-pipeline-stage cannot be combined with"));
  EXPECT_THAT(error(pp2 + "*|-|*|- --num-virtual-stages-per-pipeline-rank 3", 2),
              HasSubstr("--hybrid-layer-pattern has 4 segments, "
                        "--num-virtual-stages-per-pipeline-rank 3 x --pipeline-model-parallel-size "
                        "2 asks for 6"));
  EXPECT_THAT(
      error("--context-parallel-size 2 --cp-comm-type p2p a2a --hybrid-layer-pattern *-*", 2),
      HasSubstr("--cp-comm-type has 2 values, expected 1 or one per layer, 3"));
  EXPECT_THAT(error(pp2 + "*", 2),
              HasSubstr("--hybrid-layer-pattern has 1 layers for 2 segments of the pipeline"));
}

// Every rule of a letter's own flags, through the arguments of a run.
TEST(Hybrid, RefusesFlagsOfLetters) {
  const auto error = [](const std::string& flags, int ranks = 1) {
    return error_of([&] { parse_letters(flags, ranks); });
  };
  EXPECT_THAT(error("--num-layers 2 --mamba-num-heads 4"),
              HasSubstr("--mamba-num-heads has no effect without layers of the letter M, Mamba-2\n"
                        "hint: leave it out, or give --hybrid-layer-pattern with M"));
  EXPECT_THAT(error("--hybrid-layer-pattern *- --linear-key-head-dim 8 --linear-num-key-heads 4"),
              testing::AllOf(HasSubstr("--linear-num-key-heads has no effect without layers of the "
                                       "letter G, gated delta net"),
                             HasSubstr("--linear-key-head-dim has no effect without")));
  EXPECT_THAT(error("--hybrid-layer-pattern *- --recompute-granularity selective "
                    "--recompute-modules mamba_norm gdn_norm_out"),
              testing::AllOf(HasSubstr("--recompute-modules mamba_norm has no effect without"),
                             HasSubstr("--recompute-modules gdn_norm_out has no effect without")));
  const std::string mamba = "--hybrid-layer-pattern M- --mamba-head-dim 4 --mamba-num-heads ",
                    tp2 = " --tensor-model-parallel-size 2";
  EXPECT_THAT(error(mamba + "6 --mamba-num-groups 4"),
              HasSubstr("6 Mamba heads are not divisible by --mamba-num-groups 4\nhint: groups "
                        "that divide them: 1, 2, 3, 6"));
  EXPECT_THAT(error(mamba + "5 --mamba-num-groups 1" + tp2, 2),
              HasSubstr("5 Mamba heads are not divisible by --tensor-model-parallel-size 2"));
  EXPECT_THAT(error(mamba + "6 --mamba-num-groups 3" + tp2, 2),
              HasSubstr("--mamba-num-groups 3 and --tensor-model-parallel-size 2: neither divides "
                        "the other"));
  EXPECT_THAT(error("--hybrid-layer-pattern G- --linear-num-key-heads 3 "
                    "--linear-num-value-heads 4" +
                        tp2,
                    2),
              testing::AllOf(HasSubstr("--linear-num-value-heads 4 is not divisible by "
                                       "--linear-num-key-heads 3"),
                             HasSubstr("--linear-num-key-heads 3 is not divisible by "
                                       "--tensor-model-parallel-size 2")));
}

// Kinds of layers that Megatron-LM has and that are not built, by name.
TEST(Hybrid, NamesLayersThatAreNotBuilt) {
  const auto error = [](const std::string& flags) {
    return error_of([&] { parse_letters("--hybrid-layer-pattern *-*- " + flags, 1); });
  };
  EXPECT_THAT(error("--experimental-attention-variant gdn --linear-attention-freq 4"),
              HasSubstr("--hybrid-layer-pattern G-G-G-*- over and over"));
  EXPECT_THAT(error("--experimental-attention-variant gdn2"),
              HasSubstr("--experimental-attention-variant gdn2 is refused: gated delta nets of the "
                        "second kind are not built"));
  EXPECT_THAT(error("--gdp-num-householder 2"), HasSubstr("gated delta products are not built"));
  EXPECT_THAT(error("--spec megatron.core.models.hybrid.hybrid_layer_specs gdp_stack_spec"),
              HasSubstr("--spec gdp_stack_spec is refused: gated delta products are not built"));
}

}  // namespace
}  // namespace megatron
