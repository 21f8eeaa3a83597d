// T5: what is refused, what `prove` says of layouts, and the memory and the work of the plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/models/model_table.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/communication_estimate.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/attention/relative_positions.h"
#include "tests/extension/proofs.h"
#include "tests/parallel/against_one_rank.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::Contains;
using testing::HasSubstr;

TEST(T5, RefusesWhatIsNotBuilt) {
  const ParallelGroups groups;
  const auto refused = [&](const char* what, const auto& change) {
    ModelConfig config;
    config.type = "t5";
    change(config, config.transformer);
    try {
      make_model(config, groups);
      ADD_FAILURE() << what << " is accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), cat(what, " is not built for T5"));
    }
  };
  refused("--pipeline-vocab-parallel", [](auto& c, auto&) { c.pipeline_vocab_parallel = true; });
  refused("--cross-entropy-fusion-impl linear",
          [](auto&, auto& t) { t.cross_entropy_fusion_impl = CrossEntropyFusion::kLinear; });
  refused("--final-logit-softcapping", [](auto&, auto& t) { t.final_logit_softcapping = 30; });
  refused("--logits-scaling", [](auto&, auto& t) { t.logits_scaling = 8; });
  refused("--attn-logit-softcapping", [](auto&, auto& t) { t.attn_logit_softcapping = 30; });
  refused("--softmax-type", [](auto&, auto& t) { t.softmax_type = SoftmaxType::kLearnable; });
  refused("--window-size", [](auto&, auto& t) { t.window_size = {8, 0}; });
  refused("--group-query-attention", [](auto&, auto& t) { t.group_query_attention = true; });
  refused("--multi-latent-attention", [](auto&, auto& t) { t.multi_latent_attention = true; });
  refused("--num-experts", [](auto&, auto& t) { t.num_experts = 4; });
  refused("--mtp-num-layers", [](auto&, auto& t) { t.mtp_num_layers = 1; });
  refused("--parallel-residual", [](auto&, auto& t) { t.parallel_residual = true; });
  refused("--no-first-input-norm", [](auto&, auto& t) { t.first_input_norm = false; });
  refused("--norm-placement other than pre",
          [](auto&, auto& t) { t.norm_placement = NormPlacement::kSandwich; });
  refused("--first-last-layers-bf16", [](auto&, auto& t) { t.first_last_layers_bf16 = true; });
  refused("offloading of activations with --recompute-granularity full", [](auto&, auto& t) {
    t.fine_grained_activation_offloading = true;
    t.recompute_granularity = RecomputeGranularity::kFull;
  });
  refused("--distribute-saved-activations",
          [](auto&, auto& t) { t.distribute_saved_activations = true; });
  refused(
      "full recomputation of other units than --recompute-method uniform --recompute-num-layers 1",
      [](auto&, auto& t) {
        t.recompute_granularity = RecomputeGranularity::kFull;
        t.recompute_num_layers = 2;
      });
}

// Also of models that no rule has seen.
TEST(T5, RefusesRingsOfContextRanks) {
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.context_parallel_size = 2;
    const ParallelGroups ranks = make_parallel_groups(parallel, world);
    ModelConfig config;
    config.type = "t5";
    config.transformer.num_layers = 2;
    for (const char* type : {"p2p", "a2a+p2p"}) {
      config.transformer.cp_comm_type = {type};
      EXPECT_EQ(error_of([&] { make_model(config, ranks); }),
                "ring attention (--cp-comm-type p2p or a2a+p2p) is not built for T5");
    }
  });
}

constexpr const char* kT5Run =
    "--task t5 --mock-data --tokenizer-type NullTokenizer --vocab-size 101 "
    "--make-vocab-size-divisible-by 8 --num-workers 0 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 0 --device cpu --lr 1e-2 --train-iters 10 --adam-eps 1e-3 "
    "--init-method-std 0.2 ";
constexpr const char* kSmallT5 =
    "--encoder-num-layers 2 --decoder-num-layers 3 --hidden-size 48 --ffn-hidden-size 96 "
    "--num-attention-heads 4 --seq-length 24 --decoder-seq-length 12 ";
