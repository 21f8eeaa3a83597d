// How `prove` shrinks a configuration before it runs it; tests/parallel tests the proofs
// themselves.
#include "megatron/training/proving/prove.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/parse_line.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

using testing::Contains;

constexpr const char* kHeads = "--hidden-size 1024 --num-attention-heads 16 ";

Shrunk shrunk(const std::string& flags, int64_t world_size, const std::string& heads = kHeads,
              bool on_gpu = false) {
  const Arguments arguments = parse_line(
      "prove --mock-data --tokenizer-type ByteLevelTokenizer --lr 1e-3 --train-iters 10 "
      "--seq-length 1024 --micro-batch-size 1 --global-batch-size 48 " +
          heads + flags,
      world_size);
  return shrink(arguments, /*max_axis=*/4, /*num_steps=*/3, on_gpu);
}

TEST(Shrink, CutsEvenDepthsAndWhatCountsTheirLayers) {
  const Shrunk result = shrunk(
      "--num-layers 24 --pipeline-model-parallel-size 2 --recompute-granularity full "
      "--recompute-num-layers 6",
      2);
  EXPECT_EQ(result.arguments.transformer.num_layers, 6);
  EXPECT_EQ(result.arguments.transformer.recompute_num_layers, 2);
  EXPECT_THAT(result.changes, Contains("--num-layers 24 -> 6"));
  EXPECT_THAT(result.changes, Contains("--recompute-num-layers 6 -> 2"));
}

TEST(Shrink, AxesStayAxes) {
  const ParallelConfig five =
      shrunk("--num-layers 2 --tensor-model-parallel-size 5", 5,
             "--hidden-size 640 --num-attention-heads 20 --ffn-hidden-size 640 ")
          .arguments.parallel;
  EXPECT_EQ(five.tensor_model_parallel_size, 3);  // no divisor: an odd number stays odd
  const Arguments levels = shrunk(
                               "--num-layers 2 --context-parallel-size 16 --cp-comm-type a2a+p2p "
                               "--hierarchical-context-parallel-sizes 8 2",
                               16)
                               .arguments;
  EXPECT_EQ(levels.parallel.context_parallel_size, 4);
  EXPECT_EQ(levels.parallel.hierarchical_context_parallel_sizes, (std::vector<int64_t>{2, 2}));
  const Shrunk instances = shrunk(
      "--num-layers 2 --use-distributed-optimizer --num-distributed-optimizer-instances 8", 16);
  EXPECT_EQ(instances.arguments.world_size, 4);
  EXPECT_EQ(instances.arguments.ddp.num_distributed_optimizer_instances, 2);
  EXPECT_THAT(instances.changes, Contains("--num-distributed-optimizer-instances 8 -> 2"));
}

// Instances divide the ranks that hold the same dense weights, and the same experts.
TEST(Shrink, OptimizerInstancesStaySeveralWithExperts) {
  const auto small = [](const std::string& flags, int64_t world_size) {
    return shrunk(
               "--num-layers 2 --disable-bias-linear --num-experts 12 --moe-router-topk 2 "
               "--use-distributed-optimizer --num-distributed-optimizer-instances 2 " +
                   flags,
               world_size)
        .arguments;
  };
  const Arguments three = small(
      "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 "
      "--expert-model-parallel-size 4",
      48);  // of 24 ranks 3 would hold the same experts
  EXPECT_EQ(three.world_size, 24);
  EXPECT_EQ(three.parallel.expert_model_parallel_size, 3);
  EXPECT_EQ(three.ddp.num_distributed_optimizer_instances, 2);
  const Arguments mapped =
      small("--use-tp-pp-dp-mapping --context-parallel-size 2 --expert-model-parallel-size 2", 12);
  EXPECT_EQ(mapped.world_size, 6);  // 3 ranks hold the same experts
  EXPECT_EQ(mapped.ddp.num_distributed_optimizer_instances, 1);
}

TEST(Shrink, RanksThatShareAGroupDivideItsRows) {
  const TransformerConfig t = shrunk(
                                  "--num-layers 2 --group-query-attention --num-query-groups 1 "
                                  "--tensor-model-parallel-size 3",
                                  3, "--hidden-size 576 --num-attention-heads 12 --kv-channels 48 ")
                                  .arguments.transformer;
  EXPECT_EQ(t.query_groups(), 1);
  EXPECT_EQ((t.num_attention_heads + 2) * t.kv_channels % 3, 0);
}

