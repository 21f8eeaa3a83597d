#include "megatron/optimizer/config/learning_rate.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <set>

#include "megatron/base/value_checks.h"

namespace megatron {
namespace {

constexpr std::string_view kLrDecayStyles[] = {"constant", "linear", "cosine",
                                               "inverse-square-root", "WSD"};
constexpr std::string_view kWsdDecayStyles[] = {"exponential", "linear", "cosine", "minus_sqrt"};

}  // namespace

void LearningRateConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("learning rate");
  v.field("lr", lr, "peak learning rate");
  v.field("min_lr", min_lr, "learning rate at the end of the decay and after it");
  v.choice("lr_decay_style", lr_decay_style, kLrDecayStyles, "shape of the decay after warm-up");
  v.field("lr_decay_iters", lr_decay_iters,
          "iterations until min-lr is reached; default: the length of training");
  v.field("lr_decay_samples", lr_decay_samples,
          "samples until min-lr is reached; default: the length of training");
  v.field("lr_warmup_fraction", lr_warmup_fraction,
          "part of the decay steps that is spent on linear warm-up");
  v.field("lr_warmup_iters", lr_warmup_iters, "iterations of linear warm-up");
  v.field("lr_warmup_samples", lr_warmup_samples, "samples of linear warm-up");
  v.field("lr_warmup_init", lr_warmup_init, "learning rate at which warm-up starts");
  v.choice("lr_wsd_decay_style", lr_wsd_decay_style, kWsdDecayStyles,
           "shape of the tail of the WSD style");
  v.field("lr_wsd_decay_iters", lr_wsd_decay_iters, "iterations of the tail of the WSD style");
  v.field("lr_wsd_decay_samples", lr_wsd_decay_samples, "samples of the tail of the WSD style");
  v.field("decoupled_lr", decoupled_lr,
          "peak learning rate of the embedding and of the output layer; default: lr");
  v.field("decoupled_min_lr", decoupled_min_lr,
          "min-lr of the embedding and of the output layer; default: min-lr");
  v.field("lr_factors", lr_factors,
          "NAME=FACTOR: the learning rate of these parameters is that of the schedule, min-lr and "
          "warm-up included, times the factor, as is then what weight decay takes in a step; names "
          "as of --freeze, of which the longest that matches counts: vision_model=0.1 "
          "vision_projection=2");
  v.field({"override_opt_param_scheduler",
           "--override-opt-param-scheduler --override-opt_param-scheduler"},
          override_opt_param_scheduler,
          "on resume, take the schedule of the flags where it differs from the checkpoint's");
  v.field({"use_checkpoint_opt_param_scheduler",
           "--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler"},
          use_checkpoint_opt_param_scheduler,
          "on resume, take the schedule of the checkpoint where it differs from the flags'");
}

void LearningRateConfig::validate(Violations& v) const {
  if (lr) {  // the run checks whether it is required
    check_range("--lr", *lr, *lr >= 0, "0 or above", v);
    v.require(min_lr <= *lr, cat("--min-lr ", min_lr, " is above --lr ", *lr),
              "a value up to --lr");
  }
  check_range("--min-lr", min_lr, min_lr >= 0, "0 or above", v);
  v.require(!decoupled_min_lr || decoupled_lr, "--decoupled-min-lr is given without --decoupled-lr",
            "give both or neither");
  const double least = decoupled_min_lr.value_or(min_lr);
  if (decoupled_lr && least > *decoupled_lr)
    v.add(cat("the minimum of the decoupled learning rate, ", least, ", is above --decoupled-lr ",
              *decoupled_lr),
          "--decoupled-min-lr up to --decoupled-lr");
  std::set<std::string> names;
  for (const auto& [name, factor] : rate_factors()) {
    v.require(!name.empty() && std::isfinite(factor) && factor > 0,
              cat("--lr-factors has no positive number for \"", name, "\""),
              "NAME=FACTOR, such as vision_model=0.1");
    v.require(names.insert(name).second, cat("--lr-factors names ", name, " twice"),
              "one factor for each name");
  }
  if (lr_warmup_fraction) {
    const double fraction = *lr_warmup_fraction;
    check_range("--lr-warmup-fraction", fraction, fraction >= 0 && fraction < 1,
                "at least 0 and below 1", v);
    v.require(lr_warmup_iters == 0 && lr_warmup_samples == 0,
              "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples",
              "give one of the three");
  }
  check_range("--lr-warmup-iters", static_cast<double>(lr_warmup_iters), lr_warmup_iters >= 0,
              "0 or above", v);
  check_range("--lr-warmup-samples", static_cast<double>(lr_warmup_samples), lr_warmup_samples >= 0,
              "0 or above", v);
  v.require(!override_opt_param_scheduler || !use_checkpoint_opt_param_scheduler,
            "--override-opt-param-scheduler excludes --use-checkpoint-opt-param-scheduler",
            "the first takes the flags' schedule, the second the checkpoint's");
}

std::vector<LrFactor> LearningRateConfig::rate_factors() const {
  std::vector<LrFactor> all;
  for (const std::string& text : lr_factors) {
    const size_t sign = text.rfind('=');
    const char* end = text.data() + text.size();
    const char* begin = sign == std::string::npos ? end : text.data() + sign + 1;
    double factor = 0;
    const auto [rest, error] = std::from_chars(begin, end, factor);
    if (error != std::errc() || rest != end) factor = std::numeric_limits<double>::quiet_NaN();
    all.push_back({text.substr(0, sign), factor});
  }
  return all;
}

}  // namespace megatron
