#include "megatron/pipeline_parallel/stage_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "megatron/pipeline_parallel/replay.h"
#include "testing.h"

namespace megatron {
namespace {

// Megatron's layout string: "Ettt|tttL".
std::string text_of(const StageLayout& layout) {
  std::string text;
  for (const StageSlice& s : layout.segments()) {
    if (&s != &layout.segments().front()) text += '|';
    if (s.embedding) text += 'E';
    if (s.num_layers == 1) text += 't';
    if (s.num_layers > 1) text += cat("t*", s.num_layers);
    if (s.head) text += 'L';
  }
  return text;
}

using testing::HasSubstr;

std::string layout_error(const PipelineConfig& config, int64_t stages, int64_t layers) {
  return error_of([&] { make_stage_layout(config, stages, layers); });
}

TEST(StageLayout, EvenSplit) {
  const StageLayout layout = make_stage_layout({}, 4, 8);
  EXPECT_EQ(layout.num_chunks(), 1);
  EXPECT_EQ(layout.num_stages(), 4);
  EXPECT_EQ(layout.slice(0, 0), (StageSlice{0, 2, true, false}));
  EXPECT_EQ(layout.slice(1, 0), (StageSlice{2, 2, false, false}));
  EXPECT_EQ(layout.slice(3, 0), (StageSlice{6, 2, false, true}));
  EXPECT_EQ(text_of(layout), "Et*2|t*2|t*2|t*2L");
}

TEST(StageLayout, OneStageHoldsAll) {
  const StageLayout layout = make_stage_layout({}, 1, 7);
  EXPECT_EQ(layout.slice(0, 0), (StageSlice{0, 7, true, true}));
  EXPECT_EQ(text_of(layout), "Et*7L");
}

// Chunk v of stage r is segment v PP + r (Megatron's interleaved order).
TEST(StageLayout, VirtualStages) {
  PipelineConfig by_count, by_layers;
  by_count.num_virtual_stages_per_pipeline_rank = 2;
  by_layers.num_layers_per_virtual_pipeline_stage = 2;
  for (const PipelineConfig& config : {by_count, by_layers}) {
    const StageLayout layout = make_stage_layout(config, 2, 8);
    EXPECT_EQ(layout.num_chunks(), 2);
    EXPECT_EQ(layout.slice(0, 0), (StageSlice{0, 2, true, false}));
    EXPECT_EQ(layout.slice(1, 0), (StageSlice{2, 2, false, false}));
    EXPECT_EQ(layout.slice(0, 1), (StageSlice{4, 2, false, false}));
    EXPECT_EQ(layout.slice(1, 1), (StageSlice{6, 2, false, true}));
  }
}

TEST(StageLayout, VShapePutsBothEndsOnTheFirstStage) {
  PipelineConfig config;
  config.pipeline_schedule = ScheduleKind::kZeroBubbleV;
  const StageLayout layout = make_stage_layout(config, 3, 12);
  EXPECT_EQ(layout.num_chunks(), 2);
  EXPECT_EQ(layout.slice(0, 0), (StageSlice{0, 2, true, false}));
  EXPECT_EQ(layout.slice(2, 1), (StageSlice{6, 2, false, false}));
  EXPECT_EQ(layout.slice(0, 1), (StageSlice{10, 2, false, true}));
}

TEST(StageLayout, EndsMayCountAsLayers) {
  PipelineConfig config;
  config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = true;
  EXPECT_EQ(text_of(make_stage_layout(config, 4, 14)), "Et*3|t*4|t*4|t*3L");
  config.num_virtual_stages_per_pipeline_rank = 2;
  EXPECT_EQ(text_of(make_stage_layout(config, 2, 6)), "Et|t*2|t*2|tL");
  config.account_for_encoder_in_pipeline_split = 2;
  EXPECT_EQ(text_of(make_stage_layout(config, 2, 8)), "E|t*3|t*3|t*2L");
  config.account_for_encoder_in_pipeline_split = 0;
  // The embedding may fill its segment.
  EXPECT_EQ(text_of(make_stage_layout(config, 2, 2)), "E|t|t|L");
  config.num_virtual_stages_per_pipeline_rank.reset();
  config.num_layers_per_virtual_pipeline_stage = 2;
  EXPECT_EQ(make_stage_layout(config, 2, 6).num_chunks(), 2);
  config.account_for_loss_in_pipeline_split = false;
  config.num_layers_per_virtual_pipeline_stage.reset();
  EXPECT_EQ(text_of(make_stage_layout(config, 2, 5)), "Et*2|t*3L");
}

TEST(StageLayout, FirstAndLastStageMayHaveTheirOwnCounts) {
  PipelineConfig config;
  config.decoder_first_pipeline_num_layers = 2;
  EXPECT_EQ(text_of(make_stage_layout(config, 3, 10)), "Et*2|t*4|t*4L");
  config.decoder_last_pipeline_num_layers = 4;
  EXPECT_EQ(text_of(make_stage_layout(config, 3, 10)), "Et*2|t*4|t*4L");
  EXPECT_EQ(text_of(make_stage_layout(config, 2, 6)), "Et*2|t*4L");
  config.num_virtual_stages_per_pipeline_rank = 2;
  EXPECT_EQ(text_of(make_stage_layout(config, 3, 10)), "Et|t*2|t*2|t|t*2|t*2L");
  config.decoder_first_pipeline_num_layers.reset();
  config.num_virtual_stages_per_pipeline_rank.reset();
  config.decoder_last_pipeline_num_layers = 0;
  EXPECT_EQ(text_of(make_stage_layout(config, 3, 10)), "Et*5|t*5|L");
}

TEST(StageLayout, LayoutStrings) {
  const auto layout = [](const std::string& text, int64_t layers, int64_t stages) {
    PipelineConfig config;
    config.pipeline_model_parallel_layout = text;
    return make_stage_layout(config, stages, layers);
  };
  EXPECT_EQ(text_of(layout("Ettt|ttL", 5, 2)), "Et*3|t*2L");
  EXPECT_EQ(text_of(layout("E|t*4,|(tt|)*2L", 8, 5)), "E|t*4|t*2|t*2|L");
  EXPECT_EQ(layout("E(t|)*3L", 3, 2).num_chunks(), 2);
  // Repetition nests; a bar may be repeated between groups only where something lies between.
  EXPECT_EQ(text_of(layout("E((t*2|)*2t|)*2tL", 11, 7)), "Et*2|t*2|t|t*2|t*2|t|tL");
  EXPECT_EQ(layout("Et*3|(tt|)*29t|L", 62, 16).num_chunks(), 2);
  // 16 stages of 2 chunks: 61 layers as DeepSeek-V3 has them.
  const StageLayout deepseek = layout("Et*3|(tt|)*29,t|L", 62, 16);
  EXPECT_EQ(deepseek.slice(0, 0), (StageSlice{0, 3, true, false}));
  EXPECT_EQ(deepseek.slice(15, 1), (StageSlice{62, 0, false, true}));
  EXPECT_EQ(deepseek.slice(14, 1), (StageSlice{61, 1, false, false}));
}

// Of an encoder and its decoder: what several segments use has a home on each of these stages.
TEST(StageLayout, SlicesKnowTheStagesOfAllLayers) {
  PipelineConfig config;
  config.pipeline_model_parallel_layout = "Ee|eet|t|L";
  const StageLayout looped = make_stage_layout(config, 2, 5);
  EXPECT_EQ(text_of(looped), "Et|t*3|t|L");
  EXPECT_EQ(looped.slice(0, 1).stages, (std::vector<int>{0, 0, 1, 1, 1, 0, 1}));
  EXPECT_EQ(looped.slice(1, 0).stages, looped.slice(0, 1).stages);
  EXPECT_EQ(looped.slice(0, 0).stage_of_embedding(), 0);
  EXPECT_EQ(looped.slice(0, 0).stage_of_layer(3), 1);
  EXPECT_EQ(looped.slice(0, 0).stage_of_head(), 1);
  config.pipeline_schedule = ScheduleKind::kZeroBubbleV;
  EXPECT_EQ(make_stage_layout(config, 2, 5).slice(1, 1).stages,
            (std::vector<int>{0, 0, 1, 1, 1, 1, 0}));
  EXPECT_EQ(make_stage_layout({}, 1, 5).slice(0, 0).stage_of_layer(4), 0);
  EXPECT_EQ(count_layout_letters("E(et)*2|tL", 'e'), 2);
}

// Encoders of images before the embedding, whose borders count below 0.
TEST(StageLayout, EncodersHaveSegmentsOfTheirOwn) {
  PipelineConfig config;
  config.pipeline_model_parallel_layout = "V|V*2|VEt|ttL";
  const StageLayout layout = make_stage_layout(config, 2, 3);
  const std::vector<StageSlice>& all = layout.segments();
  EXPECT_EQ(layout.layer_counts(), (std::vector<int64_t>{0, 0, 1, 2}));
  const auto borders = [&] {
    std::vector<int64_t> out;
    for (const StageSlice& one : all) {
      out.push_back(one.layers_before());
      out.push_back(one.layers_through());
    }
    return out;
  };
  EXPECT_EQ(borders(), (std::vector<int64_t>{-5, -4, -4, -2, -2, 1, 1, 3}));
  EXPECT_TRUE(all[0].starts());
  EXPECT_FALSE(all[2].starts());
  EXPECT_TRUE(all[1].encodes_alone());
  EXPECT_FALSE(all[2].encodes_alone());
  EXPECT_EQ(all[1].first_part, 1);
  EXPECT_EQ(all[1].num_parts, 2);
  EXPECT_TRUE(all[2].embedding);
  EXPECT_EQ(layout.slice(0, 1).stages, (std::vector<int>{0, 0, 1, 1, 1}));
  config.pipeline_model_parallel_layout = "V|EtttL";
  const StageLayout whole = make_stage_layout(config, 2, 3);
  EXPECT_EQ(whole.slice(1, 0).layers_before(), -1);
  EXPECT_EQ(whole.slice(1, 0).layers_through(), 3);
  EXPECT_EQ(whole.slice(1, 0).stage_of_embedding(), 1);
}

// Whatever is asked for, the layers of all segments are the model's: none is lost, none is held
// twice.
TEST(StageLayout, NoLayerIsLost) {
  std::mt19937 random(80);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int built = 0;
  for (int round = 0; round < 4000; ++round) {
    PipelineConfig config;
    const int64_t stages = draw(1, 8), layers = draw(1, 64);
    if (draw(0, 2) == 0) config.num_virtual_stages_per_pipeline_rank = draw(1, 3);
    if (draw(0, 3) == 0) config.account_for_embedding_in_pipeline_split = true;
    if (draw(0, 3) == 0) config.account_for_loss_in_pipeline_split = true;
    if (!config.account_for_embedding_in_pipeline_split &&
        !config.account_for_loss_in_pipeline_split) {
      if (draw(0, 1) == 0) config.decoder_first_pipeline_num_layers = draw(0, 12);
      if (draw(0, 1) == 0) config.decoder_last_pipeline_num_layers = draw(0, 12);
    }
    try {
      const StageLayout layout = make_stage_layout(config, stages, layers);
      ++built;
      std::vector<int> held(static_cast<size_t>(layers), 0);
      int embeddings = 0, heads = 0;
      for (int r = 0; r < stages; ++r) {
        for (int c = 0; c < layout.num_chunks(); ++c) {
          const StageSlice slice = layout.slice(r, c);
          embeddings += slice.embedding;
          heads += slice.head;
          for (int64_t i = 0; i < slice.num_layers; ++i)
            ++held.at(static_cast<size_t>(slice.first_layer + i));
        }
      }
      EXPECT_EQ(held, std::vector<int>(static_cast<size_t>(layers), 1)) << text_of(layout);
      EXPECT_EQ(embeddings, 1);
      EXPECT_EQ(heads, 1);
      EXPECT_EQ(parse_layout(text_of(layout), layers), layout.segments());
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("\nhint: "));
    }
  }
  EXPECT_GT(built, 500);
}

TEST(StageLayout, WhatCannotBeDividedIsRefusedWithTheNearestLegalValues) {
  PipelineConfig config;
  EXPECT_EQ(
      layout_error(config, 4, 30),
      "--num-layers 30 is not divisible by --pipeline-model-parallel-size 4\n"
      "hint: the nearest --num-layers: 28 or 32; uneven stages: --pipeline-model-parallel-layout, "
      "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, "
      "--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split");
  // 80 layers over 16 stages of 2 chunks have been trained as 64 elsewhere.
  config.num_virtual_stages_per_pipeline_rank = 2;
  EXPECT_THAT(layout_error(config, 16, 80),
              HasSubstr("--num-layers 80 is not divisible by --pipeline-model-parallel-size 16 x 2 "
                        "virtual stages = 32\n"
                        "hint: the nearest --num-layers: 64 or 96;"));
  config = {};
  config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = true;
  EXPECT_THAT(layout_error(config, 4, 16),
              HasSubstr("--num-layers 16 (18 with embedding and loss) is not divisible by "
                        "--pipeline-model-parallel-size 4\n"
                        "hint: the nearest --num-layers: 14 or 18;"));
  config = {};
  config.account_for_encoder_in_pipeline_split = 3;
  config.account_for_loss_in_pipeline_split = true;
  EXPECT_THAT(layout_error(config, 2, 5),
              HasSubstr("--num-layers 5 (9 with encoder and loss) is not divisible by"));
  EXPECT_EQ(layout_error(config, 4, 4),
            "--account-for-encoder-in-pipeline-split 3: a stage has room for 2 layers\n"
            "hint: give encoders stages of their own: V in --pipeline-model-parallel-layout");
  config = {};
  config.num_layers_per_virtual_pipeline_stage = 3;
  EXPECT_EQ(layout_error(config, 4, 16),
            "--num-layers 16 is not divisible by --pipeline-model-parallel-size 4 x "
            "--num-layers-per-virtual-pipeline-stage 3 = 12\n"
            "hint: the nearest --num-layers: 12 or 24");
  config = {};
  config.decoder_first_pipeline_num_layers = 3;
  EXPECT_EQ(layout_error(config, 4, 16),
            "of --num-layers 16 --decoder-first-pipeline-num-layers 3 leave 13, which is not "
            "divisible by 3 further stages\n"
            "hint: leave 12 or 15");
  config.decoder_first_pipeline_num_layers = 15;
  EXPECT_EQ(layout_error(config, 4, 16),
            "of --num-layers 16 --decoder-first-pipeline-num-layers 15 leave 1 for 3 further "
            "stages\nhint: leave at least 3");
  config.decoder_first_pipeline_num_layers = 3;
  config.decoder_last_pipeline_num_layers = 4;
  EXPECT_EQ(layout_error(config, 2, 8),
            "--num-layers 8 is not the sum of --decoder-first-pipeline-num-layers 3 "
            "--decoder-last-pipeline-num-layers 4\n"
            "hint: --decoder-last-pipeline-num-layers 5");
  config = {};
  config.decoder_first_pipeline_num_layers = 3;
  config.num_virtual_stages_per_pipeline_rank = 2;
  EXPECT_EQ(layout_error(config, 2, 7),
            "a stage of 3 layers (--decoder-first-pipeline-num-layers 3) is not divisible into 2 "
            "virtual stages\n"
            "hint: the nearest counts: 2 or 4");
  config.decoder_first_pipeline_num_layers = 0;
  EXPECT_EQ(layout_error(config, 2, 8),
            "segment 3 of 4 of the pipeline holds nothing\nhint: give every virtual stage a layer");
  config = {};
  config.pipeline_schedule = ScheduleKind::kZeroBubbleV;
  config.num_virtual_stages_per_pipeline_rank = 3;
  EXPECT_EQ(
      layout_error(config, 2, 12),
      "--pipeline-schedule zb-v takes 2 virtual stages per pipeline rank, the flags ask for 3\n"
      "hint: --num-virtual-stages-per-pipeline-rank 2");
}

TEST(StageLayout, FaultsOfLayoutStringsAreLocated) {
  const auto error = [](const std::string& text, int64_t layers = 4, int64_t stages = 2) {
    PipelineConfig config;
    config.pipeline_model_parallel_layout = text;
    const std::string message = layout_error(config, stages, layers);
    const std::string start = "--pipeline-model-parallel-layout ";
    EXPECT_TRUE(message.starts_with(start)) << message;
    return message.substr(std::min(start.size(), message.size()));
  };
  EXPECT_THAT(
      error("Ett|xtL"),
      HasSubstr("\"Ett|xtL\": 'x' at position 5 is none of E (embedding), e (encoder layer), "
                "t (layer), m (multi-token prediction), L (loss), V (encoder of images or "
                "sounds)"));
  EXPECT_THAT(error("V|EtVt|ttL"),
              HasSubstr("'V' at position 5 is behind E: the language model reads what encoders of "
                        "images and sounds give\nhint: all V before E"));
  EXPECT_THAT(error("V|tt|ttL"), HasSubstr("does not start with the embedding\nhint: one E"));
  EXPECT_THAT(error("V|EttE|ttL"), HasSubstr("'E' at position 6 is not at the start"));
  EXPECT_THAT(
      error("Eet|etL"),
      HasSubstr("'e' at position 5 is after a t: an encoder comes before its decoder\nhint: "
                "all e before all t"));
  EXPECT_THAT(error("Ett|t,m|L"), HasSubstr("'m' at position 7 is not before L"));
  EXPECT_THAT(error("tt|ttL"), HasSubstr("does not start with the embedding\nhint: one E"));
  EXPECT_THAT(error("Ett|tt"), HasSubstr("does not end with the loss\nhint: one L"));
  EXPECT_THAT(error("EttE|ttL"), HasSubstr("'E' at position 4 is not at the start"));
  EXPECT_THAT(error("EttL|ttL"), HasSubstr("'L' at position 4 is not at the end"));
  EXPECT_THAT(error("Ett|tL"), HasSubstr("has 3 layers, --num-layers is 4\nhint: add 1 t"));
  EXPECT_THAT(error("Ettt|ttL"), HasSubstr("has 5 layers, --num-layers is 4\nhint: take away 1 t"));
  EXPECT_THAT(error("Et|t|ttL"),
              HasSubstr("has 3 segments, which is not divisible by --pipeline-model-parallel-size "
                        "2\nhint: 2 or 4 segments"));
  EXPECT_THAT(error("E(tt|ttL"), HasSubstr("'(' at position 2 is not closed"));
  EXPECT_THAT(error("Ett)*2|L"), HasSubstr("')' at position 4 has no ( before it"));
  EXPECT_THAT(error("E(tt)|ttL"),
              HasSubstr("'(' at position 2 opens a group without a count\nhint: write (...)*n"));
  EXPECT_THAT(error("Et*|ttL"), HasSubstr("'*' at position 3 needs a count from 1 on"));
  EXPECT_THAT(error("Et*0|ttL"), HasSubstr("'*' at position 3 needs a count from 1 on"));
  EXPECT_THAT(error("E(t*999999|)*999999L"), HasSubstr("repeats more than any model has layers"));
  PipelineConfig empty;
  empty.pipeline_model_parallel_layout = "Et||t|ttL";
  EXPECT_EQ(layout_error(empty, 2, 4),
            "segment 2 of 4 of the pipeline holds nothing\nhint: give every virtual stage a layer");
  empty.pipeline_schedule = ScheduleKind::kZeroBubbleV;
  empty.pipeline_model_parallel_layout = "Ett|ttL";
  EXPECT_THAT(layout_error(empty, 2, 4),
              HasSubstr("has 2 segments, the schedule takes 2 x --pipeline-model-parallel-size "
                        "2\nhint: 4 segments"));
}

std::vector<std::string> violations_of(const PipelineConfig& config, int64_t stages,
                                       int64_t layers) {
  Violations violations;
  config.validate(violations);
  validate_pipeline(config, stages, layers, violations);
  return violations.messages();
}

TEST(PipelineConfig, Rules) {
  using testing::ElementsAre;
  using testing::IsEmpty;
  EXPECT_THAT(violations_of({}, 4, 8), IsEmpty());
  EXPECT_THAT(violations_of({}, 1, 7), IsEmpty());
  PipelineConfig c;
  c.num_virtual_stages_per_pipeline_rank = 2;
  c.num_layers_per_virtual_pipeline_stage = 2;
  EXPECT_THAT(violations_of(c, 2, 8),
              ElementsAre(HasSubstr("at most one of --num-layers-per-virtual-pipeline-stage")));
  c = {};
  c.pipeline_model_parallel_layout = "Ett|ttL";
  c.decoder_first_pipeline_num_layers = 2;
  EXPECT_THAT(violations_of(c, 2, 4),
              ElementsAre(HasSubstr("--pipeline-model-parallel-layout names every layer")));
  c = {};
  c.account_for_loss_in_pipeline_split = true;
  c.decoder_last_pipeline_num_layers = 2;
  EXPECT_THAT(
      violations_of(c, 2, 4),
      ElementsAre(HasSubstr("cannot be combined with --account-for-embedding-in-pipeline-split")));
  c = {};
  c.num_layers_per_virtual_pipeline_stage = 2;
  c.decoder_last_pipeline_num_layers = 2;
  EXPECT_THAT(violations_of(c, 2, 4),
              ElementsAre(HasSubstr("--num-layers-per-virtual-pipeline-stage cannot be combined")));
  c = {};
  c.pipeline_schedule = ScheduleKind::kZeroBubbleV;
  c.decoder_first_pipeline_num_layers = 2;
  EXPECT_THAT(violations_of(c, 2, 8),
              ElementsAre(HasSubstr("mean nothing when one rank holds both ends of the model")));
  c = {};
  c.zero_bubble_pass_times = {1, 1, 1};
  EXPECT_THAT(violations_of(c, 2, 8),
              ElementsAre(HasSubstr("have no effect without --pipeline-schedule zb-auto"),
                          HasSubstr("--zero-bubble-pass-times takes 4 times")));
  c = {};
  c.pipeline_schedule = ScheduleKind::kZeroBubbleAuto;
  c.zero_bubble_pass_times = {1, 1.1, 0.9, 0.1};
  c.zero_bubble_max_pending_backward = 12;
  EXPECT_THAT(violations_of(c, 2, 8), IsEmpty());
  const ScheduleShape shape = c.shape(4, 1, 16);
  EXPECT_EQ(shape.max_in_flight, 12);
  EXPECT_EQ(shape.costs.whole_stage.backward_input, 1.1);
  EXPECT_EQ(shape.costs.transfer, 0.1);
  c = {};
  c.microbatch_group_size_per_vp_stage = 4;
  EXPECT_THAT(violations_of(c, 4, 8),
              ElementsAre(HasSubstr("has no effect without interleaved virtual stages")));
  c.microbatch_group_size_per_vp_stage = 0;
  EXPECT_THAT(violations_of(c, 4, 8),
              ElementsAre(HasSubstr(
                  "--microbatch-group-size-per-virtual-pipeline-stage is 0\nhint: at least 1")));
  c = {};
  EXPECT_THAT(violations_of(c, 3, 8), ElementsAre(HasSubstr("--num-layers 8 is not divisible")));
}

// A last-stage count on one stage has shrunk models elsewhere.
TEST(PipelineConfig, OneStageTakesNoPipelineFlags) {
  PipelineConfig c;
  c.decoder_last_pipeline_num_layers = 2;
  c.pipeline_schedule = ScheduleKind::kZeroBubbleH1;
  EXPECT_THAT(
      violations_of(c, 1, 8),
      testing::ElementsAre(
          HasSubstr("--pipeline-schedule has no effect with --pipeline-model-parallel-size 1"),
          HasSubstr("--decoder-last-pipeline-num-layers has no effect")));
}

// Patterns next to one whose `|` do not fit, and where contradicting flags come from.
TEST(StageLayout, NamesThePatternsNextToOne) {
  const auto error = [](const std::string& letters, std::vector<int64_t> segments, int64_t stages,
                        std::optional<int64_t> chunks = {}, const std::string& stored = "") {
    PipelineConfig config;
    config.hybrid = true;
    config.hybrid_letters = letters;
    config.hybrid_segments = std::move(segments);
    config.num_virtual_stages_per_pipeline_rank = chunks;
    config.stored_in = stored;
    return layout_error(config, stages, std::ssize(letters));
  };
  EXPECT_THAT(error("MM*-M-M-M-", {1, 4, 5}, 2),
              HasSubstr("hint: \"MM*-M|-M-M-\" or \"M|M*-M|-M-|M-\"; or without |"));
  EXPECT_THAT(error("M-M-", {2, 2}, 4), HasSubstr("hint: \"M|-|M|-\"; or without |"));
  EXPECT_THAT(error("M-", {1, 1}, 3), HasSubstr("hint: \"M||-\"; or without |"));
  EXPECT_THAT(error("M-M-", {2, 2}, 2, 2),
              HasSubstr("hint: leave --num-virtual-stages-per-pipeline-rank out: it is 1"));
  EXPECT_THAT(error("M-M-", {2, 2}, 2, 2, "runs/iter_0000100"),
              HasSubstr("hint: the virtual stages are those of runs/iter_0000100: leave "
                        "--use-mp-args-from-checkpoint-args out, or give \"M|-|M|-\""));
}

}  // namespace
}  // namespace megatron