TEST(Shrink, EveryTensorRankHasTokens) {
  const Arguments a = shrunk("--num-layers 2 --tensor-model-parallel-size 4", 4).arguments;
  const int64_t padded = padded_vocab_size(a.tokenizer, a.tokenizer.vocab_size.value_or(0), 4);
  EXPECT_GT(padded, *a.tokenizer.vocab_size);          // the last one has padding
  EXPECT_GT(*a.tokenizer.vocab_size, padded / 4 * 3);  // and tokens
}

TEST(Shrink, KeepsWhatRoundsOnPurpose) {
  const Arguments a = shrunk(
                          "--num-layers 2 --bf16 --grad-reduce-in-bf16 "
                          "--use-precision-aware-optimizer --exp-avg-dtype bf16 "
                          "--fp8-format hybrid --fp8-recipe delayed",
                          2)
                          .arguments;
  EXPECT_TRUE(a.ddp.grad_reduce_in_bf16);
  EXPECT_EQ(a.optimizer.exp_avg_dtype, StateType::kBf16);
  EXPECT_EQ(a.transformer.fp8_format, Fp8Format::kHybrid);
  EXPECT_EQ(a.transformer.hidden_size % 16, 0);
}

// Learning rates are those of the few steps times the user's shape.
TEST(Shrink, FitsTheSchedule) {
  const OptimizerConfig decays =
      shrunk(
          "--num-layers 2 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 5 "
          "--lr-decay-iters 20 --decoupled-lr 1e-2 --lr-factors decoder=0.5",
          2)
          .arguments.optimizer;
  const double lr = *decays.lr;
  EXPECT_EQ(decays.lr_decay_style, LrDecayStyle::kCosine);
  EXPECT_EQ(decays.lr_decay_iters, 6);  // twice as long as the training
  EXPECT_EQ(decays.lr_warmup_iters, 0);
  EXPECT_DOUBLE_EQ(*decays.lr_warmup_fraction, 0.25);
  EXPECT_DOUBLE_EQ(decays.min_lr, 0.1 * lr);
  EXPECT_DOUBLE_EQ(*decays.decoupled_lr, 10 * lr);
  EXPECT_EQ(decays.rate_factors().at(0).factor, 0.5);
  const OptimizerConfig tail = shrunk(
                                   "--num-layers 2 --lr-decay-style WSD --lr-wsd-decay-iters 2 "
                                   "--lr-wsd-decay-style linear --lr-warmup-iters 1",
                                   2)
                                   .arguments.optimizer;
  EXPECT_EQ(tail.lr_decay_iters, 3);
  EXPECT_EQ(tail.lr_wsd_decay_iters, 1);
  EXPECT_DOUBLE_EQ(*tail.lr_warmup_fraction, 1.0 / 3);  // at least a step
}

// Settings of saving, loading and logging would refuse each other without their folders.
TEST(Shrink, ForgetsWhatARunDoesAroundItsSteps) {
  const Arguments a =
      shrunk(
          "--num-layers 2 --save run --async-save --keep-last-checkpoints 2 --load base --finetune "
          "--exit-interval 5 --wandb-project p --wandb-exp-name e "
          "--reset-attention-mask --freeze embedding --seed 7",
          2)
          .arguments;
  EXPECT_EQ(a.training.save + a.training.load + a.training.wandb_exp_name, "");
  EXPECT_FALSE(a.training.async_save || a.training.finetune || a.training.no_load_optim);
  EXPECT_FALSE(a.training.keep_last_checkpoints || a.training.exit_interval);
  EXPECT_TRUE(a.data.reset_attention_mask && a.data.mock_data);
  EXPECT_EQ(a.training.freeze, std::vector<std::string>{"embedding"});
  EXPECT_EQ(a.transformer.seed, 7);
}

TEST(Shrink, KeepsTheLayersThatFactorsOfTheLearningRateName) {
  const auto layers = [](const char* factors) {
    return shrunk(cat("--num-layers 12 --lr-factors ", factors), 2)
        .arguments.transformer.num_layers;
  };
  EXPECT_LT(layers("decoder=0.5"), 12);
  EXPECT_EQ(layers("decoder.layers.11=0.5"), 12);
}