constexpr const char* kMeasuredT5 =
    "--encoder-num-layers 3 --decoder-num-layers 2 --hidden-size 128 --num-attention-heads 8 "
    "--seq-length 256 --decoder-seq-length 64 --attention-dropout 0 --mask-prob 0.08 ";

// The violations of a run's flags.
std::string t5_errors(const std::string& flags, int ranks = 1) {
  try {
    parse_run(cat(kT5Run, flags), ranks);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(T5, ReadsBothSpellings) {
  const auto sizes = [](const char* flags) {
    const Arguments a =
        parse_run(cat(kT5Run, "--hidden-size 8 --num-attention-heads 2 ", flags), 1);
    const auto& own = own_config<T5Config>(a.own);
    return std::vector<int64_t>{own.encoder_num_layers, own.decoder_num_layers,
                                a.transformer.num_layers, a.transformer.seq_length,
                                a.transformer.max_position_embeddings};
  };
  EXPECT_EQ(sizes("--num-layers 3 --seq-length 16 --decoder-seq-length 20"),
            (std::vector<int64_t>{3, 3, 6, 16, 20}));
  EXPECT_EQ(sizes("--encoder-num-layers 1 --decoder-num-layers 4 --encoder-seq-length 16 "
                  "--decoder-seq-length 8"),
            (std::vector<int64_t>{1, 4, 5, 16, 16}));
}

TEST(T5, NamesFlagsThatDoNotFit) {
  const std::string small =
      "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 32 ";
  EXPECT_THAT(t5_errors(small), HasSubstr("--decoder-seq-length is not given"));
  EXPECT_THAT(t5_errors(small), HasSubstr("--decoder-seq-length 9 is enough for every sample"));
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 9 --encoder-num-layers 3"),
              HasSubstr("--num-layers 2 and --encoder-num-layers 3 with 3 decoder layers are both "
                        "given"));
  EXPECT_THAT(t5_errors(small + "--seq-length 3 --decoder-seq-length 9"),
              HasSubstr("--seq-length 3 has no room for a sample of an encoder-decoder"));
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 9 --encoder-seq-length 16"),
              HasSubstr("--seq-length 32 and --encoder-seq-length 16 are both given"));
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 40 --max-position-embeddings 36"),
              HasSubstr("--max-position-embeddings 36 is below --decoder-seq-length 40"));
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 9 --tensor-model-parallel-size 2 "
                                "--sequence-parallel",
                        2),
              HasSubstr("--decoder-seq-length 9 is not divisible by "
                        "--tensor-model-parallel-size 2"));
  const std::string stages = small +
                             "--decoder-seq-length 9 --pipeline-model-parallel-size 2 "
                             "--pipeline-model-parallel-layout ";
  EXPECT_THAT(t5_errors(stages + "Et|tttL", 2),
              HasSubstr("\"Et|tttL\" has 0 e, the encoder has 2 layers"));
  EXPECT_THAT(t5_errors(stages + "Eet|tetL", 2), HasSubstr("'e' at position 6 is after a t"));
  EXPECT_THAT(t5_errors(small + "--task gpt --pipeline-model-parallel-size 2 "
                                "--pipeline-model-parallel-layout Ee|tL",
                        2),
              HasSubstr("has e, layers of an encoder, which --task gpt has not"));
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 9 --bf16 --fp8-format hybrid"),
              HasSubstr("--micro-batch-size x --decoder-seq-length is 18, which --fp8-format needs "
                        "to be a multiple of 16"));
  const std::string context = small + "--context-parallel-size 2 --decoder-seq-length ";
  EXPECT_THAT(
      t5_errors(context + "12 --cp-comm-type a2a --bf16 --fp8-format hybrid", 2),
      HasSubstr("--micro-batch-size x --decoder-seq-length / --context-parallel-size is 12"));
  for (const char* ring : {"", "--cp-comm-type p2p", "--cp-comm-type all_gather a2a p2p a2a",
                           "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1"})
    EXPECT_THAT(t5_errors(cat(context, "12 ", ring), 2),
                HasSubstr("ring attention with --task t5 (--cp-comm-type p2p or a2a+p2p) is not "
                          "built"))
        << ring;
  EXPECT_THAT(t5_errors(context + "12 --task seq2seq", 2),
              HasSubstr("ring attention with --task seq2seq"));
  EXPECT_THAT(t5_errors(context + "10 --cp-comm-type a2a", 2),
              HasSubstr("--decoder-seq-length 10 is not divisible by 4, twice "
                        "--context-parallel-size 2\nhint: --decoder-seq-length 12"));
  EXPECT_THAT(t5_errors(context + "12 --cp-comm-type a2a --seq-length 34", 2),
              HasSubstr("a sequence of 34 tokens is not divisible by 4"));
  EXPECT_THAT(t5_errors(context + "20 --cp-comm-type all_gather --num-attention-heads 3 "
                                  "--hidden-size 24 --seq-length 60 --sequence-parallel "
                                  "--tensor-model-parallel-size 3",
                        6),
              HasSubstr("--decoder-seq-length 20 is not divisible by --tensor-model-parallel-size "
                        "3 x --context-parallel-size 2, which --sequence-parallel splits it over"));
  EXPECT_THAT(t5_errors(context + "12 --cp-comm-type a2a --num-attention-heads 1", 2),
              HasSubstr("--cp-comm-type a2a divides heads over 2 context-parallel ranks"));
  EXPECT_THAT(
      t5_errors(context + "12 --cp-comm-type a2a --remove-padding true", 2),
      HasSubstr("--remove-padding true: --context-parallel-size divides each sample alike"));
  EXPECT_EQ(t5_errors(context + "12 --cp-comm-type a2a", 2), "");
  EXPECT_EQ(t5_errors(context + "12 --cp-comm-type all_gather", 2), "");
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 9 --mlm-replace 1 0 0"),
              HasSubstr("--mlm-replace has no effect with --task t5"));
  EXPECT_THAT(t5_errors(small + "--decoder-seq-length 9 --relative-attention-num-buckets 16"),
              HasSubstr("--relative-attention-num-buckets or --relative-attention-max-distance has "
                        "an effect only with --position-embedding-type relative"));
  const std::string relative = small + "--decoder-seq-length 9 --position-embedding-type relative ";
  EXPECT_THAT(t5_errors(relative + "--relative-attention-num-buckets 7"),
              HasSubstr("--relative-attention-num-buckets is 7"));
  EXPECT_THAT(t5_errors(relative + "--relative-attention-max-distance 16"),
              HasSubstr("--relative-attention-max-distance 16 is not above 16"));
  EXPECT_THAT(t5_errors(relative + "--t5-scale-output --untie-embeddings-and-output-weights"),
              HasSubstr("--t5-no-output-bias or --t5-scale-output has an effect only on a tied "
                        "output layer"));
  EXPECT_EQ(t5_errors(relative), "");
  EXPECT_THAT(t5_errors(small + "--task gpt --decoder-seq-length 9"),
              HasSubstr("--decoder-seq-length has no effect with --task gpt"));
}

