#include "megatron/optimizer/optimizer_param_scheduler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 5> kLrStyles = {"constant", "linear", "cosine",
                                                       "inverse-square-root", "WSD"};
constexpr std::array<std::string_view, 4> kWsdStyles = {"exponential", "linear", "cosine",
                                                        "minus_sqrt"};
constexpr std::array<std::string_view, 3> kIncrStyles = {"constant", "linear", "cosine"};

// Samples of the whole run; 0 if the length is not given.
double train_samples(const TrainLength& length) {
  if (length.train_samples) return static_cast<double>(*length.train_samples);
  return static_cast<double>(length.train_iters.value_or(0)) *
         static_cast<double>(length.global_batch_size);
}

// A number of samples from a flag in samples or in iterations; nullopt if neither is given.
std::optional<double> samples_of(const std::optional<int64_t>& samples,
                                 const std::optional<int64_t>& iters, const TrainLength& length) {
  if (samples) return static_cast<double>(*samples);
  if (iters) return static_cast<double>(*iters) * static_cast<double>(length.global_batch_size);
  return std::nullopt;
}

// JSON has no NaN and no infinities: they are strings.
Json to_json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

double from_json_number(const Json& value, const std::string& key) {
  if (value.is_number()) return value.get<double>();
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  if (text == "nan") return std::nan("");
  if (text == "inf") return HUGE_VAL;
  if (text == "-inf") return -HUGE_VAL;
  throw_error(cat("stored optimizer state: ", key, " is ", value.dump(), ", expected a number"));
}

Json parse_object(const std::string& text, const char* what) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(json.is_object(), what, " is not a JSON object: ", text.substr(0, 80));
  return json;
}

// The value of the first existing key of `keys` (the current name, then old ones).
const Json& find_key(const Json& json, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (const auto found = json.find(key); found != json.end()) return *found;
  }
  throw_error(cat("stored schedule: key \"", *keys.begin(), "\" is missing"));
}

double find_number(const Json& json, std::initializer_list<const char*> keys) {
  return from_json_number(find_key(json, keys), *keys.begin());
}

template <class E, size_t N>
E find_style(const Json& json, std::initializer_list<const char*> keys,
             const std::array<std::string_view, N>& spellings) {
  const Json& value = find_key(json, keys);
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  const auto found = std::find(spellings.begin(), spellings.end(), text);
  MEGATRON_CHECK(found != spellings.end(), "stored schedule: ", *keys.begin(), " is \"", text,
                 "\", which is no known style");
  return static_cast<E>(found - spellings.begin());
}

template <class E, size_t N>
std::string spelling(E style, const std::array<std::string_view, N>& spellings) {
  return std::string(spellings.at(static_cast<size_t>(style)));
}

// The same schedule with fixed values for members that have no effect under its styles.
ParameterSchedule without_idle_members(ParameterSchedule schedule) {
  if (schedule.lr_decay_style != LrDecayStyle::kWsd) {
    schedule.wsd_decay_steps = 0;
    schedule.wsd_decay_style = WsdDecayStyle::kExponential;
  }
  if (schedule.lr_decay_style == LrDecayStyle::kConstant) {
    schedule.lr_decay_steps = 0;
    for (double& min_lr : schedule.min_lr) min_lr = 0;
  }
  if (schedule.lr_warmup_steps == 0) schedule.lr_warmup_init = 0;
  if (schedule.weight_decay_incr_style == WeightDecayIncrStyle::kConstant)
    schedule.weight_decay_incr_steps = 0;
  return schedule;
}

// Writes a field of the record to JSON, or reads it back.
struct StateWriter {
  Json& json;
  void operator()(const char* name, const int64_t& value) const { json[name] = value; }
  void operator()(const char* name, const double& value) const {
    json[name] = to_json_number(value);
  }
};

struct StateReader {
  const Json& json;
  const Json& at(const char* name) const {
    const auto found = json.find(name);
    MEGATRON_CHECK(found != json.end(), "stored optimizer state: key \"", name, "\" is missing");
    return *found;
  }
  void operator()(const char* name, int64_t& value) const {
    const Json& stored = at(name);
    MEGATRON_CHECK(stored.is_number_integer(), "stored optimizer state: ", name, " is ",
                   stored.dump(), ", expected a whole number");
    value = stored.get<int64_t>();
  }
  void operator()(const char* name, double& value) const {
    value = from_json_number(at(name), name);
  }
};

}  // namespace

namespace {

// The flags that set the lengths of warm-up and decay, with their values.
std::string warmup_flag(const OptimizerConfig& config, const TrainLength& length) {
  if (config.lr_warmup_fraction) return cat("--lr-warmup-fraction ", *config.lr_warmup_fraction);
  return length.train_samples ? cat("--lr-warmup-samples ", config.lr_warmup_samples)
                              : cat("--lr-warmup-iters ", config.lr_warmup_iters);
}

std::string decay_flag(const OptimizerConfig& config, const TrainLength& length) {
  if (length.train_samples)
    return config.lr_decay_samples ? cat("--lr-decay-samples ", *config.lr_decay_samples)
                                   : cat("--train-samples ", *length.train_samples);
  return config.lr_decay_iters ? cat("--lr-decay-iters ", *config.lr_decay_iters)
                               : cat("--train-iters ", length.train_iters.value_or(0));
}

}  // namespace

