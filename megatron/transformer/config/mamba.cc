#include "megatron/transformer/config/mamba.h"

#include <charconv>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/detail/given_flags.h"
#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {
namespace {

// A number or an infinite one.
std::optional<double> number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || std::isnan(value)) return {};
  return value;
}

void validate_groups(const TransformerConfig& c, Violations& v) {
  if (!c.has_letter('M')) {
    refuse_without_letter(kMambaLetter, given_flags<MambaConfig>(c), v);
    for (const char* part : {"mamba", "mamba_norm"})
      if (c.recomputes(part))
        refuse_without_letter(kMambaLetter, {cat("--recompute-modules ", part)}, v);
    return;
  }
  if (c.mamba_head_dim <= 0 || c.mamba_num_groups <= 0) return;  // reported already
  v.require(c.mamba_num_heads || 2 * c.hidden_size % c.mamba_head_dim == 0,
            cat("--mamba-head-dim ", c.mamba_head_dim, " does not divide 2 --hidden-size ",
                2 * c.hidden_size),
            "--mamba-num-heads says how many heads there are");
  const int64_t heads = c.mamba_heads(c);
  v.require(heads % c.mamba_num_groups == 0,
            cat(heads, " Mamba heads are not divisible by --mamba-num-groups ", c.mamba_num_groups),
            cat("groups that divide them: ", format_divisors(heads)));
}

void validate_groups_of_ranks(const TransformerConfig& c, int64_t t, Violations& v) {
  const int64_t groups = c.mamba_num_groups;
  if (t <= 1 || groups <= 0 || c.mamba_head_dim <= 0) return;
  const int64_t heads = c.mamba_heads(c);
  v.require(heads % t == 0,
            cat(heads, " Mamba heads are not divisible by --tensor-model-parallel-size ", t),
            cat("sizes that divide them: ", format_divisors(heads)));
  v.require(groups % t == 0 || t % groups == 0,
            cat("--mamba-num-groups ", groups, " and --tensor-model-parallel-size ", t,
                ": neither divides the other"),
            cat("sizes that divide the groups: ", format_divisors(groups)));
  if (t % groups == 0)
    v.require(c.mamba_state_dim % (t / groups) == 0,
              cat("--mamba-state-dim ", c.mamba_state_dim, " is not divisible by the ", t / groups,
                  " tensor-parallel ranks that share a group"));
}

}  // namespace

constinit const LetterType kMambaLetter{.letter = 'M',
                                        .name = "Mamba-2",
                                        .validate = validate_groups,
                                        .validate_ranks = validate_groups_of_ranks,
                                        .shrink = shrink_mamba};

TimeStepLimits MambaConfig::time_step_limits() const {
  if (mamba_dt_limit.size() != 2) return {};
  return {number(mamba_dt_limit[0]).value_or(0), number(mamba_dt_limit[1]).value_or(0)};
}

void MambaConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("state-space layers");
  v.field("mamba_state_dim", mamba_state_dim, "Mamba-2: width of B and C, and of a head's state");
  v.field("mamba_head_dim", mamba_head_dim, "Mamba-2: channels of a head");
  v.field("mamba_num_groups", mamba_num_groups,
          "Mamba-2: groups of heads that share B, C and a norm");
  v.field("mamba_num_heads", mamba_num_heads,
          "Mamba-2: number of heads; none: 2 hidden_size / mamba_head_dim");
  v.field("mamba_dt_limit", mamba_dt_limit,
          "Mamba-2: least and largest time step, after softplus (0 inf limits nothing); empty: not "
          "limited");
  v.field("mamba_norm_epsilon", mamba_norm_epsilon,
          "Mamba-2: added to the mean of squares in the gated norm");
  v.role(FieldRole::kNumerics);
  v.field("mamba_chunk_size", mamba_chunk_size,
          "Mamba-2: tokens whose states the scan computes together");
}

void MambaConfig::validate(Violations& v, const ShapeConfig&) const {
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " ", value, " must be positive"));
  };
  positive("--mamba-state-dim", mamba_state_dim);
  positive("--mamba-head-dim", mamba_head_dim);
  positive("--mamba-num-groups", mamba_num_groups);
  positive("--mamba-chunk-size", mamba_chunk_size);
  positive("--mamba-num-heads", mamba_num_heads.value_or(1));
  v.require(mamba_norm_epsilon > 0,
            cat("--mamba-norm-epsilon ", mamba_norm_epsilon, " must be positive"));
  bool limits = mamba_dt_limit.empty() || mamba_dt_limit.size() == 2;
  for (const std::string& limit : mamba_dt_limit) limits = limits && number(limit).has_value();
  v.require(limits && time_step_limits().least >= 0 &&
                time_step_limits().least <= time_step_limits().most,
            cat("--mamba-dt-limit ", listed(mamba_dt_limit, {}, " "),
                ": expected two numbers, the least time step and the largest"),
            "--mamba-dt-limit 0 inf limits nothing");
}

}  // namespace megatron