TEST(T5, CountsParametersAndWork) {
  struct Size {
    const char* flags;
    int64_t h, ffn, width;
  };
  for (const Size& size :
       {Size{"--num-attention-heads 16", 1024, 4096, 1024},
        Size{"--num-attention-heads 32 --kv-channels 128 --ffn-hidden-size 16384", 1024, 16384,
             4096},
        Size{"--num-attention-heads 128 --kv-channels 128 --ffn-hidden-size 65536", 1024, 65536,
             16384}}) {
    const Arguments arguments = parse_run(
        cat(kT5Run, "--num-layers 24 --hidden-size 1024 --seq-length 512 --decoder-seq-length 128 ",
            size.flags),
        1);
    const PretrainTask task = find_task(arguments);
    const int64_t v = 32128, h = size.h, f = size.ffn, a = size.width;
    const LayoutPlan plan =
        make_layout_plan(arguments, {v, v}, /*on_gpu=*/true, task.model_provider);
    const int64_t attention = 4 * h * a + 3 * a + h, norm = 2 * h, mlp = 2 * h * f + f + h;
    const int64_t encoder = attention + mlp + 2 * norm, decoder = 2 * attention + mlp + 3 * norm;
    EXPECT_EQ(plan.model_elements, v * h + 512 * h + 24 * (encoder + decoder) + 2 * norm + v);
    // Multiply-adds of a sample
    const double s = 512, d = 128, weights_e = 4.0 * h * a + 2.0 * h * f,
                 weights_d = 4.0 * h * a + 2.0 * h * a + 2.0 * h * f;
    const double products = 24 * (s * weights_e + 2 * s * s * a) +
                            24 * (d * weights_d + 2.0 * s * h * a + d * d * a + 2 * d * s * a) +
                            d * h * v;
    EXPECT_NEAR(task.flops_per_token(arguments, {v, v}) * s / (6 * products), 1, 1e-12);
  }
}