TEST(Shrink, RaisesTheEpsilonOfAdam) {
  EXPECT_EQ(shrunk("--num-layers 2", 2).arguments.optimizer.adam_eps, 1e-5);
  EXPECT_EQ(shrunk("--num-layers 2 --adam-eps 1e-3", 2).arguments.optimizer.adam_eps, 1e-3);
}

TEST(Shrink, KeepsTheLossScale) {
  EXPECT_FALSE(shrunk("--num-layers 2 --fp16", 2).arguments.optimizer.loss_scale);
  EXPECT_EQ(shrunk("--num-layers 2 --fp16 --loss-scale 64", 2).arguments.optimizer.loss_scale, 64);
}

// One step has the smaller batch, the others the larger one.
TEST(Shrink, ABatchThatGrowsStillGrows) {
  Arguments run = shrunk("--num-layers 2 --pipeline-model-parallel-size 2", 4).arguments;
  run.training.global_batch_size = {};
  run.training.step_batch_size_schedule = "0:16 1M:32 4M:64";
  const Shrunk result = shrink(run, /*max_axis=*/4);
  const Arguments& a = result.arguments;
  EXPECT_FALSE(a.training.global_batch_size);
  EXPECT_EQ(a.microbatches().num_microbatches(0), 2);
  EXPECT_EQ(a.microbatches().num_microbatches(a.microbatches().samples_of_iterations(1)), 4);
  EXPECT_THAT(result.changes, Contains(testing::StartsWith("--step-batch-size-schedule \"0:16")));
  EXPECT_EQ(serial_arguments(a).microbatches().global_batch_size(1000),
            a.microbatches().global_batch_size(1000));
}

TEST(Shrink, EvaluationsKeepMicrobatchesOfTheirOwn) {
  const Arguments a =
      shrunk("--num-layers 2 --eval-micro-batch-size 4 --eval-global-batch-size 96", 2).arguments;
  EXPECT_EQ(a.eval_micro_batch_size(), 2);
  EXPECT_EQ(a.eval_global_batch_size(), 2 * 2 * a.data_parallel_size());
  EXPECT_EQ(serial_arguments(a).eval_global_batch_size(), a.eval_global_batch_size());
}

TEST(Shrink, ShortSamplesHaveSeveralMaskedTokens) {
  const auto share = [](const char* flags) {
    return shrunk(cat("--num-layers 2 --task bert ", flags), 2).arguments.masked.mask_prob;
  };
  EXPECT_EQ(share(""), 0.4);
  EXPECT_EQ(share("--mask-prob 0.5"), 0.5);
}

TEST(Shrink, EvaluatesIfTheRunDoes) {
  EXPECT_EQ(shrunk("--num-layers 2", 2).arguments.training.eval_iters, 2);
  EXPECT_EQ(shrunk("--num-layers 2 --eval-iters 0", 2).arguments.training.eval_iters, 0);
  const DataConfig data =
      shrunk("--num-layers 2 --full-validation --multiple-validation-sets", 2).arguments.data;
  EXPECT_TRUE(data.full_validation && data.multiple_validation_sets);
}

// Graphs stay on a GPU, but not in the run of one rank that the layout is compared with.
TEST(Shrink, KeepsGraphsOnAGpu) {
  const std::string flags = "--num-layers 2 --cuda-graph-impl local --device cuda";
  EXPECT_FALSE(shrunk(flags, 2).arguments.training.uses_cuda_graphs());
  EXPECT_EQ(shrunk(flags, 2).arguments.training.device, DeviceChoice::kCpu);
  const Arguments a = shrunk(flags, 2, kHeads, /*on_gpu=*/true).arguments;
  EXPECT_TRUE(a.training.uses_cuda_graphs());
  EXPECT_EQ(a.training.device, DeviceChoice::kCuda);
  EXPECT_FALSE(serial_arguments(a).training.uses_cuda_graphs());
}

