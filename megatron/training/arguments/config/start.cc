#include "megatron/training/arguments/config/start.h"

#include <fnmatch.h>

#include <algorithm>

#include "megatron/base/value_checks.h"

namespace megatron {
namespace {

constexpr std::string_view kStarts[] = {"auto", "fresh", "resume", "resume-or-fresh"};

bool any_stands_for(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return stands_for(pattern, name); });
}

}  // namespace

bool stands_for(const std::string& pattern, std::string_view name) {
  for (size_t end = name.find('.'); end != std::string_view::npos; end = name.find('.', end + 1))
    if (fnmatch(pattern.c_str(), std::string(name.substr(0, end)).c_str(), 0) == 0) return true;
  return fnmatch(pattern.c_str(), std::string(name).c_str(), 0) == 0;
}

void require_match(const char* flag, const std::string& pattern,
                   const std::vector<std::string>& names) {
  const bool found = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return stands_for(pattern, name);
  });
  if (!found)
    throw UsageError(cat(flag, " ", pattern,
                         " matches no parameter\nhint: the names of this model run from ",
                         names.front(), " to ", names.back()));
}

void StartConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("checkpointing");
  v.field("load", load, "folder of checkpoints, or one checkpoint, to start from");
  v.choice(
      {"start", "--start-mode --start"}, start, kStarts,
      "resume: a checkpoint must be there; resume-or-fresh: or begin anew; fresh: load nothing; "
      "auto: resume with --load, else fresh");
  v.field("ckpt_step", ckpt_step, "load this iteration and no other");
  v.field("no_load_optim", no_load_optim, "do not load the optimizer's state");
  v.field("finetune", finetune,
          "load the weights only; iterations, samples and the optimizer start anew");
  v.field("pretrained_checkpoint", pretrained_checkpoint,
          "checkpoint whose weights to start from when --load holds none");
  v.field("use_checkpoint_args", use_checkpoint_args,
          "take what the flags leave open of the model and the tokenizer from the configuration in "
          "the checkpoint");
  v.field(
      "use_mp_args_from_checkpoint_args", use_mp_args_from_checkpoint_args,
      "take what the flags leave open of tensor and pipeline parallelism from the configuration "
      "in the checkpoint");
  v.field("accept_new_data_order", accept_new_data_order,
          "resume although the order of the training samples is not that of the checkpoint");
  v.list_after("calculate_per_token_loss");
  v.field(
      "adapter", adapter,
      "folder of PEFT whose adapters a new run starts from, with their rank, alpha and targets");
  v.role(FieldRole::kNumerics);
  v.field("freeze", freeze,
          "parameters that stay as they are: names or what names begin with, such as embedding "
          "decoder.layers.0 'decoder.layers.*.mlp'; no gradient and no optimizer state is kept for "
          "them");
  v.field("freeze_except", freeze_except, "freeze every parameter but these; patterns as --freeze");
  v.field("freeze_all_layers", freeze_all_layers, "freeze every parameter");
  v.field({"freeze_lm", "--freeze-LM"}, freeze_lm, "adds language_model to --freeze");
  v.field({"freeze_vit", "--freeze-ViT"}, freeze_vit, "adds vision_model to --freeze");
  v.field("freeze_vision_projection", freeze_vision_projection,
          "adds vision_projection to --freeze");
}

void StartConfig::finalize() {
  const auto add = [this](bool given, const char* part) {
    if (given && std::ranges::find(freeze, part) == freeze.end()) freeze.emplace_back(part);
  };
  add(freeze_lm, "language_model");
  add(freeze_vit, "vision_model");
  add(freeze_vision_projection, "vision_projection");
}

void StartConfig::validate(Violations& v) const { at_least(v, "--ckpt-step", ckpt_step, 0); }

bool StartConfig::freezes(std::string_view name) const {
  if (freeze_all_layers) return true;
  return freeze_except.empty() ? any_stands_for(freeze, name)
                               : !any_stands_for(freeze_except, name);
}

void StartConfig::check_freezing(const std::vector<std::string>& names) const {
  const bool except = !freeze_except.empty();
  for (const std::string& pattern : except ? freeze_except : freeze)
    require_match(except ? "--freeze-except" : "--freeze", pattern, names);
  const bool all = std::all_of(names.begin(), names.end(),
                               [&](const std::string& name) { return freezes(name); });
  if (all && !freeze_all_layers)
    throw UsageError(
        "--freeze leaves nothing to train\nhint: if that is wanted, say --freeze-all-layers");
}

}  // namespace megatron
