#include "megatron/pipeline_parallel/pipeline_config.h"

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/stage_layout.h"

namespace megatron {
namespace {

constexpr std::string_view kVirtualStages =
    "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank and "
    "--pipeline-model-parallel-layout";

// The given flags that only make sense with stages.
std::vector<std::string_view> given_flags(const PipelineConfig& c) {
  std::vector<std::string_view> flags;
  const auto add = [&](bool given, std::string_view flag) {
    if (given) flags.push_back(flag);
  };
  add(c.pipeline_schedule != ScheduleKind::k1F1B, "--pipeline-schedule");
  add(c.microbatch_group_size_per_vp_stage.has_value(),
      "--microbatch-group-size-per-virtual-pipeline-stage");
  add(c.num_layers_per_virtual_pipeline_stage.has_value(),
      "--num-layers-per-virtual-pipeline-stage");
  add(c.num_virtual_stages_per_pipeline_rank.has_value(), "--num-virtual-stages-per-pipeline-rank");
  add(!c.pipeline_model_parallel_layout.empty(), "--pipeline-model-parallel-layout");
  add(c.decoder_first_pipeline_num_layers.has_value(), "--decoder-first-pipeline-num-layers");
  add(c.decoder_last_pipeline_num_layers.has_value(), "--decoder-last-pipeline-num-layers");
  add(c.account_for_embedding_in_pipeline_split, "--account-for-embedding-in-pipeline-split");
  add(c.account_for_loss_in_pipeline_split, "--account-for-loss-in-pipeline-split");
  add(c.account_for_encoder_in_pipeline_split != 0, "--account-for-encoder-in-pipeline-split");
  add(c.pipeline_vocab_parallel, "--pipeline-vocab-parallel");
  return flags;
}

// A pattern of layers divides them by `|` or by cost.
void refuse_beside_pattern(const PipelineConfig& c, Violations& v) {
  const auto refuse = [&](bool given, std::string_view flag, const std::string& instead) {
    if (given) v.add(cat(flag, " cannot be combined with --hybrid-layer-pattern"), instead);
  };
  const std::string bars = "| in the pattern ends a segment";
  refuse(!c.pipeline_model_parallel_layout.empty(), "--pipeline-model-parallel-layout", bars);
  refuse(c.num_layers_per_virtual_pipeline_stage.has_value(),
         "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank");
  refuse(c.account_for_embedding_in_pipeline_split, "--account-for-embedding-in-pipeline-split",
         "layers are divided by cost, with that of the embedding");
  refuse(c.account_for_loss_in_pipeline_split, "--account-for-loss-in-pipeline-split",
         "layers are divided by cost, with that of the output layer");
  if (!c.hybrid_segments.empty())
    for (const auto& [count, flag] :
         {std::pair(c.decoder_first_pipeline_num_layers, "--decoder-first-pipeline-num-layers"),
          {c.decoder_last_pipeline_num_layers, "--decoder-last-pipeline-num-layers"}})
      if (count)
        v.add(cat(flag, " cannot be combined with | in --hybrid-layer-pattern"),
              "leave one of them out");
}

void validate_pass_times(const PipelineConfig& c, Violations& v) {
  const std::vector<double>& times = c.zero_bubble_pass_times;
  v.require(
      c.pipeline_schedule == ScheduleKind::kZeroBubbleAuto ||
          (!c.zero_bubble_max_pending_backward && times.empty()),
      "--zero-bubble-max-pending-backward and --zero-bubble-pass-times have no effect without "
      "--pipeline-schedule zb-auto");
  const bool legal =
      times.size() == 4 && times[0] > 0 && times[1] > 0 && times[2] > 0 && times[3] >= 0;
  v.require(times.empty() || legal,
            "--zero-bubble-pass-times takes 4 times: forward, input gradient and weight gradient "
            "above 0, transfer from 0 on",
            "for example 1 1.1 0.9 0.1");
}

}  // namespace

void PipelineConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.group("pipeline parallelism");
  v.choice("pipeline_schedule", pipeline_schedule, schedule_names(),
           "order of work; 1f1b is the interleaved schedule when there are virtual stages");
  v.field(
      {"microbatch_group_size_per_vp_stage", "--microbatch-group-size-per-virtual-pipeline-stage"},
      microbatch_group_size_per_vp_stage,
      "micro-batches that a virtual stage runs before the next one takes over; default: the number "
      "of stages");
  v.field("zero_bubble_max_pending_backward", zero_bubble_max_pending_backward,
          "zb-auto: most micro-batches (of one virtual stage) whose activations a rank "
          "holds; default: twice as many as 1f1b");
  v.field("zero_bubble_pass_times", zero_bubble_pass_times,
          "zb-auto plans with these times of forward, input gradient, weight gradient and "
          "transfer, in any unit; default: 1 1 1 0");
  v.field("num_layers_per_virtual_pipeline_stage", num_layers_per_virtual_pipeline_stage,
          "layers of a virtual stage");
  v.field("num_virtual_stages_per_pipeline_rank", num_virtual_stages_per_pipeline_rank,
          "virtual stages of each rank; default: 1, 2 for zb-v");
  v.field(
      "pipeline_model_parallel_layout", pipeline_model_parallel_layout,
      "what each virtual stage holds: E embedding, e encoder layer, t layer, L loss, | next "
      "stage, x*n and (...)*n repeat, such as \"Et*3|(tt|)*29t|L\"; before E, V the encoders of "
      "images and sounds with their projectors, or one V for each of their layers");
  v.field("decoder_first_pipeline_num_layers", decoder_first_pipeline_num_layers,
          "layers of the first stage; the rest is divided evenly");
  v.field("decoder_last_pipeline_num_layers", decoder_last_pipeline_num_layers,
          "layers of the last stage; the rest is divided evenly");
  v.field("account_for_embedding_in_pipeline_split", account_for_embedding_in_pipeline_split,
          "count the embedding as a layer when layers are divided");
  v.field("account_for_loss_in_pipeline_split", account_for_loss_in_pipeline_split,
          "count the output layer as a layer when layers are divided");
  v.field(
      "account_for_encoder_in_pipeline_split", account_for_encoder_in_pipeline_split,
      "count the encoders of images and sounds, which are with the embedding, as so many layers "
      "when layers are divided");
  v.field("pipeline_vocab_parallel", pipeline_vocab_parallel,
          "divide the output layer over all stages, so that the last one is not the slow "
          "one; 1f1b without virtual stages, untied embeddings");
  v.field({"overlap_p2p_communication", "--no-overlap-p2p-communication", true},
          overlap_p2p_communication, "wait for each transfer between stages at once");
}

