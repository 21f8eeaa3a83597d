#include "megatron/transformer/layer/auxiliary_losses.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"

namespace megatron {

void AuxiliaryLosses::add(std::string_view name, const at::Tensor& sum, const at::Tensor& weight,
                          LossRows rows, LossDivision division) {
  train(sum, weight, rows, division, name);
  log(name, sum, weight, rows);
}

void AuxiliaryLosses::train(const at::Tensor& sum, const at::Tensor& weight, LossRows rows,
                            LossDivision division, std::string_view name) {
  const at::Tensor divisor = division == LossDivision::kNone ? at::Tensor() : weight;
  if (sum.requires_grad()) tape_->add_root(sum, options_.gradient(sum, divisor, rows, name));
}

void AuxiliaryLosses::log(std::string_view name, const at::Tensor& sum, const at::Tensor& weight,
                          LossRows rows) {
  const std::vector<std::string>& names = options_.names;
  const auto found = std::find(names.begin(), names.end(), name);
  MEGATRON_ASSERT(found != names.end(), "the model does not declare a loss named ", name);
  if (tape_->runs_again() || (rows == LossRows::kAll && !options_.counts_all_rows)) return;
  const at::NoGradGuard no_grad;
  options_.totals[found - names.begin()] +=
      at::stack({sum.detach().to(at::kDouble), weight.detach().to(at::kDouble)});
}

}  // namespace megatron
