#include "megatron/optimizer/config/states.h"

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kStateTypes[] = {"fp32", "bf16"};
constexpr std::string_view kGradTypes[] = {"fp32"};

}  // namespace

void StatesConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.list_after("hysteresis");
  v.field("use_precision_aware_optimizer", use_precision_aware_optimizer,
          "keep states of the optimizer in the types that the next flags say");
  v.choice("main_params_dtype", main_params_dtype, kStateTypes,
           "master weights; bf16: the weights themselves, with stochastic rounding");
  v.choice("main_grads_dtype", main_grads_dtype, kGradTypes, "accumulated gradients");
  v.choice("exp_avg_dtype", exp_avg_dtype, kStateTypes,
           "average of gradients; bf16: with stochastic rounding");
  v.choice("exp_avg_sq_dtype", exp_avg_sq_dtype, kStateTypes,
           "average of squared gradients; bf16: with stochastic rounding");
  v.field("optimizer_cpu_offload", optimizer_cpu_offload,
          "keep master weights and moments in host memory and update them there");
  v.field("optimizer_offload_fraction", optimizer_offload_fraction,
          "part of the elements whose states are in host memory with "
          "--optimizer-cpu-offload, at least: whole parameters are");
}

void StatesConfig::validate(Violations& v) const {
  const auto check = [&](const char* flag, StateType type) {
    if (type != StateType::kFp32 && !use_precision_aware_optimizer)
      v.add(cat(flag, " has no effect without --use-precision-aware-optimizer"), "give both");
  };
  check("--main-params-dtype", main_params_dtype);
  check("--exp-avg-dtype", exp_avg_dtype);
  check("--exp-avg-sq-dtype", exp_avg_sq_dtype);
}

}  // namespace megatron