// Self-attention of both stacks, and the keys and values of the encoder's output for each layer of
// the decoder.
TEST(T5, CountsTrafficOfContextRanks) {
  const double c = 4, b = 2, h = 128, microbatches = 4, e = 2, f = 4;
  const double encoder = 256 / c * b * h, decoder = 64 / c * b * h;
  const auto sent = [&](const char* exchange) {
    const Arguments arguments = parse_run(
        cat(kT5Run, kMeasuredT5, "--bf16 --context-parallel-size 4 --cp-comm-type ", exchange), 4);
    const LayoutPlan plan = make_layout_plan(arguments, {101, 104}, /*on_gpu=*/true,
                                             find_task(arguments).model_provider);
    for (const GroupTraffic& traffic : stage_traffic(plan, 0))
      if (traffic.group == "cp") return traffic;
    return GroupTraffic{};
  };
  const double cross = 2 * 2 * encoder;  // two layers, keys and values
  const GroupTraffic gather = sent("all_gather"), exchange = sent("a2a");
  const double own = 2 * (3 * encoder + 2 * decoder);
  EXPECT_DOUBLE_EQ(gather.forward, microbatches * (c - 1) * (own + cross) * e);
  EXPECT_DOUBLE_EQ(gather.backward, microbatches * (c - 1) * (own * (e + f) + cross * f));
  const double exchanged = (c - 1) / c * 2 * own * e;  // queries, keys, values and outputs
  EXPECT_DOUBLE_EQ(exchange.forward, microbatches * (exchanged + (c - 1) * cross * e));
  EXPECT_DOUBLE_EQ(exchange.backward, microbatches * (exchanged + (c - 1) * cross * f));
}

// What the published models of v1.0 and v1.1 hold.
TEST(T5, CountsPublishedModels) {
  const std::string relative =
      "--num-layers 24 --seq-length 512 --decoder-seq-length 128 --position-embedding-type "
      "relative "
      "--normalization RMSNorm --disable-bias-linear ";
  const std::string first = "--hidden-size 1024 --relu --t5-no-output-bias --t5-scale-output ",
                    second = "--geglu --untie-embeddings-and-output-weights --kv-channels 64 ";
  for (const auto& [flags, parameters] :
       {std::pair<std::string, int64_t>{
            first + "--ffn-hidden-size 4096 --num-attention-heads 16 --kv-channels 64", 737668096},
        {first + "--ffn-hidden-size 16384 --num-attention-heads 32 --kv-channels 128", 2851598336},
        {first + "--ffn-hidden-size 65536 --num-attention-heads 128 --kv-channels 128",
         11307321344},
        {second + "--hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16", 783150080},
        {second + "--hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 32", 2849757184},
        {second + "--hidden-size 4096 --ffn-hidden-size 10240 --num-attention-heads 64",
         11135332352}}) {
    const Arguments arguments = parse_run(cat(kT5Run, relative, flags), 1);
    EXPECT_EQ(make_layout_plan(arguments, {32128, 32128}, /*on_gpu=*/true,
                               find_task(arguments).model_provider)
                  .model_elements,
              parameters)
        << flags;
  }
}

