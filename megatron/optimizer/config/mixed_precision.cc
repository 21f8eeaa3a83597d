#include "megatron/optimizer/config/mixed_precision.h"

#include <cmath>

#include "megatron/base/value_checks.h"

namespace megatron {

void MixedPrecisionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("mixed precision");
  v.field("fp16", fp16, "model in fp16, master weights and gradients in fp32");
  v.field("bf16", bf16, "model in bf16, master weights and gradients in fp32");
  v.field("loss_scale", loss_scale, "constant loss scale; default: dynamic with fp16, else none");
  v.field("initial_loss_scale", initial_loss_scale, "dynamic loss scale at the start");
  v.field("min_loss_scale", min_loss_scale, "lowest dynamic loss scale");
  v.field("loss_scale_window", loss_scale_window,
          "good steps in a row after which the dynamic loss scale doubles");
  v.field("hysteresis", hysteresis, "bad steps before the dynamic loss scale is halved");
  v.field({"check_for_nan_in_loss_and_grad", "--no-check-for-nan-in-loss-and-grad", true},
          check_for_nan_in_loss_and_grad,
          "apply steps with NaN or infinite gradients instead of skipping them");
  v.field("max_consecutive_bad_steps", max_consecutive_bad_steps,
          "stop after that many skipped steps in a row that a lower loss scale cannot save");
}

void MixedPrecisionConfig::validate(Violations& v) const {
  v.require(!fp16 || !bf16, "--fp16 excludes --bf16", "give one of the two");
  if (loss_scale) {
    check_range("--loss-scale", *loss_scale, *loss_scale > 0, "above 0", v);
    if (!fp16) v.add("--loss-scale has no effect without --fp16", "drop it or add --fp16");
  }
  check_range("--min-loss-scale", min_loss_scale, min_loss_scale > 0, "above 0", v);
  check_range("--initial-loss-scale", initial_loss_scale, initial_loss_scale >= min_loss_scale,
              "at least --min-loss-scale", v);
  const double window = loss_scale_window;
  check_range("--loss-scale-window", window,
              window >= 1 && window < 1e15 && window == std::floor(window),
              "a whole number of at least 1", v);
  check_range("--hysteresis", static_cast<double>(hysteresis), hysteresis >= 1, "1 or above", v);
  check_range("--max-consecutive-bad-steps", static_cast<double>(max_consecutive_bad_steps),
              max_consecutive_bad_steps >= 1, "1 or above", v);
}

}  // namespace megatron