void validate_schedule(const OptimizerConfig& config, const TrainLength& length,
                       Violations& violations) {
  if (length.train_iters && length.train_samples) {
    violations.add("--train-iters excludes --train-samples", "give one of the two");
    return;
  }
  const auto refuse = [&](bool given, const char* flag, const char* unit, const char* instead) {
    if (given) violations.add(cat(flag, " does not go with ", unit), instead);
  };
  if (length.train_samples) {
    refuse(config.lr_decay_iters.has_value(), "--lr-decay-iters", "--train-samples",
           "--lr-decay-samples");
    refuse(config.lr_warmup_iters != 0, "--lr-warmup-iters", "--train-samples",
           "--lr-warmup-samples");
    refuse(config.lr_wsd_decay_iters.has_value(), "--lr-wsd-decay-iters", "--train-samples",
           "--lr-wsd-decay-samples");
  } else {
    refuse(config.lr_decay_samples.has_value(), "--lr-decay-samples", "--train-iters",
           "--lr-decay-iters");
    refuse(config.lr_warmup_samples != 0, "--lr-warmup-samples", "--train-iters",
           "--lr-warmup-iters");
    refuse(config.lr_wsd_decay_samples.has_value(), "--lr-wsd-decay-samples", "--train-iters",
           "--lr-wsd-decay-iters");
  }
  const ParameterSchedule schedule = make_schedule(config, length);
  if (schedule.lr_decay_steps <= 0) {
    violations.add(cat("the learning rate decays over ", schedule.lr_decay_steps, " samples"),
                   "a positive --train-iters or --lr-decay-iters (or the same in samples)");
  } else if (schedule.lr_warmup_steps >= schedule.lr_decay_steps) {
    violations.add(cat(warmup_flag(config, length), " (", schedule.lr_warmup_steps,
                       " samples) does not end before ", decay_flag(config, length), " (",
                       schedule.lr_decay_steps, " samples)"),
                   "warm-up must end before the decay does");
  }
  if (schedule.lr_decay_style != LrDecayStyle::kWsd) return;
  if (schedule.wsd_decay_steps <= 0) {
    violations.add("--lr-decay-style WSD needs the length of its tail",
                   "--lr-wsd-decay-iters (or --lr-wsd-decay-samples)");
  } else if (schedule.wsd_decay_steps > schedule.lr_decay_steps) {
    violations.add(cat("the WSD tail of ", schedule.wsd_decay_steps,
                       " samples is longer than the decay, ", schedule.lr_decay_steps),
                   "a tail within the decay");
  }
}

ParameterSchedule make_schedule(const OptimizerConfig& config, const TrainLength& length) {
  ParameterSchedule schedule;
  const double lr = config.lr.value_or(0.0);
  schedule.max_lr[0] = lr;
  schedule.min_lr[0] = config.min_lr;
  schedule.max_lr[1] = config.decoupled_lr.value_or(lr);
  schedule.min_lr[1] =
      config.decoupled_lr ? config.decoupled_min_lr.value_or(config.min_lr) : config.min_lr;
  schedule.lr_warmup_init = config.lr_warmup_init;
  schedule.lr_decay_style = config.lr_decay_style;
  schedule.wsd_decay_style = config.lr_wsd_decay_style;
  schedule.lr_decay_steps = samples_of(config.lr_decay_samples, config.lr_decay_iters, length)
                                .value_or(train_samples(length));
  schedule.wsd_decay_steps =
      samples_of(config.lr_wsd_decay_samples, config.lr_wsd_decay_iters, length).value_or(0.0);
  if (config.lr_warmup_fraction) {
    schedule.lr_warmup_steps = *config.lr_warmup_fraction * schedule.lr_decay_steps;
  } else if (config.lr_warmup_samples > 0) {
    schedule.lr_warmup_steps = static_cast<double>(config.lr_warmup_samples);
  } else {
    schedule.lr_warmup_steps =
        static_cast<double>(config.lr_warmup_iters) * static_cast<double>(length.global_batch_size);
  }
  schedule.weight_decay_incr_style = config.weight_decay_incr_style;
  schedule.start_weight_decay = config.start_weight_decay.value_or(config.weight_decay);
  schedule.end_weight_decay = config.end_weight_decay.value_or(config.weight_decay);
  schedule.weight_decay_incr_steps = train_samples(length);
  return schedule;
}

StepRules make_step_rules(const OptimizerConfig& config) {
  StepRules rules;
  rules.clip_grad = config.clip_grad;
  rules.dynamic_loss_scale = config.dynamic_loss_scale() ? 1 : 0;
  rules.min_loss_scale = config.min_loss_scale;
  rules.loss_scale_window = static_cast<int64_t>(config.loss_scale_window);
  rules.hysteresis = config.hysteresis;
  rules.skip_non_finite = config.check_for_nan_in_loss_and_grad ? 1 : 0;
  return rules;
}