// Decoder layers of short sequences cost less than encoder layers, and the head as much as several.
TEST(T5, StagesCostAlikeUnlessFlagsNameTheirLayers) {
  const auto counts = [](const char* flags) {
    const Arguments arguments =
        parse_run(cat(kT5Run, "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 ",
                      "--pipeline-model-parallel-size 4 --global-batch-size 16 ", flags),
                  4);
    const LayoutPlan plan = make_layout_plan(arguments, {32128, 32128}, /*on_gpu=*/true,
                                             find_task(arguments).model_provider);
    std::vector<int64_t> layers;
    for (const StageSlice& segment : plan.stages.segments()) layers.push_back(segment.num_layers);
    return layers;
  };
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(counts("--seq-length 512 --decoder-seq-length 128"), (Counts{9, 9, 12, 18}));
  EXPECT_EQ(counts("--seq-length 512 --decoder-seq-length 512"), (Counts{15, 13, 11, 9}));
  EXPECT_EQ(counts("--seq-length 512 --decoder-seq-length 128 "
                   "--num-virtual-stages-per-pipeline-rank 2"),
            (Counts{4, 4, 4, 5, 5, 7, 10, 9}));
  EXPECT_EQ(counts("--seq-length 512 --decoder-seq-length 128 "
                   "--decoder-first-pipeline-num-layers 12"),
            (Counts{12, 12, 12, 12}));
}

TEST(T5, OutputProjectionsStartByTheDepthOfTheirStack) {
  const Arguments arguments = parse_run(cat(kT5Run, kSmallT5), 1);
  const std::unique_ptr<Model> model =
      whole_model(find_task(arguments).model_provider, arguments, {101, 104});
  int found = 0;
  model->visit([&](const std::string& name, Parameter& parameter) {
    if (!name.ends_with("linear_proj.weight") && !name.ends_with("linear_fc2.weight")) return;
    const double depth = name.starts_with("encoder") ? 2 : 3;
    EXPECT_DOUBLE_EQ(parameter.init.std, 0.2 / std::sqrt(2 * depth)) << name;
    ++found;
  });
  EXPECT_EQ(found, 2 * 2 + 3 * 3);
}

// Both stacks keep several layers, and lengths that differ.
TEST(T5, ProofsKeepBothStacks) {
  const Arguments arguments =
      parse_run(cat(kT5Run,
                    "--num-layers 24 --decoder-num-layers 1 --hidden-size 1024 "
                    "--num-attention-heads 16 --seq-length 512 --decoder-seq-length 128"),
                1);
  const Arguments tiny = shrink(arguments, 2, 5).arguments;
  const auto& own = own_config<T5Config>(tiny.own);
  EXPECT_EQ(own.encoder_num_layers, 2);
  EXPECT_EQ(own.decoder_num_layers, 1);
  EXPECT_EQ(tiny.transformer.num_layers, 3);
  EXPECT_EQ(tiny.transformer.seq_length, 16);
  EXPECT_EQ(own.decoder_seq_length, 8);
}

// Parts of context ranks have two halves, of each stack; the layers of both keep their exchange.
TEST(T5, ProofsKeepLengthsOfContextRanks) {
  const std::string flags = cat(kT5Run,
                                "--num-layers 6 --hidden-size 1024 --num-attention-heads 16 "
                                "--seq-length 512 --context-parallel-size 4 ");
  for (const auto& [more, encoder, decoder] :
       {std::tuple{"--decoder-seq-length 128 --cp-comm-type a2a", 16, 8},
        std::tuple{"--decoder-seq-length 512 --cp-comm-type all_gather", 16, 16},
        std::tuple{"--decoder-seq-length 1024 --cp-comm-type all_gather", 16, 32}}) {
    const Arguments tiny = shrink(parse_run(flags + more, 4), 4, 5).arguments;
    EXPECT_EQ(tiny.parallel.context_parallel_size, 4);
    EXPECT_EQ(tiny.transformer.seq_length, encoder) << more;
    EXPECT_EQ(own_config<T5Config>(tiny.own).decoder_seq_length, decoder) << more;
  }
  const Arguments tiny =
      shrink(parse_run(flags + "--decoder-seq-length 128 --cp-comm-type a2a a2a a2a all_gather "
                               "all_gather all_gather all_gather all_gather all_gather a2a a2a a2a",
                       4),
             4, 5)
          .arguments;
  EXPECT_EQ(tiny.transformer.num_layers, 4);
  EXPECT_THAT(tiny.transformer.cp_comm_type,
              testing::ElementsAre("a2a", "all_gather", "all_gather", "a2a"));
}

