#include "megatron/optimizer/config/update.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "megatron/base/value_checks.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {
namespace {

constexpr std::string_view kIncrSpellings[] = {"constant", "linear", "cosine"};

// The name of a rule, as a choice among those of the table.
void visit_rule(std::string& name, FieldVisitor& v) {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> all;
    for (const UpdateRule* rule : update_rules()) all.push_back(rule->name);
    return all;
  }();
  const auto at = std::find(names.begin(), names.end(), name);
  MEGATRON_ASSERT(at != names.end(), "no update rule is called ", name);
  int index = static_cast<int>(at - names.begin());
  v.choice("optimizer", index, names, "update rule: AdamW, or SGD with momentum");
  name = names.at(static_cast<size_t>(index));
}

}  // namespace

void UpdateConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("optimizer");
  visit_rule(optimizer, v);
  v.field("weight_decay", weight_decay,
          "decay of matrices and embeddings; biases and one-dimensional parameters have none");
  v.field("start_weight_decay", start_weight_decay, "weight decay at the start of its ramp");
  v.field("end_weight_decay", end_weight_decay, "weight decay at the end of its ramp");
  v.choice("weight_decay_incr_style", weight_decay_incr_style, kIncrSpellings,
           "shape of the ramp of the weight decay over the run");
  v.field("apply_wd_to_qk_layernorm", apply_wd_to_qk_layernorm,
          "decay the weights of the query and key norms too");
  v.field("adam_beta1", adam_beta1, "decay of the average of gradients");
  v.field("adam_beta2", adam_beta2, "decay of the average of squared gradients");
  v.field("adam_eps", adam_eps, "added to the root of the average of squared gradients");
  v.field("sgd_momentum", sgd_momentum, "momentum of SGD");
  v.field("clip_grad", clip_grad, "bound of the norm of all gradients together; 0: none");
}

void UpdateConfig::validate(Violations& v) const {
  check_range("--weight-decay", weight_decay, weight_decay >= 0, "0 or above", v);
  const bool constant = weight_decay_incr_style == WeightDecayIncrStyle::kConstant;
  v.require(
      !constant || (!start_weight_decay && !end_weight_decay),
      "--start-weight-decay and --end-weight-decay have no effect with a constant weight decay",
      "--weight-decay-incr-style linear or cosine");
  v.require(constant || (start_weight_decay && end_weight_decay),
            "--weight-decay-incr-style linear and cosine need a ramp",
            "give --start-weight-decay and --end-weight-decay");
  if (start_weight_decay && end_weight_decay &&
      (*start_weight_decay < 0 || *end_weight_decay < *start_weight_decay))
    v.add(cat("the weight decay ramps from ", *start_weight_decay, " to ", *end_weight_decay),
          "0 <= --start-weight-decay <= --end-weight-decay");
  check_range("--adam-beta1", adam_beta1, adam_beta1 >= 0 && adam_beta1 < 1,
              "at least 0 and below 1", v);
  check_range("--adam-beta2", adam_beta2, adam_beta2 >= 0 && adam_beta2 < 1,
              "at least 0 and below 1", v);
  check_range("--adam-eps", adam_eps, adam_eps > 0, "above 0", v);
  check_range("--sgd-momentum", sgd_momentum, sgd_momentum >= 0 && sgd_momentum < 1,
              "at least 0 and below 1", v);
  check_range("--clip-grad", clip_grad, clip_grad >= 0, "0 (no clipping) or above", v);
}

}  // namespace megatron