StepState initial_step_state(const OptimizerConfig& config) {
  StepState state;
  state.loss_scale =
      config.dynamic_loss_scale() ? config.initial_loss_scale : config.loss_scale.value_or(1.0);
  state.hysteresis_tracker = config.hysteresis;
  return state;
}

std::string schedule_to_json(const ParameterSchedule& schedule) {
  Json json;
  json["max_lr"] = schedule.max_lr[0];
  json["lr_warmup_steps"] = schedule.lr_warmup_steps;
  json["lr_decay_style"] = spelling(schedule.lr_decay_style, kLrStyles);
  json["lr_decay_steps"] = schedule.lr_decay_steps;
  json["min_lr"] = schedule.min_lr[0];
  json["start_wd"] = schedule.start_weight_decay;
  json["end_wd"] = schedule.end_weight_decay;
  json["wd_incr_style"] = spelling(schedule.weight_decay_incr_style, kIncrStyles);
  json["wd_incr_steps"] = schedule.weight_decay_incr_steps;
  // Not stored by Megatron, but the next step depends on it.
  json["lr_warmup_init"] = schedule.lr_warmup_init;
  json["decoupled_max_lr"] = schedule.max_lr[1];
  json["decoupled_min_lr"] = schedule.min_lr[1];
  json["wsd_decay_style"] = spelling(schedule.wsd_decay_style, kWsdStyles);
  json["wsd_decay_steps"] = schedule.wsd_decay_steps;
  return json.dump();
}

ParameterSchedule schedule_from_json(const std::string& text) {
  const Json json = parse_object(text, "stored schedule");
  ParameterSchedule schedule;
  schedule.max_lr[0] = find_number(json, {"max_lr", "start_lr"});
  schedule.min_lr[0] = find_number(json, {"min_lr"});
  schedule.lr_warmup_steps = find_number(json, {"lr_warmup_steps", "warmup_iter", "warmup_steps"});
  schedule.lr_decay_steps =
      find_number(json, {"lr_decay_steps", "decay_steps", "decay_step", "end_iter"});
  schedule.lr_decay_style =
      find_style<LrDecayStyle>(json, {"lr_decay_style", "decay_style"}, kLrStyles);
  schedule.start_weight_decay = find_number(json, {"start_wd"});
  schedule.end_weight_decay = find_number(json, {"end_wd"});
  schedule.weight_decay_incr_style =
      find_style<WeightDecayIncrStyle>(json, {"wd_incr_style"}, kIncrStyles);
  schedule.weight_decay_incr_steps = find_number(json, {"wd_incr_steps"});
  // Absent in Megatron's own state.
  schedule.max_lr[1] = json.contains("decoupled_max_lr") ? find_number(json, {"decoupled_max_lr"})
                                                         : schedule.max_lr[0];
  schedule.min_lr[1] = json.contains("decoupled_min_lr") ? find_number(json, {"decoupled_min_lr"})
                                                         : schedule.min_lr[0];
  if (json.contains("lr_warmup_init"))
    schedule.lr_warmup_init = find_number(json, {"lr_warmup_init"});
  if (json.contains("wsd_decay_steps"))
    schedule.wsd_decay_steps = find_number(json, {"wsd_decay_steps"});
  if (json.contains("wsd_decay_style")) {
    schedule.wsd_decay_style = find_style<WsdDecayStyle>(json, {"wsd_decay_style"}, kWsdStyles);
  }
  return schedule;
}

ParameterSchedule resume_schedule(const ParameterSchedule& from_flags,
                                  const ParameterSchedule& stored, const OptimizerConfig& config) {
  if (config.override_opt_param_scheduler) return from_flags;
  if (config.use_checkpoint_opt_param_scheduler) return stored;
  const Json now = Json::parse(schedule_to_json(without_idle_members(from_flags)));
  const Json before = Json::parse(schedule_to_json(without_idle_members(stored)));
  std::string differences;
  for (const auto& [key, value] : now.items()) {
    if (value == before.at(key)) continue;
    differences += cat("\ndetail: ", key, " is ", value.dump(), " by the flags, ",
                       before.at(key).dump(), " in the checkpoint");
  }
  MEGATRON_CHECK(differences.empty(), "the schedule of the flags differs from the checkpoint's",
                 differences,
                 "\nhint: --override-opt-param-scheduler takes the flags', "
                 "--use-checkpoint-opt-param-scheduler the checkpoint's");
  return from_flags;
}

std::string step_state_to_json(const StepState& state) {
  Json json;
  for_each_field(state, StateWriter{json});
  return json.dump();
}

StepState step_state_from_json(const std::string& text) {
  const Json json = parse_object(text, "stored optimizer state");
  StepState state;
  for_each_field(state, StateReader{json});
  return state;
}

}  // namespace megatron