// Distances of the made-up samples reach the last bucket of each stack.
TEST(T5, ProofsReachTheLastBucket) {
  const Arguments arguments =
      parse_run(cat(kT5Run,
                    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
                    "--decoder-seq-length 128 --position-embedding-type relative"),
                1);
  const Arguments tiny = shrink(arguments, 2, 5).arguments;
  const auto& own = own_config<T5Config>(tiny.own);
  const auto last = [&](bool bidirectional) {
    return bucket_starts({own.relative_attention_num_buckets, own.relative_attention_max_distance,
                          bidirectional})
        .back();
  };
  EXPECT_LT(last(true), tiny.transformer.seq_length);
  EXPECT_LT(last(false), own.decoder_seq_length);
}

// The segments that were before, at and behind the border stay so.
TEST(T5, ProofsKeepTheBorderBetweenStages) {
  const Arguments arguments =
      parse_run(cat(kT5Run,
                    "--encoder-num-layers 18 --decoder-num-layers 30 --hidden-size 1024 "
                    "--num-attention-heads 16 --seq-length 512 --decoder-seq-length 512 "
                    "--pipeline-model-parallel-size 4 --global-batch-size 64"),
                4);
  const Arguments tiny = shrink(arguments, 2, 5).arguments;
  EXPECT_EQ(tiny.pipeline.pipeline_model_parallel_layout, "Eee|eett|tt|ttL");
  EXPECT_EQ(own_config<T5Config>(tiny.own).encoder_num_layers, 4);
  EXPECT_EQ(tiny.transformer.num_layers, 10);
  EXPECT_EQ(own_config<T5Config>(tiny.own).decoder_seq_length, tiny.transformer.seq_length);
}

// The real model is divided by cost, and so the border lies on another stage than in halves.
TEST(T5, ProofsKeepTheBorderOfADivisionByCost) {
  const auto layout = [](const char* flags) {
    const Arguments arguments =
        parse_run(cat(kT5Run,
                      "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
                      "--seq-length 512 --decoder-seq-length 128 "
                      "--pipeline-model-parallel-size 4 --global-batch-size 64 ",
                      flags),
                  4);
    return shrink(arguments, 2, 5).arguments.pipeline.pipeline_model_parallel_layout;
  };
  EXPECT_EQ(layout(""), "Eee|ee|eett|ttL");
  EXPECT_EQ(layout("--num-virtual-stages-per-pipeline-rank 2"), "Eee|ee|ee|ee|ee|eett|tt|ttL");
  EXPECT_EQ(layout("--freeze encoder.layers.3"),
            "Eeeeeeeeee|eeeeeeeee|eeeeeettttt|tttttttttttttttttttL");
  EXPECT_EQ(layout("--pipeline-model-parallel-layout Ee*16|e*8|t*12|t*12L"),
            "Ee*16|e*8|t*12|t*12L");
}

class T5Layouts : public testing::TestWithParam<ProvedLayout> {};

TEST_P(T5Layouts, AreProved) {
  EXPECT_EQ(unproved(cat(kT5Run, kSmallT5, "--hidden-dropout 0.1 --attention-dropout 0.1 ",
                         GetParam().flags),
                     GetParam().ranks),
            "");
}

#define OFFLOADED                                                                         \
  "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules " \
  "attn_norm "                                                                            \
  "qkv_linear core_attn attn_proj mlp_norm mlp_act "

class T5Memory : public T5Layouts {};