void PipelineConfig::validate(Violations& v) const {
  const auto at_least = [&](std::string_view flag, std::optional<int64_t> value, int64_t least) {
    if (value && *value < least) v.add(cat(flag, " is ", *value), cat("at least ", least));
  };
  at_least("--microbatch-group-size-per-virtual-pipeline-stage", microbatch_group_size_per_vp_stage,
           1);
  at_least("--zero-bubble-max-pending-backward", zero_bubble_max_pending_backward, 1);
  at_least("--num-layers-per-virtual-pipeline-stage", num_layers_per_virtual_pipeline_stage, 1);
  at_least("--num-virtual-stages-per-pipeline-rank", num_virtual_stages_per_pipeline_rank, 1);
  at_least("--decoder-first-pipeline-num-layers", decoder_first_pipeline_num_layers, 0);
  at_least("--decoder-last-pipeline-num-layers", decoder_last_pipeline_num_layers, 0);
  at_least("--account-for-encoder-in-pipeline-split", account_for_encoder_in_pipeline_split, 0);

  const bool has_layout = !pipeline_model_parallel_layout.empty();
  const bool has_counts = decoder_first_pipeline_num_layers || decoder_last_pipeline_num_layers;
  const bool accounts = account_for_embedding_in_pipeline_split ||
                        account_for_loss_in_pipeline_split ||
                        account_for_encoder_in_pipeline_split != 0;
  const int virtual_flags = num_layers_per_virtual_pipeline_stage.has_value() +
                            num_virtual_stages_per_pipeline_rank.has_value() + has_layout;
  v.require(virtual_flags <= 1, cat("at most one of ", kVirtualStages, " may be given"));
  v.require(!has_layout || (!has_counts && !accounts),
            "--pipeline-model-parallel-layout names every layer; it cannot be combined with "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, "
            "--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split or "
            "--account-for-encoder-in-pipeline-split");
  v.require(!has_counts || !accounts,
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers cannot be "
            "combined with --account-for-embedding-in-pipeline-split, "
            "--account-for-loss-in-pipeline-split or --account-for-encoder-in-pipeline-split",
            "lower the count of that stage by one instead");
  v.require(!pipeline_vocab_parallel || !account_for_loss_in_pipeline_split,
            "--account-for-loss-in-pipeline-split counts an output layer on the last stage, "
            "--pipeline-vocab-parallel divides it over all stages",
            "leave one of them out");
  v.require(!has_counts || !num_layers_per_virtual_pipeline_stage,
            "--num-layers-per-virtual-pipeline-stage cannot be combined with "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
            "--num-virtual-stages-per-pipeline-rank");
  v.require(
      !has_counts || schedule_placement(pipeline_schedule) != ChunkPlacement::kVShaped,
      "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers mean nothing "
      "when one rank holds both ends of the model (--pipeline-schedule zb-v)",
      "--pipeline-model-parallel-layout");
  validate_pass_times(*this, v);
}