// Stages that divide the vocabulary add up a gradient in another order, which may move its largest
// value.
TEST(Prove, ScalesAreComparedWhereSumsHaveOneOrder) {
  const Arguments a =
      shrunk(
          "--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-vocab-parallel "
          "--untie-embeddings-and-output-weights --bf16 --fp8-format e4m3 --fp8-recipe delayed "
          "--eval-iters 0 --num-query-groups 16",
          2)
          .arguments;
  const Proof proof = prove(gpt_task(), a, /*num_steps=*/1).at(1);
  EXPECT_TRUE(proof.holds());
  EXPECT_EQ(proof.not_proved.size(), 1u);
  for (const ProofLine& line : proof.lines) EXPECT_NE(line.quantity, "states");
}

// In fp64 nothing is imposed; in the run's own type the choices of routers are counted beside it.
TEST(Prove, RoutersChooseByThemselves) {
  const Arguments a =
      shrunk(
          "--num-layers 2 --num-experts 8 --moe-router-topk 2 --moe-router-score-function sigmoid "
          "--moe-router-enable-expert-bias --tensor-model-parallel-size 2 --sequence-parallel "
          "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --bf16 --eval-iters 0 "
          "--disable-bias-linear",
          2)
          .arguments;
  const std::vector<Proof> proofs = prove(gpt_task(), a, /*num_steps=*/1);
  EXPECT_EQ(proofs.at(0).routed_tokens, 0);
  const Proof& own = proofs.at(1);
  EXPECT_TRUE(own.holds());
  EXPECT_EQ(own.lines.front().quantity, "routing");
  EXPECT_EQ(own.lines.front().compared, a.transformer.num_layers);
  const int64_t passes = *a.training.global_batch_size, steps = kFewestRoundingSteps;
  EXPECT_GE(own.routed_tokens,
            steps * passes * a.transformer.seq_length * a.transformer.num_layers);
  EXPECT_GT(own.routed_otherwise, 0);
  EXPECT_LT(own.routed_otherwise, own.routed_tokens / 10);
}

// A product of an overflow with zero is no number: such a loss scale is too large, too.
TEST(Prove, Fp16HasALossScaleWithoutOverflowsOfOneRank) {
  const Arguments whole = parse_line(
      "prove --tokenizer-type NullTokenizer --vocab-size 46 --make-vocab-size-divisible-by 1 "
      "--mock-data --num-layers 1 --hidden-size 24 --num-attention-heads 6 --kv-channels 4 "
      "--ffn-hidden-size 17 --group-query-attention --num-query-groups 1 --geglu --seq-length 28 "
      "--max-position-embeddings 32 --normalization RMSNorm --norm-placement post "
      "--disable-bias-linear --untie-embeddings-and-output-weights --init-method-xavier-uniform "
      "--hidden-dropout 0.1 --attention-dropout 0.2 --micro-batch-size 3 --global-batch-size 9 "
      "--train-iters 5 --lr 1e-2 --eval-iters 0 --eod-mask-loss --reset-position-ids --seed 732 "
      "--fp16",
      1);
  const Proof proof = prove(gpt_task(), shrink(whole, /*max_axis=*/4).arguments, 1).at(1);
  EXPECT_THAT(proof.faults, testing::IsEmpty());
}

// The run of one rank and that of the layout are quantised, and that in fp64 is not.
TEST(Prove, ScalesOfBlocksAreThoseOfTheRun) {
  const Shrunk small = shrunk(
      "--num-layers 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16 "
      "--fp8-format e4m3 --fp8-recipe blockwise --eval-iters 0",
      2);
  PretrainTask task = gpt_task();
  std::set<std::pair<int, QuantizationRecipe>> models;  // by the number of ranks
  task.model_provider = [&, make = task.model_provider](
                            const Arguments& a, const Vocabulary& vocabulary,
                            const ParallelGroups& groups, const StageSlice& slice,
                            const std::vector<Model*>& chunks) {
    if (groups.world.rank() == 0)
      models.emplace(groups.world.size(), a.transformer.quantization(1).recipe);
    return make(a, vocabulary, groups, slice, chunks);
  };
  const std::vector<Proof> proofs = prove(task, small.arguments, /*num_steps=*/1);
  EXPECT_TRUE(proofs.at(1).holds());
  EXPECT_EQ(proofs.at(1).dtype, "bf16");
  EXPECT_GT(proofs.at(1).lines.size(), 1u);
  EXPECT_THAT(proofs.at(1).not_proved, testing::IsEmpty());
  constexpr auto kNone = QuantizationRecipe::kNone, kBlocks = QuantizationRecipe::kBlockwise;
  EXPECT_THAT(models, testing::UnorderedElementsAre(std::pair(1, kNone), std::pair(1, kBlocks),
                                                    std::pair(2, kNone), std::pair(2, kBlocks)));
}