// Transfers between stages that have ended early weigh more where the stage holds little.
TEST_P(T5Memory, IsThatOfThePlan) {
  const std::vector<RankMemory> ranks = memory_of_ranks(
      cat(kT5Run, kMeasuredT5, "--remove-padding false ", GetParam().flags), GetParam().ranks);
  const int64_t fullest = std::ranges::max(ranks, {}, &RankMemory::metered).metered;
  for (const RankMemory& rank : ranks) {
    const double planned = static_cast<double>(rank.planned) / static_cast<double>(rank.metered);
    EXPECT_TRUE(planned > 0.98 && planned < (rank.metered == fullest ? 1.05 : 1.08))
        << rank.planned << " and " << rank.metered;
  }
}

const ProvedLayout kT5Layouts[] = {
    {"one", 1, ""},
    {"tp2_sp", 2, "--tensor-model-parallel-size 2 --sequence-parallel"},
    {"tp2_full", 2,
     "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
     "--recompute-num-layers 1"},
    {"dp2_zero3", 2,
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--overlap-grad-reduce --overlap-param-gather"},
    {"pp2", 2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Eeet|ttL"},
    {"tp2_sp_lora", 2, "--tensor-model-parallel-size 2 --sequence-parallel --lora-rank 4"},
    {"relative_tp2_pp2", 4,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
     "--pipeline-model-parallel-layout Eeet|ttL --position-embedding-type relative"},
    {"cp2_gather", 2, "--context-parallel-size 2 --cp-comm-type all_gather"},
    {"relative_cp2_a2a", 2,
     "--context-parallel-size 2 --cp-comm-type a2a --position-embedding-type relative"},
    {"relative_cp2_gather_pp2", 4,
     "--context-parallel-size 2 --cp-comm-type all_gather --position-embedding-type relative "
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Eeet|ttL"},
};
const ProvedLayout kRelativeT5[] = {
    {"relative", 1, "--position-embedding-type relative"},
    {"relative_of_one_sample", 1, "--position-embedding-type relative --micro-batch-size 1"},
};

INSTANTIATE_TEST_SUITE_P(Proofs, T5Layouts, testing::ValuesIn(kT5Layouts),
                         [](const auto& info) { return std::string(info.param.name); });
// Borders behind, in and before the decoder's first stage, stages of several chunks, and a decoder
// of several stages, which hold the encoder's output.
const ProvedLayout kT5Stages[] = {
    {"pp2_behind", 2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Eeee|ttL"},
    {"pp3_homes", 3, "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ee|eet|tL"},
    {"pp2_vpp2", 2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ee|eet|t|L"},
    {"offload", 1, OFFLOADED "--decoder-num-layers 4"},
    {"pp2_offload", 2,
     OFFLOADED "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Eeeet|ttL "
               "--decoder-num-layers 3"},
    {"pp2_by_cost", 2, "--decoder-num-layers 5 --pipeline-model-parallel-size 2"},
    {"pp4_gpipe", 4,
     "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ee|ee|t|tL "
     "--pipeline-schedule gpipe"},
    {"pp3_full", 3,
     "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Eee|et|tL "
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"},
};
const ProvedLayout kT5Contexts[] = {
    {"cp2_gather", 2, "--context-parallel-size 2 --cp-comm-type all_gather"},
    {"cp2_a2a", 2, "--context-parallel-size 2 --cp-comm-type a2a"},
    {"relative_cp4_gather", 4,
     "--context-parallel-size 4 --cp-comm-type all_gather --position-embedding-type relative"},
    {"relative_cp2_a2a", 2,
     "--context-parallel-size 2 --cp-comm-type a2a --position-embedding-type relative"},
};
INSTANTIATE_TEST_SUITE_P(Contexts, T5Memory, testing::ValuesIn(kT5Contexts),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Relative, T5Memory, testing::ValuesIn(kRelativeT5),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Proofs, T5Memory, testing::Values(kT5Layouts[0], kT5Layouts[1]),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Stages, T5Memory, testing::ValuesIn(kT5Stages),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