ScheduleShape PipelineConfig::shape(int64_t pipeline_model_parallel_size, int64_t num_chunks,
                                    int64_t num_microbatches) const {
  ScheduleShape shape;
  shape.num_stages = static_cast<int>(pipeline_model_parallel_size);
  shape.num_chunks = static_cast<int>(num_chunks);
  shape.num_microbatches = static_cast<int>(num_microbatches);
  shape.vocab_parallel = pipeline_vocab_parallel && pipeline_model_parallel_size > 1;
  shape.group_size = static_cast<int>(microbatch_group_size_per_vp_stage.value_or(0));
  shape.max_in_flight = static_cast<int>(zero_bubble_max_pending_backward.value_or(0));
  if (zero_bubble_pass_times.size() == 4) {
    shape.costs.whole_stage = {zero_bubble_pass_times[0], zero_bubble_pass_times[1],
                               zero_bubble_pass_times[2]};
    shape.costs.transfer = zero_bubble_pass_times[3];
  }
  return shape;
}

ScheduleShape PipelineConfig::shape(const StageLayout& stages, int64_t num_microbatches) const {
  ScheduleShape out = shape(stages.num_stages(), stages.num_chunks(), num_microbatches);
  if (stages.costs().empty() || !zero_bubble_pass_times.empty()) return out;
  out.costs.passes.assign(static_cast<size_t>(out.num_stages),
                          std::vector<PassCosts>(static_cast<size_t>(out.num_chunks)));
  for (size_t i = 0; i < stages.costs().size(); ++i) {
    const SegmentPlace at =
        place_of(schedule_placement(pipeline_schedule), out.num_stages, static_cast<int>(i));
    out.costs.passes[static_cast<size_t>(at.stage)][static_cast<size_t>(at.chunk)] =
        stages.costs()[i];
  }
  return out;
}

void validate_pipeline(const PipelineConfig& config, int64_t pipeline_model_parallel_size,
                       int64_t num_layers, Violations& violations) {
  if (pipeline_model_parallel_size < 1 || num_layers < 1) return;  // reported by their owners
  if (config.hybrid) refuse_beside_pattern(config, violations);
  if (pipeline_model_parallel_size == 1) {
    for (std::string_view flag : given_flags(config))
      violations.add(cat(flag, " has no effect with --pipeline-model-parallel-size 1"),
                     "leave it out, or raise the size");
    return;
  }
  Violations own;
  config.validate(own);
  if (!own.empty()) return;  // reported where the struct is validated
  try {
    const StageLayout layout = make_stage_layout(config, pipeline_model_parallel_size, num_layers);
    if (config.microbatch_group_size_per_vp_stage &&
        (layout.num_chunks() == 1 ||
         schedule_placement(config.pipeline_schedule) == ChunkPlacement::kVShaped))
      violations.add(
          "--microbatch-group-size-per-virtual-pipeline-stage has no effect without interleaved "
          "virtual stages",
          "--num-virtual-stages-per-pipeline-rank");
  } catch (const UsageError& error) {
    violations.add(error.what());
  }
}

}  // namespace megatron