// Weights that stayed the same would be quantised in the same way in every step, and scale all its
// gradients alike. In fp64 they are those of the own type.
TEST(Prove, StepsWithoutUpdatesHaveWeightsOfTheirOwn) {
  const Arguments a = serial_arguments(shrunk("--num-layers 2 --bf16", 1).arguments);
  const auto weights = [&](at::ScalarType type) {
    std::vector<at::Tensor> seen;  // of each micro-batch
    PretrainTask task = gpt_task();
    task.forward_step = [&seen, forward = task.forward_step](Model& model, const Batch& batch,
                                                             const StageTensors& input,
                                                             const ForwardContext& context) {
      seen.push_back(model.embedding_tables().words->value.to(at::kDouble, false, /*copy=*/true));
      return forward(model, batch, input, context);
    };
    trace_training(task, a, {type, /*num_steps=*/3, /*updates=*/false, at::kBFloat16});
    return seen;
  };
  const std::vector<at::Tensor> wide = weights(at::kDouble), own = weights(at::kBFloat16);
  ASSERT_EQ(wide.size(), own.size());
  const size_t of_step = wide.size() / 3;
  ASSERT_EQ(of_step, 2u);
  for (size_t i = 0; i < wide.size(); ++i) {
    EXPECT_TRUE(at::equal(wide[i], own[i])) << i;
    if (i > 0) {
      EXPECT_EQ(at::equal(wide[i], wide[i - 1]), i % of_step != 0) << i;
    }
  }
}

// Twelve layers that norm the outputs of their branches make of 1e-16 in a weight 1e-11 in a
// gradient, and a thousand times as much in each further step. A layout's rounding grows alike; an
// error stands out in the first step.
TEST(Prove, BandsAllowForRoundingThatGrows) {
  const auto parsed = [](const std::string& ranks, int64_t world_size) {
    return parse_line(
        "prove --mock-data --tokenizer-type NullTokenizer --vocab-size 81 --num-workers 0 "
        "--num-layers 12 --num-attention-heads 5 --kv-channels 16 --hidden-size 96 "
        "--ffn-hidden-size 48 --position-embedding-type none --normalization RMSNorm "
        "--apply-layernorm-1p --untie-embeddings-and-output-weights --norm-placement post "
        "--seq-length 32 --micro-batch-size 3 --global-batch-size 6 --hidden-dropout 0 "
        "--attention-dropout 0.2 --lr 1e-2 --adam-eps 1e-3 --init-method-std 0.2 "
        "--train-iters 5 --eval-iters 0 --clip-grad 1 --weight-decay 0 --seed 587 " +
            ranks,
        world_size);
  };
  const Arguments layout = parsed("--context-parallel-size 2 ", 2), one = serial_arguments(layout);
  TraceOptions options{at::kDouble, /*num_steps=*/3};
  const TrainingTrace serial = trace_training(gpt_task(), one, options);
  options.disturbance = kRoundingOfWeights;
  const TrainingTrace disturbed = trace_training(gpt_task(), one, options);
  options.disturbance = 0;
  const auto beyond = [&](const PretrainTask& task, bool allow) {
    std::vector<Comparison> comparisons =
        compare_traces(trace_training(task, layout, options), serial, kExactBand);
    if (allow) {
      const std::vector<GrownRounding> grown =
          allow_grown_rounding(comparisons, disturbed, serial, kExactBand);
      EXPECT_FALSE(grown.empty());
      for (const GrownRounding& g : grown) EXPECT_LT(g.band, 0.1) << g.step;
    }
    std::set<int> steps;
    for (const Comparison& c : comparisons)
      if (!c.holds()) steps.insert(c.step);
    return steps;
  };
  EXPECT_THAT(beyond(gpt_task(), false), testing::AllOf(testing::Not(Contains(1)), Contains(3)));
  EXPECT_THAT(beyond(gpt_task(), true), testing::IsEmpty());
  PretrainTask broken = gpt_task();
  broken.forward_step = [forward = broken.forward_step](Model& model, const Batch& batch,
                                                        const StageTensors& input,
                                                        const ForwardContext& context) {
    StageOutput output = forward(model, batch, input, context);
    output.loss.sum = output.loss.sum * (1 + 1e-6);
    return output;
  };
  EXPECT_THAT(beyond(broken, true), Contains(1));
}

// Of a step with gradients of rounding alone: their norm may happen to stay where it was.
TEST(Prove, BandsOfAStepAreWideTogether) {
  const auto trace = [](double gradient, double norm, double later) {
    TrainingTrace t;
    t.steps.resize(2);
    const auto set = [](TracedStep& step, double grad, double of_all) {
      step.grads["w"] = at::full({4}, grad, at::kDouble);
      step.numbers["gradient norm"] = {Quantity::kGradientNorm, of_all};
      step.numbers["samples"] = {Quantity::kSchedule, 8, /*exact=*/true};
    };
    set(t.steps[0], gradient, norm);
    set(t.steps[1], 1, later);
    return t;
  };
  const TrainingTrace one = trace(1e-18, 2e-18, 2), disturbed = trace(-2e-18, 2e-18, 2);
  const auto beyond = [&](const TrainingTrace& layout) {
    std::vector<Comparison> comparisons = compare_traces(layout, one, kExactBand);
    allow_grown_rounding(comparisons, disturbed, one, kExactBand);
    std::vector<std::string> names;
    for (const Comparison& c : comparisons)
      if (!c.holds()) names.push_back(c.name);
    return names;
  };
  EXPECT_THAT(beyond(trace(2e-18, 4e-18, 2)), testing::IsEmpty());
  EXPECT_THAT(beyond(trace(2e-18, 4e-18, 2.001)), testing::ElementsAre("step 2 gradient norm"));
  EXPECT_THAT(beyond(trace(1e-15, 2e-15, 2)),
              testing::UnorderedElementsAre("step 1 gradient of w", "step 1 gradient norm"));
  TrainingTrace fewer = trace(2e-18, 4e-18, 2);
  fewer.steps[0].numbers["samples"].value = 7;
  EXPECT_THAT(beyond(fewer), testing::ElementsAre("step 1 samples"));
}

// As ranks with an agreement, which a job of processes has, too: only the first rank has proofs,
// all have the verdict.
TEST(Prove, EveryRankLearnsTheVerdict) {
  const Arguments arguments = shrunk("--num-layers 2 --num-query-groups 16", 2).arguments;
  const auto verdicts = [&](const PretrainTask& task) {
    ThreadAgreement::Room room(2);
    std::vector<std::string> out(2);
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      ThreadAgreement agreement(room, world->rank());
      Job job;
      job.groups = make_parallel_groups(arguments.parallel, world);
      job.agreement = &agreement;
      const std::vector<Proof> proofs = prove(task, arguments, /*num_steps=*/1, job, c10::kCPU);
      out[static_cast<size_t>(world->rank())] =
          std::to_string(proofs.size()) + (all_hold(proofs, job) ? " holds" : " fails");
    });
    return out;
  };
  EXPECT_THAT(verdicts(gpt_task()), testing::ElementsAre("3 holds", "0 holds"));
  // A loss that depends on the number of ranks.
  static thread_local int ranks = 1;
  PretrainTask broken = gpt_task();
  broken.model_provider = [make = broken.model_provider](
                              const Arguments& a, const Vocabulary& vocabulary,
                              const ParallelGroups& groups, const StageSlice& slice,
                              const std::vector<Model*>& chunks) {
    ranks = groups.world.size();
    return make(a, vocabulary, groups, slice, chunks);
  };
  broken.forward_step = [forward = broken.forward_step](Model& model, const Batch& batch,
                                                        const StageTensors& input,
                                                        const ForwardContext& context) {
    StageOutput output = forward(model, batch, input, context);
    output.loss.sum = output.loss.sum * (1.0 + 0.1 * (ranks - 1));
    return output;
  };
  EXPECT_THAT(verdicts(broken), testing::ElementsAre("3 fails", "0 fails"));
}

}  // namespace
}  // namespace megatron
